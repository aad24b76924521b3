"""State of virtual clusters on disk: one folder for each under ``home()/virtual``.

``state.json`` holds the arguments of the cluster and the status of each host, but no process ids.
Processes are found by the mark in their environment (`processes`), which is never out of date and
remains if the process that created the cluster is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec

from hvd_elastic.config import home
from hvd_elastic.errors import VirtualClusterError
from hvd_elastic.own_files import private_folder
from hvd_elastic.replaced_files import write_whole

# Increased whenever older versions cannot read the state any more.
FORMAT = 1
HostStatus = Literal["up", "cut", "off"]


@dataclass(frozen=True)
class HostState:
    """One virtual host.

    Attributes:
        name: host name and ssh alias, such as ``vc1-1``.
        index: number in its cluster, from 1; determines its address.
        address: IPv4 address.
        status: ``up``; ``cut``: its network cable is disconnected; ``off``: it has crashed.
    """

    name: str
    index: int
    address: str
    port: int
    status: HostStatus = "off"


@dataclass(frozen=True)
class ClusterState:
    """A virtual cluster.

    Attributes:
        backend: ``netns``, or ``loopback`` without root.
        subnet: /24 network of the hosts; "" until one is chosen.
        rate_bits_per_s: link rate [bit/s], or None for no limit.
        cpus: CPU cores that each host may use, or None for no limit.
        shares: paths under /tmp, /data or /run that all hosts share with the machine.
        hostfiles: paths of additional copies of the hostfile.
        users: accounts that were made for it.
        hosts: hosts in the order of the hostfile.
    """

    name: str
    backend: Literal["netns", "loopback"]
    slots: int
    user: str
    subnet: str = ""
    rate_bits_per_s: int | None = None
    cpus: float | None = None
    shares: tuple[str, ...] = ()
    hostfiles: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    hosts: tuple[HostState, ...] = ()

    def host(self, name: str) -> HostState:
        """Return the host of that name or number."""
        for host in self.hosts:
            if name in (host.name, str(host.index)):
                return host
        raise VirtualClusterError(
            f"cluster {self.name} has no host '{name}'; "
            f"its hosts are {', '.join(host.name for host in self.hosts) or 'none'}"
        )

    def with_status(self, name: str, status: HostStatus) -> ClusterState:
        hosts = tuple(
            replace(host, status=status) if host.name == name else host for host in self.hosts
        )
        return replace(self, hosts=hosts)


def clusters_folder() -> Path:
    """Return the folder that contains the folders of this user's virtual clusters."""
    return home().resolve() / "virtual"


def cluster_folder(name: str) -> Path:
    """Return the folder of one cluster, which may not exist."""
    return clusters_folder() / name


def cluster_names() -> list[str]:
    """Return the names of all clusters with a folder, even if ``up`` was killed before its end."""
    try:
        return sorted(entry.name for entry in clusters_folder().iterdir() if entry.is_dir())
    except FileNotFoundError:
        return []


def save_state(folder: Path, state: ClusterState) -> None:
    """Write the state atomically.

    Raises:
        VirtualClusterError: it cannot be written.
    """
    path = folder / "state.json"
    try:
        write_whole(path, json.dumps({"format": FORMAT, **asdict(state)}, indent=2) + "\n")
    except OSError as error:
        raise unwritable(path, error.strerror) from error


def unwritable(path: Path, why: str | None) -> VirtualClusterError:
    """Return the error for a file in a cluster's folder that cannot be written."""
    return VirtualClusterError(
        f"{path} cannot be written: {why}; free space or fix the permissions there, or "
        "set HVD_ELASTIC_HOME to a folder on another disk"
    )


def load_state(folder: Path) -> ClusterState | None:
    """Return the state; None if ``up`` was killed before it had written one."""
    path = folder / "state.json"
    try:
        record = json.loads(path.read_text())
        if record["format"] != FORMAT:
            raise VirtualClusterError(
                f"{path} was written by another version of virtclust; "
                f"take the cluster down with: virtclust down --name {folder.name}"
            )
        return msgspec.convert(record, ClusterState)
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, ValueError) as error:
        raise VirtualClusterError(
            f"{path} cannot be read ({error}); "
            f"take the cluster down with: virtclust down --name {folder.name}"
        ) from error


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock for changes to the clusters in ``folder``.

    The lock is on the folder itself, so no lock file is left behind.
    """
    descriptor = _lock(folder)
    try:
        yield
    finally:
        os.close(descriptor)


def _lock(folder: Path) -> int:
    while True:
        try:
            private_folder(folder)
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise VirtualClusterError(
                f"the folder of virtual clusters, {folder}, cannot be used: {error.strerror}; "
                "set HVD_ELASTIC_HOME to a folder that you may write to"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # The removal of the last cluster removes the folder too, maybe while we waited.
            if os.path.samestat(os.fstat(descriptor), folder.stat()):
                return descriptor
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)

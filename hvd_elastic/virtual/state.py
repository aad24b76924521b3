"""The state of virtual clusters on disk: one folder each under ``home()/virtual``.

``state.json`` says what was asked for and how each host stands. It holds no process ids: those are
found by the mark in their environment (`marks`), which cannot go stale and survives a kill -9 of
whoever made the cluster.
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

FORMAT = 1
HostStatus = Literal["up", "cut", "off"]


@dataclass(frozen=True)
class HostState:
    """One virtual host.

    Attributes:
        name: host name and ssh alias, such as ``vc1-1``.
        index: number in its cluster, from 1; fixes its address.
        address: IPv4 address.
        port: port of its sshd.
        status: ``up``; ``cut``: its cable is pulled; ``off``: it crashed.
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
        name: name of the cluster and of its folder.
        backend: ``netns``, or ``loopback`` without root.
        slots: slots of each host.
        user: who logs in.
        subnet: the /24 of the hosts; "" until one is chosen.
        rate_bits_per_s: link rate, or None for no limit.
        cpus: CPU share of each host [cores], or None for no limit.
        shares: paths under /tmp, /data or /run that all hosts see nevertheless.
        hostfiles: copies of the hostfile that the user asked for.
        hosts: in the order of the hostfile.
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
    hosts: tuple[HostState, ...] = ()

    def host(self, name: str) -> HostState:
        """The host of that name or number."""
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
    """The folder that holds one folder for each virtual cluster of this user."""
    return home().resolve() / "virtual"


def cluster_folder(name: str) -> Path:
    """The folder of one cluster, there or not."""
    return clusters_folder() / name


def cluster_names() -> list[str]:
    """Names of the clusters that have a folder, also of those left by a killed ``up``."""
    try:
        return sorted(entry.name for entry in clusters_folder().iterdir() if entry.is_dir())
    except FileNotFoundError:
        return []


def save_state(folder: Path, state: ClusterState) -> None:
    """Write the state, whole or not at all.

    Raises:
        VirtualClusterError: it cannot be written.
    """
    path = folder / "state.json"
    temporary = path.with_suffix(".new")
    try:
        temporary.write_text(json.dumps({"format": FORMAT, **asdict(state)}, indent=2) + "\n")
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise unwritable(path, error.strerror) from error


def unwritable(path: Path, why: str | None) -> VirtualClusterError:
    """What to say when something in a cluster's folder cannot be written."""
    return VirtualClusterError(
        f"{path} cannot be written: {why}; free space or mend the permissions there, or "
        "set HVD_ELASTIC_HOME to a folder on another disk"
    )


def load_state(folder: Path) -> ClusterState | None:
    """The state, or None where ``up`` was killed before it had written one."""
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
    """One caller at a time changes the clusters in ``folder``.

    The lock is on the folder itself: no lock file is left behind.
    """
    descriptor = _lock(folder)
    try:
        yield
    finally:
        os.close(descriptor)


def _lock(folder: Path) -> int:
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise VirtualClusterError(
                f"the folder of virtual clusters, {folder}, cannot be used: {error.strerror}; "
                "set HVD_ELASTIC_HOME to a folder that you may write to"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # The last cluster takes the folder with it, maybe while this caller waited.
            if os.path.samestat(os.fstat(descriptor), folder.stat()):
                return descriptor
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)

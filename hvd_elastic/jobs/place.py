"""The folder of a cluster, and the lock that lets one daemon at a time own it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from hvd_elastic.config import home
from hvd_elastic.errors import RunError, UsageError
from hvd_elastic.json_text import parse_json
from hvd_elastic.own_files import private_folder, socket_in
from hvd_elastic.records.process_lock import is_locked, take_lock

CLUSTER_VARIABLE = "HVD_ELASTIC_CLUSTER"
"""Environment variable with the name of the cluster to use."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_UNSUITABLE = re.compile(r"[^A-Za-z0-9._-]+|^[^A-Za-z0-9]+")


class ClusterFolder:
    """The folder of one cluster: ``$HVD_ELASTIC_HOME/clusters/NAME``.

    Attributes:
        path: the folder; only its owner can enter it.
        hostfiles: folder with the hostfile of each job that holds slots.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.database = path / "queue.sqlite"
        self.events = path / "events.jsonl"
        self.log = path / "daemon.log"
        self.hostfiles = path / "hostfiles"
        self._lock = path / "daemon.lock"

    @classmethod
    def create(cls, name: str) -> ClusterFolder:
        """Create the folder of a cluster, or return the existing one.

        Raises:
            UsageError: the name is not valid.
            RunError: the folder cannot be made.
            StrangerError: it belongs to another user.
        """
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"cluster name {name!r} is not valid: it has 1 to 64 of the characters A-Z a-z 0-9 "
                ". _ - and starts with a letter or a digit"
            )
        folder = cls(clusters_folder() / name)
        try:
            for path in (clusters_folder(), folder.path, folder.hostfiles):
                private_folder(path)
        except OSError as error:
            raise RunError(
                f"cannot make the folder {folder.path}: {error.strerror}. Free space or mend the "
                "permissions there, or set HVD_ELASTIC_HOME to a folder elsewhere."
            ) from error
        return folder

    # -- the daemon ------------------------------------------------------------------------

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the lock that makes this process the daemon; the kernel frees it when it ends.

        Raises:
            RunError: another process is the daemon of this cluster.
        """
        lock = take_lock(self._lock)
        if lock is None:
            told = self.daemon()
            raise RunError(
                f"cluster {self.name} has a daemon already (pid {told.get('pid')}, hosts "
                f"of {told.get('hostfile')}). Look at it with: hvd-elastic hosts --cluster "
                f"{self.name}   End it with: hvd-elastic down --cluster {self.name}"
            )
        with lock:
            yield

    def describe_daemon(self, hostfile: Path) -> None:
        """Write which process is the daemon; called by the daemon, which holds the lock."""
        told = {"pid": os.getpid(), "host": socket.gethostname(), "hostfile": str(hostfile)}
        with contextlib.suppress(OSError):  # on a full disk, the lock is valid without the text
            self._lock.write_text(json.dumps(told), encoding="utf-8")

    def daemon(self) -> dict[str, Any]:
        """Return ``{"pid", "host", "hostfile"}`` of the present or last daemon; empty: unknown."""
        try:
            found = parse_json(self._lock.read_bytes())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def daemon_alive(self) -> bool:
        """Return whether a process is the daemon of this cluster now."""
        try:
            return is_locked(self._lock)
        except OSError:  # of another user
            return False

    def socket_address(self) -> AbstractContextManager[str]:
        """Return a context with an address of the daemon's socket, as :func:`socket_in`."""
        return socket_in(self.path, "daemon.sock")


def clusters_folder() -> Path:
    """Return the folder that holds one folder for each cluster."""
    return home() / "clusters"


def name_of_hostfile(hostfile: Path) -> str:
    """Return the name of a cluster that is named after its hostfile.

    >>> name_of_hostfile(Path("/etc/gpu hosts.txt"))
    'gpu-hosts'
    """
    return _UNSUITABLE.sub("-", hostfile.stem).strip("-")[:64] or "cluster"


def list_clusters() -> list[ClusterFolder]:
    """Return the clusters of this user, by name."""
    try:
        found = [path for path in clusters_folder().iterdir() if path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [ClusterFolder(path) for path in sorted(found) if _NAME.fullmatch(path.name)]


def likely_clusters(name: str | None = None) -> list[ClusterFolder]:
    """Return the clusters that a user may mean.

    It is the one of this name or of the environment's, else those with a daemon, else all.

    Raises:
        RunError: there is no cluster of that name; the message names those that there are.
    """
    name = name or os.environ.get(CLUSTER_VARIABLE) or None
    known = list_clusters()
    if name is None:
        return [cluster for cluster in known if cluster.daemon_alive()] or known
    named = [cluster for cluster in known if cluster.name == name]
    if not named:
        names = ", ".join(cluster.name for cluster in known) or "none"
        raise RunError(
            f"there is no cluster {name!r} in {clusters_folder()}; there is: {names}. Start one "
            "with: hvd-elastic up HOSTFILE"
        )
    return named


def open_cluster(name: str | None) -> ClusterFolder:
    """Return the cluster of a name; without one, that of the environment, or the only one.

    Raises:
        RunError: there is no such cluster, or there are several; the message names them.
    """
    candidates = likely_clusters(name)
    if len(candidates) == 1:
        return candidates[0]
    if not candidates:
        raise RunError(
            f"there is no cluster in {clusters_folder()}. Start one with: hvd-elastic up HOSTFILE"
        )
    names = ", ".join(cluster.name for cluster in candidates)
    raise RunError(
        f"there are several clusters: {names}. Name one with --cluster, or set {CLUSTER_VARIABLE}"
    )

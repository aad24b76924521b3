"""The folder of a cluster, and the lock that lets one daemon at a time own it."""

from __future__ import annotations

import contextlib
import grp
import hashlib
import json
import os
import re
import socket
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from hvd_elastic.config import home
from hvd_elastic.errors import RunError, StrangerError, UsageError
from hvd_elastic.json_text import parse_json
from hvd_elastic.own_files import private_folder, socket_in, user_words, who_else_writes
from hvd_elastic.programs.peers import connect_own
from hvd_elastic.records.process_lock import is_locked, take_lock
from hvd_elastic.replaced_files import write_whole

CLUSTER_VARIABLE = "HVD_ELASTIC_CLUSTER"
"""Environment variable with the name of the cluster to use."""
_LOOK_S = 10.0
"""Longest wait for a daemon of another user to accept a connection [s]."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_UNSUITABLE = re.compile(r"[^A-Za-z0-9._-]+|^[^A-Za-z0-9]+")


class ClusterFolder:
    """The folder of one cluster: ``$HVD_ELASTIC_HOME/clusters/NAME``, or one that a group shares.

    Attributes:
        path: the folder; only its owner, and the group that shares it, can enter it.
        shared: whether this user has named a folder that may be another user's.
        hostfiles: folder with the hostfile of each job that holds slots.
    """

    def __init__(self, path: Path, *, shared: bool = False) -> None:
        self.path = path
        self.shared = shared or path.is_symlink()
        self.name = path.name
        self.database = path / "queue.sqlite"
        self.events = path / "events.jsonl"
        self.log = path / "daemon.log"
        self.hostfiles = path / "hostfiles"
        self.limits = path / "limits.toml"
        self.shares = path / "shares.json"
        self.operator_state = path / "operator.json"
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
        if folder.shared:
            raise UsageError(
                f"cluster {name} is in a folder that a group shares, {folder.path.resolve()}. Name "
                "both again: --place FOLDER --group GROUP"
            )
        try:
            for path in (clusters_folder(), folder.path, folder.hostfiles):
                private_folder(path)
        except OSError as error:
            raise RunError(
                f"cannot make the folder {folder.path}: {error.strerror}. Free space or mend the "
                "permissions there, or set HVD_ELASTIC_HOME to a folder elsewhere."
            ) from error
        return folder

    @classmethod
    def create_shared(cls, path: Path, group: str) -> ClusterFolder:
        """Create the folder of a cluster that a group shares, or return the existing one.

        A link in this user's folder of clusters leads to it.

        Raises:
            UsageError: there is no such group, this user is not in it, or the name is not valid.
            StrangerError: the folder, or one above it, is not this user's alone to write.
            RunError: it cannot be made.
        """
        path = path.absolute()
        if not _NAME.fullmatch(path.name):
            raise UsageError(f"--place {path}: its last part is the cluster's name, and not valid")
        try:
            gid = grp.getgrnam(group).gr_gid
        except KeyError:
            raise UsageError(
                f"--group {group}: this machine has no such group; see: getent group"
            ) from None
        if os.geteuid() != 0 and gid not in (os.getegid(), *os.getgroups()):
            raise UsageError(
                f"--group {group}: you are not in it, as far as this login goes; see: id -Gn"
            )
        folder = cls(path, shared=True)
        try:
            if is_new := not path.exists():
                path.mkdir(mode=0o700)
            if who := who_else_writes(path):
                if is_new:
                    path.rmdir()
                raise StrangerError(
                    f"--place {path}: others could replace the daemon's files there. Choose a "
                    f"folder that only you can write. Here, {who}"
                )
            os.chown(path, -1, gid)
            path.chmod(0o750)
            private_folder(folder.hostfiles)
            folder.link()
        except OSError as error:
            raise RunError(f"cannot use the folder {path}: {error.strerror}") from error
        return folder

    def link(self) -> None:
        """Have this user's later commands find a cluster that was named by its path."""
        place = clusters_folder() / self.name
        private_folder(place.parent)
        if not place.exists():
            place.unlink(missing_ok=True)  # it leads nowhere
            place.symlink_to(self.path.absolute())
        self._known_owner()

    @property
    def keeper(self) -> Path:
        """Folder of this user's keeper of the cluster: two may have one name."""
        path = self.path.resolve()
        digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:8]
        return home() / "keepers" / f"{path.name}-{digest}"

    @property
    def group(self) -> int | None:
        """Id of the group that may use the cluster; None: its user alone."""
        found = self.path.stat()
        return found.st_gid if found.st_mode & stat.S_IXGRP else None

    @property
    def is_others(self) -> bool:
        """Whether the daemon is that of another user."""
        with contextlib.suppress(OSError):
            return self.shared and self.path.stat().st_uid != os.geteuid()
        return False

    def connect(self, name: str, timeout_s: float | None) -> socket.socket:
        """Return a connection to a socket of the daemon.

        Raises:
            StrangerError: it is not that of the folder's owner, or the folder is not that of its
                first owner any more. Nothing was sent to it.
            OSError: nobody listens there.
        """
        with self.socket_address(name) as address:
            owner = self._known_owner() if self.shared else None
            return connect_own(address, timeout_s, owner)

    def _known_owner(self) -> int:
        """Return the id of the folder's user, who is remembered from its first use on.

        Raises:
            StrangerError: it was that of another user, as under /tmp before a reboot.
        """
        uid = self.path.stat().st_uid
        known = self._note
        told = user_words(uid)
        try:
            before = known.read_text(encoding="utf-8")
        except FileNotFoundError:
            with contextlib.suppress(OSError):  # a full disk: the next use remembers it
                private_folder(known.parent)
                write_whole(known, told, mode=0o600)
            return uid
        if before != told:
            raise StrangerError(
                f"the folder {self.named} of cluster {self.name} was that of {before} when you "
                f"used it first, and is now that of {told}, who would see what you ask for and "
                f"decide about your jobs. If that is right: rm {known}"
            )
        return uid

    @property
    def named(self) -> Path:
        """The folder as it was named, also if this is the link to it."""
        is_link = self.path.parent == clusters_folder() and self.path.is_symlink()
        return self.path.readlink() if is_link else self.path.absolute()

    @property
    def _note(self) -> Path:
        """File with the user whose folder it was when this user used it first."""
        digest = hashlib.sha256(os.fsencode(self.named)).hexdigest()[:8]
        return clusters_folder() / f".{self.name}-{digest}.owner"

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
            if self.is_others:
                self.connect("daemon.sock", _LOOK_S).close()
                return True
            return is_locked(self._lock)
        except (OSError, StrangerError):  # of another user
            return False

    def socket_address(self, name: str = "daemon.sock") -> AbstractContextManager[str]:
        """Return a context with an address of a socket of the daemon, as :func:`socket_in`."""
        return socket_in(self.path, name, of_anybody=self.shared)


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
    if name is not None and "/" in name:
        return [_shared_cluster(Path(name))]
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


def _shared_cluster(path: Path) -> ClusterFolder:
    """Return the cluster of a folder that a user has named, and note it for later commands."""
    if not path.is_dir():
        raise RunError(f"--cluster {path}: there is no such folder, or you may not look there")
    found = ClusterFolder(path.absolute(), shared=True)
    found.link()
    return found


def open_cluster(name: str | None) -> ClusterFolder:
    """Return the cluster of a name; without one, that of the environment, or the only one.

    A name with a slash is the path of a folder that a group shares.

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

"""Finding and ending the processes of a virtual cluster.

Everything that belongs to a cluster carries two variables in its environment: the cluster's folder
and the host's name. They are inherited, cannot go stale as recorded process ids do, and are found
after a kill -9 of whatever made the cluster.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from hvd_elastic.errors import VirtualClusterError
from hvd_elastic.hosts.programs.processes import (
    Process,
    all_processes,
    end_processes,
    environment,
    own_ancestors,
)

CLUSTER_MARK = "HVD_ELASTIC_VIRTUAL"
HOST_MARK = "HVD_ELASTIC_VIRTUAL_HOST"

SWITCH = "(switch)"
"""The host mark of the process that holds the bridge; no host can have this name."""

LIMIT_S = 10.0


def marks(folder: Path, host: str) -> dict[str, str]:
    """The variables that mark a process of this host."""
    return {CLUSTER_MARK: str(folder), HOST_MARK: host}


def marked_processes(folder: Path, host: str | None = None) -> dict[Process, str]:
    """Process → host name, of the cluster in ``folder`` (of one host of it).

    The caller and its ancestors are left out: whoever works inside a host must not end itself.
    """
    spared = own_ancestors()
    found = {}
    for process in all_processes().values():
        variables = environment(process.pid)
        owner = variables.get(HOST_MARK, "")
        if variables.get(CLUSTER_MARK) == str(folder) and host in (None, owner):
            if process.pid not in spared:
                found[process] = owner
    return found


def marked_clusters() -> set[str]:
    """Folders of all clusters that have a process."""
    found = {environment(pid).get(CLUSTER_MARK) for pid in all_processes()}
    return {folder for folder in found if folder is not None}


def processes_in_namespace(kind: str, inode: int) -> list[Process]:
    """Processes whose namespace of that kind (``pid``, ``net``) is the one given."""
    return [process for pid, process in all_processes().items() if namespace_of(pid, kind) == inode]


def namespace_of(pid: int, kind: str) -> int | None:
    """The inode of a process's namespace; None when it cannot be seen."""
    try:
        return os.stat(f"/proc/{pid}/ns/{kind}").st_ino  # noqa: PTH116  # hot loop
    except OSError:
        return None


def kill_all(find: Callable[[], Iterable[Process]], what: str) -> None:
    """Kill -9 whatever ``find`` returns until it returns nothing.

    Raises:
        VirtualClusterError: a process does not end.
    """
    ended = end_processes(find, 0.0, LIMIT_S)
    left = [str(pid) for (pid, _), how in sorted(ended.items()) if how == "left"]
    if left:
        raise VirtualClusterError(
            f"processes of {what} did not end within {LIMIT_S:g} s of kill -9: {', '.join(left)}; "
            "they may hang in the kernel (a dead disk or network file system); repeat the command "
            "when they are gone"
        )

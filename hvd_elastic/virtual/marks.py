"""Find and end the processes of a virtual cluster.

All processes of a cluster have two variables in their environment: the cluster's folder and the
host's name. Child processes inherit them. Unlike recorded process ids they are never out of date,
and they are found even if the process that created the cluster was killed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from hvd_elastic.errors import VirtualClusterError
from hvd_elastic.programs.processes import (
    Process,
    all_processes,
    end_processes,
    environment,
    own_ancestors,
)

CLUSTER_MARK = "HVD_ELASTIC_VIRTUAL"
HOST_MARK = "HVD_ELASTIC_VIRTUAL_HOST"

SWITCH = "(switch)"
"""Host mark of the process that holds the bridge; not a valid host name."""

LIMIT_S = 10.0
"""Time within which killed processes must end."""


def marks(folder: Path, host: str) -> dict[str, str]:
    """Return the variables that mark a process of this host."""
    return {CLUSTER_MARK: str(folder), HOST_MARK: host}


def marked_processes(folder: Path, host: str | None = None) -> dict[Process, str]:
    """Return the processes of the cluster in ``folder``, or of one of its hosts, with their host.

    The caller and its ancestors are left out, since a command inside a host must not end itself,
    and so are the processes of containers: the same path is another folder there.
    """
    spared = own_ancestors()
    found = {}
    for process in all_processes().values():
        variables = environment(process.pid)
        owner = variables.get(HOST_MARK, "")
        if variables.get(CLUSTER_MARK) == str(folder) and host in (None, owner):
            if process.pid not in spared and not _is_elsewhere(process.pid, str(folder)):
                found[process] = owner
    return found


def marked_clusters() -> set[str]:
    """Return the folders of all clusters that have a process."""
    found = {pid: environment(pid).get(CLUSTER_MARK) for pid in all_processes()}
    return {
        folder
        for pid, folder in found.items()
        if folder is not None and not _is_elsewhere(pid, folder)
    }


def _is_elsewhere(pid: int, folder: str) -> bool:
    """Return whether the path of a cluster's folder is another folder for this process."""
    theirs = Path(f"/proc/{pid}/root{folder}")
    try:
        return not theirs.samefile(folder)
    except OSError:
        return theirs.exists()


def processes_in_namespace(inode: int) -> list[Process]:
    """Return the processes in the pid namespace of this inode."""
    return [each for pid, each in all_processes().items() if namespace_of(pid, "pid") == inode]


def namespace_of(pid: int, kind: str) -> int | None:
    """Return the inode of a process's namespace; None if it cannot be read."""
    try:
        return os.stat(f"/proc/{pid}/ns/{kind}").st_ino  # noqa: PTH116  # hot loop
    except OSError:
        return None


def kill_all(find: Callable[[], Iterable[Process]], what: str) -> None:
    """Kill the processes that ``find`` returns with SIGKILL, until it returns none.

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

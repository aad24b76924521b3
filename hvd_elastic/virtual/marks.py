"""Finding and ending the processes of a virtual cluster.

Everything that belongs to a cluster carries two variables in its environment: the cluster's folder
and the host's name. They are inherited, cannot go stale as recorded process ids do, and are found
after a kill -9 of whatever made the cluster.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from hvd_elastic.errors import VirtualClusterError

__all__ = [
    "CLUSTER_MARK",
    "HOST_MARK",
    "SWITCH",
    "children_of",
    "end_processes",
    "is_alive",
    "marked_clusters",
    "marked_processes",
    "marks",
    "process_ids",
    "processes_in_namespace",
]

CLUSTER_MARK = "HVD_ELASTIC_VIRTUAL"
HOST_MARK = "HVD_ELASTIC_VIRTUAL_HOST"

SWITCH = "(switch)"
"""The host mark of the process that holds the bridge; no host can have this name."""

POLL_S = 0.005


def marks(folder: Path, host: str) -> dict[str, str]:
    """The variables that mark a process of this host."""
    return {CLUSTER_MARK: str(folder), HOST_MARK: host}


def process_ids() -> list[int]:
    """Ids of all processes now."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208


def _read_marks(pid: int) -> tuple[str, str] | None:
    try:
        content = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    if CLUSTER_MARK.encode() not in content:
        return None
    found = dict(
        entry.split(b"=", 1) for entry in content.split(b"\0") if entry.startswith(b"HVD_ELASTIC_V")
    )
    cluster, host = found.get(CLUSTER_MARK.encode()), found.get(HOST_MARK.encode(), b"")
    return None if cluster is None else (os.fsdecode(cluster), os.fsdecode(host))


def marked_processes(folder: Path, host: str | None = None) -> dict[int, str]:
    """Process id → host name, of the cluster in ``folder`` (of one host of it).

    The caller and its ancestors are left out: whoever works inside a host must not end itself.
    """
    spared = _ancestors()
    found: dict[int, str] = {}
    for pid in process_ids():
        mark = _read_marks(pid)
        if mark and mark[0] == str(folder) and pid not in spared and is_alive(pid):
            if host is None or host == mark[1]:
                found[pid] = mark[1]
    return found


def marked_clusters() -> set[str]:
    """Folders of all clusters that have a process."""
    return {mark[0] for mark in map(_read_marks, process_ids()) if mark}


def _status(pid: int) -> tuple[str, int] | None:
    """State letter and parent of a process; None when it is gone."""
    try:
        content = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    state, parent = content.rpartition(")")[2].split()[:2]
    return state, int(parent)


def is_alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    status = _status(pid)
    return status is not None and status[0] not in "ZX"


def _ancestors() -> set[int]:
    found: set[int] = set()
    pid = os.getpid()
    while pid > 0 and pid not in found:
        found.add(pid)
        status = _status(pid)
        pid = status[1] if status else 0
    return found


def children_of(roots: Iterable[int]) -> set[int]:
    """``roots`` that are alive, and everything below them."""
    below: dict[int, list[int]] = {}
    for pid in process_ids():
        status = _status(pid)
        if status:
            below.setdefault(status[1], []).append(pid)
    found: set[int] = set()
    waiting = [pid for pid in roots if is_alive(pid)]
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting.extend(below.get(pid, []))
    return found


def processes_in_namespace(kind: str, inode: int) -> set[int]:
    """Processes whose namespace of that kind (``pid``, ``net``) is the one given."""
    found = set()
    for pid in process_ids():
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{pid}/ns/{kind}").st_ino == inode:  # noqa: PTH116  # hot loop
                found.add(pid)
    return found


def end_processes(find: Callable[[], Iterable[int]], *, what: str, timeout_s: float = 10.0) -> None:
    """Kill -9 whatever ``find`` returns until it returns nothing that lives.

    All are stopped before the first is killed, so that none can start another meanwhile; what was
    found once stays on the list when its parent, and with it the way to find it, is gone.
    """
    deadline = time.monotonic() + timeout_s
    condemned: set[int] = set()
    while True:
        found = {pid for pid in find() if is_alive(pid)}
        if found <= condemned:
            break
        for pid in found - condemned:
            _send(pid, signal.SIGSTOP)
        condemned |= found
    while True:
        for pid in condemned:
            _send(pid, signal.SIGKILL)
        _wait_gone(condemned, deadline)
        left = {pid for pid in find() if is_alive(pid)} | {p for p in condemned if is_alive(p)}
        if not left:
            return
        condemned = left
        if time.monotonic() > deadline:
            raise VirtualClusterError(
                f"processes of {what} did not end within {timeout_s:g} s of kill -9: "
                f"{', '.join(map(str, sorted(left)))}; they may hang in the kernel (a dead disk or "
                "network file system); repeat the command when they are gone"
            )


def _wait_gone(pids: Iterable[int], deadline: float) -> None:
    for pid in pids:
        while is_alive(pid) and time.monotonic() < deadline:
            time.sleep(POLL_S)


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)

"""Read, find and end processes of this machine.

All code that reads ``/proc`` or signals a tree of processes uses this module: the agent, virtual
clusters, and the programs that are sent to hosts without this package. So it needs only the
standard library and Python 3.7.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

SHOWN_LETTERS = 200
# Intervals at which processes that are being ended are checked, and searched for again.
PAUSE_S = 0.01
FIND_AGAIN_S = 0.1
# A longer turn is a pause of this machine, in which no process can end.
LONGEST_TURN_S = 1.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Process(NamedTuple):
    """A living process.

    Attributes:
        pid: its id, which another process may get after its end.
        started: clock ticks from boot to its start; together with ``pid`` it is unique.
        parent, session: ids of its parent and its session.
        state: state letter of proc(5), such as ``S`` or ``T``.
        cpu_s: processor time that it has used [s].
    """

    pid: int
    started: int
    parent: int
    session: int
    state: str
    cpu_s: float

    @property
    def key(self) -> tuple[int, int]:
        """Unique key of this process: id and start time."""
        return self.pid, self.started


def read(pid: int | str, name: str) -> bytes:
    """Return a file in the process's /proc folder; empty if the process is gone or not readable."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:  # noqa: PTH123  # importing pathlib is slow
            return file.read()
    except OSError:
        return b""


def read_process(pid: int) -> Process | None:
    """Return a process; None if it has ended, also if it is a zombie."""
    found = _read_entry(pid)
    return None if found is None or found.state in _ENDED else found


_ENDED = ("Z", "X")


def _read_entry(pid: int) -> Process | None:
    """Return a process, also a zombie; None if there is none."""
    fields = read(pid, "stat").rpartition(b")")[2].split()
    if len(fields) < 20:
        return None
    cpu_s = (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    parent, session, started = int(fields[1]), int(fields[3]), int(fields[19])
    return Process(pid, started, parent, session, fields[0].decode(), cpu_s)


def run_delay_s(pid: int) -> float:
    """Return how long the living threads of a process have waited for a core, ready to run [s].

    Time in which a quota of their control group holds them back counts. It is 0 if the process is
    gone, or the kernel does not measure it.
    """
    try:
        threads = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208
    except OSError:
        return 0.0
    return sum(_delay_s(read(pid, f"task/{thread}/schedstat")) for thread in threads)


def own_delay_s() -> float:
    """Return :func:`run_delay_s` of the calling thread alone."""
    return _delay_s(read("thread-self", "schedstat"))


def _delay_s(schedstat: bytes) -> float:
    fields = schedstat.split()
    return int(fields[1]) / 1e9 if len(fields) > 1 else 0.0


def all_processes() -> dict[int, Process]:
    """Return all living processes by id."""
    return {pid: found for pid, found in _all_entries().items() if found.state not in _ENDED}


def _all_entries() -> dict[int, Process]:
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208
    return {pid: found for pid in pids for found in [_read_entry(pid)] if found is not None}


def environment(pid: int) -> dict[str, str]:
    """Return the environment variables that a process was started with."""
    entries = os.fsdecode(read(pid, "environ")).split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def real_uid(pid: int) -> int | None:
    """Return the user who started a process, whatever rights it has; None if it is gone."""
    for line in read(pid, "status").splitlines():
        if line.startswith(b"Uid:"):
            return int(line.split()[1])
    return None


def command_line(pid: int, most: int = SHOWN_LETTERS) -> str:
    """Return the command line of a process, cut to ``most`` characters."""
    return read(pid, "cmdline").replace(b"\0", b" ").decode("utf-8", "replace").strip()[:most]


def own_ancestors() -> set[int]:
    """Return the ids of this process and its ancestors."""
    found: set[int] = set()
    process = read_process(os.getpid())
    while process is not None and process.pid not in found:
        found.add(process.pid)
        process = read_process(process.parent)
    return found


def descendants(
    roots: Iterable[int] = (), processes: dict[int, Process] | None = None
) -> list[Process]:
    """Return the living descendants of some processes (default: of this one)."""
    below: dict[int, list[Process]] = {}
    # A process whose first thread has ended before the others is a zombie that still has children.
    for process in (_all_entries() if processes is None else processes).values():
        below.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    waiting = list(roots) or [os.getpid()]
    while waiting:
        children = below.pop(waiting.pop(), [])
        found += children
        waiting += [process.pid for process in children]
    return [process for process in found if process.state not in _ENDED]


def is_alive(process: Process) -> bool:
    """Return whether this process, and not a later one with the same id, is alive."""
    now = read_process(process.pid)
    return now is not None and now.started == process.started


def send(process: Process, number: int) -> None:
    """Send a signal to a process, never to a later one with its id; errors are ignored."""
    try:
        handle = os.pidfd_open(process.pid) if hasattr(os, "pidfd_open") else -1
        try:
            if not is_alive(process):
                return
            if handle < 0:
                os.kill(process.pid, number)
            else:
                signal.pidfd_send_signal(handle, number)
        finally:
            if handle >= 0:
                os.close(handle)
    except OSError:
        pass


def end_processes(
    find: Callable[[], Iterable[Process]], grace_s: float, limit_s: float = 10.0
) -> dict[tuple[int, int], str]:
    """End the processes that ``find`` returns: send TERM, and after the grace time KILL.

    ``find`` is called again until it returns nothing, since processes may start others while they
    are being ended. Before KILL all are stopped: otherwise one could start a child that, once its
    parent is dead, would not be found any more.

    Args:
        find: returns living processes.
        grace_s: seconds between TERM and KILL; 0 for no TERM.
        limit_s: seconds after the grace time until it gives up.

    Returns:
        How each process, by its key, ended: ``TERM``, ``KILL``, or ``left`` (still alive).
    """
    spent_s, before = 0.0, time.monotonic()
    ended: dict[tuple[int, int], str] = {}
    known: dict[tuple[int, int], Process] = {}
    while True:
        known.update((process.key, process) for process in find())
        known = {key: process for key, process in known.items() if is_alive(process)}
        now = time.monotonic()
        spent_s, before = spent_s + min(now - before, LONGEST_TURN_S), now
        if not known or spent_s >= grace_s + limit_s:
            return {**ended, **dict.fromkeys(known, "left")}
        if spent_s < grace_s:
            for key in known.keys() - ended.keys():
                send(known[key], signal.SIGTERM)
                send(known[key], signal.SIGCONT)  # a stopped process cannot end
                ended[key] = "TERM"
        else:
            stopped: set[tuple[int, int]] = set()
            while known.keys() - stopped:
                for key in known.keys() - stopped:
                    send(known[key], signal.SIGSTOP)
                stopped.update(known)
                known.update((process.key, process) for process in find())
            for process in known.values():
                send(process, signal.SIGKILL)
            ended.update(dict.fromkeys(known, "KILL"))
        # Only a parent is notified of the end of a process, so poll.
        find_again = time.monotonic() + FIND_AGAIN_S
        while any(map(is_alive, known.values())) and time.monotonic() < find_again:
            time.sleep(PAUSE_S)

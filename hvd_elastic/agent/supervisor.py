"""Starting, signalling and reaping the processes of one host, so that none outlives its run.

The agent is a child subreaper: whatever a worker starts, however it detaches, becomes a child of
the agent when its parent ends, and is found and ended with the rest (facts: a process group loses
3 of 9 kinds of stray, a subreaper none). If the agent itself is killed, the kernel kills its
workers (parent-death signal), and the next agent of the run on this host sweeps what they left.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import psutil

__all__ = ["become_subreaper", "end_processes", "marked_processes", "spawn", "strays_of"]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Adopt every orphaned descendant of this process from now on (prctl(2))."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def spawn(
    command: Sequence[str], *, cwd: str, env: Mapping[str, str], output: int
) -> subprocess.Popen[bytes]:
    """Start ``command`` in its own session, its output going to the file descriptor ``output``.

    Raises:
        OSError: the command or the folder does not exist, or cannot be used.
    """
    parent = os.getpid()

    def before_exec() -> None:
        # The agent has one thread, so running Python between fork and exec is safe.
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the agent ended in between
            os._exit(1)

    return subprocess.Popen(
        list(command),
        cwd=cwd,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        preexec_fn=before_exec,  # noqa: PLW1509
    )


def marked_processes(marks: Mapping[str, str]) -> list[psutil.Process]:
    """This user's processes whose environment holds every ``NAME=value`` of ``marks``.

    The caller itself and its ancestors are left out: an agent carries no marks, but a shell that
    started it may.
    """
    spared = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        if process.pid in spared:
            continue
        with contextlib.suppress(psutil.Error, OSError):
            if process.uids().real != os.getuid():
                continue
            environment = process.environ()
            if all(environment.get(name) == value for name, value in marks.items()):
                found.append(process)
    return found


def strays_of(session: int, name: str, value: str) -> list[psutil.Process]:
    """Descendants of this process that belong to a worker which has ended.

    Args:
        session: the session the worker led.
        name: variable that marks everything the worker started.
        value: what it holds for that worker.
    """
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError):
            if os.getsid(process.pid) == session or process.environ().get(name) == value:
                found.append(process)
    return found


def end_processes(
    find: Callable[[], Iterable[psutil.Process]], grace_s: float, deadline_s: float = 10.0
) -> int:
    """TERM what ``find`` finds, KILL what is left after ``grace_s``, until nothing is found.

    ``find`` is asked again and again, because what is being ended may fork.

    Returns:
        How many processes were signalled.
    """
    begin = time.monotonic()
    termed: set[tuple[int, float]] = set()
    while time.monotonic() - begin < deadline_s:
        alive = []
        for process in find():
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(process)
        if not alive:
            break
        late = time.monotonic() - begin >= grace_s
        for process in alive:
            with contextlib.suppress(psutil.Error):
                # psutil compares the start time before it signals: a reused pid is spared.
                mark = (process.pid, process.create_time())
                if late:
                    process.kill()
                elif mark not in termed:
                    process.terminate()
                    process.send_signal(signal.SIGCONT)  # a stopped process cannot end
                termed.add(mark)
        psutil.wait_procs(alive, timeout=0.1)
    return len(termed)

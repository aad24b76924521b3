"""Ends all processes that came of this one, which is their child subreaper (prctl(2)).

Few imports, and loaded only when it is needed: see ``hold_command``.
"""

from __future__ import annotations

import os
import time

SIGKILL, SIGTERM, SIGCONT = 9, 15, 18
PAUSE_S = 0.02
LAST_S = 5.0


def descendants() -> list[int]:
    """All that came of this process and still lives."""
    parents = {}
    for name in os.listdir("/proc"):  # noqa: PTH208  # pathlib is slow to load
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            if fields[0] not in (b"Z", b"X"):
                parents[int(name)] = int(fields[1])
    found: list[int] = []
    below = {os.getpid()}
    while below:
        below = {pid for pid, parent in parents.items() if parent in below}
        found += below
    return found


def signal_all(pids: list[int], number: int) -> None:
    """Signals those that can be; another user's, of a setuid program, cannot."""
    for pid in pids:
        try:  # noqa: SIM105  # contextlib is slow to load
            os.kill(pid, number)
        except OSError:
            pass


def end_all(grace_s: float) -> None:
    """TERM, after the grace time KILL, until nothing is left; what is forked meanwhile included."""
    begin = time.monotonic()
    told: set[int] = set()
    while time.monotonic() - begin < grace_s + LAST_S:
        left = descendants()
        if not left:
            return
        if time.monotonic() - begin >= grace_s:
            signal_all(left, SIGKILL)
        else:
            new = [pid for pid in left if pid not in told]
            signal_all(new, SIGTERM)
            signal_all(new, SIGCONT)  # a stopped process cannot end
            told.update(new)
        time.sleep(PAUSE_S)

"""Whether a process is alive: by its heartbeat, or, where that is missing, by what it does."""

from __future__ import annotations

import time

from hvd_elastic.hosts.programs.processes import read_process

_BEAT_DUE_S = 1.5  # a little more than the longest interval
_LOOK_EVERY_S = 1.0
# Threads that wait with a time limit wake up all the time: in a deadlock they use up to 0.5 %.
_BUSY_SHARE = 0.02
_STOPPED = ("T", "t")


class Liveness:
    """The signs of life of one process.

    Code that holds Python's lock for long keeps the heart from beating and is busy; a process that
    is frozen, or whose threads wait for each other, is not.

    Args:
        pid: the process.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._beat = time.monotonic()
        self._busy = self._beat
        self._used_s = 0.0
        self._looked = self._beat

    def beat(self) -> None:
        """It has said something."""
        self._beat = time.monotonic()

    def excuse(self, seconds: float) -> None:
        """For so long nobody listened [s]."""
        self._beat += seconds

    def silent_s(self, now: float) -> float:
        """For how long there was neither a heartbeat nor, while one is due, real work [s]."""
        if now - self._looked >= _LOOK_EVERY_S:
            self._look(now)
        if now - self._beat < _BEAT_DUE_S:
            return 0.0
        return now - max(self._beat, self._busy)

    def _look(self, now: float) -> None:
        process = read_process(self._pid)
        if process is not None:
            share = (process.cpu_s - self._used_s) / (now - self._looked)
            if share >= _BUSY_SHARE and process.state not in _STOPPED:
                self._busy = now
            self._used_s, self._looked = process.cpu_s, now

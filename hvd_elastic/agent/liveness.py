"""Decide whether a process is alive, by its heartbeat or else by its use of the processor."""

from __future__ import annotations

import time

from hvd_elastic.programs.processes import read_process

_BEAT_DUE_S = 1.5  # a little more than the longest interval of heartbeats
# Interval at which the processor time is read.
_LOOK_EVERY_S = 1.0
# Threads that wait with a timeout keep waking up: a deadlocked process uses up to 0.5 %.
_BUSY_SHARE = 0.02
# States of a process that is stopped by a signal or a debugger.
_STOPPED = ("T", "t")


class Liveness:
    """Signs of life of one process.

    Code that holds Python's global interpreter lock prevents heartbeats, but it uses the processor.
    A process that is frozen, or whose threads wait for each other, does not.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._beat = time.monotonic()
        self._busy = self._beat
        self._used_s = 0.0
        self._looked = self._beat

    def beat(self) -> None:
        """Record a message of the process."""
        self._beat = time.monotonic()

    def discount(self, seconds: float) -> None:
        """Subtract a time in which the agent itself was suspended [s]."""
        self._beat += seconds

    def silent_s(self, now: float) -> float:
        """Return the time without a heartbeat and, once one is due, without real work [s]."""
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

"""Measures how long this rank waits for its training data, and what reading it takes."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from hvd_elastic.policy.input import Reading
from hvd_elastic.training.planning.compute_times import (
    DeviceEvent,
    KnownTimes,
    NewEvent,
    no_event,
)

_AHEAD = 64
"""Most waits on a device that are pending; a device is a few steps behind at the most."""
_TICKS = os.sysconf("SC_CLK_TCK")


class Helpers(NamedTuple):
    """Processes of input hosts that read for a rank.

    Attributes:
        number: number of those that are connected.
        cpu_s: processor time that all have taken so far [s].
        sent_s: time in which they have sent batches [s].
    """

    number: int = 0
    cpu_s: float = 0.0
    sent_s: float = 0.0


class InputTimes:
    """Adds up this rank's waits for data, and the processor time of reading.

    On a CPU a wait is the time that the loop spends in the loader. A GPU works asynchronously, so
    the loader may be waited for while the GPU is busy. Two events in its queue, before and after
    the loader is asked, are as far apart as the GPU was idle between them.

    Args:
        clock: returns the time [s].
        cpu_clock: returns the processor time of this process [s].

    Attributes:
        new_event: creates an event on the training device; returns None where that is the CPU.
        processes: number of processes that read; 0: this one; None: not known.
        pids: returns the process ids of the live ones.
        helpers: returns what processes of input hosts have done for this rank so far.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self.new_event: NewEvent = no_event
        self.processes: int | None = None
        self.pids: Callable[[], Sequence[int]] = tuple
        self.helpers: Callable[[], Helpers] = Helpers
        self._clock, self._cpu_clock = clock, cpu_clock
        self._began = self._cpu_began = 0.0
        self._mark: DeviceEvent | None = None
        self._device = KnownTimes(_AHEAD)
        self._loop_s = self._wait_s = self._cpu_s = 0.0
        self._examples = 0

    def read_begins(self) -> None:
        """Note that the loop asks the loader for a batch."""
        self._mark = self.new_event()
        if self._mark is not None:
            self._mark.record()
        if self.processes == 0:
            self._cpu_began = self._cpu_clock()
        self._began = self._clock()

    def read_ends(self, examples: int) -> None:
        """Note that the loader has returned a batch of this rank's ``examples``."""
        wait_s = self._clock() - self._began
        if self.processes == 0:
            self._cpu_s += self._cpu_clock() - self._cpu_began
        last = None if self._mark is None else self.new_event()
        if self._mark is None or last is None:
            self._wait_s += wait_s
        else:
            last.record()
            self._device.add_marks([(self._mark, last)])
            self._wait_s += sum(self._device.read())
            self._device.clear_known()
        self._examples += examples

    def body_ends(self) -> None:
        """Note that the loop body has ended for the batch that was read last."""
        self._loop_s += self._clock() - self._began

    @property
    def waited(self) -> tuple[float, float]:
        """Total time in the loop, and the part of it that waited for data [s]."""
        return self._loop_s, self._wait_s

    def reading(self) -> Reading | None:
        """Return what was read so far; None: nothing. Any thread may call it."""
        if not self._examples:
            return None
        helpers = self.helpers()
        cpu_s = self._reading_cpu_s()
        return Reading(
            loop_s=round(self._loop_s, 4),
            wait_s=round(self._wait_s, 4),
            cpu_s=None if cpu_s is None else round(cpu_s + helpers.cpu_s, 4),
            examples=self._examples,
            processes=self.processes,
            helpers=helpers.number,
            sent_s=round(helpers.sent_s, 4),
        )

    def _reading_cpu_s(self) -> float | None:
        if self.processes is None:
            return None
        if self.processes == 0:
            return self._cpu_s
        # Those of an earlier epoch have ended, and count as reaped children.
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        alive = sum(_cpu_s(pid) for pid in self.pids())
        return ended.ru_utime + ended.ru_stime + alive


def _cpu_s(pid: int) -> float:
    """Return the processor time of a process [s]; 0 if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0.0
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS

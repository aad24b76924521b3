"""Measures how long this rank waits for its training data, and what reading it takes."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hvd_elastic.policy.input import Reading
from hvd_elastic.programs.processes import own_delay_s, read_process, run_delay_s
from hvd_elastic.worker.planning.compute_times import (
    DeviceEvent,
    KnownTimes,
    NewEvent,
    no_event,
)

_AHEAD = 64
"""Most waits on a device that are pending; a device is a few steps behind at the most."""
_WAITED = 0.05
"""Part of a step that is spent in the loader, above which no batch was ahead."""


class Helpers(NamedTuple):
    """Processes of input hosts that read for a rank.

    Attributes:
        number: number of those that are connected.
        cpu_s, delay_s, busy_s, link_s: totals of all their batches so far; see :class:`Batch`.
    """

    number: int = 0
    cpu_s: float = 0.0
    delay_s: float = 0.0
    busy_s: float = 0.0
    link_s: float = 0.0


class InputTimes:
    """Adds up this rank's waits for data, and what reading takes of the cores.

    On a CPU a wait is the time that the loop spends in the loader. A GPU works asynchronously, so
    the loader may be waited for while the GPU is busy. Two events in its queue, before and after
    the loader is asked, are as far apart as the GPU was idle between them.

    Args:
        clock: returns the time [s].
        cpu_clock: returns the processor time of this process [s].
        delay_clock: returns how long this thread has waited for a core [s].

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
        delay_clock: Callable[[], float] = own_delay_s,
    ) -> None:
        self.new_event: NewEvent = no_event
        self.processes: int | None = None
        self.pids: Callable[[], Sequence[int]] = tuple
        self.helpers: Callable[[], Helpers] = Helpers
        self._clock, self._cpu_clock, self._delay_clock = clock, cpu_clock, delay_clock
        self._began = self._cpu_began = self._delay_began = 0.0
        self._last_wait_s = 0.0
        self._mark: DeviceEvent | None = None
        self._device = KnownTimes(_AHEAD)
        self._loop_s = self._wait_s = self._starved_s = self._cpu_s = self._delay_s = 0.0
        self._delays: dict[int, float] = {}
        """Wait for a core of each process that was seen last [s]."""
        self._examples = 0

    def read_begins(self) -> None:
        """Note that the loop asks the loader for a batch."""
        self._mark = self.new_event()
        if self._mark is not None:
            self._mark.record()
        if self.processes == 0:
            self._cpu_began, self._delay_began = self._cpu_clock(), self._delay_clock()
        self._began = self._clock()

    def read_ends(self, examples: int) -> None:
        """Note that the loader has returned a batch of this rank's ``examples``."""
        wait_s = self._last_wait_s = self._clock() - self._began
        if self.processes == 0:
            self._cpu_s += self._cpu_clock() - self._cpu_began
            self._delay_s += self._delay_clock() - self._delay_began
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
        took_s = self._clock() - self._began
        self._loop_s += took_s
        if self._last_wait_s > _WAITED * took_s:
            self._starved_s += took_s

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
            starved_s=round(self._starved_s, 4),
            cpu_s=None if cpu_s is None else round(cpu_s + helpers.cpu_s, 4),
            delay_s=round(self._reading_delay_s() + helpers.delay_s, 4),
            examples=self._examples,
            processes=self.processes,
            helpers=helpers.number,
            helped_s=round(helpers.busy_s, 4),
            link_s=round(helpers.link_s, 4),
        )

    def _reading_cpu_s(self) -> float | None:
        if self.processes is None:
            return None
        if self.processes == 0:
            return self._cpu_s
        # Those of an earlier epoch have ended, and count as reaped children.
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        alive = [process for pid in self.pids() if (process := read_process(pid)) is not None]
        return ended.ru_utime + ended.ru_stime + sum(process.cpu_s for process in alive)

    def _reading_delay_s(self) -> float:
        """Return how long reading has waited for a core so far [s]."""
        if self.processes:
            now = {pid: run_delay_s(pid) for pid in self.pids()}
            # Of processes and threads that have ended nothing is known any more.
            self._delay_s += sum(max(0.0, s - self._delays.get(pid, 0.0)) for pid, s in now.items())
            self._delays = now
        return self._delay_s

"""Time that a rank computes for a step, without the time in which it waits for the others.

In a synchronous job all ranks see the same step time; which of them is slow shows only in what each
does by itself: reading its share, forward and backward pass.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median

from hvd_elastic.torch.device_times import DeviceEvent, KnownTimes, cuda_event

__all__ = ["OwnTimes"]

_KEPT = 256
_SETTLING_STEPS = 2
"""Steps after a change that are not timed: readers start, memory is allocated."""


class OwnTimes:
    """Times the steps of this rank: the whole of each, and its compute time.

    On a CPU the compute time of a step is from its beginning to its end less the waits in between.
    A GPU works behind the script, and what looks like waiting for other ranks may be waiting for
    it. So two events are recorded in its work, where a step begins and where its backward pass
    ends, and the time between them is read when the GPU has reached both, without ever waiting for
    it. A GPU that is idle, because the next batch is still being read, reaches the first event at
    once: reading counts on both.

    Args:
        clock: [s].
        new_event: makes an event on the device that trains; gives None where that is the CPU.
        settling_steps: steps after :meth:`forget` that are not timed.

    Attributes:
        step_s: times of whole steps since :meth:`clear_steps`, by number of passes [s].
        passes: all that this rank has begun.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        new_event: Callable[[], DeviceEvent | None] = cuda_event,
        settling_steps: int = _SETTLING_STEPS,
    ) -> None:
        self._clock = clock
        self._new_event = new_event
        self._settling_steps = self._settling = settling_steps
        self._began = 0.0
        self._waited_s = 0.0
        self._marks: tuple[DeviceEvent, DeviceEvent] | None = None
        self._worked = False
        self._times = KnownTimes(_KEPT)
        self.step_s: defaultdict[int, list[float]] = defaultdict(list)
        self.passes = 0

    def step_begins(self, waited_s: float, passes: int = 1) -> None:
        """Begin a step: its share is read next.

        Args:
            waited_s: total time spent waiting for other ranks since the process began [s].
            passes: that this rank will make.
        """
        self.passes += passes
        self._began, self._waited_s, self._worked = self._clock(), waited_s, False
        first, last = self._new_event(), self._new_event()
        self._marks = None if first is None or last is None else (first, last)
        if self._marks is not None:
            self._marks[0].record()

    def work_ends(self) -> None:
        """Note that the last backward pass of the step was given to the device."""
        if self._marks is not None:
            self._marks[1].record()
        self._worked = True

    def step_ends(self, waited_s: float, passes: int = 1, *, full: bool) -> None:
        """End a step: the script came back for the next batch.

        Args:
            waited_s: as for :meth:`step_begins`.
            passes: that this rank made.
            full: whether it had all examples of a step; others are not timed.
        """
        if self._settling > 0:
            self._settling -= 1
        elif full:
            whole = self._clock() - self._began
            self.step_s[passes].append(whole)
            if self._worked and self._marks is not None:
                self._times.add_marks([self._marks])
            elif self._worked:
                self._times.add(whole - (waited_s - self._waited_s))
        self._marks = None

    def all_step_s(self) -> list[float]:
        """Return the times of whole steps of any number of passes [s]."""
        return [seconds for times in self.step_s.values() for seconds in times]

    def typical_s(self) -> float:
        """Return the median compute time of the steps since the last call [s]; NaN: none."""
        times = self._times.read()
        self._times.clear_known()
        return median(times) if times else math.nan

    def clear_steps(self) -> None:
        """Drop the times of whole steps."""
        self.step_s.clear()

    def forget(self) -> None:
        """Drop all times: steps take another time from now on."""
        self._times.clear()
        self.clear_steps()
        self._settling = self._settling_steps

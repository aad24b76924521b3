"""How long a rank works for a step, without the time in which it waits for the others.

In a synchronous job all ranks see the same step time; who is slow shows only in what each does by
itself: reading its share, forward and backward pass.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median

from hvd_elastic.torch.device_times import DeviceEvent, KnownTimes, cuda_event

__all__ = ["OwnTimes"]

_KEPT = 256


class OwnTimes:
    """Times the steps of this rank.

    On a CPU a step's own time is from its beginning to its end less the waits in between. A GPU
    works behind the script, and what looks like waiting for other ranks may be waiting for it. So
    there two marks are put into its work, where a step begins and where its backward pass ends, and
    the time between them is read when the GPU has come to both, without ever waiting for it. A GPU
    that stands idle, because the next batch is still being read, reaches the first mark at once:
    reading counts on both.

    Args:
        clock: [s].
        new_event: makes a mark for the device that trains; gives None where that is the CPU.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        new_event: Callable[[], DeviceEvent | None] = cuda_event,
    ) -> None:
        self._clock = clock
        self._new_event = new_event
        self._began = 0.0
        self._waited_s = 0.0
        self._marks: tuple[DeviceEvent, DeviceEvent] | None = None
        self._worked = False
        self._times = KnownTimes(_KEPT)

    def step_begins(self, waited_s: float) -> None:
        """The reading of a step's share begins.

        Args:
            waited_s: for the other ranks so far, in this step or not [s].
        """
        self._began, self._waited_s, self._worked = self._clock(), waited_s, False
        first, last = self._new_event(), self._new_event()
        self._marks = None if first is None or last is None else (first, last)
        if self._marks is not None:
            self._marks[0].record()

    def work_ends(self) -> None:
        """The last backward pass of the step was given to the device."""
        if self._marks is not None:
            self._marks[1].record()
        self._worked = True

    def step_ends(self, waited_s: float, *, counts: bool) -> float:
        """The script came back for the next batch.

        Args:
            waited_s: for the other ranks so far, in this step or not [s].
            counts: whether it was a step like the others, and not a short one.

        Returns:
            Time of the whole step [s].
        """
        whole = self._clock() - self._began
        if counts and self._worked:
            if self._marks is None:
                self._times.add(whole - (waited_s - self._waited_s))
            else:
                self._times.add_marks([self._marks])
        self._marks = None
        return whole

    def typical_s(self) -> float:
        """The median of the steps timed since the last call [s]; NaN: there are none."""
        times = self._times.read()
        self._times.clear_known()
        return median(times) if times else math.nan

    def forget(self) -> None:
        """What was timed is out of date."""
        self._times.clear()

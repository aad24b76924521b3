"""What looking at the gradients of a step takes: how often that is worth it rests on it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median

from hvd_elastic.torch.device_times import DeviceEvent, KnownTimes, cuda_event

__all__ = ["LookTimes"]

_KEPT = 16


class LookTimes:
    """Times the looks of this rank, several of which make a step: ``with times: look()``.

    On a GPU a look is between two marks in its work, read when it has come to both without waiting
    for it; see :class:`~hvd_elastic.torch.own_times.OwnTimes`.

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
        self._began: DeviceEvent | float = 0.0
        self._spent_s = 0.0
        self._marks: list[tuple[DeviceEvent, DeviceEvent]] = []
        self._times = KnownTimes(_KEPT)

    def step_begins(self) -> None:
        """A step that will be looked at."""
        self._spent_s, self._marks = 0.0, []

    def __enter__(self) -> None:
        event = self._new_event()
        if event is not None:
            event.record()
        self._began = self._clock() if event is None else event

    def __exit__(self, *_: object) -> None:
        if isinstance(self._began, float):
            self._spent_s += self._clock() - self._began
            return
        event = self._new_event()
        assert event is not None
        event.record()
        self._marks.append((self._began, event))

    def step_ends(self) -> None:
        """All of the step was looked at."""
        if self._marks:
            self._times.add_marks(self._marks)
        else:
            self._times.add(self._spent_s)

    def typical_s(self) -> float:
        """The median of the last steps that were looked at [s]; NaN: none is known yet."""
        times = self._times.read()
        return median(times) if times else math.nan

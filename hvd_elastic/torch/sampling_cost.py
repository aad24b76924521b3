"""Time that sampling the gradient statistics of a step takes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median

from hvd_elastic.torch.device_times import DeviceEvent, KnownTimes, cuda_event

__all__ = ["SamplingCost"]

_KEPT = 16


class SamplingCost:
    """Times this rank's sampling, which is done in several pieces of a step: ``with cost: ...``.

    On a GPU each piece is between two events in its work, which are read when it has reached both,
    without waiting for it; see :class:`~hvd_elastic.torch.own_times.OwnTimes`.

    Args:
        clock: [s].
        new_event: makes an event on the device that trains; gives None where that is the CPU.
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
        """Begin a step that is sampled."""
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
        """End a step of which every piece was sampled."""
        if self._marks:
            self._times.add_marks(self._marks)
        else:
            self._times.add(self._spent_s)

    def typical_s(self) -> float:
        """Return the median of the last sampled steps [s]; NaN: none is known yet."""
        times = self._times.read()
        return median(times) if times else math.nan

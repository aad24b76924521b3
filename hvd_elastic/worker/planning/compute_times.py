"""Measures this rank's compute time, on the CPU or on a device that works asynchronously.

In a synchronous job all ranks see the same step time. Which rank is slow shows only in the time for
its own work: reading its share, forward and backward pass. Work on a device is timed by events in
its queue, which are read once the device has reached them, so measuring never waits for the device.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Protocol

_KEPT_STEPS = 256  # more than are taken between two reviews
_KEPT_SAMPLES = 16  # latest sampled steps whose median is the cost
_SETTLING_STEPS = 2
"""Steps after a change that are not timed: loader processes start, memory is allocated."""


class DeviceEvent(Protocol):
    """Event in the work queue of a device, such as :class:`torch.cuda.Event`."""

    def record(self) -> None:
        """Put the event behind all work queued on the device so far."""

    def query(self) -> bool:
        """Return whether the device has reached the event; does not wait."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Return the time from this event to a later one, both reached [ms]."""


NewEvent = Callable[[], DeviceEvent | None]
"""Function that creates an event on the training device; returns None where that is the CPU."""


def no_event() -> None:
    """Return None: the training device is the CPU."""


class KnownTimes:
    """Latest durations of one kind of work; those on a device become known later.

    Args:
        kept: number of durations kept.
    """

    def __init__(self, kept: int) -> None:
        self._pending: deque[Sequence[tuple[DeviceEvent, DeviceEvent]]] = deque(maxlen=kept)
        self._known: deque[float] = deque(maxlen=kept)

    def add_duration(self, seconds: float) -> None:
        """Add a duration that is known already [s]."""
        self._known.append(seconds)

    def add_marks(self, pairs: Sequence[tuple[DeviceEvent, DeviceEvent]]) -> None:
        """Add a duration that is the sum of the times between pairs of events, in queue order."""
        self._pending.append(pairs)

    def read(self) -> list[float]:
        """Return all durations that are known by now [s]."""
        # The device works in order: if it has not reached an event, it has reached no later one.
        while self._pending and self._pending[0][-1][1].query():
            pairs = self._pending.popleft()
            self._known.append(sum(first.elapsed_time(last) for first, last in pairs) / 1000)
        return list(self._known)

    def clear_known(self) -> None:
        """Drop the durations that are known."""
        self._known.clear()

    def clear(self) -> None:
        """Drop all durations, those that are still pending too."""
        self._pending.clear()
        self._known.clear()


class ComputeTimes:
    """Measures the steps of this rank: the time of the whole step, and its compute time.

    On a CPU the compute time of a step is its duration minus the time spent waiting for other
    ranks. A GPU works asynchronously, and what looks like waiting for other ranks may be waiting
    for the GPU. So two events are recorded in its queue, where a step begins and where its backward
    pass ends, and the time between them is read once the GPU has reached both. A GPU that is idle,
    because the next batch is still being read, reaches the first event at once: the time for
    reading counts on both.

    Args:
        clock: returns the time [s].
        new_event: creates an event on the training device; returns None where that is the CPU.
        settling_steps: steps after :meth:`forget` that are not timed.

    Attributes:
        step_s: times of whole steps since :meth:`clear_steps`, by number of passes [s].
        passes: number of passes that this rank has begun.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        new_event: NewEvent = no_event,
        settling_steps: int = _SETTLING_STEPS,
    ) -> None:
        self._clock = clock
        self._new_event = new_event
        self._settling_steps = self._settling = settling_steps
        self._began = 0.0
        self._waited_s = 0.0
        self._marks: tuple[DeviceEvent, DeviceEvent] | None = None
        self._worked = False
        self._times = KnownTimes(_KEPT_STEPS)
        self.step_s: defaultdict[int, list[float]] = defaultdict(list)
        self.passes = 0

    def step_begins(self, waited_s: float, passes: int = 1) -> None:
        """Begin a step: its share is read next.

        Args:
            waited_s: total time spent waiting for other ranks since the process began [s].
            passes: number of passes in which this rank computes its share.
        """
        self.passes += passes
        self._began, self._waited_s, self._worked = self._clock(), waited_s, False
        first, last = self._new_event(), self._new_event()
        self._marks = None if first is None or last is None else (first, last)
        if self._marks is not None:
            self._marks[0].record()

    def work_ends(self) -> None:
        """Note that the last backward pass of the step is queued on the device."""
        if self._marks is not None:
            self._marks[1].record()
        self._worked = True

    def step_ends(self, waited_s: float, passes: int = 1, *, full: bool) -> None:
        """End a step: the script came back for the next batch.

        Args:
            waited_s: as for :meth:`step_begins`.
            passes: number of passes in which this rank computed its share.
            full: whether the step had a whole batch; others are not timed.
        """
        if self._settling > 0:
            self._settling -= 1
        elif full:
            whole = self._clock() - self._began
            self.step_s[passes].append(whole)
            if self._worked and self._marks is not None:
                self._times.add_marks([self._marks])
            elif self._worked:
                self._times.add_duration(whole - (waited_s - self._waited_s))
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
        """Drop all times, since the plan or the world has changed."""
        self._times.clear()
        self.clear_steps()
        self._settling = self._settling_steps


class SamplingCost:
    """Measures the time that sampling takes on this rank; wrap each piece in ``with cost: ...``.

    A step is sampled in several pieces. On a GPU each piece lies between two events in its queue.

    Args:
        clock: returns the time [s].
        new_event: creates an event on the training device; returns None where that is the CPU.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        new_event: NewEvent = no_event,
    ) -> None:
        self._clock = clock
        self._new_event = new_event
        self._began: DeviceEvent | float = 0.0
        self._spent_s = 0.0
        self._marks: list[tuple[DeviceEvent, DeviceEvent]] = []
        self._times = KnownTimes(_KEPT_SAMPLES)

    def step_begins(self) -> None:
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

    def add_piece(self, seconds: float) -> None:
        """Add a piece that was measured elsewhere [s]."""
        self._spent_s += seconds

    def step_ends(self) -> None:
        """End a sampled step, and store the total time of its pieces."""
        if self._marks:
            self._times.add_marks(self._marks)
        else:
            self._times.add_duration(self._spent_s)

    def typical_s(self) -> float:
        """Return the median cost of the latest sampled steps [s]; NaN: none is known yet."""
        times = self._times.read()
        return median(times) if times else math.nan

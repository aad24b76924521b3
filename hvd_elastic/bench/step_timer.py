"""Times the steps of a training at each number of ranks, in a worker of a benchmark."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

PREFIX = "bench_"
"""Begin of the names of the metrics by which a worker tells its figures."""
_WARM_STEPS, _WARM_S = 5, 1.0
_BLOCK_S = 0.5
_BLOCKS = 5
"""Fewest blocks from which a figure is made."""
_Z = 1.959964
"""Quantile of the normal distribution for an interval of 95 %."""


class StepTimer:
    """Times blocks of steps after a warm-up, again for each number of ranks.

    The time of a step is that of a block divided by its steps. The parts of a step are told apart
    by :meth:`mark`. Where a device computes beside the processor, that needs it to be waited for,
    which would make steps slower: such parts are taken from further steps after the blocks.

    Args:
        seconds: time to measure each number of ranks for [s].
        synchronize: waits for the device; None: the processor computes.
        clock: returns the time [s].
    """

    def __init__(
        self,
        seconds: float,
        synchronize: Callable[[], object] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._seconds, self._synchronize, self._clock = seconds, synchronize, clock
        self._size = 0
        self._begin_world(0)

    def _begin_world(self, size: int) -> None:
        self._size = size
        self._world_began = self._clock()
        self._steps = 0
        self._warm = False
        self._per_block = 1
        self._in_block = 0
        self._block_began = self._measuring_since = 0.0
        self._blocks: list[float] = []
        self._parts: dict[str, float] = {}
        self._split_steps = 0
        self._splits = False
        self._last = 0.0
        self._figures: dict[str, float] = {}

    def begin_step(self, size: int) -> None:
        """Begin a step of so many ranks."""
        if size != self._size:
            self._begin_world(size)
        self._last = self._clock()

    def mark(self, part: str) -> None:
        """End a part of the step; its time counts to all parts of that name."""
        if not self._splits:
            return
        if self._synchronize is not None:
            self._synchronize()
        now = self._clock()
        self._parts[part] = self._parts.get(part, 0.0) + now - self._last
        self._last = now

    def end_step(self) -> dict[str, float]:
        """End a step; return the figures of this number of ranks, empty while they are measured.

        Names begin with :data:`PREFIX`: ``size``, ``step_s`` (mean), ``half_s`` (half of its 95 %
        interval), ``blocks``, and the mean time of each part with ``_s`` [s].
        """
        if self._figures:
            return self._figures
        self._steps += 1
        if self._splits:
            self._split_steps += 1
        if not self._warm:
            self._warm_up()
        elif self._measuring_since:
            self._in_block += 1
            if self._in_block == self._per_block:
                self._end_block()
        elif self._split_steps >= self._per_block:
            self._finish()
        return self._figures

    def _warm_up(self) -> None:
        now = self._wait()
        if self._steps < _WARM_STEPS or now - self._world_began < _WARM_S:
            return
        self._warm = True
        self._splits = self._synchronize is None
        step_s = max(1e-6, now - self._last)  # the first steps are slower
        self._per_block = max(1, math.ceil(min(_BLOCK_S, self._seconds / _BLOCKS) / step_s))
        self._measuring_since = self._block_began = now

    def _end_block(self) -> None:
        now = self._wait()
        self._blocks.append((now - self._block_began) / self._in_block)
        self._in_block, self._block_began = 0, now
        if len(self._blocks) < _BLOCKS or now - self._measuring_since < self._seconds:
            return
        self._measuring_since = 0.0
        if self._splits:
            self._finish()
        self._splits = True

    def _finish(self) -> None:
        parts = {part: total / self._split_steps for part, total in self._parts.items()}
        found = {
            "size": float(self._size),
            "step_s": statistics.fmean(self._blocks),
            "half_s": half_interval(self._blocks),
            "blocks": float(len(self._blocks)),
            **{f"{part}_s": seconds for part, seconds in parts.items()},
        }
        self._figures = {PREFIX + name: value for name, value in found.items()}

    def _wait(self) -> float:
        if self._synchronize is not None:
            self._synchronize()
        return self._clock()


def half_interval(values: Sequence[float]) -> float:
    """Return half of the 95 % interval of the mean of at least two values.

    The quantile of Student's distribution is approximated (Abramowitz and Stegun, 26.7.5).

    >>> round(half_interval([1.0, 2.0, 3.0, 4.0, 5.0]), 2)
    1.93
    """
    free = len(values) - 1
    first = (_Z**3 + _Z) / (4 * free)
    second = (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / (96 * free**2)
    return (_Z + first + second) * statistics.stdev(values) / math.sqrt(len(values))

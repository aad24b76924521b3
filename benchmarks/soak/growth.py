"""Detects growth of memory, file descriptors and threads in long-lived processes.

Pure functions of samples.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

WARM_UP_S = 30.0
"""Time before a process is judged: it imports modules, fills its caches and forms a ring first."""

_SHORTEST_S = 60.0  # over a shorter time a slope is mostly noise
_FEWEST_GENERATIONS = 6
_MOST_POINTS = 150


@dataclass(frozen=True)
class Sample:
    """Measurements of a process at one time.

    Attributes:
        mono: time [s, monotonic].
        generation: number of worlds so far.
        size: number of ranks of the world; a larger one needs more connections.
        hosts: number of hosts with an agent; for each the leader has a connection and threads.
        memory: resident memory [bytes].
        files: number of open descriptors.
        threads: number of threads.
    """

    mono: float
    generation: int
    size: int
    hosts: int
    memory: int
    files: int
    threads: int


@dataclass(frozen=True)
class Limit:
    """Growth over the observed life of a process above which it counts as a leak."""

    absolute: float
    relative: float


LIMITS = {
    "memory": Limit(32 * 2**20, 0.15),
    "files": Limit(6, 0.0),
    "threads": Limit(4, 0.0),
}


@dataclass(frozen=True)
class Growth:
    """Growth of one quantity of one process after its warm-up.

    Attributes:
        process: name of the process.
        quantity: ``memory``, ``files`` or ``threads``.
        over: ``time`` [s] or ``generations`` (between their medians).
        slope: units per second or per generation.
        total: slope times the observed range.
        first, last: medians of the first and the last quarter of the samples.
    """

    process: str
    quantity: str
    over: str
    slope: float
    total: float
    first: float
    last: float

    @property
    def too_much(self) -> bool:
        """Whether the growth is above its limit, by the slope and by the last samples."""
        limit = LIMITS[self.quantity]
        allowed = max(limit.absolute, limit.relative * self.first)
        return self.total > allowed and self.last - self.first > allowed / 2

    def text(self) -> str:
        """Return the growth as a sentence for the report."""
        scale, unit = (2**20, "MiB") if self.quantity == "memory" else (1, self.quantity)
        per = "generation" if self.over == "generations" else "minute"
        slope = self.slope * (1 if per == "generation" else 60) / scale
        return (
            f"{self.process}: {self.quantity} from {self.first / scale:.0f} to "
            f"{self.last / scale:.0f} {unit}, {slope:+.2f} {unit} per {per}"
        )


def robust_slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return the median slope between all pairs of points (Theil, Sen), robust to outliers.

    >>> robust_slope([0, 1, 2, 3, 4], [0, 2, 4, 600, 8])
    2.0
    """
    slopes = [
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for earlier, later in combinations(sorted(zip(xs, ys, strict=True)), 2)
        if later[0] > earlier[0]
    ]
    return statistics.median(slopes) if slopes else 0.0


def measure_growth(process: str, samples: Sequence[Sample]) -> list[Growth]:
    """Return the growth of each quantity over time and over generations; empty for a short life.

    Only samples at the most frequent number of ranks and hosts are compared.

    Args:
        process: name of the process in the report.
        samples: samples in order of time.
    """
    if not samples:
        return []
    kept = [sample for sample in samples if sample.mono - samples[0].mono >= WARM_UP_S]
    if not kept or kept[-1].mono - kept[0].mono < _SHORTEST_S:
        return []
    usual = statistics.mode((sample.size, sample.hosts) for sample in kept)
    kept = [sample for sample in kept if (sample.size, sample.hosts) == usual]
    found = []
    by_generation: dict[int, list[Sample]] = {}
    for sample in kept:
        by_generation.setdefault(sample.generation, []).append(sample)
    thinned = kept[:: max(1, len(kept) // _MOST_POINTS)]
    for quantity in LIMITS:
        over_time = [(s.mono - kept[0].mono, float(getattr(s, quantity))) for s in thinned]
        found.append(_growth(process, quantity, "time", over_time))
        if len(by_generation) >= _FEWEST_GENERATIONS:
            medians = [
                (float(generation), statistics.median(float(getattr(s, quantity)) for s in members))
                for generation, members in sorted(by_generation.items())
            ]
            thin = medians[:: max(1, len(medians) // _MOST_POINTS)]
            found.append(_growth(process, quantity, "generations", thin))
    return found


def grown(growths: Sequence[Growth]) -> list[str]:
    """Return a sentence for each quantity that grew too much, once per process and quantity."""
    worst: dict[tuple[str, str], Growth] = {}
    for growth in growths:
        if growth.too_much:
            worst.setdefault((growth.process, growth.quantity), growth)
    return [growth.text() for growth in worst.values()]


def _growth(
    process: str, quantity: str, over: str, points: Sequence[tuple[float, float]]
) -> Growth:
    xs, ys = [x for x, _ in points], [y for _, y in points]
    quarter = max(1, len(ys) // 4)
    slope = robust_slope(xs, ys)
    return Growth(
        process=process,
        quantity=quantity,
        over=over,
        slope=slope,
        total=slope * (xs[-1] - xs[0]),
        first=statistics.median(ys[:quarter]),
        last=statistics.median(ys[-quarter:]),
    )

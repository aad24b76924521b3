"""Whether long-lived processes grow: memory, file descriptors and threads over time. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

WARM_UP_S = 30.0
"""A process imports, fills its caches and meets the others before it is judged."""

_SHORTEST_S = 60.0  # less than that says nothing
_FEWEST_GENERATIONS = 6
_MOST_POINTS = 150


@dataclass(frozen=True)
class Sample:
    """One look at a process.

    Attributes:
        mono: when [s].
        generation: how many worlds there had been.
        size: ranks of the world; a larger one needs more connections.
        hosts: with an agent; the leader has a connection and its threads for each of them.
        memory: resident [bytes]; files: open descriptors; threads: their number.
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
    """Growth over all that was seen of a process, above which it counts as a leak."""

    absolute: float
    relative: float


LIMITS = {
    "memory": Limit(32 * 2**20, 0.15),
    "files": Limit(6, 0.0),
    "threads": Limit(4, 0.0),
}


@dataclass(frozen=True)
class Growth:
    """How one quantity of one process developed after its warm-up.

    Attributes:
        process: who.
        quantity: ``memory``, ``files`` or ``threads``.
        over: ``time`` [s] or ``generations`` (between their medians).
        slope: units per second or per generation.
        total: slope times the range that was seen.
        first, last: medians of the first and the last quarter of what was looked at.
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
        """Above its limit, by the slope and by what is there at the end."""
        limit = LIMITS[self.quantity]
        allowed = max(limit.absolute, limit.relative * self.first)
        return self.total > allowed and self.last - self.first > allowed / 2

    def text(self) -> str:
        """For the report."""
        scale, unit = (2**20, "MiB") if self.quantity == "memory" else (1, self.quantity)
        per = "generation" if self.over == "generations" else "minute"
        slope = self.slope * (1 if per == "generation" else 60) / scale
        return (
            f"{self.process}: {self.quantity} from {self.first / scale:.0f} to "
            f"{self.last / scale:.0f} {unit}, {slope:+.2f} {unit} per {per}"
        )


def robust_slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Median of the slopes between all pairs (Theil, Sen): single outliers do not move it.

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
    """Growth of each quantity, over time and over generations; empty for a short life.

    Only what was seen at the most frequent number of ranks and hosts is compared.

    Args:
        process: its name in the report.
        samples: in order of time.
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
    """What grew too much, in words; by time and by generations is one finding."""
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

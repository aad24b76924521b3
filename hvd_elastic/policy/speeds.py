"""How fast hosts are, and which part of a pass is fixed, from the compute times of the ranks."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median, quantiles
from typing import NamedTuple

from hvd_elastic.model.goodput import BatchPlan
from hvd_elastic.model.shares import TimedTwice, constant_examples

__all__ = ["FixedCost", "HostSpeeds", "Pass", "RankSpeeds"]

_REPORTS = 6
"""Most recent reports of a host that are kept."""
_STANDS_OUT = 1.15
_FORGET_S = 4 * 3600.0
_PAIRS = 32
_MOVED = 0.1
"""Change of a host's slowness, in logarithms, that makes what was timed with it doubtful."""
_UNEVEN = 1.2
_BALANCED_AFTER = 5
"""Reports after which ranks with such unlike times will not share out the batch any more."""


class HostSpeeds:
    """How slow each host is relative to the fastest, from the compute times of its ranks.

    Each report holds hosts that trained together, at a batch plan that other reports may not
    have. In logarithms a time is what the report has in common plus what is the host's own; both
    are medians (median polish: Tukey, Exploratory Data Analysis, 1977, chapter 11), so neither one
    odd host nor one odd report moves the rest. A host counts as slow once three of four of its
    last reports say so, and is forgotten a while after it was last seen: it may have been mended.
    """

    def __init__(self) -> None:
        self._own: dict[str, deque[float]] = {}
        self._seen_at: dict[str, float] = {}

    def note(self, times: Mapping[str, float], now: float) -> None:
        """Add a report.

        Args:
            times: compute time of a step by host [s]; what is not positive and finite is ignored.
            now: [s].
        """
        logs = {h: math.log(t) for h, t in times.items() if math.isfinite(t) and t > 0}
        if not logs:
            return
        known = [value - median(self._own[h]) for h, value in logs.items() if h in self._own]
        common = median(known or logs.values())
        for host, value in logs.items():
            self._own.setdefault(host, deque(maxlen=_REPORTS)).append(value - common)
            self._seen_at[host] = now
        for host in [h for h, at in self._seen_at.items() if now - at > _FORGET_S]:
            del self._own[host], self._seen_at[host]

    def slowness(self) -> dict[str, float]:
        """Return the slowness by host: 1 for the fastest and those that do not stand out."""
        if not self._own:
            return {}
        middle = {host: median(own) for host, own in self._own.items()}
        fastest = min(middle.values())
        found = {}
        for host, own in self._own.items():
            slow = middle[host] - fastest > math.log(_STANDS_OUT) and len(own) > 3
            slow = slow and quantiles(own, n=4)[0] - fastest > math.log(_STANDS_OUT)
            found[host] = round(math.exp(middle[host] - fastest), 2) if slow else 1.0
        return found


class FixedCost:
    """Learns the fixed cost of a pass when a rank gets another share, or all another batch.

    Attributes:
        examples: number of examples whose compute time equals the fixed cost of one pass; 0 until
            it is known.

    >>> cost = FixedCost()
    >>> cost.note(["a", "b"], 1, [16, 16], [0.26, 0.78])
    >>> cost.examples
    0.0
    >>> cost.note(["a", "b"], 1, [24, 8], [0.34, 0.54])
    >>> round(cost.examples)
    10
    """

    def __init__(self) -> None:
        self._last: tuple[Sequence[str], int, Sequence[float], Sequence[float]] | None = None
        self._pairs: deque[TimedTwice] = deque(maxlen=_PAIRS)
        self.examples = 0.0

    def note(
        self,
        hosts: Sequence[str],
        passes: int,
        examples: Sequence[float],
        compute_s: Sequence[float],
    ) -> None:
        """Add a report.

        Args:
            hosts: of each rank; reports of other hosts are not compared.
            passes: in which each rank makes its examples.
            examples: of each rank in a step.
            compute_s: of each rank for them, above 0 [s].
        """
        last, self._last = self._last, (hosts, passes, examples, compute_s)
        if last is None or last[0] != hosts or last[1:3] == (passes, examples):
            return
        before = zip(last[2], last[3], strict=True)
        for (made, took_s), makes, takes_s in zip(before, examples, compute_s, strict=True):
            self._pairs.append(TimedTwice(last[1], made, took_s, passes, makes, takes_s))
        found = constant_examples(self._pairs)
        self.examples = self.examples if found is None else found


class Pass(NamedTuple):
    """What the fastest ranks computed in a step."""

    examples: float
    slowness: float
    compute_s: float


class RankSpeeds:
    """Speeds of the ranks that train, from reports of their compute times and shares.

    Attributes:
        hosts: of each rank.
        unequal: whether the run has unequal shares.
        fixed: fixed cost of a pass.
    """

    def __init__(self) -> None:
        self.hosts: tuple[str, ...] = ()
        self.unequal = False
        self.fixed = FixedCost()
        self._shares: tuple[int, ...] = ()
        self._speeds = HostSpeeds()
        self._slowness: dict[str, float] = {}
        self._last_report: Sequence[object] = ()
        self._uneven = 0
        """Consecutive reports with unlike times."""

    def formed(self, hosts: Sequence[str]) -> None:
        """Begin another generation."""
        self.hosts = tuple(hosts)
        self._shares = ()
        self._uneven = 0

    def note_shares(self, shares: Sequence[int]) -> bool:
        """Take the examples of each rank in a full step; return whether they changed."""
        self.unequal = True
        changed = shares != self._shares and bool(self._shares or max(shares) - min(shares) > 1)
        if changed:
            self._uneven = 0
        self._shares = tuple(shares)
        return changed

    def is_new(self, report: Sequence[object]) -> bool:
        """Return whether compute times differ from those before: metrics repeat them."""
        before, self._last_report = self._last_report, report
        return report != before

    def note(
        self, compute_s: Sequence[float], plan: BatchPlan | None, passes: int, now: float
    ) -> bool:
        """Add a report.

        Args:
            compute_s: compute time of each rank for a step [s]; 0: not known.
            plan: the batch plan in use; None: not known.
            passes: of a step.
            now: [s].

        Returns:
            Whether a host turned out to be much slower or faster than was known.
        """
        self._uneven = self._uneven + 1 if max(compute_s) > _UNEVEN * median(compute_s) else 0
        if plan is not None and all(compute_s):
            self.fixed.note(self.hosts, passes, self._examples(plan), compute_s)
        by_host: dict[str, list[float]] = {}
        for host, value, load in zip(self.hosts, compute_s, self._loads(plan), strict=True):
            if value:
                by_host.setdefault(host, []).append(value / load)
        # A host is as slow as its slowest slot: all wait for that.
        self._speeds.note({host: max(values) for host, values in by_host.items()}, now)
        before, self._slowness = self._slowness, self._speeds.slowness()
        return any(
            abs(math.log(slowness / before.get(host, 1.0))) > _MOVED
            for host, slowness in self._slowness.items()
        )

    def fastest(self, compute_s: Sequence[float], plan: BatchPlan) -> Pass | None:
        """Return what the fastest of several ranks computed for; None: a rank is not known."""
        if len(compute_s) < 2 or not all(compute_s):
            return None
        fastest = min(self.slowness(host) for host in self.hosts)
        of_fastest = [
            (made, took_s)
            for host, made, took_s in zip(self.hosts, self._examples(plan), compute_s, strict=True)
            if self.slowness(host) == fastest
        ]
        made, took_s = (median(values) for values in zip(*of_fastest, strict=True))
        return Pass(made, fastest, took_s)

    @property
    def rebalancing(self) -> bool:
        """Whether the ranks are about to share out the batch: other step times are coming."""
        return self.unequal and 0 < self._uneven <= _BALANCED_AFTER

    def slowness(self, host: str) -> float:
        """Return that of a host relative to the fastest; 1 where it was not measured."""
        return self._slowness.get(host, 1.0)

    def steps_slowness(self, plan: BatchPlan | None) -> float:
        """Return the slowness at which equal shares would take as long as the present ones."""
        ranks = zip(self.hosts, self._loads(plan), strict=True)
        return round(max((self.slowness(host) * load for host, load in ranks), default=1.0), 1)

    def _examples(self, plan: BatchPlan) -> Sequence[float]:
        """Return those of each rank in a full step."""
        return self._shares or [plan.global_batch_size / len(self.hosts)] * len(self.hosts)

    def _loads(self, plan: BatchPlan | None) -> list[float]:
        """Return the time that each rank's share takes, relative to an equal one."""
        if not self._shares:
            return [1.0] * len(self.hosts)
        extra = plan.accumulation_steps if plan else 0
        constant = (extra + 1) * self.fixed.examples
        equal = constant + sum(self._shares) / len(self._shares)
        return [(constant + share) / equal for share in self._shares]

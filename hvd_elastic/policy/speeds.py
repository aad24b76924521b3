"""Estimate the speeds of hosts and the fixed cost of a pass from the ranks' compute times."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median, quantiles
from typing import NamedTuple

from hvd_elastic.model.goodput import BatchPlan
from hvd_elastic.model.shares import TimedTwice, constant_examples

_REPORTS = 6
"""Number of recent reports kept for each host."""
_STANDS_OUT = 1.15
"""Ratio to the fastest host above which a host counts as slow."""
_FORGET_S = 4 * 3600.0
"""Time after which a host that is not used is forgotten; it may have been repaired."""
_PAIRS = 32
"""Number of recent pairs of timings that the fixed cost is fitted to."""
_MOVED = 0.1
"""Change of a host's slowness, in logarithms, that makes step times with it unreliable."""
_UNEVEN = 1.2
"""Ratio of the slowest rank's time to the median above which shares may be about to change."""
_BALANCED_AFTER = 5
"""Consecutive reports with such times after which a change of shares is not expected any more."""


class HostSpeeds:
    """Estimates the slowness of each host relative to the fastest.

    Each report holds the times of hosts that trained together, at a batch plan that may differ
    between reports. The logarithm of a time is modelled as a value common to the report plus a
    value of the host. Both are medians (median polish: Tukey, Exploratory Data Analysis, 1977,
    chapter 11), so outliers have no influence. A host counts as slow once three quarters of its
    recent reports show it.
    """

    def __init__(self) -> None:
        self._own: dict[str, deque[float]] = {}
        self._seen_at: dict[str, float] = {}

    def add_report(self, times: Mapping[str, float], now: float) -> None:
        """Add a report.

        Args:
            times: compute time of a step by host [s]; values that are not positive and finite are
                ignored.
            now: monotonic time [s].
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
        """Return the slowness by host; 1 for hosts that are not clearly slower than the fastest."""
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
    """Estimates the fixed cost of a pass from changes of the shares or the batch.

    Attributes:
        examples: number of examples whose compute time equals the fixed cost of one pass; 0: not
            known.

    >>> cost = FixedCost()
    >>> cost.add_report(["a", "b"], 1, [16, 16], [0.26, 0.78])
    >>> cost.examples
    0.0
    >>> cost.add_report(["a", "b"], 1, [24, 8], [0.34, 0.54])
    >>> round(cost.examples)
    10
    """

    def __init__(self) -> None:
        self._last: tuple[Sequence[str], int, Sequence[float], Sequence[float]] | None = None
        self._pairs: deque[TimedTwice] = deque(maxlen=_PAIRS)
        self.examples = 0.0

    def add_report(
        self,
        hosts: Sequence[str],
        passes: int,
        examples: Sequence[float],
        compute_s: Sequence[float],
    ) -> None:
        """Add a report.

        Args:
            hosts: host of each rank; only reports of the same hosts are compared.
            examples: number of examples of each rank in a step.
            compute_s: compute time of each rank for a step, above 0 [s].
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
    """Examples and compute time of the fastest ranks in a step."""

    examples: float
    slowness: float
    compute_s: float


class RankSpeeds:
    """Estimates the speeds of the ranks that train, from their compute times and shares.

    Attributes:
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
        """Number of consecutive reports with uneven times."""

    def formed(self, hosts: Sequence[str]) -> None:
        """Begin another generation."""
        self.hosts = tuple(hosts)
        self._shares = ()
        self._uneven = 0

    def note_shares(self, shares: Sequence[int]) -> bool:
        """Record the examples of each rank in a full step; return whether they changed."""
        self.unequal = True
        changed = shares != self._shares and bool(self._shares or max(shares) - min(shares) > 1)
        if changed:
            self._uneven = 0
        self._shares = tuple(shares)
        return changed

    def is_new(self, report: Sequence[object]) -> bool:
        """Return whether a report differs from the last one; metrics repeat them."""
        before, self._last_report = self._last_report, report
        return report != before

    def add_report(
        self, compute_s: Sequence[float], plan: BatchPlan | None, passes: int, now: float
    ) -> bool:
        """Add a report.

        Args:
            compute_s: compute time of each rank for a step [s]; 0: not known.
            plan: batch plan in use; None: not known.
            now: monotonic time [s].

        Returns:
            Whether the slowness of a host has changed much.
        """
        self._uneven = self._uneven + 1 if max(compute_s) > _UNEVEN * median(compute_s) else 0
        if plan is not None and all(compute_s):
            self.fixed.add_report(self.hosts, passes, self._examples(plan), compute_s)
        by_host: dict[str, list[float]] = {}
        for host, value, load in zip(self.hosts, compute_s, self._loads(plan), strict=True):
            if value:
                by_host.setdefault(host, []).append(value / load)
        # A host is as slow as its slowest slot, for which all wait.
        self._speeds.add_report({host: max(values) for host, values in by_host.items()}, now)
        before, self._slowness = self._slowness, self._speeds.slowness()
        return any(
            abs(math.log(slowness / before.get(host, 1.0))) > _MOVED
            for host, slowness in self._slowness.items()
        )

    def fastest(self, compute_s: Sequence[float], plan: BatchPlan) -> Pass | None:
        """Return the median of the fastest ranks; None for a single rank or an unknown time."""
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
        """Return whether the ranks are about to change their shares, and so the step time."""
        return self.unequal and 0 < self._uneven <= _BALANCED_AFTER

    def slowness(self, host: str) -> float:
        """Return the slowness of a host relative to the fastest; 1 if it was not measured."""
        return self._slowness.get(host, 1.0)

    def steps_slowness(self, plan: BatchPlan | None) -> float:
        """Return the slowness at which equal shares would take as long as the present ones."""
        ranks = zip(self.hosts, self._loads(plan), strict=True)
        return round(max((self.slowness(host) * load for host, load in ranks), default=1.0), 1)

    def _examples(self, plan: BatchPlan) -> Sequence[float]:
        """Return the number of examples of each rank in a full step."""
        return self._shares or [plan.global_batch_size / len(self.hosts)] * len(self.hosts)

    def _loads(self, plan: BatchPlan | None) -> list[float]:
        """Return the time for each rank's share, relative to an equal share."""
        if not self._shares:
            return [1.0] * len(self.hosts)
        extra = plan.accumulation_steps if plan else 0
        constant = (extra + 1) * self.fixed.examples
        equal = constant + sum(self._shares) / len(self._shares)
        return [(constant + share) / equal for share in self._shares]

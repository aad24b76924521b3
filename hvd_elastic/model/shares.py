"""Divide a global batch into unequal shares by the speeds of the ranks.

A synchronous step waits for its slowest rank. If ranks differ in speed, slow ranks get fewer
examples and fast ones more, so that all finish at the same time. Gradients are weighted by
examples, so the step remains that of the global batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import geometric_mean, median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from hvd_elastic.model.goodput import BatchPlan

LEAST_SHARE = 2
"""Fewest examples of a rank, for layers that cannot train on one example."""
_MIN_SPEEDUP = 1.1
"""Least predicted speedup of a step for which shares change."""
_PATIENCE = 3
"""Consecutive reviews in which a rank has to be slow."""
_REFINE_AFTER = 12
"""Reviews with unequal shares after which the shares are refined, by the mean of them all."""
_MIN_SPEEDUP_REFINED = 1.03
"""Least predicted speedup of a step for which shares are refined."""
_NEARLY_EQUAL = 1.05
"""Equal shares are preferred if the slowest rank takes at most this many times as long."""
_HELPED = 1.03
"""Least speedup of the slowest rank for which a change of shares has not failed."""
_SAME_TIMES = 1.2
"""Times that differ by at most this factor count as unchanged."""
_PAUSE = 50
"""Reviews without a change after a failed one; doubled with each further failure."""
_MIN_CHANGE = 1.2
"""Least factor by which examples must have changed for a comparison; below it, times scatter."""
_PARTS = np.linspace(0.0, 0.98, 50)
"""Fixed parts of a pass that are tried in the fit of the fixed cost."""
_BISECTIONS = 60
"""Steps of bisection; more would not change a float."""


def balanced_shares(
    examples: int,
    speeds: Sequence[float],
    low: int = 1,
    high: int | None = None,
    constant: float = 0.0,
) -> tuple[int, ...]:
    """Return the shares with which all ranks finish at the same time, within bounds.

    Args:
        examples: number of examples of all ranks together.
        speeds: speed of each rank [examples/s], above 0; its fixed cost counts as ``constant``
            examples.
        low, high: fewest and most examples of a rank; high None: no bound.
        constant: number of examples whose compute time equals the fixed cost of a step.

    Returns:
        Number of examples of each rank; the sum is ``examples``. If no shares keep to the bounds,
        they differ by at most one.

    >>> balanced_shares(32, [3.0, 1.0])
    (24, 8)
    >>> balanced_shares(32, [3.0, 1.0], high=20)
    (20, 12)
    >>> balanced_shares(32, [3.0, 1.0], constant=4)
    (26, 6)
    """
    ranks = len(speeds)
    most = examples if high is None else high
    if not ranks * low <= examples <= ranks * most:
        return _equal_shares(examples, ranks)

    # Bisect for the time after which all ranks together have processed enough examples.
    pace = np.asarray(speeds, np.float64)
    short, long = 0.0, (most + constant) / float(pace.min())
    for _ in range(_BISECTIONS):
        middle = (short + long) / 2
        done = np.clip(pace * middle - constant, low, most).sum()
        short, long = (middle, long) if done < examples else (short, middle)
    # Round down, then give each missing example to the rank that would finish it first.
    found = np.floor(np.clip(pace * short - constant, low, most)).astype(np.int64)
    for _ in range(examples - int(found.sum())):
        after = np.where(found < most, (found + 1 + constant) / pace, np.inf)
        found[int(np.argmin(after))] += 1
    return tuple(found.tolist())


def _equal_shares(examples: int, ranks: int) -> tuple[int, ...]:
    size, larger = divmod(examples, ranks)
    return tuple(size + (rank < larger) for rank in range(ranks))


def shares_in_passes(low: int, high: int, passes: int, share: int) -> tuple[int, int]:
    """Return a range of shares, all of which can be divided into passes within bounds.

    Args:
        low, high: fewest and most examples of a pass, low <= high.
        passes: largest number of passes.
        share: an equal share.

    Returns:
        Fewest and most examples. The range contains ``share``, unless that cannot be divided.

    >>> shares_in_passes(10, 13, passes=8, share=12)  # 14 to 19 are too many for one, too few for 2
    (10, 13)
    >>> shares_in_passes(4, 13, passes=8, share=12)
    (4, 104)
    """
    least, most = low, high
    for number in range(2, passes + 1):
        if number * low > most + 1:
            if share <= most:
                break
            least = number * low
        most = number * high
    return least, most


def balanced_slowness(
    slowness: Sequence[float],
    ranks: Sequence[int],
    constant: ArrayLike = 0.0,
    least: ArrayLike = 0.0,
) -> np.ndarray:
    """Return the slowness at which equal shares would take as long as balanced shares do.

    A rank of slowness ``s_i`` takes ``s_i (alpha + beta m_i)`` for ``m_i`` of M examples. If all
    finish at the same time T, then ``m_i = (T / s_i - alpha) / beta``, and the sum over K ranks
    gives ``T = K / sum(1 / s_i) (alpha + beta M / K)``. So the harmonic mean of the slowness takes
    the place of the largest one, which counts with equal shares. A rank that takes longer than T
    for the smallest share gets that share; the others process the rest and wait.

    Args:
        slowness: slowness of each host.
        ranks: number of ranks on each host.
        constant: ``alpha / (alpha + beta M / K)``, the part of a pass with an equal share that
            does not depend on its examples; any shape S.
        least: smallest share of a rank, relative to an equal one; shape S.

    Returns:
        The slowness; shape S.

    >>> float(balanced_slowness([1.0, 3.0], [1, 1]))
    1.5
    >>> balanced_slowness([1.0, 3.0], [3, 1], constant=[0.2, 0.5]).tolist()
    [1.2, 1.5]
    """
    part, small = np.asarray(constant, np.float64), np.asarray(least, np.float64)
    order = np.argsort(slowness, kind="stable")
    slow, number = np.asarray(slowness, np.float64)[order], np.asarray(ranks)[order]
    total = number.sum()
    # Times if the n fastest hosts are balanced and all others have the smallest share, for each n.
    rate, working = np.cumsum(number / slow), np.cumsum(number)
    made = total - small[..., None] * (total - working)
    alone = ((1 - part)[..., None] * made + part[..., None] * working) / rate
    return np.maximum(alone.min(axis=-1), slow[-1] * (part + (1 - part) * small))


class TimedTwice(NamedTuple):
    """Two timings of one rank, with different numbers of examples or passes.

    Attributes:
        passes, examples, own_s: passes, examples and compute time [s] of a step before.
        new_passes, new_examples, new_own_s: the same now.
    """

    passes: int
    examples: float
    own_s: float
    new_passes: int
    new_examples: float
    new_own_s: float


def constant_examples(seen: Sequence[TimedTwice]) -> float | None:
    """Return the number of examples whose compute time equals the fixed cost of one pass.

    A rank of slowness s takes ``t = s (alpha n + beta m)`` for m examples in n passes. In two such
    times of one rank ``(alpha / beta n + m) / t`` is the same, so they give ``alpha / beta``
    whatever s is: ``x alpha / beta = y`` with ``x = n / t - n' / t'`` and ``y = m' / t' - m / t``.
    Both x and y are measured, so the line is fitted with errors in both (total least squares). The
    result is at most 49 times the number of examples in a pass.

    Returns:
        The number of examples; None if no number of examples changed by a fifth or more, since the
        times scatter.

    >>> round(constant_examples([TimedTwice(1, 16, 0.26, 1, 24, 0.34)]))
    10
    """
    found = [
        pair
        for pair in seen
        if not 1 / _MIN_CHANGE < pair.new_examples / pair.examples < _MIN_CHANGE
    ]
    if not found:
        return None
    n, m, t, new_n, new_m, new_t = np.asarray(found, np.float64).T[:, :, None]
    scale, passes, examples = np.sqrt(t * new_t), np.sqrt(n * new_n), np.sqrt(m * new_m)
    x, y = scale * (n / t - new_n / new_t), scale * (new_m / new_t - m / t)
    tried = _PARTS / (1 - _PARTS) * np.median(examples / passes)
    off = ((tried * x - y) ** 2 / ((tried * passes) ** 2 + examples**2)).sum(axis=0)
    return float(tried[int(np.argmin(off))])


def effective_slowness(own_s: Sequence[float], shares: Sequence[int]) -> float:
    """Return the slowness at which equal shares would take as long as these shares do.

    It is the time of the slowest rank, relative to that of a typical rank (by the median of the
    times for one example) with an equal share. With equal shares this is the largest slowness, and
    with balanced shares :func:`balanced_slowness`.

    Args:
        own_s: compute time of each rank for a step [s].
        shares: number of examples of each rank in a step.

    >>> effective_slowness([1.0, 1.0, 3.0], [16, 16, 16])
    3.0
    >>> round(effective_slowness([1.3, 1.3, 1.3], [20, 20, 8]), 2)
    1.25
    """
    typical = median(seconds / share for seconds, share in zip(own_s, shares, strict=True))
    return max(own_s) / (typical * sum(shares) / len(shares))


@dataclass(frozen=True)
class _Change:
    """A change of shares whose effect is not known yet.

    Attributes:
        speeds, constant: values that determined the shares before.
        example_s: time for an example on each rank before [s].
        shares: number of examples of each rank before.
        examples: number of examples of a step.
        limit_s: longest time of the slowest rank for which the change has not failed [s].
    """

    speeds: tuple[float, ...]
    constant: float
    example_s: tuple[float, ...]
    shares: tuple[int, ...]
    examples: int
    limit_s: float


@dataclass
class ShareBalance:
    """Chooses the share of each rank from the ranks' compute times.

    The first unequal shares are proportional to the ranks' speeds ``m_i / t_i``, as if the time
    ``t_i`` for ``m_i`` examples had no fixed part. They lie between equal shares and those with
    which all ranks finish together. Their effect shows how large the fixed part is
    (:func:`constant_examples`), so the next shares are the right ones.

    Times scatter, and one of many ranks is always the slowest. So a rank counts as slow by its
    shortest time in three consecutive reviews, and shares follow the means of the three. Shares
    change if that makes steps 1.1 times as fast, and become equal again if the slowest rank takes
    at most 5 % longer with equal ones. After twelve reviews with unequal shares they are refined
    by the means of all twelve, if that makes steps 1.03 times as fast.

    Time does not always grow with the number of examples: a processor that works in blocks may
    take as long for 17 as for 32. So the effect of a change is checked. If it did not help, the
    shares before are restored and kept until the ranks' times differ, or for a number of reviews.
    That number doubles each time, and is finite because something else may have disturbed the
    measurement.

    Attributes:
        parts: number of examples of each rank in a full step; empty: equal shares.
        speeds: speed of each rank that ``parts`` follow [examples/s]; empty: equal shares.
        constant: number of examples whose compute time equals the fixed cost of a step, as assumed
            for ``parts``.
        learnt: the same, as measured after the last change.
        seen: time for an example on each rank in the last reviews with these shares [s].
        reviews: number of reviews of steps of ``examples`` examples with these shares.
        examples: number of examples of a step in these reviews.
        logs: sums of the logarithms of the times in these reviews, until the shares are refined.
        change: last change while its effect is not known; None: there is none.
        in_vain: time for an example on each rank at which a change failed [s]; empty: none failed.
        failures: number of consecutive failed changes.
        pause: number of reviews in which the times of ``in_vain`` do not lead to a change.

    >>> balance = ShareBalance()
    >>> for _ in range(3):
    ...     reason = balance.review([0.3, 0.1], 0.3, 32)
    >>> print(reason)
    rank 0 takes 0.3 s for 16 examples and rank 1 0.1 s for 16; steps of 0.15 s are expected ...
    >>> balance.cut(32, ranks=2)
    >>> balance.parts
    (8, 24)
    """

    parts: tuple[int, ...] = ()
    speeds: tuple[float, ...] = ()
    constant: float = 0.0
    learnt: float = 0.0
    seen: tuple[tuple[float, ...], ...] = ()
    reviews: int = 0
    examples: int = 0
    logs: tuple[float, ...] = ()
    change: _Change | None = None
    in_vain: tuple[float, ...] = ()
    failures: int = 0
    pause: int = 0

    def review(
        self,
        own_s: Sequence[float],
        step_s: float,
        examples: int,
        low: int = 1,
        high: int | None = None,
    ) -> str:
        """Decide on the shares from the times of the ranks; :meth:`cut` then applies them.

        Args:
            own_s: compute time of each rank for a step with the present shares [s]; NaN: unknown.
            step_s: time of such a step [s].
            examples: number of examples of a step.
            low, high: see :func:`balanced_shares`.

        Returns:
            The reason if the shares change, else an empty string.
        """
        ranks = len(own_s)
        shares = self.parts_of(examples, ranks)
        known = all(math.isfinite(own) and own > 0 for own in own_s)
        if ranks < 2 or not known or min(shares) < 1:
            return ""
        times = tuple(own / share for own, share in zip(own_s, shares, strict=True))
        self.seen = (*self.seen, times)[-_PATIENCE:]
        self._sum_up(times, examples)
        if len(self.seen) < _PATIENCE:
            return ""
        least = [min(of_rank) for of_rank in zip(*self.seen, strict=True)]
        mean = tuple(geometric_mean(of_rank) for of_rank in zip(*self.seen, strict=True))
        now_s = max(share * each_s for share, each_s in zip(shares, least, strict=True))
        change, self.change = self.change, None
        if change is not None and change.examples != examples:
            change = None
        if change is not None:
            if now_s > change.limit_s:
                return self._undo(change, now_s)
            self.failures = 0
        if self.pause and _alike(self.in_vain, mean):
            self.pause -= 1
            return ""
        self.in_vain, self.pause = (), 0
        took = [share * example_s for share, example_s in zip(shares, mean, strict=True)]
        if change is not None:
            self._learn_constant(change, shares, took)
        speeds = self._speeds(shares, mean)
        best = balanced_shares(examples, speeds, low, high, self.learnt)
        best_s = self._slowest_s(best, speeds)
        even_s = self._slowest_s([examples / ranks] * ranks, self._speeds(shares, least))
        if even_s <= _NEARLY_EQUAL * best_s:
            if not self.speeds:
                return ""
            self._change_to((), _NEARLY_EQUAL * now_s, mean, shares)
            return "the ranks are equally fast, to 5 %"
        before_s = max(step_s, now_s)
        after_s = before_s - (now_s - best_s)
        if before_s < _MIN_SPEEDUP * after_s:
            return self._refine(shares, step_s, low, high)
        self._change_to(speeds, now_s / _HELPED, mean, shares)
        self.constant, self.reviews, self.logs = self.learnt, 0, ()
        slow, fast = took.index(max(took)), took.index(min(took))
        return (
            f"rank {slow} takes {took[slow]:.3g} s for {shares[slow]} examples and rank {fast} "
            f"{took[fast]:.3g} s for {shares[fast]}; steps of {after_s:.3g} s are expected "
            f"instead of {before_s:.3g} s"
        )

    def _change_to(
        self,
        speeds: tuple[float, ...],
        limit_s: float,
        example_s: tuple[float, ...],
        shares: tuple[int, ...],
    ) -> None:
        """Change the speeds; undo that later if the slowest rank takes longer than ``limit_s``."""
        self.change = _Change(self.speeds, self.constant, example_s, shares, self.examples, limit_s)
        self.speeds, self.seen = speeds, ()

    def _undo(self, change: _Change, now_s: float) -> str:
        """Return to the shares before a change that did not help, and wait before the next."""
        self.speeds, self.constant = change.speeds, change.constant
        self.learnt, self.seen, self.in_vain = 0.0, (), change.example_s
        self.reviews, self.logs = 0, ()
        self.pause = _PAUSE << min(self.failures, 10)
        self.failures += 1
        return f"the slowest rank takes {now_s:.3g} s: the last change did not help"

    def _learn_constant(
        self, change: _Change, shares: Sequence[int], took: Sequence[float]
    ) -> None:
        """Learn the fixed cost of a pass from the times before and after a change of shares."""
        before = zip(change.shares, change.example_s, strict=True)
        pairs = [
            TimedTwice(1, share, share * each_s, 1, new, new_s)
            for (share, each_s), new, new_s in zip(before, shares, took, strict=True)
        ]
        found = constant_examples(pairs)
        self.learnt = self.learnt if found is None else found

    def _sum_up(self, times: Sequence[float], examples: int) -> None:
        if examples != self.examples or not self.speeds:
            self.examples, self.reviews, self.logs = examples, 0, ()
        self.reviews += 1
        if self.reviews <= _REFINE_AFTER:
            sums = self.logs or [0.0] * len(times)
            self.logs = tuple(s + math.log(each) for s, each in zip(sums, times, strict=True))

    def _refine(self, shares: Sequence[int], step_s: float, low: int, high: int | None) -> str:
        """Decide once on shares by the mean of many reviews; return the reason or ""."""
        if self.reviews != _REFINE_AFTER or not self.speeds:
            return ""
        mean = [math.exp(total / self.reviews) for total in self.logs]
        self.logs = ()
        speeds = self._speeds(shares, mean)
        best = balanced_shares(sum(shares), speeds, low, high, self.learnt)
        now_s = max(share * each_s for share, each_s in zip(shares, mean, strict=True))
        before_s = max(step_s, now_s)
        after_s = before_s - (now_s - self._slowest_s(best, speeds))
        if before_s < _MIN_SPEEDUP_REFINED * after_s:
            return ""
        self.speeds, self.constant, self.seen = speeds, self.learnt, ()
        return (
            f"the mean of {self.reviews} reviews: steps of {after_s:.3g} s are expected instead of "
            f"{before_s:.3g} s"
        )

    def parts_of(self, examples: int, ranks: int) -> tuple[int, ...]:
        """Return the number of examples of each rank in a full step, also if shares are equal."""
        if len(self.parts) == ranks:
            return self.parts
        return _equal_shares(examples, ranks)

    def cut(self, examples: int, ranks: int, low: int = 1, high: int | None = None) -> None:
        """Apply the shares that the last review decided on, for steps of ``examples``."""
        self.parts = self.decided(examples, ranks, low, high) if self.speeds else ()

    def decided(
        self, examples: int, ranks: int, low: int = 1, high: int | None = None
    ) -> tuple[int, ...]:
        """Return the shares that the last review decided on, for steps of ``examples``."""
        if len(self.speeds) != ranks:
            return _equal_shares(examples, ranks)
        return balanced_shares(examples, self.speeds, low, high, self.constant)

    def slowness_of(
        self,
        atomic: np.ndarray,
        extra: np.ndarray,
        timed: BatchPlan,
        low: int = 1,
    ) -> np.ndarray:
        """Return the slowness of steps with other passes, relative to the steps that were timed.

        The larger the fixed part of a pass, the less unequal shares can compensate for a slow rank.
        With equal shares all ranks wait for the slowest, so the result is 1.

        Args:
            atomic: mean numbers of examples of a pass over the ranks; any shape S.
            extra: numbers of extra passes; shape S.
            timed: batch plan of the steps that were timed.
            low: fewest examples of a rank.

        Returns:
            Relative slowness; shape S.
        """
        if not self.speeds:
            return np.ones(np.shape(atomic))
        ranks = len(self.speeds)
        slowness = [max(self.speeds) / speed for speed in self.speeds]
        constant = self.constant / (timed.accumulation_steps + 1)

        def balanced(mean: np.ndarray, share: np.ndarray) -> np.ndarray:
            part, least = constant / (constant + mean), np.minimum(low / share, 1.0)
            return balanced_slowness(slowness, [1] * ranks, part, least)

        share = np.asarray(timed.global_batch_size / ranks)
        return balanced(atomic, atomic * (extra + 1)) / balanced(
            share / (timed.accumulation_steps + 1), share
        )

    def _speeds(self, shares: Sequence[int], example_s: Sequence[float]) -> tuple[float, ...]:
        """Return the speed of each rank, its fixed cost counted as examples [examples/s]."""
        times = zip(shares, example_s, strict=True)
        return tuple((share + self.learnt) / (share * each_s) for share, each_s in times)

    def _slowest_s(self, shares: Sequence[float], speeds: Sequence[float]) -> float:
        """Return the compute time of the slowest rank with other shares [s]."""
        return max(
            (share + self.learnt) / speed for share, speed in zip(shares, speeds, strict=True)
        )

    def forget(self) -> None:
        """Reset to equal shares, for another set of ranks."""
        self.parts, self.speeds, self.seen = (), (), ()
        self.reviews, self.examples, self.logs = 0, 0, ()
        self.constant = self.learnt = 0.0
        self.change, self.in_vain, self.failures, self.pause = None, (), 0, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data, for a broadcast or a checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a :meth:`state_dict`, in which tuples may have become lists."""
        self.parts, self.speeds = tuple(state["parts"]), tuple(state["speeds"])
        self.seen = tuple(tuple(times) for times in state["seen"])
        self.in_vain, change = tuple(state["in_vain"]), state["change"]
        self.failures, self.pause = state["failures"], state["pause"]
        self.constant, self.learnt = state["constant"], state["learnt"]
        self.reviews, self.examples = state["reviews"], state["examples"]
        self.logs = tuple(state["logs"])
        self.change = None
        if change is not None:
            saved = ((field.name, change[field.name]) for field in fields(_Change))
            values: dict[str, Any] = {
                name: tuple(value) if isinstance(value, list) else value for name, value in saved
            }
            self.change = _Change(**values)


def _alike(some: Sequence[float], others: Sequence[float]) -> bool:
    """Return whether each time differs by less than ``_SAME_TIMES`` from the other one."""
    return all(
        one < other * _SAME_TIMES and other < one * _SAME_TIMES
        for one, other in zip(some, others, strict=True)
    )

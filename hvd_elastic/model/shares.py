"""Unequal shares of a global batch: how many examples each rank gets, by how fast it is.

A synchronous step waits for its slowest rank. Where ranks differ, a slow one gets fewer examples
and a fast one more, so that all are ready at the same time. Gradients are averaged by examples, so
the step stays the one of the global batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import geometric_mean, median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from hvd_elastic.model.goodput import BatchPlan

__all__ = ["LEAST_SHARE", "ShareBalance", "TimedTwice", "balanced_shares", "balanced_slowness"]
__all__ += ["constant_examples", "effective_slowness", "shares_in_passes"]

LEAST_SHARE = 2
"""Examples of a rank at the least, for layers that cannot train on one."""
_WORTH_IT = 1.1
"""Steps have to become this many times as fast before shares change."""
_PATIENCE = 3
"""Reviews running in which a rank has to be slow."""
_SECOND_LOOK = 12
"""Reviews with unequal shares, after which their mean tells what three could not."""
_WORTH_IT_THEN = 1.03
_NEARLY_EQUAL = 1.05
"""Equal shares are preferred where the slowest rank needs at most this much longer with them."""
_HELPED = 1.03
"""The slowest rank has to become this many times as fast, or a change was in vain."""
_SAME_TIMES = 1.2
"""Ranks are as fast as they were where no time differs by more than this factor."""
_PAUSE = 50
"""Reviews without a change after one in vain; doubled with each further one."""
_TELLS_NOTHING = 1.2
_PARTS = np.linspace(0.0, 0.98, 50)
_BISECTIONS = 60


def balanced_shares(
    examples: int,
    speeds: Sequence[float],
    low: int = 1,
    high: int | None = None,
    constant: float = 0.0,
) -> tuple[int, ...]:
    """Shares with which all ranks end at the same time, within bounds.

    Args:
        examples: of all ranks together.
        speeds: of each rank [examples/s], above 0, those of ``constant`` included.
        low, high: fewest and most examples of a rank; high None: no bound.
        constant: so many examples take as long as what a rank does for any share.

    Returns:
        Whole numbers whose sum is ``examples``. Where the bounds exclude each other, shares are
        equal but for one example.

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

    # What all have done after some time grows with it: look for the time at which it is enough.
    pace = np.asarray(speeds, np.float64)
    short, long = 0.0, (most + constant) / float(pace.min())
    for _ in range(_BISECTIONS):
        middle = (short + long) / 2
        done = np.clip(pace * middle - constant, low, most).sum()
        short, long = (middle, long) if done < examples else (short, middle)
    # The time is one in which a little too much is done: whole examples that fit into it, and the
    # rest where the next one is done first. A slow rank's example takes as long as many others.
    found = np.floor(np.clip(pace * short - constant, low, most)).astype(np.int64)
    for _ in range(examples - int(found.sum())):
        after = np.where(found < most, (found + 1 + constant) / pace, np.inf)
        found[int(np.argmin(after))] += 1
    return tuple(found.tolist())


def _equal_shares(examples: int, ranks: int) -> tuple[int, ...]:
    size, larger = divmod(examples, ranks)
    return tuple(size + (rank < larger) for rank in range(ranks))


def shares_in_passes(low: int, high: int, passes: int, share: int) -> tuple[int, int]:
    """The shares around one that all can be made in passes within bounds.

    Args:
        low, high: fewest and most examples of a pass, low <= high.
        passes: at the most.
        share: an equal one.

    Returns:
        The fewest and the most examples; not around ``share`` where that cannot be made itself.

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
    """The slowness at which equal shares would take as long as balanced ones do.

    A rank of slowness ``s_i`` makes ``m_i`` of M examples in ``s_i (alpha + beta m_i)``. Where all
    end at the same time T, ``m_i = (T / s_i - alpha) / beta`` and so, summed over K ranks,
    ``T = K / sum(1 / s_i) (alpha + beta M / K)``: the harmonic mean of the ranks' slowness takes
    the place of the largest one, which counts where shares are equal. A rank so slow that even
    the least share takes it longer gets that one; the others make the rest, and wait.

    Args:
        slowness: of each host.
        ranks: on each host.
        constant: ``alpha / (alpha + beta M / K)``, the part of a pass with an equal share that
            does not depend on its examples; any shape.
        least: the smallest share of a rank, relative to an equal one; the same shape.

    Returns:
        Shape of ``constant``.

    >>> float(balanced_slowness([1.0, 3.0], [1, 1]))
    1.5
    >>> balanced_slowness([1.0, 3.0], [3, 1], constant=[0.2, 0.5]).tolist()
    [1.2, 1.5]
    """
    part, small = np.asarray(constant, np.float64), np.asarray(least, np.float64)
    order = np.argsort(slowness, kind="stable")
    slow, number = np.asarray(slowness, np.float64)[order], np.asarray(ranks)[order]
    total = number.sum()
    # With so many of the fastest hosts, and the least shares for all others: the least of these is
    # the time at which everything is done.
    rate, working = np.cumsum(number / slow), np.cumsum(number)
    made = total - small[..., None] * (total - working)
    alone = ((1 - part)[..., None] * made + part[..., None] * working) / rate
    return np.maximum(alone.min(axis=-1), slow[-1] * (part + (1 - part) * small))


class TimedTwice(NamedTuple):
    """A rank that made another number of examples, or in other passes, than before.

    Attributes:
        passes, examples, own_s: then: own time of a step [s].
        new_passes, new_examples, new_own_s: now.
    """

    passes: int
    examples: float
    own_s: float
    new_passes: int
    new_examples: float
    new_own_s: float


def constant_examples(seen: Sequence[TimedTwice]) -> float | None:
    """How many examples take as long as what is constant in a pass.

    A rank of slowness s takes ``t = s (alpha n + beta m)`` for m examples in n passes. Two such
    times of one rank give ``alpha / beta`` whatever s is, since ``(alpha / beta n + m) / t`` stays:
    ``x alpha / beta = y`` with ``x = n / t - n' / t'`` and ``y = m' / t' - m / t``. Both sides are
    measured, so the line is fitted with errors in both (total least squares), to at most 49 times
    the examples of a pass.

    Returns:
        None where no number of examples changed by a fifth: times scatter.

    >>> round(constant_examples([TimedTwice(1, 16, 0.26, 1, 24, 0.34)]))
    10
    """
    found = [
        pair
        for pair in seen
        if not 1 / _TELLS_NOTHING < pair.new_examples / pair.examples < _TELLS_NOTHING
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
    """The slowness at which equal shares would take as long as these do.

    The slowest rank's time, relative to that of a typical rank (the median of the times for an
    example) with an equal share: the largest slowness where shares are equal, and
    :func:`balanced_slowness` where all end at the same time.

    Args:
        own_s: own time of each rank for a step, without waiting [s].
        shares: examples of each rank in it.

    >>> effective_slowness([1.0, 1.0, 3.0], [16, 16, 16])
    3.0
    >>> round(effective_slowness([1.3, 1.3, 1.3], [20, 20, 8]), 2)
    1.25
    """
    typical = median(seconds / share for seconds, share in zip(own_s, shares, strict=True))
    return max(own_s) / (typical * sum(shares) / len(shares))


@dataclass(frozen=True)
class _Change:
    """A change of shares, until it is known what it brought.

    Attributes:
        speeds, constant: by which shares were cut before.
        example_s: what an example took each rank before [s].
        shares: of each rank before.
        examples: of a step.
        limit_s: the slowest rank must not take longer than this now [s].
    """

    speeds: tuple[float, ...]
    constant: float
    example_s: tuple[float, ...]
    shares: tuple[int, ...]
    examples: int
    limit_s: float


@dataclass
class ShareBalance:
    """Decides who gets how much, from how long each rank's own work took.

    At first shares are cut in proportion to the ranks' speeds ``m_i / t_i``, as if no part of the
    time ``t_i`` for ``m_i`` examples were constant: that lies between where they are and where all
    ranks end together. What comes of it shows how large that part is
    (:func:`constant_examples`), and the next cut is the right one.

    Times are chance in part, and of many ranks one is always the slowest. So a rank counts as slow
    by the least time that it took in three reviews running, while shares are cut by the means of
    the three. They change where steps would become 1.1 times as fast, and become equal again where
    nobody would need 5 % longer for it. Once twelve reviews have seen unequal shares they are cut
    by the means of those, if that makes steps 1.03 times as fast.

    Not all work grows with its examples: a processor that works in blocks takes as long for 17 as
    for 32. So a change has to show that it helped. Where it did not, the shares are again what they
    were, and stay that until the ranks' times are others, or for some time: longer each time, since
    it may have been something else that disturbed it.

    Attributes:
        parts: examples of each rank in a full step; empty: equal shares.
        speeds: by which they were cut, of each rank [examples/s]; empty: equal shares.
        constant: so many examples were taken to take as long as what a rank does for any share.
        learnt: as many do, by what the last change brought.
        seen: own time of each rank for an example in the last reviews with these shares [s].
        reviews: of steps of ``examples``, since such a change.
        examples: of a step in these.
        logs: sum of the logarithms of those times, until the second look.
        change: the last one, while it has not shown what it brought.
        in_vain: time for an example with which a change did not help [s]; empty: there was none.
        failures: changes in vain, since one helped.
        pause: reviews in which the times of ``in_vain`` still change nothing.

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
        """Look at what the ranks took; :meth:`cut` then makes the shares.

        Args:
            own_s: own time of each rank for a step with the shares as they are, without waiting
                [s]; NaN: not known.
            step_s: time of such a step [s].
            examples: of it.
            low, high: see :func:`balanced_shares`.

        Returns:
            Why shares change, in words; empty: they do not.
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
        if change is not None and change.examples == examples:
            if now_s > change.limit_s:
                self.speeds, self.constant = change.speeds, change.constant
                self.learnt, self.seen, self.in_vain = 0.0, (), change.example_s
                self.reviews, self.logs = 0, ()
                self.pause = _PAUSE << min(self.failures, 10)
                self.failures += 1
                return f"the slowest rank takes {now_s:.3g} s: the last change did not help"
            self.failures = 0
        if self.pause and _alike(self.in_vain, mean):
            self.pause -= 1
            return ""
        self.in_vain, self.pause = (), 0
        took = [share * example_s for share, example_s in zip(shares, mean, strict=True)]
        if change is not None and change.examples == examples:
            before = zip(change.shares, change.example_s, strict=True)
            pairs = [
                TimedTwice(1, share, share * each_s, 1, new, new_s)
                for (share, each_s), new, new_s in zip(before, shares, took, strict=True)
            ]
            found = constant_examples(pairs)
            self.learnt = self.learnt if found is None else found
        speeds = self._speeds(shares, mean)
        best = balanced_shares(examples, speeds, low, high, self.learnt)
        best_s = self._slowest_s(best, speeds)
        equal = [examples / ranks] * ranks
        even = self._slowest_s(equal, self._speeds(shares, least)) <= _NEARLY_EQUAL * best_s
        before_s = max(step_s, now_s)
        after_s = before_s - (now_s - best_s)
        if even:
            if not self.speeds:
                return ""
            limit_s = now_s * _NEARLY_EQUAL
            self.change = _Change(self.speeds, self.constant, mean, shares, examples, limit_s)
            self.speeds, self.seen = (), ()
            return "the ranks are equally fast, to 5 %"
        if before_s < _WORTH_IT * after_s:
            return self._second_look(shares, step_s, low, high)
        limit_s = now_s / _HELPED
        self.change = _Change(self.speeds, self.constant, mean, shares, examples, limit_s)
        self.speeds, self.constant, self.seen = speeds, self.learnt, ()
        self.reviews, self.logs = 0, ()
        slow, fast = took.index(max(took)), took.index(min(took))
        return (
            f"rank {slow} takes {took[slow]:.3g} s for {shares[slow]} examples and rank {fast} "
            f"{took[fast]:.3g} s for {shares[fast]}; steps of {after_s:.3g} s are expected "
            f"instead of {before_s:.3g} s"
        )

    def _sum_up(self, times: Sequence[float], examples: int) -> None:
        if examples != self.examples or not self.speeds:
            self.examples, self.reviews, self.logs = examples, 0, ()
        self.reviews += 1
        if self.reviews <= _SECOND_LOOK:
            sums = self.logs or [0.0] * len(times)
            self.logs = tuple(s + math.log(each) for s, each in zip(sums, times, strict=True))

    def _second_look(self, shares: Sequence[int], step_s: float, low: int, high: int | None) -> str:
        """Once there are many reviews: cut by their mean, where that is worth it."""
        if self.reviews != _SECOND_LOOK or not self.speeds:
            return ""
        mean = [math.exp(total / self.reviews) for total in self.logs]
        self.logs = ()
        speeds = self._speeds(shares, mean)
        best = balanced_shares(sum(shares), speeds, low, high, self.learnt)
        now_s = max(share * each_s for share, each_s in zip(shares, mean, strict=True))
        before_s = max(step_s, now_s)
        after_s = before_s - (now_s - self._slowest_s(best, speeds))
        if before_s < _WORTH_IT_THEN * after_s:
            return ""
        self.speeds, self.constant, self.seen = speeds, self.learnt, ()
        return (
            f"the mean of {self.reviews} reviews: steps of {after_s:.3g} s are expected instead of "
            f"{before_s:.3g} s"
        )

    def parts_of(self, examples: int, ranks: int) -> tuple[int, ...]:
        """Examples of each rank in a full step, equal shares included."""
        if len(self.parts) == ranks:
            return self.parts
        return _equal_shares(examples, ranks)

    def cut(self, examples: int, ranks: int, low: int = 1, high: int | None = None) -> None:
        """Make the shares of steps of ``examples``, as the last review had it."""
        self.parts = self.decided(examples, ranks, low, high) if self.speeds else ()

    def decided(
        self, examples: int, ranks: int, low: int = 1, high: int | None = None
    ) -> tuple[int, ...]:
        """Examples of each rank once shares are made as the last review had it."""
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
        """How slow steps are with other passes, relative to those that were timed.

        A rank that is slow takes the longer for what is constant in a pass, the more of a pass
        that is. With equal shares all wait for the slowest, and nothing changes.

        Args:
            atomic: mean sizes of a pass over the ranks [examples].
            extra: passes beyond the first.
            timed: of the steps that were timed.
            low: fewest examples of a rank.
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
        """Of each rank, what is constant counted in examples [examples/s]."""
        times = zip(shares, example_s, strict=True)
        return tuple((share + self.learnt) / (share * each_s) for share, each_s in times)

    def _slowest_s(self, shares: Sequence[float], speeds: Sequence[float]) -> float:
        """Time of a step with other shares [s]."""
        return max(
            (share + self.learnt) / speed for share, speed in zip(shares, speeds, strict=True)
        )

    def forget(self) -> None:
        """Equal shares, until the ranks of another world were timed."""
        self.parts, self.speeds, self.seen = (), (), ()
        self.reviews, self.examples, self.logs = 0, 0, ()
        self.constant = self.learnt = 0.0
        self.change, self.in_vain, self.failures, self.pause = None, (), 0, 0

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, for a broadcast or a checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What :meth:`state_dict` gave, tuples perhaps as lists."""
        self.parts, self.speeds = tuple(state["parts"]), tuple(state["speeds"])
        self.seen = tuple(tuple(times) for times in state["seen"])
        self.in_vain, change = tuple(state["in_vain"]), state["change"]
        self.failures, self.pause = state["failures"], state["pause"]
        # Checkpoints of before have neither these nor those of the change.
        self.constant, self.learnt = state.get("constant", 0.0), state.get("learnt", 0.0)
        self.reviews, self.examples = state.get("reviews", 0), state.get("examples", 0)
        self.logs = tuple(state.get("logs", ()))
        self.change = (
            None
            if change is None or "shares" not in change
            else _Change(
                tuple(change["speeds"]),
                change["constant"],
                tuple(change["example_s"]),
                tuple(change["shares"]),
                change["examples"],
                change["limit_s"],
            )
        )


def _alike(some: Sequence[float], others: Sequence[float]) -> bool:
    """Whether no time is another one."""
    return all(
        one < other * _SAME_TIMES and other < one * _SAME_TIMES
        for one, other in zip(some, others, strict=True)
    )

"""Unequal shares of a global batch: how many examples each rank gets, by how fast it is.

A synchronous step waits for its slowest rank. Where ranks differ, a slow one gets fewer examples
and a fast one more, so that all are ready at the same time. Gradients are averaged by examples, so
the step stays the one of the global batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

__all__ = ["ShareBalance", "balanced_shares", "balanced_slowness", "effective_slowness"]

_WORTH_IT = 1.1
"""Steps have to become this many times as fast before shares change."""
_PATIENCE = 2
"""Reviews in a row that want a change before it is made."""
_NEARLY_EQUAL = 1.05
"""Equal shares are preferred where the slowest rank needs at most this much longer with them."""
_BISECTIONS = 60


def balanced_shares(
    examples: int, speeds: Sequence[float], low: int = 1, high: int | None = None
) -> tuple[int, ...]:
    """Shares in proportion to the ranks' speeds, within bounds.

    Args:
        examples: of all ranks together.
        speeds: of each rank [examples/s], above 0.
        low, high: fewest and most examples of a rank; high None: no bound.

    Returns:
        Whole numbers whose sum is ``examples``. Where the bounds exclude each other, shares are
        equal but for one example.

    >>> balanced_shares(32, [3.0, 1.0])
    (24, 8)
    >>> balanced_shares(32, [3.0, 1.0], high=20)
    (20, 12)
    """
    ranks = len(speeds)
    most = examples if high is None else high
    if not ranks * low <= examples <= ranks * most:
        size, larger = divmod(examples, ranks)
        return tuple(size + (rank < larger) for rank in range(ranks))

    def shares(time: float) -> list[float]:
        return [min(max(speed * time, low), most) for speed in speeds]

    # What all have done after some time grows with it: look for the time at which it is enough.
    short, long = 0.0, most / min(speeds)
    for _ in range(_BISECTIONS):
        middle = (short + long) / 2
        short, long = (middle, long) if sum(shares(middle)) < examples else (short, middle)
    exact = shares(long)
    found = [min(max(math.floor(share), low), most) for share in exact]
    # The rest goes to those that lost most by rounding, the first of equals.
    order = sorted(range(ranks), key=lambda rank: (found[rank] - exact[rank], rank))
    rest = examples - sum(found)
    while rest:
        for rank in order:
            if rest and found[rank] < most:
                found[rank], rest = found[rank] + 1, rest - 1
    return tuple(found)


def balanced_slowness(slowness: Sequence[float], ranks: Sequence[int]) -> float:
    """The slowness at which equal shares would take as long as balanced ones do.

    A rank of slowness ``s_i`` makes ``m_i`` of M examples in ``s_i (alpha + beta m_i)``. Where all
    end at the same time T, ``m_i = (T / s_i - alpha) / beta`` and so, summed over K ranks,
    ``T = K / sum(1 / s_i) (alpha + beta M / K)``: the harmonic mean of the ranks' slowness takes
    the place of the largest one, which counts where shares are equal.

    Args:
        slowness: of each host.
        ranks: on each host.

    >>> balanced_slowness([1.0, 3.0], [1, 1])
    1.5
    """
    rate = sum(number / slow for slow, number in zip(slowness, ranks, strict=True))
    return sum(ranks) / rate


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


@dataclass
class ShareBalance:
    """Decides who gets how much, from how long each rank's own work took.

    Where a rank took ``t_i`` for ``m_i`` of M examples, a step with balanced shares takes
    ``M / sum(m_i / t_i)``, whatever part of ``t_i`` does not depend on ``m_i`` (see
    :func:`balanced_slowness`). The shares themselves do depend on it. They are taken to be
    ``m_i' ~ m_i / t_i``, as if nothing were constant: that lies between where they are and where
    all ranks end together, so reviews approach it and never swing around it.

    Shares change where two reviews running found that steps could be 1.1 times as fast, and become
    equal again where nobody would need 5 % longer for it.

    Attributes:
        parts: examples of each rank in a full step; empty: equal shares.
        speeds: by which they were cut, of each rank [examples/s]; empty: equal shares.
        wanted: reviews running that wanted a change.

    >>> balance = ShareBalance()
    >>> balance.review([0.3, 0.1], 0.3, 32), balance.parts
    ('', ())
    >>> print(balance.review([0.3, 0.1], 0.3, 32))
    rank 0 takes 0.3 s for 16 examples and rank 1 0.1 s for 16; steps of 0.15 s are expected ...
    >>> balance.cut(32, ranks=2)
    >>> balance.parts
    (8, 24)
    """

    parts: tuple[int, ...] = ()
    speeds: tuple[float, ...] = ()
    wanted: int = 0

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
        if ranks < 2 or not all(math.isfinite(own) and own > 0 for own in own_s):
            return ""
        shares = self.parts_of(examples, ranks)
        if min(shares) < 1:
            return ""
        speeds = tuple(share / own for share, own in zip(shares, own_s, strict=True))
        best = balanced_shares(examples, speeds, low, high)

        def slowest_s(tried: Sequence[float]) -> float:
            return max(share / speed for share, speed in zip(tried, speeds, strict=True))

        even = slowest_s([examples / ranks] * ranks) <= _NEARLY_EQUAL * slowest_s(best)
        now_s, best_s = max(own_s), slowest_s(best)
        before_s = max(step_s, now_s)
        after_s = before_s - (now_s - best_s)
        if not (even and self.speeds) and (even or before_s < _WORTH_IT * after_s):
            self.wanted = 0
            return ""
        self.wanted += 1
        if self.wanted < _PATIENCE:
            return ""
        self.wanted = 0
        self.speeds = () if even else speeds
        if even:
            return "the ranks are equally fast, to 5 %"
        slow, fast = own_s.index(max(own_s)), own_s.index(min(own_s))
        return (
            f"rank {slow} takes {own_s[slow]:.3g} s for {shares[slow]} examples and rank {fast} "
            f"{own_s[fast]:.3g} s for {shares[fast]}; steps of {after_s:.3g} s are expected "
            f"instead of {before_s:.3g} s"
        )

    def parts_of(self, examples: int, ranks: int) -> tuple[int, ...]:
        """Examples of each rank in a full step, equal shares included."""
        if len(self.parts) == ranks:
            return self.parts
        return balanced_shares(examples, [1.0] * ranks, low=0)

    def cut(self, examples: int, ranks: int, low: int = 1, high: int | None = None) -> None:
        """Make the shares of steps of ``examples``, as the last review had it."""
        self.parts = self.decided(examples, ranks, low, high) if self.speeds else ()

    def decided(
        self, examples: int, ranks: int, low: int = 1, high: int | None = None
    ) -> tuple[int, ...]:
        """Examples of each rank once shares are made as the last review had it."""
        if len(self.speeds) != ranks:
            return balanced_shares(examples, [1.0] * ranks, low=0)
        return balanced_shares(examples, self.speeds, low, high)

    def forget(self) -> None:
        """Equal shares, until the ranks of another world were timed."""
        self.parts, self.speeds, self.wanted = (), (), 0

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, for a broadcast or a checkpoint."""
        return {"parts": list(self.parts), "speeds": list(self.speeds), "wanted": self.wanted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What :meth:`state_dict` gave."""
        self.parts, self.speeds = tuple(state["parts"]), tuple(state["speeds"])
        self.wanted = state["wanted"]

"""Choose the batch plan of a run, and the shares of its ranks, from what was measured.

Training and the simulator both call this, so that what the simulator tests is what ships.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from hvd_elastic.model.goodput import (
    BatchLimits,
    BatchPlan,
    best_batch_plan,
    nearest_plan,
    score_plan,
)
from hvd_elastic.model.shares import (
    LEAST_SHARE,
    ShareBalance,
    effective_slowness,
    shares_in_passes,
)
from hvd_elastic.model.step_time import StepTimeModel

__all__ = ["BatchChoice", "steps_to_review"]

_OPTIMISM = 0.5
"""Standard deviations of the step time by which a plan that was never measured is scored better."""
_GROWTH = 2
"""The batch grows at most by this factor at once: memory and step times beyond are guesses."""
_WORTH_IT = 1.05
"""A plan that may bring this many times the goodput is changed to at once."""
_WORTH_WAITING = 1.02
"""One that is expected to bring this many times is changed to once it was found repeatedly: chance
alone makes as much of few measurements."""
_PATIENCE = 3
"""Consecutive reviews that have to find it."""
_NOTABLE_GAIN = 0.01
"""A plan that is expected to bring less than this part more is reported as a try."""
_MEMORY_MARGIN = 0.9
"""A pass a little smaller than one that ran out of memory runs out of it too."""
_REVIEW_S = 1.0
_REVIEW_STEPS = (10, 50)


class BatchChoice:
    """The batch plan and the shares of a run, and the rule that changes them.

    Args:
        limits: what the user allows.
        unequal_shares: whether slow ranks get fewer examples of a step.

    Attributes:
        plan: the batch plan in use.
        balance: which rank gets how much of it.
        memory_bound: most examples of a pass that are believed to fit into memory; None: no pass
            has failed.
        largest: the largest global batch that was in use.
    """

    def __init__(self, limits: BatchLimits, unequal_shares: bool = True) -> None:
        self.limits = limits
        self.unequal_shares = unequal_shares
        self.plan = BatchPlan(limits.initial_batch_size)
        self.balance = ShareBalance()
        self.memory_bound: int | None = None
        self.largest = limits.initial_batch_size
        self._better = 0
        """Consecutive reviews that expected a better plan to be worth waiting for."""

    # -- bounds ----------------------------------------------------------------------------

    @property
    def atomic_bound(self) -> int | None:
        """Most examples in a pass that the user allows and that fit into memory."""
        bounds = (self.limits.max_atomic_batch_size, self.memory_bound)
        return min((bound for bound in bounds if bound), default=None)

    @property
    def limits_now(self) -> BatchLimits:
        """The user's limits, with what fits into memory."""
        return dataclasses.replace(self.limits, max_atomic_batch_size=self.atomic_bound)

    def bound_after_failure(self, atomic_batch_size: int) -> int:
        """Return the bound of a pass [examples] after one of this size ran out of memory."""
        bound = int(_MEMORY_MARGIN * atomic_batch_size)
        before = self.atomic_bound
        if before is not None and self.limits.max_accumulation_steps == 0:
            # The last step of an epoch, larger than the plan's, failed; the plan has to give way.
            bound = min(bound, before - 1)
        return max(self.limits.min_atomic_batch_size, bound)

    def share_bounds(self, ranks: int) -> tuple[int, int | None]:
        """Return the fewest and most examples of a rank in a step; None: no upper bound."""
        least = max(LEAST_SHARE, self.limits.min_atomic_batch_size)
        bound = self.atomic_bound
        if bound is None:
            return least, None
        passes = self.limits.max_accumulation_steps + 1
        equal = -(-self.plan.global_batch_size // ranks)
        fewest, most = shares_in_passes(min(least, bound), bound, passes, equal)
        return max(least, fewest), most

    # -- the plan --------------------------------------------------------------------------

    def keep_to_limits(self, ranks: int) -> str:
        """Change a plan that is not possible on so many ranks to the nearest one that is.

        Returns:
            Why it changed, in words; empty: it did not.
        """
        limits = self.limits_now
        nearest = nearest_plan(limits, self.plan.global_batch_size, ranks)
        atomic = self.plan.atomic_batch_size(ranks)
        if (
            nearest.global_batch_size == self.plan.global_batch_size
            and atomic <= (limits.max_atomic_batch_size or atomic)
            and self.plan.accumulation_steps <= limits.max_accumulation_steps
        ):
            return ""
        self._change_to(nearest)
        if self.memory_bound is not None and atomic > self.memory_bound:
            return f"a pass of {atomic} examples did not fit into the memory of a rank"
        return f"passes of {atomic} examples on each of {ranks} ranks are not possible"

    def follow_goodput(
        self,
        model: StepTimeModel,
        noise_scale: float,
        hosts: int,
        ranks: int,
        slowness: float = 1.0,
    ) -> str:
        """Change to the plan with the most goodput, where that is worth it.

        Args:
            model: of the step time.
            noise_scale: gradient noise scale [examples].
            hosts, ranks: that train together.
            slowness: of steps with the shares decided on.

        Returns:
            Why the plan changed, in words; empty: it did not.
        """
        limits = self.limits_now
        low, _ = self.share_bounds(ranks)

        def slowness_of(atomic: np.ndarray, extra: np.ndarray) -> np.ndarray:
            return slowness * self.balance.slowness_of(atomic, extra, self.plan, low)

        bounded = dataclasses.replace(
            limits, max_batch_size=min(limits.max_batch_size, _GROWTH * self.largest)
        )
        best = best_batch_plan(model, noise_scale, bounded, hosts, ranks, slowness_of, _OPTIMISM)
        if best is None:
            return ""
        initial = limits.initial_batch_size
        now = score_plan(model, self.plan, noise_scale, initial, hosts, ranks, slowness_of)
        hoped = best.goodput * math.exp(_OPTIMISM * (best.uncertainty - now.uncertainty))
        if not self._worth_changing(hoped / now.goodput, best.goodput / now.goodput):
            return ""
        self._change_to(best.plan)
        return _why_changed(noise_scale, now.goodput, best.goodput, hoped)

    def _worth_changing(self, hoped: float, expected: float) -> bool:
        """Decide on a plan that makes so many times the present goodput, with optimism and without.

        For a small gain nothing is tried that was not measured.
        """
        self._better = self._better + 1 if expected > _WORTH_WAITING else 0
        if hoped <= _WORTH_IT and self._better < _PATIENCE:
            return False
        self._better = 0
        return True

    def _change_to(self, plan: BatchPlan) -> None:
        self.plan = plan
        self.largest = max(self.largest, plan.global_batch_size)

    # -- the shares ------------------------------------------------------------------------

    def review_shares(self, compute_s: Sequence[float], step_s: float) -> str:
        """Decide on shares; :meth:`cut_shares` makes them. See :meth:`ShareBalance.review`."""
        if not self.unequal_shares:
            return ""
        size, bounds = self.plan.global_batch_size, self.share_bounds(len(compute_s))
        return self.balance.review(compute_s, step_s, size, *bounds)

    def cut_shares(self, ranks: int) -> None:
        """Make the shares of the plan in use, as the last review decided."""
        self.balance.cut(self.plan.global_batch_size, ranks, *self.share_bounds(ranks))

    def slowness(self, compute_s: Sequence[float]) -> float:
        """Return the slowness of steps with the shares decided on.

        Args:
            compute_s: compute time of each rank with the present shares [s]; NaN: not known.

        Returns:
            In steps of a quarter: the rest is chance.
        """
        ranks, size = len(compute_s), self.plan.global_batch_size
        if ranks < 2 or not all(math.isfinite(each) and each > 0 for each in compute_s):
            return 1.0
        timed = self.balance.parts_of(size, ranks)
        if min(timed) < 1:
            return 1.0
        coming = self.balance.decided(size, ranks, *self.share_bounds(ranks))
        scaled = [t * new / old for t, new, old in zip(compute_s, coming, timed, strict=True)]
        return max(0.25, round(4 * effective_slowness(scaled, coming)) / 4)

    # -- what lasts ------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, for a broadcast or a checkpoint."""
        return {
            "plan": dataclasses.asdict(self.plan),
            "memory_bound": self.memory_bound,
            "balance": self.balance.state_dict(),
            "wished": self._better,
            "largest": self.largest,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what :meth:`state_dict` gave, here or in an earlier version."""
        self.plan = BatchPlan(**state["plan"])
        self.memory_bound = state["memory_bound"]
        self.largest = state["largest"]
        # Early checkpoints have neither of these.
        if "balance" in state:
            self.balance.load_state_dict(state["balance"])
        self._better = state.get("wished", 0)


def steps_to_review(step_s: Sequence[float]) -> int:
    """Return the steps until the next review: about a second's, within bounds.

    Args:
        step_s: times of steps since the last one [s]; few steps where there are none.
    """
    few, many = _REVIEW_STEPS
    wished = _REVIEW_S / median(step_s) if step_s else few
    return int(min(max(wished, few), many))


def _why_changed(noise: float, now: float, expected: float, hoped: float) -> str:
    """Say why the batch changes: goodput now, expected, and possible as far as is known.

    >>> _why_changed(207.3, 700.0, 936.0, 990.0)
    'at a noise scale of 207 examples, 936 useful examples/s are expected instead of 700'
    >>> _why_changed(207.3, 938.0, 936.0, 990.0)
    'at a noise scale of 207 examples, up to 990 useful examples/s are possible instead of 938: it was never measured, so it is tried'
    """  # noqa: E501
    at = f"at a noise scale of {noise:.0f} examples"
    if expected > (1 + _NOTABLE_GAIN) * now:
        return f"{at}, {expected:.0f} useful examples/s are expected instead of {now:.0f}"
    return (
        f"{at}, up to {hoped:.0f} useful examples/s are possible instead of {now:.0f}: it was "
        "never measured, so it is tried"
    )

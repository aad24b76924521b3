"""Choose the batch plan of a run and the shares of its ranks from measurements.

Training and the simulator both call this, so the simulator tests the rule of real runs.
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

_OPTIMISM = 0.5
"""Standard deviations of the step time by which a plan that was never measured is scored better."""
_GROWTH = 2
"""Largest growth of the batch at once: memory and step times beyond it are guesses."""
_GAIN_AT_ONCE = 1.05
"""Least ratio of the goodput of a plan, by the optimistic score, for a change at once."""
_GAIN_IN_TIME = 1.02
"""Least ratio of the expected goodput for a change after several reviews. Few measurements show
such a gain by chance."""
_PATIENCE = 3
"""Consecutive reviews that have to find the smaller gain."""
_NOTABLE_GAIN = 0.01
"""A change with a smaller expected relative gain is reported as a try."""
_MEMORY_MARGIN = 0.9
"""Bound of a pass relative to one that ran out of memory: slightly smaller ones would fail too."""
_REVIEW_S = 1.0
"""Wanted time between reviews."""
_REVIEW_STEPS = (10, 50)
"""Fewest and most steps between reviews, unless these cost too much."""
_REVIEW_SHARE = 0.003
"""Part of the time to spend on deciding in reviews, for which all ranks wait."""
_COSTLY_STEPS = 200
"""Most steps between reviews whatever they cost."""


class BatchChoice:
    """The batch plan and the shares of a run, and the rule that changes them.

    Args:
        unequal_shares: whether slow ranks get fewer examples of a step.

    Attributes:
        memory_bound: most examples of a pass that fit into memory, as far as is known; None: no
            pass has failed.
        largest: largest global batch size used so far.
    """

    def __init__(self, limits: BatchLimits, unequal_shares: bool = True) -> None:
        self.limits = limits
        self.unequal_shares = unequal_shares
        self.plan = BatchPlan(limits.initial_batch_size)
        self.balance = ShareBalance()
        self.memory_bound: int | None = None
        self.largest = limits.initial_batch_size
        self._better = 0
        """Number of consecutive reviews that found the smaller gain."""

    # -- bounds ----------------------------------------------------------------------------

    @property
    def atomic_bound(self) -> int | None:
        """Most examples in a pass that the user allows and that fit into memory."""
        bounds = (self.limits.max_atomic_batch_size, self.memory_bound)
        return min((bound for bound in bounds if bound), default=None)

    @property
    def limits_now(self) -> BatchLimits:
        """The user's limits, with the bound of the memory."""
        return dataclasses.replace(self.limits, max_atomic_batch_size=self.atomic_bound)

    def bound_after_failure(self, atomic_batch_size: int) -> int:
        """Return the bound of a pass [examples] after one of this size ran out of memory."""
        bound = int(_MEMORY_MARGIN * atomic_batch_size)
        before = self.atomic_bound
        if before is not None and self.limits.max_accumulation_steps == 0:
            # The last step of an epoch failed, which is larger than others; shrink the plan.
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
        """Change a plan that is not possible on this number of ranks to the nearest possible one.

        Returns:
            The reason of the change; empty if there was none.
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
        """Change to the plan with the most goodput if the gain is large enough.

        Args:
            noise_scale: gradient noise scale [examples].
            hosts, ranks: number of hosts and ranks that train together.
            slowness: slowness of steps with the shares decided on.

        Returns:
            The reason of the change; empty if there was none.
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
        """Decide on a plan by its goodput relative to the present, with optimism and without it."""
        self._better = self._better + 1 if expected > _GAIN_IN_TIME else 0
        if hoped <= _GAIN_AT_ONCE and self._better < _PATIENCE:
            return False
        self._better = 0
        return True

    def _change_to(self, plan: BatchPlan) -> None:
        self.plan = plan
        self.largest = max(self.largest, plan.global_batch_size)

    # -- the shares ------------------------------------------------------------------------

    def review_shares(self, compute_s: Sequence[float], step_s: float) -> str:
        """Decide on shares, which :meth:`cut_shares` applies; see :meth:`ShareBalance.review`."""
        if not self.unequal_shares:
            return ""
        size, bounds = self.plan.global_batch_size, self.share_bounds(len(compute_s))
        return self.balance.review(compute_s, step_s, size, *bounds)

    def cut_shares(self, ranks: int) -> None:
        """Apply the shares that the last review decided on."""
        self.balance.cut(self.plan.global_batch_size, ranks, *self.share_bounds(ranks))

    def slowness(self, compute_s: Sequence[float]) -> float:
        """Return the slowness of steps with the shares decided on.

        Args:
            compute_s: compute time of each rank with the present shares [s]; NaN: not known.

        Returns:
            Slowness rounded to a quarter, since smaller differences are noise.
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

    # -- state -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data, for a broadcast or a checkpoint."""
        return {
            "plan": dataclasses.asdict(self.plan),
            "memory_bound": self.memory_bound,
            "balance": self.balance.state_dict(),
            "wished": self._better,
            "largest": self.largest,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.plan = BatchPlan(**state["plan"])
        self.memory_bound = state["memory_bound"]
        self.largest = state["largest"]
        self.balance.load_state_dict(state["balance"])
        self._better = state["wished"]


def steps_to_review(step_s: Sequence[float], cost_s: float = 0.0) -> int:
    """Return the number of steps until the next review: those of about a second, or more.

    Args:
        step_s: times of the steps since the last review [s]; may be empty.
        cost_s: time that rank 0 took to decide in the last review [s].
    """
    few, many = _REVIEW_STEPS
    if not step_s:
        return few
    typical_s = median(step_s)
    affordable = min(cost_s / (_REVIEW_SHARE * typical_s), _COSTLY_STEPS)
    return int(max(min(max(_REVIEW_S / typical_s, few), many), affordable))


def _why_changed(noise: float, now: float, expected: float, hoped: float) -> str:
    """Return the reason of a change: goodput now, expected, and by the optimistic score.

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

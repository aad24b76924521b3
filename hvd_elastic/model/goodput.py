"""Goodput: useful examples per second, and the batch plan that makes the most of given slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from hvd_elastic.model.step_time import StepTimeModel

__all__ = ["ACCUMULATION_STEPS", "BatchLimits", "BatchPlan", "ScoredPlan", "best_batch_plan"]
__all__ += ["nearest_plan", "score_plan", "statistical_efficiency"]

ACCUMULATION_STEPS = (0, 1, 2, 3, 5, 7, 11, 15)
"""Extra passes that a plan may have; who predicts what a plan brings tries the same ones."""
_CANDIDATES = 64

SlownessOf = Callable[[np.ndarray, np.ndarray], np.ndarray]


def statistical_efficiency(
    noise_scale: ArrayLike, initial_batch_size: int, global_batch_size: ArrayLike
) -> np.ndarray:
    """Progress per example, relative to training at the initial batch size.

    Args:
        noise_scale: gradient noise scale now [examples], >= 0; may be infinite. Any shape that
            broadcasts with S.
        initial_batch_size: batch size the user tuned for [examples].
        global_batch_size: candidates [examples], any shape S,
            each >= initial_batch_size.

    Returns:
        Shape S (broadcast), float64, in (0, 1]; 1 at ``initial_batch_size``.

    Raises:
        ValueError: a candidate or a noise scale is too small; names it and the limit.

    Source: Pollux, OSDI 2021, section 3.1.

    >>> float(statistical_efficiency(100.0, 100, 300))
    0.5
    """
    sizes, noise = np.asarray(global_batch_size, np.float64), np.asarray(noise_scale, np.float64)
    if not np.all(noise >= 0):
        raise ValueError(f"noise_scale is {noise.min():g}, it must be 0 or more")
    if np.any(sizes < initial_batch_size):
        raise ValueError(
            f"global_batch_size {sizes.min():g} is below initial_batch_size {initial_batch_size}"
        )
    # As one less a fraction, an infinite noise scale gives 1 without being a case of its own.
    return np.asarray(1 - (sizes - initial_batch_size) / (noise + sizes))


@dataclass(frozen=True)
class BatchPlan:
    """How large a global batch is, and in how many passes each rank makes its share of it.

    Attributes:
        global_batch_size: examples of a step over all ranks.
        accumulation_steps: extra passes before the reduction, 0 = none.
    """

    global_batch_size: int
    accumulation_steps: int = 0

    def atomic_batch_size(self, ranks: int) -> int:
        """Examples in the largest pass of a step on ``ranks`` ranks.

        >>> BatchPlan(100, accumulation_steps=1).atomic_batch_size(ranks=4)
        13
        """
        share = -(-self.global_batch_size // ranks)
        return -(-share // (self.accumulation_steps + 1))


@dataclass(frozen=True)
class BatchLimits:
    """What a batch plan must keep to.

    Attributes:
        initial_batch_size: smallest global batch, the one the user tuned for.
        max_batch_size: largest global batch.
        min_atomic_batch_size, max_atomic_batch_size: of one pass on one rank; the upper one is
            the user's or what fits into memory.
        max_accumulation_steps: most extra passes.
    """

    initial_batch_size: int
    max_batch_size: int
    min_atomic_batch_size: int = 1
    max_atomic_batch_size: int | None = None
    max_accumulation_steps: int = ACCUMULATION_STEPS[-1]

    def allow_passes(self, atomic_batch_size: np.ndarray) -> np.ndarray:
        """Whether passes of these mean sizes [examples] keep to the bounds, rounded either way."""
        allowed = np.floor(atomic_batch_size) >= self.min_atomic_batch_size
        if self.max_atomic_batch_size is not None:
            allowed &= np.ceil(atomic_batch_size) <= self.max_atomic_batch_size
        return np.asarray(allowed)


@dataclass(frozen=True)
class ScoredPlan:
    """A plan with what is expected of it.

    Attributes:
        plan: the plan.
        throughput: [examples/s].
        efficiency: statistical efficiency, in (0, 1].
        goodput: their product.
        uncertainty: standard deviation of the logarithm of the step time.
    """

    plan: BatchPlan
    throughput: float
    efficiency: float
    goodput: float
    uncertainty: float


def nearest_plan(limits: BatchLimits, global_batch_size: int, ranks: int) -> BatchPlan:
    """The plan within the limits that is nearest to a wanted global batch size.

    Where the limits exclude each other on so many ranks, memory comes first, then the largest
    batch, then the smallest pass.

    >>> nearest_plan(BatchLimits(64, 512, max_atomic_batch_size=16), 64, ranks=2)
    BatchPlan(global_batch_size=64, accumulation_steps=1)
    """
    size = max(global_batch_size, limits.initial_batch_size, ranks * limits.min_atomic_batch_size)
    size = min(size, limits.max_batch_size)
    extras = [s for s in ACCUMULATION_STEPS if s <= limits.max_accumulation_steps]
    if limits.max_atomic_batch_size is None:
        return BatchPlan(size)
    for extra in extras:
        if BatchPlan(size, extra).atomic_batch_size(ranks) <= limits.max_atomic_batch_size:
            return BatchPlan(size, extra)
    return BatchPlan(ranks * limits.max_atomic_batch_size * (extras[-1] + 1), extras[-1])


def score_plan(
    model: StepTimeModel,
    plan: BatchPlan,
    noise_scale: float,
    initial_batch_size: int,
    hosts: int,
    ranks: int,
    slowness: float | SlownessOf = 1.0,
) -> ScoredPlan:
    """Throughput, efficiency and goodput of one plan; see :func:`best_batch_plan`."""
    atomic = np.asarray(plan.global_batch_size / ranks / (plan.accumulation_steps + 1))
    extra = np.asarray(plan.accumulation_steps)
    slow = slowness(atomic, extra) if callable(slowness) else slowness
    times = model.predict(hosts, ranks, atomic, plan.accumulation_steps, slow)
    throughput = plan.global_batch_size / float(times.step_s)
    efficiency = float(
        statistical_efficiency(
            noise_scale, initial_batch_size, max(plan.global_batch_size, initial_batch_size)
        )
    )
    return ScoredPlan(
        plan, throughput, efficiency, throughput * efficiency, float(times.uncertainty)
    )


def best_batch_plan(
    model: StepTimeModel,
    noise_scale: float,
    limits: BatchLimits,
    hosts: int,
    ranks: int,
    slowness: float | SlownessOf = 1.0,
    optimism: float = 0.0,
) -> ScoredPlan | None:
    """The plan with the most goodput on given hosts and ranks.

    Global batch sizes on a geometric grid, each with several numbers of accumulation passes, are
    scored at once. Accumulation is chosen where the model finds it worth it or memory demands it.

    Args:
        model: of the step time.
        noise_scale: gradient noise scale now [examples].
        limits: what the plan must keep to.
        hosts, ranks: that train together.
        slowness: of the slowest rank; where shares are unequal a function that gives it for mean
            sizes of a pass and numbers of extra passes.
        optimism: goodput is judged as if a step were this many standard deviations faster:
            above 0, what was never tried is tried.

    Returns:
        The best; None if no plan keeps to the limits.

    Source: Pollux, OSDI 2021, section 3.3.
    """
    smallest = max(limits.initial_batch_size, ranks * limits.min_atomic_batch_size)
    largest = limits.max_batch_size
    extras = [s for s in ACCUMULATION_STEPS if s <= limits.max_accumulation_steps]
    if limits.max_atomic_batch_size is not None:
        largest = min(largest, ranks * limits.max_atomic_batch_size * (extras[-1] + 1))
    if smallest > largest:
        return None
    sizes = np.unique(np.rint(np.geomspace(smallest, largest, _CANDIDATES)).astype(np.int64))
    size, extra = (grid.ravel() for grid in np.meshgrid(sizes, extras))
    share = -(-size // ranks)
    atomic = -(-share // (extra + 1))
    allowed = (size // ranks) // (extra + 1) >= limits.min_atomic_batch_size
    # A rank that has fewer examples than passes would leave some empty.
    allowed |= (extra == 0) & (limits.min_atomic_batch_size <= 1)
    if limits.max_atomic_batch_size is not None:
        allowed &= atomic <= limits.max_atomic_batch_size
    if not allowed.any():
        return None
    size, extra = size[allowed], extra[allowed]
    mean = size / ranks / (extra + 1)
    slow = slowness(mean, extra) if callable(slowness) else slowness
    times = model.predict(hosts, ranks, mean, extra, slow)
    useful = size * statistical_efficiency(noise_scale, limits.initial_batch_size, size)
    best = int(np.argmax(useful / times.step_s * np.exp(optimism * times.uncertainty)))
    plan = BatchPlan(int(size[best]), int(extra[best]))
    return score_plan(model, plan, noise_scale, limits.initial_batch_size, hosts, ranks, slowness)

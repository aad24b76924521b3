"""Compute goodput (useful examples per second) and find the batch plan with the most of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from hvd_elastic.model.step_time import StepTimeModel

ACCUMULATION_STEPS = (0, 1, 2, 3, 5, 7, 11, 15)
"""Numbers of extra passes that are tried."""
_CANDIDATES = 64
"""Global batch sizes that are tried, on a geometric grid."""

SlownessOf = Callable[[np.ndarray, np.ndarray], np.ndarray]


def statistical_efficiency(
    noise_scale: ArrayLike, initial_batch_size: int, global_batch_size: ArrayLike
) -> np.ndarray:
    """Return the progress per example, relative to training at the initial batch size.

    Args:
        noise_scale: current gradient noise scale [examples], >= 0; may be infinite. Any shape that
            broadcasts with S.
        initial_batch_size: global batch size that the user tuned for [examples].
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
    # In this form an infinite noise scale gives 1 without a special case.
    return np.asarray(1 - (sizes - initial_batch_size) / (noise + sizes))


@dataclass(frozen=True)
class BatchPlan:
    """A global batch size and the number of passes in which each rank processes its share.

    Attributes:
        global_batch_size: number of examples of a step over all ranks.
        accumulation_steps: number of extra passes before the all-reduce; 0: none.
    """

    global_batch_size: int
    accumulation_steps: int = 0

    def atomic_batch_size(self, ranks: int) -> int:
        """Return the number of examples in the largest pass of a step on ``ranks`` ranks.

        >>> BatchPlan(100, accumulation_steps=1).atomic_batch_size(ranks=4)
        13
        """
        share = -(-self.global_batch_size // ranks)
        return -(-share // (self.accumulation_steps + 1))


@dataclass(frozen=True)
class BatchLimits:
    """Limits of a batch plan.

    Attributes:
        initial_batch_size: smallest global batch size, the one that the user tuned for.
        max_batch_size: largest global batch size.
        min_atomic_batch_size, max_atomic_batch_size: fewest and most examples of one pass on one
            rank; the most is what the user allows or what fits into memory. None: no limit.
        max_accumulation_steps: largest number of extra passes.
    """

    initial_batch_size: int
    max_batch_size: int
    min_atomic_batch_size: int = 1
    max_atomic_batch_size: int | None = None
    max_accumulation_steps: int = ACCUMULATION_STEPS[-1]

    @property
    def accumulation_choices(self) -> list[int]:
        """Numbers of extra passes to try."""
        return [steps for steps in ACCUMULATION_STEPS if steps <= self.max_accumulation_steps]

    def allow_passes(self, atomic_batch_size: np.ndarray) -> np.ndarray:
        """Return whether passes of these mean sizes [examples], rounded either way, are allowed."""
        allowed = np.floor(atomic_batch_size) >= self.min_atomic_batch_size
        if self.max_atomic_batch_size is not None:
            allowed &= np.ceil(atomic_batch_size) <= self.max_atomic_batch_size
        return np.asarray(allowed)


@dataclass(frozen=True)
class ScoredPlan:
    """A batch plan with its predicted performance.

    Attributes:
        throughput: predicted throughput [examples/s].
        efficiency: statistical efficiency, in (0, 1].
        goodput: product of the two [useful examples/s].
        uncertainty: standard deviation of the logarithm of the predicted step time.
    """

    plan: BatchPlan
    throughput: float
    efficiency: float
    goodput: float
    uncertainty: float


def nearest_plan(limits: BatchLimits, global_batch_size: int, ranks: int) -> BatchPlan:
    """Return the plan within the limits that is nearest to a wanted global batch size.

    If no plan keeps to all limits on this number of ranks, ``max_atomic_batch_size`` has priority,
    then ``max_batch_size``, then ``min_atomic_batch_size``.

    >>> nearest_plan(BatchLimits(64, 512, max_atomic_batch_size=16), 64, ranks=2)
    BatchPlan(global_batch_size=64, accumulation_steps=1)
    """
    size = max(global_batch_size, limits.initial_batch_size, ranks * limits.min_atomic_batch_size)
    size = min(size, limits.max_batch_size)
    extras = limits.accumulation_choices
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
    """Return the predicted performance of one plan; see :func:`best_batch_plan`."""
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
    """Return the batch plan with the most goodput on given hosts and ranks.

    Scores global batch sizes on a geometric grid, each with several numbers of extra passes.
    Gradients are accumulated where the model predicts a gain or memory demands it.

    Args:
        noise_scale: current gradient noise scale [examples].
        hosts, ranks: number of hosts and ranks that train together.
        slowness: slowness of the slowest rank. With unequal shares, a function of the mean sizes of
            a pass and the numbers of extra passes.
        optimism: plans are compared as if a step were faster by this many standard deviations of
            the prediction; above 0, plans that were never measured get tried.

    Returns:
        The best plan; None if no plan keeps to the limits.

    Source: Pollux, OSDI 2021, section 3.3.
    """
    smallest = max(limits.initial_batch_size, ranks * limits.min_atomic_batch_size)
    largest = limits.max_batch_size
    extras = limits.accumulation_choices
    if limits.max_atomic_batch_size is not None:
        largest = min(largest, ranks * limits.max_atomic_batch_size * (extras[-1] + 1))
    if smallest > largest:
        return None
    sizes = np.unique(np.rint(np.geomspace(smallest, largest, _CANDIDATES)).astype(np.int64))
    size, extra = (grid.ravel() for grid in np.meshgrid(sizes, extras))
    share = -(-size // ranks)
    atomic = -(-share // (extra + 1))
    allowed = (size // ranks) // (extra + 1) >= limits.min_atomic_batch_size
    # With fewer examples than passes a rank would have empty passes, so allow one pass only.
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


@dataclass(frozen=True)
class GoodputCurve:
    """The best batch of each of several numbers of slots.

    Attributes:
        goodput: useful examples per second; 0 where no batch keeps to the limits.
        atomic_batch_size, accumulation_steps: the batch plan with that goodput.
    """

    goodput: np.ndarray
    atomic_batch_size: np.ndarray
    accumulation_steps: np.ndarray


def goodput_curve(
    model: StepTimeModel,
    noise_scale: float,
    limits: BatchLimits,
    hosts: ArrayLike,
    ranks: ArrayLike,
    passes_alone: int = 1,
) -> GoodputCurve:
    """Return the best batch of each number of slots in one evaluation of the model.

    A pass is as large as memory allows, and gradients are accumulated only beyond that; this is
    coarser than :func:`best_batch_plan` and fast enough for a thousand jobs.

    Args:
        noise_scale: gradient noise scale [examples].
        limits: limits of the batch, with ``max_atomic_batch_size``.
        hosts, ranks: candidates, of one shape (N,).
        passes_alone: fewest passes of one rank with more than the initial batch size; 2 where the
            noise is measured from the differences between passes.

    Returns:
        Three arrays of shape (N,).

    Source: Pollux, OSDI 2021, section 3.3, and AdaptDL's ``goodput.py``.
    """
    ranks, hosts = np.atleast_1d(np.asarray(ranks)), np.atleast_1d(np.asarray(hosts))
    most = limits.max_atomic_batch_size or limits.max_batch_size
    low = np.maximum(limits.initial_batch_size, limits.min_atomic_batch_size * ranks)
    low = np.minimum(low, limits.max_batch_size)
    share = np.geomspace(low, limits.max_batch_size, _CANDIDATES) / ranks
    passes = np.ceil(share / most - 1e-8).astype(int)
    alone = (ranks == 1) & (share > limits.initial_batch_size + 1e-8)
    passes = np.where(alone, np.maximum(passes, passes_alone), passes)
    atomic = np.ceil(share / passes - 1e-8).astype(int)
    # Shares that were rounded up hold padding beyond the largest batch.
    size = np.minimum(ranks * atomic * passes, limits.max_batch_size)
    times = model.step_s(hosts, ranks, np.maximum(atomic, 1), passes - 1)
    useful = 1 - (size - limits.initial_batch_size) / (noise_scale + size)
    goodput = size * useful / times
    goodput = np.where((limits.min_atomic_batch_size <= atomic) & (atomic <= most), goodput, 0.0)
    best = np.argmax(goodput, axis=0), np.arange(ranks.size)
    return GoodputCurve(goodput[best], atomic[best], passes[best] - 1)

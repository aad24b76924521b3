"""Who reads which examples: an epoch as one fixed order, cut into global steps and shares.

An epoch is a permutation fixed by (seed, epoch), and progress in it is one number, the position.
Everything here is a pure function of a few whole numbers, so ranks that agree on those agree on
every share without a message, at any world size and after any change of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Slice", "permutation", "step_slice", "steps_left"]


def permutation(seed: int, epoch: int, n: int, shuffle: bool = True) -> np.ndarray:
    """The order in which an epoch reads a dataset.

    Args:
        seed: the run's data seed, >= 0.
        epoch: number of the epoch, >= 0.
        n: examples in the dataset, >= 0.
        shuffle: False gives 0, 1, 2, ...

    Returns:
        Shape (n,), int64; every index below n once.

    Raises:
        ValueError: a number is negative; names it.

    >>> permutation(seed=7, epoch=0, n=6).tolist()
    [3, 4, 0, 2, 5, 1]
    >>> permutation(seed=7, epoch=0, n=4, shuffle=False).tolist()
    [0, 1, 2, 3]
    """
    for name, value in (("seed", seed), ("epoch", epoch), ("n", n)):
        if value < 0:
            raise ValueError(f"{name} is {value}, it must be 0 or more")
    if not shuffle:
        return np.arange(n, dtype=np.int64)
    # Hosts may run different NumPy versions, and all must draw the same order: NumPy promises
    # unchanged streams for SeedSequence and PCG64's raw output, not for Generator.permutation
    # (NEP 19). A stable sort makes equal keys no matter of the processor either.
    keys = np.random.PCG64(np.random.SeedSequence((seed, epoch))).random_raw(n)
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)


@dataclass(frozen=True)
class Slice:
    """One rank's share of one global step, as positions in the epoch's order.

    Attributes:
        start, stop: the positions this rank reads, [start, stop); never empty.
        step_start: first position of the global step.
        step_examples: examples of the global step over all ranks; progress moves by this.
        weight: factor on this rank's mean gradient before a plain average over all ranks, so that
            the average is the mean gradient over the step: own examples x ranks / step_examples.
        padding: True if this rank has no example of its own; it reads some of the step's again
            with weight 0, because every rank must take part in the all-reduce.
    """

    start: int
    stop: int
    step_start: int
    step_examples: int
    weight: float
    padding: bool

    @property
    def step_stop(self) -> int:
        """The position at which the next global step starts."""
        return self.step_start + self.step_examples


def step_slice(
    position: int,
    n: int,
    global_batch_size: int,
    rank: int,
    world_size: int,
    min_share: int = 1,
    *,
    parts: Sequence[int] = (),
) -> Slice:
    """This rank's share of the global step that starts at ``position``.

    The step takes the next ``global_batch_size`` positions. It takes the rest of the epoch too if
    that would be fewer than ``min_share`` for each rank, so a last step is never too small to go
    round. Shares are contiguous in rank order and differ by at most one, the larger ones first,
    unless ``parts`` says otherwise.
    If the step is smaller than ``min_share`` for each rank (a dataset smaller than the world, or a
    restart at a larger world close to the end of an epoch), fewer ranks get examples and the
    others padding.

    Args:
        position: examples of the epoch consumed so far, 0 <= position < n.
        n: examples in the epoch.
        global_batch_size: examples in a step over all ranks, >= 1.
        rank: 0 <= rank < world_size.
        world_size: ranks, >= 1.
        min_share: examples a rank should get at the least, >= 1. 2 suits layers that cannot train
            on one example (batch normalisation). Where the global batch itself has fewer for each
            rank, that number is used.
        parts: examples of each rank in a step of ``sum(parts)``; each at least ``min_share``. In
            other steps what is left when each has ``min_share`` is shared out in proportion.
            Empty, or for another number of ranks: equal shares.

    Raises:
        ValueError: an argument is out of range; names it and the limit.

    >>> [step_slice(0, 100, 32, rank, 3).start for rank in range(3)]
    [0, 11, 22]
    >>> step_slice(64, 100, 32, rank=0, world_size=8).step_examples  # 4 left over would not do
    36
    >>> unequal = [step_slice(0, 100, 32, rank, 2, parts=(24, 8)) for rank in range(2)]
    >>> [(share.stop - share.start, share.weight) for share in unequal]
    [(24, 1.5), (8, 0.5)]
    >>> step_slice(98, 100, 32, rank=3, world_size=4)
    Slice(start=99, stop=100, step_start=98, step_examples=2, weight=0.0, padding=True)
    """
    if not 0 <= position < n:
        raise ValueError(f"position is {position}, it must be from 0 to {n - 1} (n is {n})")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}, it must be from 0 to {world_size - 1}")
    share_floor = _share_floor(global_batch_size, world_size, min_share)

    left = n - position
    enough_for_another = left - global_batch_size >= share_floor * world_size
    step_examples = global_batch_size if enough_for_another else left

    readers = min(world_size, max(1, step_examples // share_floor))
    if rank >= readers:
        # Padding reads as many examples as a real share would, for the same layers' sake.
        again = min(share_floor, step_examples)
        stop = position + step_examples
        return Slice(stop - again, stop, position, step_examples, 0.0, True)
    if len(parts) == readers == world_size:
        first, last = _cuts(step_examples, share_floor, parts, rank)
    else:
        size, larger = divmod(step_examples, readers)
        first = rank * size + min(rank, larger)
        last = first + size + (rank < larger)
    weight = (last - first) * world_size / step_examples
    return Slice(position + first, position + last, position, step_examples, weight, False)


def _cuts(step_examples: int, share_floor: int, parts: Sequence[int], rank: int) -> tuple[int, int]:
    """Where the share of a rank begins and ends in a step that has the floor for all.

    Whole numbers alone, so that every host comes to the same.
    """
    beyond = [max(0, part - share_floor) for part in parts]
    spare, whole = step_examples - share_floor * len(parts), sum(beyond)
    if whole == 0:
        beyond, whole = [1] * len(parts), len(parts)

    def cut(before: int) -> int:
        return share_floor * before + spare * sum(beyond[:before]) // whole

    return cut(rank), cut(rank + 1)


def steps_left(
    position: int, n: int, global_batch_size: int, world_size: int, min_share: int = 1
) -> int:
    """Global steps from ``position`` to the end of the epoch, if the world stays as it is.

    Args as in :func:`step_slice`, but ``position`` may be ``n`` or more (0 steps).

    >>> steps_left(0, 100, 32, world_size=4), steps_left(0, 100, 32, world_size=8)
    (4, 3)
    """
    left = n - position
    smallest_rest = _share_floor(global_batch_size, world_size, min_share) * world_size
    if left <= 0:
        return 0
    if left < global_batch_size + smallest_rest:
        return 1
    return 1 + (left - smallest_rest) // global_batch_size


def _share_floor(global_batch_size: int, world_size: int, min_share: int) -> int:
    for name, value in (
        ("global_batch_size", global_batch_size),
        ("world_size", world_size),
        ("min_share", min_share),
    ):
        if value < 1:
            raise ValueError(f"{name} is {value}, it must be 1 or more")
    # A user who asks for one example a rank gets that on all ranks, not two on half of them.
    return min(min_share, max(1, global_batch_size // world_size))

"""Determine which rank reads which examples: the order of an epoch, global steps, and shares.

The order of an epoch is a permutation fixed by (seed, epoch). It is computed position by position,
so its cost does not depend on the size of the dataset. Progress in an epoch is one number, the
position. All functions are pure functions of a few integers, so ranks that agree on these agree on
every share without communication, at any world size and after any change of it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import getattr_static
from typing import Any, NamedTuple

import numpy as np

Order = Callable[[np.ndarray], np.ndarray]
"""Maps positions of an epoch to dataset indices; both int64, of the same shape (k,)."""

_TABLE_EXAMPLES = 1 << 16
"""Most examples whose order is a sorted table (0.5 MB, made in 5 ms). In a table all permutations
are equally likely, which a cipher cannot guarantee for few examples."""

_CIPHER_ROUNDS = 8
"""With 4 rounds a chi-squared test finds that examples one row apart are related, with 6 it
sometimes does; with 8 it finds no difference from a sorted table."""


def attribute_of(dataset: Any, name: str) -> Any:
    """Return what a dataset may have, such as ``blocks``; None: it has none.

    A ``__getattr__`` of the script may raise what it likes for a name that it does not know.
    """
    try:
        return getattr(dataset, name, None)
    except Exception:
        if getattr_static(dataset, name, None) is not None:
            raise
        return None


class Blocks(NamedTuple):
    """Blocks of a dataset, such as files, a few of which an epoch reads at a time.

    Attributes:
        sizes: number of examples of each block, in the order of the dataset.
        window: number of blocks that are mixed with each other.
    """

    sizes: Sequence[int]
    window: int


def epoch_order(seed: int, epoch: int, n: int, *, shuffle: bool = True) -> Order:
    """Return the order in which an epoch reads a dataset, as a function of positions.

    Time and memory of a call depend on the number of positions, not on ``n``.

    Args:
        seed: data seed of the run, >= 0.
        epoch: number of the epoch, >= 0.
        n: number of examples in the dataset, 0 to 2^63 - 1.
        shuffle: whether the order is random; False: it is 0, 1, 2, ...

    Raises:
        ValueError: a number is out of range; names it.

    >>> order = epoch_order(seed=7, epoch=0, n=6)
    >>> order(np.arange(6)).tolist()
    [3, 4, 0, 2, 5, 1]
    >>> epoch_order(seed=7, epoch=0, n=10**12)(np.array([0, 1, 10**12 - 1])).tolist()
    [72254712410, 466403261010, 267307380739]
    """
    _require_not_negative(seed=seed, epoch=epoch, n=n)
    if n >= 1 << 63:
        raise ValueError(f"n is {n}, it must be below 2^63")
    if not shuffle:
        return lambda positions: positions
    return _shuffled((seed, epoch), n)


def block_order(seed: int, epoch: int, sizes: Sequence[int], window: int = 1) -> Order:
    """Return an order that reads a dataset of blocks (such as files) a few blocks at a time.

    The blocks are shuffled, every ``window`` consecutive blocks form a group, and the examples of
    a group are shuffled. Memory depends on the number of blocks, not on the number of examples.

    Args:
        seed, epoch: as in :func:`epoch_order`.
        sizes: number of examples of each block, in the order of the dataset; each >= 0.
        window: number of blocks in a group, >= 1. A larger window mixes better and needs more files
            open at the same time.

    Raises:
        ValueError: a number is out of range; names it.

    >>> order = block_order(seed=7, epoch=0, sizes=[4, 4, 2])
    >>> order(np.arange(10)).tolist()
    [1, 2, 0, 3, 8, 9, 7, 4, 6, 5]
    """
    _require_not_negative(seed=seed, epoch=epoch, **{"smallest size": min(sizes, default=0)})
    if window < 1:
        raise ValueError(f"window is {window}, it must be 1 or more")
    lengths = np.asarray(sizes, dtype=np.int64)
    blocks, ends = _shuffled_blocks(seed, epoch, lengths)
    first_index = (np.cumsum(lengths) - lengths)[blocks]
    starts = ends - lengths[blocks]
    group_starts = starts[::window]

    @functools.lru_cache(maxsize=2)  # a step may lie in two groups
    def inside(group: int) -> tuple[int, Order]:
        start = int(group_starts[group])
        end = int(ends[min(len(ends), (group + 1) * window) - 1])
        return start, _shuffled((seed, epoch, 1 + group), end - start)

    def order(positions: np.ndarray) -> np.ndarray:
        # Empty blocks share their start with the next block; "right" finds the last of them.
        group_of = np.searchsorted(group_starts, positions, side="right") - 1
        mixed = np.empty_like(positions)
        for group in np.unique(group_of).tolist():
            here = group_of == group
            start, shuffled = inside(group)
            mixed[here] = start + shuffled(positions[here] - start)
        place = np.searchsorted(starts, mixed, side="right") - 1
        return first_index[place] + mixed - starts[place]

    return order


def blocks_from(
    seed: int, epoch: int, blocks: Blocks, position: int, *, shuffle: bool = True
) -> tuple[list[int], int]:
    """Return the blocks that an epoch of :func:`block_order` reads from a position on.

    Args:
        seed, epoch: as in :func:`epoch_order`.
        blocks: of the dataset.
        position: in the epoch, >= 0.
        shuffle: False: the dataset is read in its own order, a block at a time.

    Returns:
        Numbers of the blocks, in the order in which they are read; and the position at which the
        first ones are done with, the end of their group.

    >>> blocks_from(7, 0, Blocks([4, 4, 2], 2), 0)
    ([0, 2, 1], 6)
    >>> blocks_from(7, 0, Blocks([4, 4, 2], 2), 6)
    ([1], 10)
    """
    lengths = np.asarray(blocks.sizes, dtype=np.int64)
    found, ends = _shuffled_blocks(seed, epoch, lengths, shuffle=shuffle)
    window = blocks.window if shuffle else 1
    first = int(np.searchsorted(ends, position, side="right")) // window * window
    group = ends[first : first + window]
    return found[first:].tolist(), int(group[-1]) if len(group) else position


def _shuffled_blocks(
    seed: int, epoch: int, lengths: np.ndarray, *, shuffle: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Return the blocks in the order in which an epoch reads them, and where each one ends."""
    blocks = epoch_order(seed, epoch, len(lengths), shuffle=shuffle)(np.arange(len(lengths)))
    return blocks, np.cumsum(lengths[blocks])


def _shuffled(entropy: tuple[int, ...], n: int) -> Order:
    """Return a random permutation of 0 to n - 1 fixed by ``entropy``."""
    return (_sorted(entropy, n) if n <= _TABLE_EXAMPLES else _Cipher(entropy, n)).__getitem__


class _Cipher:
    """A random permutation of 0 to n - 1, computed element by element.

    A generalised Feistel network: a number below ``rows * columns`` is split into row and column,
    and each round adds a hash of one to the other. A result of ``n`` or more is enciphered again
    until it is below ``n`` (cycle walking), which keeps this a permutation. Only 64-bit integers
    are used, so every host computes the same.

    Source: Black and Rogaway, Ciphers with arbitrary finite domains, CT-RSA 2002. The hash is the
    output function of SplitMix64.
    """

    def __init__(self, entropy: tuple[int, ...], n: int) -> None:
        rows = math.isqrt(n - 1) + 1
        self._n, self._rows = np.uint64(n), np.uint64(rows)
        self._columns = np.uint64(-(-n // rows))
        seeds = np.random.SeedSequence(entropy)
        self._keys = seeds.generate_state(_CIPHER_ROUNDS, np.uint64)

    def __getitem__(self, positions: np.ndarray) -> np.ndarray:
        numbers = self._encipher(positions.astype(np.uint64))
        while (outside := numbers >= self._n).any():
            numbers[outside] = self._encipher(numbers[outside])
        return numbers.astype(np.int64)

    def _encipher(self, numbers: np.ndarray) -> np.ndarray:
        row, column = np.divmod(numbers, self._columns)
        for number, key in enumerate(self._keys):
            if number % 2 == 0:
                row = _add_hash(row, column + key, self._rows)
            else:
                column = _add_hash(column, row + key, self._columns)
        return row * self._columns + column


def _add_hash(numbers: np.ndarray, bits: np.ndarray, modulus: np.uint64) -> np.ndarray:
    """Return ``numbers`` plus a hash of ``bits``, modulo ``modulus``; overwrites ``bits``."""
    bits ^= bits >> np.uint64(30)
    bits *= np.uint64(0xBF58476D1CE4E5B9)
    bits ^= bits >> np.uint64(27)
    bits *= np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    bits >>= np.uint64(1)  # room for the sum
    bits += numbers
    bits %= modulus
    return bits


def _sorted(entropy: tuple[int, ...], n: int) -> np.ndarray:
    # Hosts with different NumPy versions must compute the same order: NumPy guarantees unchanged
    # streams for SeedSequence and PCG64's raw output, not for Generator.permutation (NEP 19). A
    # stable sort orders equal keys alike on every processor.
    keys = np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(n)
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)


def _require_not_negative(**numbers: int) -> None:
    for name, value in numbers.items():
        if value < 0:
            raise ValueError(f"{name} is {value}, it must be 0 or more")


@dataclass(frozen=True)
class Slice:
    """One rank's share of one global step, as positions in the epoch's order.

    Attributes:
        start, stop: range of positions that this rank reads, [start, stop); never empty.
        step_start: first position of the global step.
        step_examples: number of examples of the global step over all ranks; progress advances by
            this.
        weight: factor on this rank's mean gradient before the plain average over all ranks, which
            makes that average the mean gradient over the step: own examples x ranks /
            step_examples.
        padding: whether this rank has no example of its own. It then reads examples of other ranks
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
        """Position at which the next global step starts."""
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
    """Return a rank's share of the global step that starts at ``position``.

    The step takes the next ``global_batch_size`` positions. If fewer than ``min_share`` examples
    for each rank would remain in the epoch after it, it takes these too. Shares are contiguous in
    rank order. Without ``parts`` they differ by at most one, the larger ones first.
    If the step has fewer than ``min_share`` examples for each rank (a dataset smaller than the
    world, or a restart at a larger world close to the end of an epoch), fewer ranks get examples
    and the others get padding.

    Args:
        position: number of examples of the epoch consumed so far, 0 <= position < n.
        n: number of examples in the epoch.
        global_batch_size: number of examples of a step over all ranks, >= 1.
        rank: rank, 0 <= rank < world_size.
        world_size: number of ranks, >= 1.
        min_share: fewest examples of a rank, >= 1. 2 suits layers that cannot train on one example
            (batch normalisation). If the global batch has fewer for each rank, that number is used.
        parts: number of examples of each rank in a step of ``sum(parts)`` examples, each at least
            ``min_share``. In other steps each rank gets ``min_share``, and the rest is divided in
            proportion. Empty, or for another number of ranks: equal shares.

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
        # Padding has as many examples as the smallest share, which batch normalisation needs.
        size = min(share_floor, step_examples)
        stop = position + step_examples
        return Slice(stop - size, stop, position, step_examples, 0.0, True)
    if len(parts) == readers == world_size:
        first, last = _cuts(step_examples, share_floor, parts, rank)
    else:
        size, larger = divmod(step_examples, readers)
        first = rank * size + min(rank, larger)
        last = first + size + (rank < larger)
    weight = (last - first) * world_size / step_examples
    return Slice(position + first, position + last, position, step_examples, weight, False)


def _cuts(step_examples: int, share_floor: int, parts: Sequence[int], rank: int) -> tuple[int, int]:
    """Return where the share of a rank begins and ends in a step that has enough examples for all.

    It uses integers only, so that every host computes the same.
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
    """Return the number of global steps from ``position`` to the end of the epoch.

    The arguments are those of :func:`step_slice`, but ``position`` may be ``n`` or more (0 steps).

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
    # A global batch of one example for each rank is divided so, not as two on half of the ranks.
    return min(min_share, max(1, global_batch_size // world_size))

"""A dataset that mixes others, each with a weight."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from numbers import Real
from typing import Any

import numpy as np

from hvd_elastic.data.example import example_number
from hvd_elastic.errors import DataError
from hvd_elastic.formatting import as_whole
from hvd_elastic.model.sharding import Blocks, Order, attribute_of, block_order, epoch_order

_LARGEST_DENOMINATOR = 10**6


class Mixture:
    """A map-style dataset that picks from several others in proportion to their weights.

    Of the first n examples, a dataset whose weight is the share w of all gives n w, give or take
    fewer than there are datasets. Which example is picked follows from the index alone, so what a
    run promises holds for the places of the mixture: each one exactly once an epoch, at any
    sequence of world sizes. Each dataset is read in passes of its own, which continue from an epoch
    of the mixture to the next: every pass takes each of its examples exactly once. A
    :class:`Stream` is read in its own order, and its passes are its epochs.

    With ``shuffle``, the examples of each dataset come in random order, so give the mixture to the
    loader with ``shuffle=False``: shards are then read a few at a time. Which dataset comes next
    is not random: they take turns by their weights, in a fixed pattern. A :class:`Stream`, and all
    with ``shuffle=False``, keep their order.

    Args:
        parts: pairs of a map-style dataset and its weight (> 0; they need not add up to 1).
        length: examples of an epoch; None: as many as it takes to read every dataset once.
        seed: of the order of the passes, >= 0, the same on all ranks.
        shuffle: whether the passes are in a random order that follows from ``seed``; False: 0, 1,
            2, ...

    Raises:
        DataError: there are no parts, one is empty, or a weight, length or seed is out of range.

    >>> mixture = Mixture([(["a", "b", "c"], 3), (["x"], 1)], shuffle=False)
    >>> len(mixture), list(mixture)
    (4, ['x', 'a', 'b', 'c'])
    """

    endless = True
    """An epoch continues where the one before it ended; see :class:`DataOrder`."""

    def __init__(
        self,
        parts: Sequence[tuple[Any, float]],
        *,
        length: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        length, seed = as_whole(length), as_whole(seed)
        _check(parts, length, seed)
        self._datasets = [dataset for dataset, _ in parts]
        self._lengths = [len(dataset) for dataset in self._datasets]
        self._seed, self._shuffle = seed, shuffle
        weights = [
            Fraction(float(weight)).limit_denominator(_LARGEST_DENOMINATOR) for _, weight in parts
        ]
        if not all(weights):
            raise DataError(
                f"Mixture: the weights {[weight for _, weight in parts]} differ too much; a "
                f"weight must be at least 1/{_LARGEST_DENOMINATOR}"
            )
        # Of the picks that the datasets before it leave, the share of each one.
        self._shares = [weight / sum(weights[place:]) for place, weight in enumerate(weights)]
        self._length = self._whole() if length is None else length
        keys = [_order_key(dataset, shuffle) for dataset in self._datasets]
        self.order_key = repr((self._lengths, weights, seed, shuffle, keys))
        self._orders = lru_cache(maxsize=2 * len(parts))(self._order)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, range(self._length))

    def __getitem__(self, index: int) -> Any:
        number, example = self.pick(index)
        return self._datasets[number][example]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return several examples, in this order; each dataset is asked once."""
        counts = [self._count(index) for index in indices]
        found: list[Any] = [None] * len(counts)
        for number, dataset in enumerate(self._datasets):
            places = [place for place, count in enumerate(counts) if count[0] == number]
            wanted = self._examples(number, [counts[place][1] for place in places])
            at_once = attribute_of(dataset, "__getitems__")
            read = at_once(wanted) if at_once and wanted else [dataset[each] for each in wanted]
            for place, example in zip(places, read, strict=True):
                found[place] = example
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_orders"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._orders = lru_cache(maxsize=2 * len(self._datasets))(self._order)

    def pick(self, index: int) -> tuple[int, int]:
        """Return the number of the dataset of an example, and its index there.

        Args:
            index: of the mixture, >= 0; from ``len()`` on those of later epochs.
        """
        number, before = self._count(index)
        (example,) = self._examples(number, [before])
        return number, example

    def _examples(self, number: int, before: Sequence[int]) -> list[int]:
        """Return the indices that a dataset gives after so many; each pass is asked once."""
        length = self._lengths[number]
        turns, places = np.divmod(np.array(before, np.int64), length)
        found = np.empty_like(places)
        for turn in np.unique(turns).tolist():
            here = turns == turn
            found[here] = self._orders(number, turn)(places[here])
        if attribute_of(self._datasets[number], "endless"):
            found += turns * length
        indices: list[int] = found.tolist()
        return indices

    def _count(self, index: int) -> tuple[int, int]:
        """Return the dataset that gives an example, and how many it has given before."""
        index = example_number(index)
        if index < 0:
            raise IndexError(f"example {index} of a mixture, which has no last one")
        left = index
        for number, share in enumerate(self._shares):
            taken = left * share.numerator // share.denominator
            if (left + 1) * share.numerator // share.denominator > taken:
                return number, taken
            left -= taken
        raise AssertionError("the last data set takes all that the others leave")

    def _order(self, number: int, turn: int) -> Order:
        """Return the order of a pass over a dataset."""
        dataset, length = self._datasets[number], self._lengths[number]
        seed = self._seed * len(self._datasets) + number
        blocks: Blocks | None = attribute_of(dataset, "blocks")
        shuffle = self._shuffle and not attribute_of(dataset, "ordered")
        if blocks is not None and shuffle:
            return block_order(seed, turn, *blocks)
        return epoch_order(seed, turn, length, shuffle=shuffle)

    def _whole(self) -> int:
        """Return the number of examples after which every dataset has been read once."""
        low, high = 0, 1
        while not self._all_read(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._all_read(middle) else (middle, high)
        return high

    def _all_read(self, examples: int) -> bool:
        left = examples
        for share, length in zip(self._shares, self._lengths, strict=True):
            taken = left * share.numerator // share.denominator
            if taken < length:
                return False
            left -= taken
        return True


def _check(parts: Sequence[tuple[Any, float]], length: int | None, seed: int) -> None:
    """Raise DataError if a mixture cannot be made of this; see :class:`Mixture`."""
    if not parts:
        raise DataError("Mixture([]): give pairs of a data set and its weight")
    for number, (dataset, weight) in enumerate(parts):
        if not (isinstance(weight, Real) and 0 < weight < math.inf):
            raise DataError(f"Mixture: weight {number} is {weight!r}, it must be above 0")
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            raise DataError(
                f"Mixture: data set {number} ({type(dataset).__name__}) cannot be read by "
                "index; give one with __getitem__ and __len__"
            )
        if not len(dataset):
            raise DataError(f"Mixture: data set {number} is empty; leave it out")
    if length is not None and length < 1:
        raise DataError(f"Mixture: length is {length}, it must be 1 or more")
    if seed < 0:
        raise DataError(f"Mixture: seed is {seed}, it must be 0 or more")


def _order_key(dataset: Any, shuffle: bool) -> Any:
    """Return what the examples of a dataset depend on beside their index; None: nothing."""
    key, blocks = attribute_of(dataset, "order_key"), attribute_of(dataset, "blocks")
    if blocks is None or not shuffle:
        return key
    sizes = np.asarray(blocks.sizes, np.int64).tobytes()  # there may be a million
    return key, hashlib.sha256(sizes).hexdigest(), int(blocks.window)

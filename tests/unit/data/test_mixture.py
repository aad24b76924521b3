"""Mixtures: their picks follow from the index, and each data set is read in whole passes."""

from __future__ import annotations

import pickle
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_elastic.data import Mixture, ShardDataset, Stream
from hvd_elastic.errors import DataError
from hvd_elastic.model.sharding import Blocks
from tests.unit.data.shards import write_numbers


class Named:
    """Example i is (name, i)."""

    def __init__(self, name: int, length: int) -> None:
        self.name, self.length = name, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, int]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return self.name, index


@given(
    parts=st.lists(st.tuples(st.integers(1, 20), st.floats(0.01, 10)), min_size=1, max_size=5),
    length=st.none() | st.integers(1, 50),
    shuffle=st.booleans(),
)
def test_every_pass_takes_each_example_once_and_shares_follow_the_weights(
    parts: list[tuple[int, float]], length: int | None, shuffle: bool
) -> None:
    datasets = [(Named(name, size), weight) for name, (size, weight) in enumerate(parts)]
    mixture = Mixture(datasets, length=length, shuffle=shuffle)
    count = 3 * len(mixture) if length is None else 200
    read = mixture.__getitems__(range(count))
    total = sum(weight for _, weight in parts)
    for name, (size, weight) in enumerate(parts):
        own = [example for which, example in read if which == name]
        for start in range(0, len(own), size):
            taken = own[start : start + size]
            assert len({*taken}) == len(taken)
            if not shuffle:
                assert taken == list(range(len(taken)))
        assert abs(len(own) - count * weight / total) < len(parts) + 0.01 * count
    if length is None:
        first = Counter(which for which, _ in read[: len(mixture)])
        assert all(first[name] >= size for name, (size, _) in enumerate(parts))
        less = Counter(which for which, _ in read[: len(mixture) - 1])
        assert any(less[name] < size for name, (size, _) in enumerate(parts)), "no longer than that"


def test_passes_differ_and_follow_from_the_seed() -> None:
    def passes(seed: int) -> list[list[Any]]:
        mixture = Mixture([(Named(0, 50), 1)], seed=seed)
        return [mixture.__getitems__(range(start, start + 50)) for start in (0, 50, 100)]

    found = passes(1)
    assert found == passes(1)
    assert all(one != other for one, other in pairwise([*found, *passes(2)]))
    mixture = Mixture([(Named(0, 50), 1), (Named(1, 50), 1)])
    first, second = ([e for w, e in list(mixture) if w == which] for which in (0, 1))
    assert first != second, "each data set has an order of its own"


def test_it_is_pickled_and_read_as_other_data_sets(tmp_path: Path) -> None:
    shards = ShardDataset(write_numbers(tmp_path / "d", [4, 3, 5]), shuffle_window=1)
    mixture = Mixture([(shards, 2), (Named(7, 6), 1)])
    assert len(mixture) == 18
    assert [str(mixture[i]) for i in range(18)] == [*map(str, mixture.__getitems__(range(18)))]
    again = pickle.loads(pickle.dumps(mixture))
    assert [again.pick(i) for i in range(40)] == [mixture.pick(i) for i in range(40)]
    own = [i for which, i in map(mixture.pick, range(18)) if which == 0]
    assert sorted(own) == list(range(12))
    shard_of = [0] * 4 + [1] * 3 + [2] * 5
    turns = [shard_of[i] for i in own]
    assert sum(one != other for one, other in pairwise(turns)) == 2, "a shard at a time"


def test_numbers_of_numpy_are_numbers() -> None:
    parts = [(Named(0, 3), 2), (Named(1, 4), 0.5)]
    theirs = [(dataset, np.float32(weight)) for dataset, weight in parts]
    mixture = Mixture(theirs, length=np.int64(5), seed=np.int64(2))
    assert mixture.order_key == Mixture(parts, length=5, seed=2).order_key
    assert len(mixture) == 5


def test_arguments_that_do_not_fit_are_explained() -> None:
    good = Named(0, 3)
    for parts, options, said in (
        ([], {}, "give pairs of a data set and its weight"),
        ([(good, 0)], {}, "weight 0 is 0, it must be above 0"),
        ([(good, 1), (good, float("nan"))], {}, "weight 1 is nan"),
        ([(good, 1), (good, "much")], {}, "weight 1 is 'much'"),
        ([(good, 1), (good, 1e-9)], {}, "differ too much"),
        ([(good, 1), (iter([1]), 1)], {}, r"data set 1 \(list_iterator\) cannot be read by index"),
        ([(good, 1), (Named(1, 0), 1)], {}, "data set 1 is empty"),
        ([(good, 1)], {"length": 0}, "length is 0, it must be 1 or more"),
        ([(good, 1)], {"seed": -1}, "seed is -1, it must be 0 or more"),
    ):
        with pytest.raises(DataError, match=said):
            Mixture(parts, **options)  # type: ignore[arg-type]
    with pytest.raises(IndexError, match="example -1 of a mixture"):
        Mixture([(good, 1)])[-1]


def test_a_stream_goes_on_with_its_next_epoch_in_its_own_order() -> None:
    stream = Stream(lambda epoch, share, start: iter((epoch, i) for i in range(start, 4)), length=4)
    mixture = Mixture([(stream, 1)])
    expected = [(epoch, i) for epoch in range(3) for i in range(4)]
    assert mixture.__getitems__(range(12)) == expected


def test_its_order_key_depends_on_those_of_its_parts_and_on_their_blocks() -> None:
    def key(sizes: Any, window: int, own: str | None = None, *, shuffle: bool = True) -> str:
        part = Named(0, 6)
        part.blocks = Blocks(sizes, window)  # type: ignore[attr-defined]
        part.order_key = own  # type: ignore[attr-defined]
        return Mixture([(part, 1)], shuffle=shuffle).order_key

    first = key([2, 4], 1)
    assert key(np.array([2, 4]), 1) == first
    assert len({first, key([4, 2], 1), key([2, 4], 2), key([2, 4], 1, "x")}) == 4
    assert key([2, 4], 1, shuffle=False) == key([4, 2], 2, shuffle=False)

"""Streams: which example of which share has an index, and how shares are opened."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_elastic.data import Stream
from hvd_elastic.errors import DataError


class Shares:
    """Example n of a share in an epoch is (epoch, share, n); keeps what was opened and read."""

    def __init__(self, length: int = 10**6) -> None:
        self.length = length
        self.opened: list[tuple[int, int, int]] = []
        self.read = 0

    def __call__(self, epoch: int, share: int, start: int) -> Iterator[tuple[int, int, int]]:
        self.opened.append((epoch, share, start))
        for number in range(start, self.length):
            self.read += 1
            yield epoch, share, number


@given(of_share=st.integers(1, 20), shares=st.integers(1, 6), chunk=st.integers(1, 25))
def test_an_epoch_takes_the_first_examples_of_each_share_once(
    of_share: int, shares: int, chunk: int
) -> None:
    source = Shares()
    stream = Stream(source, length=of_share * shares, shares=shares, chunk=chunk)
    for epoch in range(2):
        read = [stream[i] for i in range(epoch * len(stream), (epoch + 1) * len(stream))]
        assert sorted(read) == [(epoch, s, n) for s in range(shares) for n in range(of_share)]
        for share in range(shares):
            own = [number for _, which, number in read if which == share]
            assert own == sorted(own), "a share is read from its beginning to its end"
    assert len(source.opened) == 2 * shares
    assert source.read == 2 * len(stream)


def test_with_a_chunk_of_the_batch_a_rank_reads_its_own_shares_alone() -> None:
    batch, shares, ranks = 24, 6, 3
    for rank in range(ranks):
        source = Shares()
        stream = Stream(source, length=240, shares=shares, chunk=batch // shares)
        for step in range(10):
            first = step * batch + rank * batch // ranks
            stream.__getitems__(range(first, first + batch // ranks))
        assert source.opened == [(0, share, 0) for share in (2 * rank, 2 * rank + 1)]
        assert source.read == 240 // ranks, "nothing is read and dropped"


def test_what_lies_between_is_dropped_and_what_lies_before_is_opened_anew() -> None:
    source = Shares()
    stream = Stream(source, length=100)
    assert stream[3] == (0, 0, 3)
    assert source.opened == [(0, 0, 3)]
    assert stream[7] == (0, 0, 7)
    assert (source.opened, source.read) == ([(0, 0, 3)], 5)
    assert stream[4] == (0, 0, 4)
    assert source.opened[1:] == [(0, 0, 4)]
    assert stream[205] == (2, 0, 5)
    assert source.opened[2:] == [(2, 0, 5)]
    assert pickle.loads(pickle.dumps(Stream(islice_of, length=4)))[1] == 1


def islice_of(epoch: int, share: int, start: int) -> Iterator[int]:
    return islice(iter(range(4)), start, None)


def test_a_share_that_ends_early_is_named() -> None:
    stream = Stream(Shares(length=7), length=20, shares=2, chunk=5)
    assert len(stream.__getitems__(range(12))) == 12
    with pytest.raises(
        DataError,
        match=r"share 0 of 2 .* after 7 examples in epoch 0, .* takes 10 of each; .* at most 14",
    ):
        stream[12]


@pytest.mark.parametrize("wrong", [{"length": 0}, {"shares": 3}, {"chunk": 0}])
def test_numbers_that_do_not_fit_are_explained(wrong: dict[str, int]) -> None:
    with pytest.raises(DataError, match=r"each must be 1 or more, and length a multiple of shares"):
        Stream(Shares(), **{"length": 10, **wrong})
    with pytest.raises(IndexError, match="example -1 of a stream"):
        Stream(Shares(), length=10)[-1]

"""An epoch is read exactly once, whatever the world sizes."""

from __future__ import annotations

import math
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_elastic.model import sharding
from hvd_elastic.model.sharding import (
    block_order,
    epoch_order,
    step_slice,
    steps_left,
)

SIZES = st.integers(1, 12)
GOLDEN_0_0 = [3, 2, 1, 8, 6, 0, 7, 4, 5, 9]
GOLDEN_12345_3 = [9, 6, 2, 4, 7, 1, 0, 5, 3, 8]
GOLDEN_CIPHER: dict[tuple[int, int, int], list[int]] = {
    (0, 0, 65_537): [6809, 12496, 40853, 20321],
    (12345, 3, 10**6): [115038, 244270, 418995, 407590],
    (1, 7, 10**12): [432490365347, 417260595392, 57488892178, 287379882364],
    (2**40, 0, 2**63 - 1): [
        2000646504085931626,
        1165939152930660583,
        177270650212515082,
        7754825264136050980,
    ],
}
GOLDEN_BLOCKS = [4, 9, 8, 6, 3, 5, 7, 2, 1, 0]


def few(seed: int, epoch: int, n: int) -> np.ndarray:
    """The order of an epoch of so few examples that it is a table."""
    return epoch_order(seed, epoch, n)(np.arange(n))


@given(seed=st.integers(0, 2**40), epoch=st.integers(0, 1000), n=st.integers(0, 300))
def test_order_of_few_holds_every_index_once_and_is_fixed(seed: int, epoch: int, n: int) -> None:
    order = few(seed, epoch, n)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(n))
    assert order.tolist() == few(seed, epoch, n).tolist()


def test_order_of_few_never_changes_between_versions() -> None:
    """Ranks on hosts with other library versions, and old checkpoints, rely on these values."""
    assert few(0, 0, 10).tolist() == GOLDEN_0_0
    assert few(12345, 3, 10).tolist() == GOLDEN_12345_3


def test_order_of_few_differs_by_epoch_and_seed_and_can_be_off() -> None:
    first = few(1, 0, 100).tolist()
    assert first != few(1, 1, 100).tolist()
    assert first != few(2, 0, 100).tolist()
    unshuffled = epoch_order(1, 1, 5, shuffle=False)
    assert unshuffled(np.arange(5)).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("seed", "epoch", "n"), [(-1, 0, 1), (0, -1, 1), (0, 0, -1)])
def test_order_of_few_refuses_negative_numbers(seed: int, epoch: int, n: int) -> None:
    with pytest.raises(ValueError, match="is -1, it must be 0 or more"):
        few(seed, epoch, n)


@pytest.mark.parametrize("n", [65_537, 257 * 257, 100_000, 131_072])
def test_epoch_order_holds_every_index_once(n: int) -> None:
    order = epoch_order(3, 1, n)(np.arange(n))
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(n))
    parts = [epoch_order(3, 1, n)(part) for part in np.array_split(np.arange(n), 7)]
    assert np.array_equal(np.concatenate(parts), order)


@given(n=st.integers(1, 3000), seed=st.integers(0, 2**70), epoch=st.integers(0, 99))
def test_cipher_is_a_permutation_at_any_size(n: int, seed: int, epoch: int) -> None:
    """Also where few numbers are examples, so that most are enciphered again."""
    numbers = sharding._Cipher((seed, epoch), n)[np.arange(n)]
    assert sorted(numbers.tolist()) == list(range(n))


def test_epoch_order_never_changes_between_versions() -> None:
    """Ranks on hosts with other library versions, and old checkpoints, rely on these values."""
    asked = [0, 1, 2, -1]
    for (seed, epoch, n), values in GOLDEN_CIPHER.items():
        positions = np.array([place % n for place in asked], dtype=np.int64)
        assert epoch_order(seed, epoch, n)(positions).tolist() == values


def test_epoch_order_takes_the_memory_of_what_is_asked_for() -> None:
    tracemalloc.start()
    for n in (10**12, 2**63 - 1):
        order = epoch_order(1, 0, n)(np.arange(n - 10_000, n))
        assert len(set(order.tolist())) == 10_000
        assert 0 <= order.min() < n // 1000 < n - n // 1000 < order.max() < n
        unshuffled = epoch_order(1, 0, n, shuffle=False)
        assert unshuffled(np.array([0, n - 1])).tolist() == [0, n - 1]
    assert tracemalloc.get_traced_memory()[1] < 5_000_000
    tracemalloc.stop()


def test_epoch_order_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match=r"n is 9223372036854775808, it must be below 2\^63"):
        epoch_order(0, 0, 2**63)
    with pytest.raises(ValueError, match="seed is -1, it must be 0 or more"):
        epoch_order(-1, 0, 5)


def deviation(counts: Sequence[int] | np.ndarray) -> float:
    """How far counts of equally likely cases are from equal, in standard deviations.

    That is of the chi-squared statistic, whose mean is the degrees of freedom.
    """
    found = np.asarray(counts, dtype=float).ravel()
    expected = found.sum() / found.size
    degrees = found.size - 1
    return float((((found - expected) ** 2 / expected).sum() - degrees) / math.sqrt(2 * degrees))


def test_all_orders_of_few_examples_are_equally_likely() -> None:
    for n in (2, 3, 4):
        seen = Counter(tuple(epoch_order(s, 1, n)(np.arange(n)).tolist()) for s in range(2400))
        assert len(seen) == math.factorial(n)
        assert abs(deviation(list(seen.values()))) < 4


@pytest.mark.parametrize("n", [5, 37, 100, 65_537, 10**6, 10**12, 2**63 - 1])
def test_every_position_gets_every_example_equally_often_over_seeds(n: int) -> None:
    cells = 5
    places = np.array([0, 1, n // 2, n - 2, n - 1])
    drawn = [epoch_order(seed, 0, n)(places) for seed in range(1000)]
    binned = np.array([[value * cells // n for value in row.tolist()] for row in drawn])
    for column in binned.T:
        assert abs(deviation(cell_counts(column, cells, n))) < 5
    if n >= 10**6:  # neighbours are independent, so all pairs of cells are equally likely
        for left, right in pairwise(binned.T):
            assert abs(deviation(np.bincount(left * cells + right, minlength=cells**2))) < 5


def cell_counts(cells: np.ndarray, number: int, n: int) -> np.ndarray:
    """Counts of each cell, scaled to cells that hold equally many of ``n`` examples."""
    counts = np.bincount(cells, minlength=number).astype(float)
    held = np.array(
        [-(-n * (cell + 1) // number) - -(-n * cell // number) for cell in range(number)]
    )
    return counts * (n / number / held.astype(float))


@pytest.mark.parametrize("n", [65_537, 257 * 257, 131_072, 1_000_000])
def test_an_epoch_shows_no_structure(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def worst(order: np.ndarray) -> float:
        """Of examples that lie some way apart: how uneven their distances are."""
        row = -(-n // (math.isqrt(n - 1) + 1))
        found = []
        for apart in (1, 2, row - 1, row, row + 1, n // 2):
            steps = (order[apart:] - order[:-apart]) % n
            found.append(deviation(np.bincount(steps * 1024 // n, minlength=1024)))
        where = np.arange(n) * 64 // n * 64 + order * 64 // n
        found.append(deviation(np.bincount(where, minlength=64 * 64)))
        return max(map(abs, found))

    assert worst(epoch_order(11, 0, n)(np.arange(n))) < 5
    if n == 1_000_000:  # the test can see what too few rounds leave
        monkeypatch.setattr(sharding, "_CIPHER_ROUNDS", 4)
        assert worst(epoch_order(11, 0, n)(np.arange(n))) > 10


@given(
    sizes=st.lists(st.integers(0, 30), max_size=12),
    window=st.integers(1, 5),
    seed=st.integers(0, 9),
    cuts=st.lists(st.integers(0, 360), max_size=4),
)
def test_block_order_stays_inside_a_window_of_blocks_and_reads_all_once(
    sizes: list[int], window: int, seed: int, cuts: list[int]
) -> None:
    n = sum(sizes)
    order = block_order(seed, 2, sizes, window)
    pieces = np.split(np.arange(n), sorted(cut for cut in cuts if cut < n))
    read = np.concatenate([order(piece) for piece in pieces]).tolist()
    assert sorted(read) == list(range(n))
    block_of = np.repeat(np.arange(len(sizes)), sizes)
    at, seen = 0, set[int]()
    blocks = epoch_order(seed, 2, len(sizes))(np.arange(len(sizes))).tolist()
    for start in range(0, len(blocks), window):
        group = blocks[start : start + window]
        held = sum(sizes[block] for block in group)
        inside = {int(block_of[index]) for index in read[at : at + held]}
        assert inside <= set(group)
        assert not inside & seen
        seen |= inside
        at += held


def test_block_order_shuffles_the_blocks_and_inside_of_them() -> None:
    sizes = [100] * 50
    order = block_order(1, 0, sizes)(np.arange(5000))
    blocks = (order[::100] // 100).tolist()
    assert blocks != sorted(blocks)
    inside = [tuple((order[at : at + 100] % 100).tolist()) for at in range(0, 5000, 100)]
    assert len(set(inside)) == 50, "each block has an order of its own"
    assert tuple(range(100)) not in inside
    assert order.tolist() != block_order(1, 1, sizes)(np.arange(5000)).tolist()
    assert order.tolist() != block_order(2, 0, sizes)(np.arange(5000)).tolist()
    mixed = block_order(1, 0, sizes, window=5)(np.arange(500)) // 100
    assert len(set(mixed[:100].tolist())) == 5


def test_block_order_takes_the_memory_of_the_list_of_blocks() -> None:
    tracemalloc.start()
    order = block_order(1, 0, [10**9] * 1000, window=4)(np.arange(10**12 - 1000, 10**12))
    assert len(set(order.tolist())) == 1000
    assert tracemalloc.get_traced_memory()[1] < 5_000_000
    tracemalloc.stop()


def test_block_order_never_changes_between_versions() -> None:
    order = block_order(4, 1, [3, 5, 2], window=2)
    assert order(np.arange(10)).tolist() == GOLDEN_BLOCKS


def test_block_order_refuses_impossible_blocks() -> None:
    with pytest.raises(ValueError, match="smallest size is -2, it must be 0 or more"):
        block_order(0, 0, [3, -2])
    with pytest.raises(ValueError, match="window is 0, it must be 1 or more"):
        block_order(0, 0, [3], window=0)


@given(
    n=st.integers(1, 400),
    batch=st.integers(1, 80),
    start=st.integers(0, 399),
    min_share=st.integers(1, 3),
    data=st.data(),
)
def test_any_sequence_of_world_sizes_covers_each_position_once(
    n: int, batch: int, start: int, min_share: int, data: st.DataObject
) -> None:
    position = min(start, n - 1)
    read: list[int] = []
    first = position
    while position < n:
        world_size = data.draw(SIZES)
        shares = [
            step_slice(position, n, batch, r, world_size, min_share) for r in range(world_size)
        ]
        examples = shares[0].step_examples
        own = [range(s.start, s.stop) for s in shares if not s.padding]
        assert {s.step_examples for s in shares} == {examples}
        assert {s.step_start for s in shares} == {position}
        assert list(chain(*own)) == list(range(position, position + examples))
        assert max(map(len, own)) - min(map(len, own)) <= 1
        assert list(map(len, own)) == sorted(map(len, own), reverse=True)
        assert sum(s.weight for s in shares) == pytest.approx(world_size)
        for share in shares:
            assert position <= share.start < share.stop <= position + examples
            assert share.weight == (
                0.0
                if share.padding
                else pytest.approx((share.stop - share.start) * world_size / examples)
            )
        # Memory on a rank is bounded: the rest taken along adds little to each share.
        assert examples < batch + world_size * min_share
        read += chain(*own)
        position = shares[0].step_stop
    assert read == list(range(first, n))


@given(
    n=st.integers(1, 400),
    batch=st.integers(1, 80),
    world_size=SIZES,
    start=st.integers(0, 399),
    min_share=st.integers(1, 3),
)
def test_steps_left_is_the_number_of_steps_taken(
    n: int, batch: int, world_size: int, start: int, min_share: int
) -> None:
    position = min(start, n)
    steps = 0
    said = steps_left(position, n, batch, world_size, min_share)
    while position < n:
        position = step_slice(position, n, batch, 0, world_size, min_share).step_stop
        steps += 1
    assert said == steps


@given(n=st.integers(1, 300), batch=st.integers(1, 60), world_size=SIZES)
def test_weighted_average_of_local_means_is_the_global_mean(
    n: int, batch: int, world_size: int
) -> None:
    values = np.random.default_rng(n).normal(size=n)
    shares = [step_slice(0, n, batch, rank, world_size, 2) for rank in range(world_size)]
    average = np.mean([s.weight * values[s.start : s.stop].mean() for s in shares])
    assert average == pytest.approx(values[: shares[0].step_examples].mean())


@given(n=st.integers(2, 400), batch=st.integers(1, 80), world_size=SIZES)
def test_no_rank_trains_on_a_single_example_unless_the_batch_says_so(
    n: int, batch: int, world_size: int
) -> None:
    if batch < 2 * world_size:
        return
    position = 0
    while position < n:
        shares = [step_slice(position, n, batch, r, world_size, 2) for r in range(world_size)]
        assert min(s.stop - s.start for s in shares) >= 2
        position = shares[0].step_stop


def test_one_example_for_eight_ranks_is_read_by_one_and_padded_on_seven() -> None:
    shares = [step_slice(0, 1, 32, rank, 8) for rank in range(8)]
    assert [(s.start, s.stop) for s in shares] == [(0, 1)] * 8
    assert [s.padding for s in shares] == [False] + [True] * 7
    assert [s.weight for s in shares] == [8.0] + [0.0] * 7


@given(
    n=st.integers(1, 400),
    parts=st.lists(st.integers(2, 40), min_size=1, max_size=6),
    batch=st.integers(1, 160),
    as_planned=st.booleans(),
)
def test_unequal_shares_cover_each_position_once(
    n: int, parts: list[int], batch: int, as_planned: bool
) -> None:
    ranks, batch = len(parts), sum(parts) if as_planned else batch
    position = 0
    while position < n:
        shares = [step_slice(position, n, batch, r, ranks, 2, parts=parts) for r in range(ranks)]
        readers = [share for share in shares if not share.padding]
        ends = [position, *(share.stop for share in readers)]
        assert [share.start for share in readers] == ends[:-1]
        assert ends[-1] == shares[0].step_stop
        assert sum(share.weight for share in shares) == pytest.approx(ranks)
        found = [share.stop - share.start for share in shares]
        if len(readers) == ranks:
            assert min(found) >= min(2, max(1, min(batch, n) // ranks))
        if as_planned and shares[0].step_examples == batch:
            assert found == parts
        position = shares[0].step_stop


def test_parts_of_another_world_are_not_used() -> None:
    shares = [step_slice(0, 100, 30, rank, 3, parts=(20, 10)) for rank in range(3)]
    assert [share.stop - share.start for share in shares] == [10, 10, 10]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 10, 4, 0, 1), "position is 10, it must be from 0 to 9"),
        ((-1, 10, 4, 0, 1), "position is -1"),
        ((0, 10, 0, 0, 1), "global_batch_size is 0, it must be 1 or more"),
        ((0, 10, 4, 2, 2), "rank is 2, it must be from 0 to 1"),
        ((0, 10, 4, 0, 1, 0), "min_share is 0"),
    ],
)
def test_arguments_out_of_range_are_named(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        step_slice(*arguments)

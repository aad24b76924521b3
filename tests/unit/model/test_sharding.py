"""An epoch is read exactly once, whatever the world sizes."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_elastic.model.sharding import permutation, step_slice, steps_left

SIZES = st.integers(1, 12)
GOLDEN_0_0 = [3, 2, 1, 8, 6, 0, 7, 4, 5, 9]
GOLDEN_12345_3 = [9, 6, 2, 4, 7, 1, 0, 5, 3, 8]


@given(seed=st.integers(0, 2**40), epoch=st.integers(0, 1000), n=st.integers(0, 300))
def test_permutation_holds_every_index_once_and_is_fixed(seed: int, epoch: int, n: int) -> None:
    order = permutation(seed, epoch, n)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(n))
    assert order.tolist() == permutation(seed, epoch, n).tolist()


def test_permutation_never_changes_between_versions() -> None:
    """Ranks on hosts with other library versions, and old checkpoints, rely on these values."""
    assert permutation(0, 0, 10).tolist() == GOLDEN_0_0
    assert permutation(12345, 3, 10).tolist() == GOLDEN_12345_3


def test_permutation_differs_by_epoch_and_seed_and_can_be_off() -> None:
    first = permutation(1, 0, 100).tolist()
    assert first != permutation(1, 1, 100).tolist()
    assert first != permutation(2, 0, 100).tolist()
    assert permutation(1, 1, 5, shuffle=False).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("seed", "epoch", "n"), [(-1, 0, 1), (0, -1, 1), (0, 0, -1)])
def test_permutation_refuses_negative_numbers(seed: int, epoch: int, n: int) -> None:
    with pytest.raises(ValueError, match="is -1, it must be 0 or more"):
        permutation(seed, epoch, n)


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
            assert min(found) >= min(2, max(1, batch // ranks))
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

"""Shares of a batch that follow the ranks' speed."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_elastic.model.goodput import BatchPlan
from hvd_elastic.model.shares import (
    ShareBalance,
    TimedTwice,
    balanced_shares,
    balanced_slowness,
    constant_examples,
    effective_slowness,
)

SPEEDS = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=9)


@given(
    speeds=SPEEDS,
    each=st.integers(1, 60),
    more=st.integers(0, 8),
    low=st.integers(1, 4),
    room=st.one_of(st.none(), st.integers(0, 50)),
)
def test_shares_add_up_and_keep_to_the_bounds(
    speeds: list[float], each: int, more: int, low: int, room: int | None
) -> None:
    examples = each * len(speeds) + min(more, len(speeds) - 1)
    high = None if room is None else low + room
    shares = balanced_shares(examples, speeds, low, high)
    assert sum(shares) == examples
    possible = low * len(speeds) <= examples <= (high or examples) * len(speeds)
    if possible:
        assert min(shares) >= low
        assert high is None or max(shares) <= high
    else:
        assert max(shares) - min(shares) <= 1


@given(speeds=SPEEDS, each=st.integers(1, 60), constant=st.floats(0.0, 20.0))
def test_no_whole_example_would_be_done_sooner_on_another_rank(
    speeds: list[float], each: int, constant: float
) -> None:
    shares = balanced_shares(each * len(speeds), speeds, low=1, constant=constant)
    end = (
        max(
            (constant + share) / speed
            for share, speed in zip(shares, speeds, strict=True)
            if share > 1
        )
        if max(shares) > 1
        else 0.0
    )
    for share, speed in zip(shares, speeds, strict=True):
        assert (constant + share + 1) / speed > end * (1 - 1e-6)


@given(
    slowness=st.lists(st.floats(1.0, 4.0), min_size=2, max_size=8),
    constant=st.floats(0.0, 0.2),
)
def test_balanced_shares_take_as_long_as_equal_ones_on_the_harmonic_mean(
    slowness: list[float], constant: float
) -> None:
    """Parts need not be whole numbers here; the constant is small enough for all to be above 0."""
    ranks, equal = len(slowness), 1.0
    end = balanced_slowness(slowness, [1] * ranks) * (constant + equal)
    shares = [end / slow - constant for slow in slowness]
    assert sum(shares) == pytest.approx(ranks * equal)


@given(
    slowness=st.lists(st.floats(1.0, 9.0), min_size=2, max_size=6),
    part=st.floats(0.0, 0.95),
)
def test_with_constant_parts_no_shares_are_faster(slowness: list[float], part: float) -> None:
    """Beside all shares that are cut finely: those with which all end together where they can."""
    examples, ranks = 60_000, len(slowness)
    each = examples / ranks
    constant = part / (1 - part) * each
    shares = balanced_shares(examples, [1 / slow for slow in slowness], 0, None, constant)
    times = [slow * (constant + m) for slow, m in zip(slowness, shares, strict=True)]
    expected = float(balanced_slowness(slowness, [1] * ranks, part)) * (constant + each)
    assert max(times) == pytest.approx(expected, rel=2e-3)


@given(
    constant=st.floats(0.0, 100.0),
    seen=st.lists(
        st.tuples(st.floats(1, 5), *([st.integers(1, 4), st.integers(4, 60)] * 2)), min_size=1
    ),
)
def test_what_is_constant_shows_whatever_the_ranks_speed(
    constant: float, seen: list[tuple[float, int, int, int, int]]
) -> None:
    pairs = [
        TimedTwice(n0, m0, slow * (n0 * constant + m0), n, m, slow * (n * constant + m))
        for slow, n0, m0, n, m in seen
        # Where passes grow as examples do, so does what is constant.
        if abs(math.log(m / m0)) > 0.2 and abs(math.log(m * n0 / m0 / n)) > 0.1
    ]
    found = constant_examples(pairs)
    assert (found is None) == (not pairs)
    if found is not None:
        most = 49 * np.median([math.sqrt(p.examples * p.new_examples) for p in pairs])
        assert found == pytest.approx(constant, abs=1 + 0.4 * min(constant, most))


@given(
    hosts=st.lists(st.tuples(st.floats(0.1, 10.0), st.integers(1, 4)), min_size=1, max_size=6),
    part=st.floats(0.0, 0.9),
    least=st.floats(0.0, 1.0),
)
def test_ranks_that_take_too_long_get_the_smallest_share(
    hosts: list[tuple[float, int]], part: float, least: float
) -> None:
    def examples(end: float) -> float:
        return sum(n * max(least, (end / s - part) / (1 - part)) for s, n in hosts)

    slowness, ranks = zip(*hosts, strict=True)
    low, high = 0.0, max(slowness)
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if examples(middle) < sum(ranks) else (low, middle)
    expected = max(high, max(slowness) * (part + (1 - part) * least))
    assert float(balanced_slowness(slowness, ranks, part, least)) == pytest.approx(expected)


def test_slowness_of_equal_and_of_balanced_shares() -> None:
    assert effective_slowness([0.1, 0.1, 0.4], [8, 8, 8]) == pytest.approx(4.0)
    shares = balanced_shares(2700, [4.0, 4.0, 1.0])
    own = [shares[0] / 4, shares[1] / 4, shares[2] / 1]
    expected = balanced_slowness([1.0, 1.0, 4.0], [1, 1, 1])
    assert effective_slowness(own, shares) == pytest.approx(expected)


class Ranks:
    """Ranks of given slowness; ``reviewed`` is one review of theirs."""

    def __init__(self, slowness: Sequence[float], constant_s: float = 0.0, sync_s: float = 0.0):
        self.slowness, self.constant_s, self.sync_s = list(slowness), constant_s, sync_s
        self.balance = ShareBalance()
        self.batch = 64

    def own_s(self) -> list[float]:
        shares = self.balance.parts_of(self.batch, len(self.slowness))
        return [
            slow * (self.constant_s + 0.01 * share)
            for slow, share in zip(self.slowness, shares, strict=True)
        ]

    def step_s(self) -> float:
        return max(self.own_s()) + self.sync_s

    def reviewed(self) -> str:
        reason = self.balance.review(self.own_s(), self.step_s(), self.batch, low=2)
        self.balance.cut(self.batch, len(self.slowness), low=2)
        return reason


def test_a_rank_that_is_slow_gets_less_until_it_recovers() -> None:
    ranks = Ranks([1.0, 3.0])
    assert [ranks.reviewed() for _ in range(2)] == [""] * 2, "that may be chance"
    assert "rank 1 takes 0.96 s for 32 examples and rank 0 0.32 s for 32" in ranks.reviewed()
    assert ranks.balance.parts == (48, 16)
    assert [ranks.reviewed() for _ in range(5)] == [""] * 5
    ranks.slowness[1] = 1.0
    reasons = [ranks.reviewed() for _ in range(4)]
    assert any("equally fast" in reason for reason in reasons)
    assert not ranks.balance.parts
    assert [ranks.reviewed() for _ in range(5)] == [""] * 5


def test_a_change_that_does_not_last_changes_nothing() -> None:
    ranks = Ranks([1.0, 1.0])
    for _ in range(5):
        for slowness in (3.0, 3.0, 1.0):
            ranks.slowness[1] = slowness
            assert ranks.reviewed() == ""


@pytest.mark.parametrize(
    ("slowness", "sync_s", "moves"),
    [(1.15, 0.0, False), (1.3, 0.0, True), (1.3, 0.5, False), (3.0, 0.5, True)],
)
def test_steps_must_become_a_tenth_faster(slowness: float, sync_s: float, moves: bool) -> None:
    """With what they take besides the ranks' own work."""
    ranks = Ranks([1.0, slowness], sync_s=sync_s)
    before = ranks.step_s()
    reasons = [ranks.reviewed() for _ in range(8)]
    assert any(reasons) is moves
    assert (before > 1.1 * ranks.step_s()) is moves


@given(
    slowness=st.lists(st.floats(1.0, 5.0), min_size=2, max_size=6),
    constant_s=st.floats(0.0, 1.0),
)
@settings(max_examples=20)
def test_reviews_settle_and_never_make_steps_slower(
    slowness: list[float], constant_s: float
) -> None:
    ranks = Ranks(slowness, constant_s)
    before = ranks.step_s()
    for _ in range(100):
        ranks.reviewed()
        assert ranks.step_s() <= 1.06 * before, "but for rounding, and where equal is as good"
        before = min(before, ranks.step_s())
    assert [ranks.reviewed() for _ in range(4)] == [""] * 4


@pytest.mark.parametrize("number", [2, 8, 64])
def test_chance_leaves_shares_equal_and_a_straggler_is_found_in_it(number: int) -> None:
    """The median of some ten steps that vary by a tenth varies by four in a hundred."""
    rng = np.random.default_rng(number)
    ranks = Ranks([1.0] * number)
    ranks.batch = 16 * number

    def reviewed() -> str:
        own_s = [own * math.exp(0.04 * rng.normal()) for own in ranks.own_s()]
        reason = ranks.balance.review(own_s, max(own_s), ranks.batch, low=2)
        ranks.balance.cut(ranks.batch, number, low=2)
        return reason

    assert [reviewed() for _ in range(300)] == [""] * 300
    ranks.slowness[number - 1] = 2.0
    assert sum(bool(reviewed()) for _ in range(8)) == 1
    parts = ranks.balance.parts
    assert parts[-1] < 0.6 * max(parts)
    assert sum(bool(reviewed()) for _ in range(200)) <= 1, "and then they stay"


@pytest.mark.parametrize("seed", range(3))
def test_many_reviews_tell_what_three_cannot(seed: int) -> None:
    """Speeds from three reviews are off by some per cent, and the slowest rank counts."""
    rng = np.random.default_rng(seed)
    slowness = [1.0] * 20 + [3.0] * 12
    ranks = Ranks(slowness, constant_s=0.1)
    ranks.batch = 1600

    def reviewed() -> str:
        own_s = [own * math.exp(0.06 * rng.normal()) for own in ranks.own_s()]
        reason = ranks.balance.review(own_s, max(own_s), ranks.batch, low=2)
        ranks.balance.cut(ranks.batch, len(slowness), low=2)
        return reason

    found = [(ranks.step_s(), reviewed()) for _ in range(60)]
    looked = [place for place, (_, reason) in enumerate(found) if "12 reviews" in reason]
    assert looked
    assert found[looked[0] + 1][0] < found[looked[0]][0]
    assert not any("12 reviews" in reviewed() for _ in range(40)), "one such look is enough"


@pytest.mark.parametrize("slow", [1.5, 3.0])
def test_a_first_change_shows_what_is_constant_and_the_second_lets_all_end_together(
    slow: float,
) -> None:
    ranks = Ranks([1.0, 1.0, slow], constant_s=0.3)
    ranks.batch = 300
    changes = [reason for _ in range(40) if (reason := ranks.reviewed())]
    assert 1 <= len(changes) <= 2
    own_s = ranks.own_s()
    assert max(own_s) == pytest.approx(min(own_s), rel=0.12 if len(changes) == 1 else 0.03)


@pytest.mark.parametrize("extra", [0, 2])
def test_larger_passes_wait_less_for_a_slow_rank(extra: int) -> None:
    """Relative to the steps that were timed."""
    ranks = Ranks([1.0, 1.0, 3.0], constant_s=2.0)
    ranks.batch = 300
    for _ in range(40):
        ranks.reviewed()
    balance, timed = ranks.balance, BatchPlan(300, extra)
    passes = np.array([100.0, 400.0]) / (extra + 1)
    same, larger = balance.slowness_of(passes, np.full(2, extra), timed)
    assert same == pytest.approx(1.0)
    part = balance.constant / (balance.constant + np.array([100.0, 400.0]))
    expected = balanced_slowness([1.0, 1.0, 3.0], [1, 1, 1], part)
    assert larger == pytest.approx(expected[1] / expected[0], rel=0.05)
    assert larger < 0.9


@pytest.mark.parametrize(("slowness", "block"), [([1.0, 1.5], 32), ([1.0, 2.0], 16)])
def test_shares_that_do_not_help_are_given_up(slowness: list[float], block: int) -> None:
    """A device that works in blocks of examples takes as long for one more as for a whole block."""

    class Blocks(Ranks):
        def own_s(self) -> list[float]:
            shares = self.balance.parts_of(self.batch, len(self.slowness))
            return [
                slow * math.ceil(share / block)
                for slow, share in zip(self.slowness, shares, strict=True)
            ]

    ranks = Blocks(slowness)
    at_first = ranks.step_s()
    reasons = [reason for _ in range(40) if (reason := ranks.reviewed())]
    assert len(reasons) == 2, "one that seems worth it, and back"
    assert sum(bool(ranks.reviewed()) for _ in range(400)) <= 6, "ever more seldom"
    while ranks.reviewed() or not ranks.balance.pause:
        pass
    assert "did not help" in reasons[1]
    assert ranks.step_s() == at_first
    other = ShareBalance()
    other.load_state_dict(json.loads(json.dumps(ranks.balance.state_dict())))
    assert other == ranks.balance
    ranks.slowness[1] *= 2.0
    assert any(ranks.reviewed() for _ in range(8)), "the ranks are not what they were"


def test_a_change_that_was_disturbed_is_tried_again() -> None:
    ranks = Ranks([1.0, 3.0])
    while not ranks.reviewed():
        pass
    ranks.slowness = [20.0, 60.0]
    while not (reason := ranks.reviewed()):
        pass
    assert "did not help" in reason
    assert (ranks.balance.reviews, ranks.balance.logs) == (0, ()), "those were of other shares"
    ranks.slowness = [1.0, 3.0]
    assert any(ranks.reviewed() for _ in range(80))
    assert ranks.balance.parts == (48, 16)
    assert [ranks.reviewed() for _ in range(5)] == [""] * 5


@pytest.mark.parametrize("own_s", [[1.0], [1.0, math.nan], [0.0, 1.0], [1.0, math.inf]])
def test_what_is_not_known_changes_nothing(own_s: list[float]) -> None:
    balance = ShareBalance()
    assert [balance.review(own_s, 1.0, 32) for _ in range(3)] == [""] * 3


def test_the_shares_follow_the_batch_and_are_forgotten_in_another_world() -> None:
    ranks = Ranks([1.0, 3.0])
    while not ranks.reviewed():
        pass
    ranks.balance.cut(128, 2)
    assert ranks.balance.parts == (96, 32)
    other = ShareBalance()
    other.load_state_dict(json.loads(json.dumps(ranks.balance.state_dict())))
    assert other == ranks.balance
    other.forget()
    assert other == ShareBalance()
    assert other.parts_of(30, 4) == (8, 8, 7, 7)

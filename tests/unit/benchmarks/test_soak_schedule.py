"""Schedules of a soak: fixed by their seed, possible within min_np, shortened without change."""

from __future__ import annotations

from itertools import islice, pairwise

import pytest

from benchmarks.soak.schedule import (
    KINDS,
    MIN_NP,
    MOST_PROCESSES,
    faults_of_seed,
    hosts_before,
    parse_kinds,
    parse_only,
    selected,
    starting_hosts,
)
from hvd_elastic.errors import UsageError

HOSTS = ["a", "b", "c", "d"]
SEEDS = range(20)
TIMEOUT_S = 5.0


def faults(seed: int, count: int = 200):
    return list(islice(faults_of_seed(seed, HOSTS, TIMEOUT_S), count))


def test_a_seed_gives_the_same_schedule_and_another_seed_another() -> None:
    assert faults(7) == faults(7)
    assert faults(7) != faults(8)


def test_every_kind_comes_up() -> None:
    assert {fault.kind for seed in SEEDS for fault in faults(seed)} == KINDS.keys()


@pytest.mark.parametrize("seed", SEEDS)
def test_numbers_count_from_1_and_times_are_not_negative(seed: int) -> None:
    made = faults(seed)
    assert [fault.number for fault in made] == list(range(1, 201))
    assert all(fault.after_s >= 0 and fault.duration_s >= 0 for fault in made)


@pytest.mark.parametrize("seed", SEEDS)
def test_any_host_of_any_hostfile_may_be_lost_without_going_below_min_np(seed: int) -> None:
    listed = [dict(fault.hosts) for fault in faults(seed) if fault.kind == "hosts"]
    assert listed
    for hosts in [starting_hosts(HOSTS), *listed]:
        assert sum(hosts.values()) - max(hosts.values()) >= MIN_NP
        assert sum(hosts.values()) <= MOST_PROCESSES
    for before, after in pairwise(listed):
        assert [*before.items()] != [*after.items()], "an edit that changes nothing"


@pytest.mark.parametrize("seed", SEEDS)
def test_only_what_leaves_training_able_to_go_on_comes_on_top_of_the_fault_before(
    seed: int,
) -> None:
    made = faults(seed)
    assert not made[0].overlaps
    for before, fault in pairwise(made):
        if fault.overlaps:
            assert KINDS[before.kind].may_overlap
            assert KINDS[fault.kind].may_overlap


def test_silences_last_longer_than_it_may_take_to_notice_them() -> None:
    for fault in faults(3):
        kind = KINDS[fault.kind]
        if kind.beyond_timeout:
            assert fault.duration_s > TIMEOUT_S + 15
        elif kind.longest_s and fault.kind.startswith(("pause", "blip")):
            assert 0 < fault.duration_s < TIMEOUT_S


def test_a_leader_is_resumed_at_once_or_later() -> None:
    waits = {fault.duration_s > 0 for fault in faults(1, 500) if fault.kind == "kill_leader"}
    assert waits == {True, False}


def test_a_part_of_a_schedule_has_the_faults_of_the_whole() -> None:
    whole = faults(5, 40)
    kinds = ("crash", "hosts", "kill_worker")
    part = list(selected(faults_of_seed(5, HOSTS, TIMEOUT_S), kinds, range(10, 41)))
    assert part
    for fault in part:
        assert fault.kind in kinds
        same = whole[fault.number - 1]
        assert (fault.kind, fault.where, fault.duration_s) == (
            same.kind,
            same.where,
            same.duration_s,
        )


def test_a_fault_does_not_come_on_top_of_one_that_is_left_out() -> None:
    made = faults(1, 2000)
    on_top = next(f for f in made if f.overlaps and made[f.number - 2].kind != f.kind)
    alone = next(selected(iter(made), (on_top.kind,), range(on_top.number, on_top.number + 1)))
    assert (alone.number, alone.overlaps) == (on_top.number, False)
    both = selected(iter(made), KINDS, range(on_top.number - 1, on_top.number + 1))
    assert [fault.overlaps for fault in both][1]


def test_a_part_begins_with_the_hostfile_of_its_place() -> None:
    made = faults(2)
    first, second = [fault for fault in made if fault.kind == "hosts"][:2]
    start = starting_hosts(HOSTS)
    assert hosts_before(made, KINDS, first.number, start) == start
    assert hosts_before(made, KINDS, second.number, start) == dict(first.hosts)
    assert hosts_before(made, ("crash",), second.number, start) == start


def test_kinds_are_named_or_left_out() -> None:
    assert parse_kinds(None) == tuple(KINDS)
    assert parse_kinds("crash,cut") == ("crash", "cut")
    assert parse_kinds("-crash,-cut") == tuple(k for k in KINDS if k not in ("crash", "cut"))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("crush", "there is no 'crush'; valid: kill_worker"),
        ("cut,-crash", "either those to make or those to leave out"),
        (",".join(f"-{kind}" for kind in KINDS), "leaves no fault"),
        ("", "leaves no fault"),
    ],
)
def test_wrong_kinds_are_told(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        parse_kinds(text)


def test_a_kind_that_cannot_be_made_here_is_told() -> None:
    with pytest.raises(UsageError, match="cut needs virtual hosts in network namespaces"):
        parse_kinds("cut", possible=("crash",))


def test_numbers() -> None:
    assert parse_only(None) is None
    assert parse_only("12") == range(12, 13)
    assert parse_only("12-17") == range(12, 18)


@pytest.mark.parametrize("text", ["0", "5-3", "a-b", "-3", ""])
def test_wrong_numbers_are_told(text: str) -> None:
    with pytest.raises(UsageError, match="write the numbers of faults as 12-17"):
        parse_only(text)


def test_too_few_hosts_are_told() -> None:
    with pytest.raises(UsageError, match="at least 4 hosts, and was given 3"):
        next(faults_of_seed(1, HOSTS[:3]))

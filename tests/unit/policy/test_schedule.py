"""The scheduler of many jobs: what it maximises, what it promises, and how it places."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_elastic.policy.schedule.decide import decide
from hvd_elastic.policy.schedule.jobs import Assignment, HostSlots, Job
from hvd_elastic.policy.schedule.knapsack import choose_options
from hvd_elastic.policy.schedule.placement import place_jobs

HOSTS = [HostSlots(f"h{number}", 4) for number in range(4)]
LINEAR = np.arange(17.0)


def slots_of(decided: dict[str, Assignment]) -> dict[str, int]:
    return {name: sum(each.hosts.values()) for name, each in decided.items()}


@given(st.data())
def test_the_chosen_options_are_the_best_of_all_combinations(data: st.DataObject) -> None:
    sizes = [np.asarray([0, 1, 2, 4])] * 3
    worth = st.lists(st.floats(0, 10), min_size=4, max_size=4)
    values = [np.asarray(data.draw(worth)) for _ in sizes]
    capacity = data.draw(st.integers(0, 12))
    chosen = choose_options(sizes, values, capacity)
    assert sum(sizes[0][index] for index in chosen) <= capacity
    best = max(
        sum(values[job][index] for job, index in enumerate(combination))
        for combination in itertools.product(range(4), repeat=3)
        if sum(sizes[0][index] for index in combination) <= capacity
    )
    assert sum(values[job][index] for job, index in enumerate(chosen)) == pytest.approx(best)


def test_an_idle_cluster_gives_all_slots_to_one_job() -> None:
    decided = decide([Job("a", 0.0, LINEAR, 1e5, max_slots=16)], HOSTS, 0.0)
    assert slots_of(decided) == {"a": 16}
    assert "starts from 0 to 16 slots on 4 hosts: 16.0 times" in decided["a"].reason


def test_a_busy_cluster_shrinks_jobs_before_one_waits() -> None:
    long = Job("long", 0.0, LINEAR, 1e7, {"h0": 4, "h1": 4, "h2": 4, "h3": 4}, max_slots=16)
    short = [Job(f"s{number}", 1.0, LINEAR, 100.0, max_slots=16) for number in range(15)]
    decided = decide([long, *short], HOSTS, 1.0)
    assert set(slots_of(decided).values()) == {1}
    assert decided["long"].reason.startswith("shrinks from 16 to 1 slot")


def test_a_job_that_needs_more_than_the_cluster_has_waits_and_says_why() -> None:
    big = Job("big", 0.0, LINEAR, 1e5, min_slots=17, max_slots=17)
    decided = decide([big, Job("a", 0.0, LINEAR, 1e5, max_slots=16)], HOSTS, 0.0)
    assert not decided["big"].hosts
    assert "needs 17 slots, the cluster has 16" in decided["big"].reason


def test_a_dear_rescale_near_the_end_is_left_out() -> None:
    cheap = Job("a", 0.0, LINEAR, 100.0, {"h0": 4}, rescale_s=0.1, max_slots=8)
    dear = Job("a", 0.0, LINEAR, 100.0, {"h0": 4}, rescale_s=60.0, max_slots=8)
    assert slots_of(decide([cheap], HOSTS, 0.0)) == {"a": 8}
    assert slots_of(decide([dear], HOSTS, 0.0)) == {"a": 4}


def test_priority_and_deadline_move_slots() -> None:
    jobs = [Job(name, 0.0, LINEAR**0.5, 1e4, max_slots=16) for name in "ab"]
    favoured = Job("b", 0.0, LINEAR**0.5, 1e4, max_slots=16, priority=10.0)
    late = Job("b", 0.0, LINEAR**0.5, 1e4, max_slots=16, deadline_s=60.0)
    assert slots_of(decide(jobs, HOSTS, 0.0)) == {"a": 8, "b": 8}
    for other in (favoured, late):
        found = slots_of(decide([jobs[0], other], HOSTS, 0.0))
        assert found["b"] > found["a"] > 0


@given(st.lists(st.sampled_from([0, 1, 2, 3, 4, 8]), min_size=1, max_size=12))
def test_every_choice_that_fits_is_placed_and_unchanged_jobs_stay(sizes: list[int]) -> None:
    wanted, left = {}, 16
    for number, size in enumerate(sizes):
        wanted[f"j{number}"] = min(size, left)
        left -= wanted[f"j{number}"]
    placed = place_jobs(wanted, {}, HOSTS)
    assert {job: sum(hosts.values()) for job, hosts in placed.items()} == wanted
    for host in HOSTS:
        assert sum(hosts.get(host.name, 0) for hosts in placed.values()) <= host.slots
    assert place_jobs(wanted, placed, HOSTS) == placed


def test_a_small_job_moves_where_a_large_one_would_be_split() -> None:
    held = {"a": {"h0": 1}, "b": {"h1": 1}}
    two = HOSTS[:2]
    placed = place_jobs({"a": 1, "b": 1, "large": 4}, held, two)
    assert len(placed["large"]) == 1


def test_a_job_with_invalid_limits_is_refused() -> None:
    with pytest.raises(ValueError, match="min_slots 3 and max_slots 2"):
        Job("a", 0.0, min_slots=3, max_slots=2)

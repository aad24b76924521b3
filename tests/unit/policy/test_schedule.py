"""The scheduler of many jobs: what it maximises, what it promises, and how it places."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_elastic.policy.schedule.decide import choose_options, decide
from hvd_elastic.policy.schedule.jobs import Assignment, Job
from hvd_elastic.policy.schedule.placement import Wish, place_jobs
from hvd_elastic.policy.schedule.policies import (
    Policy,
    equal_shares,
    first_come_first_served,
)
from hvd_elastic.policy.snapshot import HostOffer

HOSTS = [HostOffer(f"h{number}", 4) for number in range(4)]
LINEAR = np.arange(17.0)


def slots_of(decided: Mapping[str, Assignment]) -> dict[str, int]:
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


def test_who_waits_is_told_of_the_jobs_that_hold_slots_alone() -> None:
    jobs = [Job(name, number, LINEAR, 1e5) for number, name in enumerate("abcde")]
    decided = decide(jobs, [HostOffer("h", 2)], 0.0)
    assert slots_of(decided) == {"a": 1, "b": 1, "c": 0, "d": 0, "e": 0}
    assert decided["e"].reason == "waits: all 2 slots are worth more to 2 other jobs"
    kept = Job("kept", 0.0, held={"h": 1}, preemptible=False)
    wide = Job("wide", 9.0, LINEAR, 1e5, min_slots=2, max_slots=2)
    decided = decide([kept, wide], [HostOffer("h", 2)], 0.0)
    told = "waits: 1 of 2 slots is worth more to 1 other job, and it needs 2"
    assert decided["wide"].reason == told


def test_a_dear_rescale_near_the_end_is_left_out() -> None:
    cheap = Job("a", 0.0, LINEAR, 100.0, {"h0": 4}, rescale_s=0.1, max_slots=8)
    dear = Job("a", 0.0, LINEAR, 100.0, {"h0": 4}, rescale_s=60.0, max_slots=8)
    assert slots_of(decide([cheap], HOSTS, 0.0)) == {"a": 8}
    assert slots_of(decide([dear], HOSTS, 0.0)) == {"a": 4}


def test_a_job_that_was_rescaled_often_is_left_alone() -> None:
    calm = Job("a", 0.0, LINEAR**0.1, 1e6, {"h0": 4}, rescale_s=30.0, max_slots=8, rescales=1)
    restless = dataclasses.replace(calm, rescales=60)
    assert slots_of(decide([calm], HOSTS, 3600.0)) == {"a": 8}
    assert slots_of(decide([restless], HOSTS, 3600.0)) == {"a": 4}


def test_priority_and_deadline_move_slots() -> None:
    jobs = [Job(name, 0.0, LINEAR**0.5, 1e4, max_slots=16) for name in "ab"]
    favoured = Job("b", 0.0, LINEAR**0.5, 1e4, max_slots=16, priority=10.0)
    late = Job("b", 0.0, LINEAR**0.5, 1e4, max_slots=16, deadline_s=60.0)
    assert slots_of(decide(jobs, HOSTS, 0.0)) == {"a": 8, "b": 8}
    for other in (favoured, late):
        found = slots_of(decide([jobs[0], other], HOSTS, 0.0))
        assert found["b"] > found["a"] > 0


def placed_on(
    hosts: list[HostOffer], wanted: dict[str, int], held: dict[str, dict[str, int]] | None = None
) -> dict[str, dict[str, int]]:
    wishes = {job: Wish(slots, (held or {}).get(job, {})) for job, slots in wanted.items()}
    return {job: dict(hosts_of) for job, hosts_of in place_jobs(wishes, hosts).items()}


@given(st.lists(st.sampled_from([0, 1, 2, 3, 4, 8]), min_size=1, max_size=12))
def test_every_choice_that_fits_is_placed_and_unchanged_jobs_stay(sizes: list[int]) -> None:
    wanted, left = {}, 16
    for number, size in enumerate(sizes):
        wanted[f"j{number}"] = min(size, left)
        left -= wanted[f"j{number}"]
    placed = placed_on(HOSTS, wanted)
    assert {job: sum(hosts.values()) for job, hosts in placed.items()} == wanted
    for host in HOSTS:
        assert sum(hosts.get(host.name, 0) for hosts in placed.values()) <= host.slots
    assert placed_on(HOSTS, wanted, placed) == placed


def test_a_small_job_moves_where_a_large_one_would_be_split() -> None:
    held = {"a": {"h0": 1}, "b": {"h1": 1}}
    placed = placed_on(HOSTS[:2], {"a": 1, "b": 1, "large": 4}, held)
    assert len(placed["large"]) == 1


def test_two_jobs_across_hosts_do_not_share_a_host_where_it_can_be_avoided() -> None:
    placed = placed_on(HOSTS, {"a": 6, "b": 6})
    assert not placed["a"].keys() & placed["b"].keys()
    assert len(placed["a"]) == len(placed["b"]) == 2
    small = placed_on(HOSTS, {"a": 6, "b": 6, "c": 2, "d": 2})
    assert not small["a"].keys() & small["b"].keys(), "small jobs fill what is left"


MIXED = [HostOffer("fast0", 4), HostOffer("fast1", 4), HostOffer("slow0", 4, slowness=3.0)]


def test_the_job_to_which_speed_is_worth_most_gets_the_fast_hosts() -> None:
    wishes = {"a": Wish(4, {}, 1.0), "b": Wish(4, {}, 3.0), "c": Wish(4, {}, 2.0)}
    placed = place_jobs(wishes, MIXED)
    assert set(placed["a"]) == {"slow0"}
    held = {"a": {"fast0": 4}, "b": {"slow0": 4}}
    wishes = {"a": Wish(4, held["a"], 1.0, 0.001), "b": Wish(4, held["b"], 3.0, 0.001)}
    placed = place_jobs(wishes, MIXED)
    assert placed == {"a": {"fast0": 4}, "b": {"fast1": 4}}, "a fast host is free, so b moves"
    dear = {**wishes, "b": Wish(4, held["b"], 3.0, 0.9)}
    assert place_jobs(dear, MIXED) == held, "the move would cost more than it brings"


def test_one_job_alone_takes_slow_hosts_only_where_they_help() -> None:
    linear = np.arange(17.0)
    decided = decide([Job("a", 0.0, linear, 1e5, max_slots=12)], MIXED, 0.0)
    assert slots_of(decided) == {"a": 12}
    # With slots three times as slow, twelve are 1.17 times as fast as eight at best.
    flat = np.minimum(linear, 8 + 0.1 * np.maximum(linear - 8, 0))
    decided = decide([Job("a", 0.0, flat, 1e5, max_slots=12)], MIXED, 0.0)
    assert decided["a"].hosts == {"fast0": 4, "fast1": 4}


def test_hosts_of_unequal_size_are_filled() -> None:
    hosts = [HostOffer("a", 4), HostOffer("b", 4), HostOffer("c", 3)]
    alone = decide([Job("a", 0.0, LINEAR, 1e5, max_slots=16)], hosts, 0.0)
    assert slots_of(alone) == {"a": 11}
    two = [Job(name, 0.0, LINEAR, 1e5, max_slots=16) for name in "ab"]
    assert sum(slots_of(decide(two, hosts, 0.0)).values()) == 11


def test_a_deadline_gets_the_slots_that_it_takes_and_no_more() -> None:
    other = Job("a", 0.0, LINEAR, 1e4, max_slots=16)
    urgent = Job("b", 0.0, LINEAR, 1e5, max_slots=16, deadline_s=2e4)
    found = slots_of(decide([other, urgent], HOSTS, 0.0))
    assert found == {"a": 8, "b": 8}, "4 slots would take 25,000 s"
    calm = Job("b", 0.0, LINEAR, 1e5, max_slots=16, deadline_s=2e5)
    assert slots_of(decide([other, calm], HOSTS, 0.0))["b"] < 8


def test_a_pause_counts_against_a_deadline() -> None:
    hosts = [HostOffer("small", 4), HostOffer("large", 8)]
    other = Job("b", 0.0, LINEAR, 1e4, {"small": 3, "large": 8}, max_slots=16)
    late = Job(
        "a", 0.0, LINEAR, 320.0, {"small": 1}, max_slots=16, deadline_s=100.0, rescale_s=30.0
    )
    found = slots_of(decide([late, other], hosts, 0.0))
    assert found["a"] == 8, "with 4 slots it would end after 30 + 80 s"


def test_a_job_that_may_not_be_preempted_keeps_its_minimum() -> None:
    fixed = Job("a", 0.0, LINEAR, 1e9, {"h0": 4}, min_slots=4, max_slots=4, preemptible=False)
    short = [Job(f"s{n}", 1.0, LINEAR, 10.0, max_slots=4) for n in range(20)]
    assert slots_of(decide([fixed, *short], HOSTS, 1.0))["a"] == 4
    taken = Job("a", 0.0, LINEAR, 1e9, {"h0": 4}, min_slots=4, max_slots=4)
    assert slots_of(decide([taken, *short], HOSTS, 1.0))["a"] == 0


# -- what holds for all jobs and hosts -----------------------------------------------------


@st.composite
def clusters(draw: st.DrawFn) -> list[HostOffer]:
    sizes = draw(st.lists(st.integers(1, 8), min_size=1, max_size=6))
    slow = draw(st.lists(st.sampled_from([1.0, 1.0, 2.5]), min_size=6, max_size=6))
    return [HostOffer(f"h{n}", size, slowness=slow[n]) for n, size in enumerate(sizes)]


@st.composite
def queues(draw: st.DrawFn, hosts: list[HostOffer]) -> list[Job]:
    """Jobs of all kinds; some hold slots, on hosts that may be gone."""
    free = {host.name: host.slots for host in hosts} | {"gone": 4}
    jobs = []
    for number in range(draw(st.integers(1, 12))):
        least = draw(st.integers(1, 4))
        most = least + draw(st.integers(0, 12))
        known = draw(st.booleans())
        held: dict[str, int] = {}
        for host in draw(st.lists(st.sampled_from(sorted(free)), unique=True, max_size=2)):
            slots = draw(st.integers(0, min(free[host], most - sum(held.values()))))
            if slots:
                held[host] = slots
                free[host] -= slots
        jobs.append(
            Job(
                f"j{number}",
                draw(st.floats(0, 1000)),
                np.arange(33.0) ** draw(st.floats(0.2, 1.0)) if known else None,
                draw(st.floats(1, 1e6)) if known and draw(st.booleans()) else None,
                held,
                draw(st.floats(0, 1e6)),
                draw(st.sampled_from([0.0, 0.2, 30.0, 300.0])),
                min_slots=least,
                max_slots=most,
                priority=draw(st.sampled_from([0.5, 1.0, 4.0])),
                deadline_s=draw(st.sampled_from([None, 1e3, 1e6])),
                preemptible=draw(st.booleans()),
            )
        )
    return jobs


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_every_decision_keeps_to_the_hosts_and_to_the_limits_of_jobs(data: st.DataObject) -> None:
    hosts = data.draw(clusters())
    jobs = data.draw(queues(hosts))
    decided = decide(jobs, hosts, 1000.0)
    for host in hosts:
        assert sum(each.hosts.get(host.name, 0) for each in decided.values()) <= host.slots
    slots = slots_of(decided)
    for job in jobs:
        assert decided[job.name].hosts.keys() <= {host.name for host in hosts}
        assert all(count > 0 for count in decided[job.name].hosts.values())
        assert slots[job.name] == 0 or job.min_slots <= slots[job.name] <= job.max_slots
        assert decided[job.name].reason
    capacity = sum(host.slots for host in hosts)
    if sum(job.min_slots for job in jobs) <= capacity:
        assert all(slots.values()), "nobody waits while there is room for all minimums"
    waiting = [job for job in jobs if not slots[job.name]]
    left = capacity - sum(slots.values())
    assert all(job.min_slots > left for job in waiting), "nobody waits for slots that are free"
    shuffled = data.draw(st.permutations(jobs))
    assert decide(shuffled, hosts, 1000.0) == decided, "the order of the jobs means nothing"


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_a_higher_priority_never_brings_fewer_slots(data: st.DataObject) -> None:
    jobs = [
        Job(f"j{n}", float(n), LINEAR ** data.draw(st.floats(0.3, 0.9)),
            data.draw(st.floats(100, 1e6)), max_slots=16)
        for n in range(data.draw(st.integers(2, 6)))
    ]  # fmt: skip
    before = slots_of(decide(jobs, HOSTS, 100.0))
    factor = data.draw(st.floats(1.1, 20))
    raised = [dataclasses.replace(jobs[0], priority=factor), *jobs[1:]]
    assert slots_of(decide(raised, HOSTS, 100.0))["j0"] >= before["j0"]


def test_a_job_with_invalid_limits_is_refused() -> None:
    with pytest.raises(ValueError, match="min_slots 3 and max_slots 2"):
        Job("a", 0.0, min_slots=3, max_slots=2)


def test_first_come_first_served_lets_nobody_overtake_and_changes_nobody() -> None:
    jobs = [
        Job("late", 3.0, min_slots=1, max_slots=16),
        Job("large", 2.0, min_slots=12, max_slots=12),
        Job("first", 1.0, min_slots=6, max_slots=16),
    ]
    decided = slots_of(first_come_first_served(jobs, HOSTS, 10.0))
    assert decided == {"first": 6, "large": 0, "late": 0}
    runs = dataclasses.replace(jobs[0], held={"h0": 1})
    decided = slots_of(first_come_first_served([runs, *jobs[1:]], HOSTS, 20.0))
    assert decided == {"first": 6, "large": 0, "late": 1}, "what runs keeps its slots"


def test_equal_shares_are_equal_as_far_as_jobs_can_use_them() -> None:
    jobs = [
        Job("any", 1.0, min_slots=1, max_slots=16),
        Job("new", 2.0, min_slots=1, max_slots=2),
        Job("fixed", 3.0, min_slots=6, max_slots=6, fixed=True),
        Job("other", 4.0, min_slots=1, max_slots=16),
    ]
    decided = slots_of(equal_shares(jobs, HOSTS, 10.0))
    assert decided == {"any": 4, "new": 2, "fixed": 6, "other": 4}
    keeps = dataclasses.replace(jobs[2], preemptible=False)
    few = slots_of(equal_shares([*jobs[:2], keeps, jobs[3]], HOSTS[:2], 10.0))
    assert few == {"any": 1, "new": 1, "fixed": 6, "other": 0}, "it may not be preempted"


@pytest.mark.parametrize("choose", [decide, equal_shares, first_come_first_served])
def test_what_cannot_be_moved_stays_while_its_host_is_there(choose: Policy) -> None:
    """Neither for a job that needs a whole host nor for a faster one."""
    hosts = [HostOffer("fast", 2, slowness=0.5), HostOffer("slow", 2)]
    command = Job("command", 0.0, held={"slow": 1}, preemptible=False, movable=False)
    ring = Job("ring", 1.0, LINEAR, 1e5, min_slots=2, max_slots=2, fixed=True)
    decided = choose([command, ring, dataclasses.replace(ring, name="other")], hosts, 2.0)
    assert decided["command"].hosts == {"slow": 1}
    assert choose([command], hosts[:1], 2.0)["command"].hosts == {"fast": 1}


def test_a_job_goes_where_no_process_has_to_leave_first() -> None:
    hosts = [HostOffer("a", 2), HostOffer("b", 2), HostOffer("c", 2)]
    leaves = Wish(2, {"b": 2}, occupied={"a": 2, "b": 2})
    assert place_jobs({"leaves": leaves, "new": Wish(2, {})}, hosts)["new"] == {"c": 2}
    assert place_jobs({"leaves": leaves, "new": Wish(4, {})}, hosts)["new"] == {"c": 2, "a": 2}
    stays = Wish(2, {"a": 1}, occupied={"a": 2})
    assert place_jobs({"stays": stays}, hosts)["stays"] == {"a": 2}, "it waits for no other"


@pytest.mark.parametrize(("gain", "slots"), [(1.03, 1), (1.2, 2)])
def test_slots_change_for_more_than_the_noise_of_the_figures(gain: float, slots: int) -> None:
    measured = np.array([0.0, 10.0, 10.0 * gain])
    job = Job("a", 0.0, measured, 1e6, {"h0": 1}, max_slots=2, noise=0.02)
    assert slots_of(decide([job], HOSTS, 0.0)) == {"a": slots}
    exact = dataclasses.replace(job, noise=0.0)
    assert slots_of(decide([exact], HOSTS, 0.0)) == {"a": 2}


def test_reason_says_why_a_job_has_no_more_slots() -> None:
    job = Job("a", 0.0, LINEAR, 1e5, {"h0": 2}, max_slots=4)
    taken = decide([job], HOSTS, 0.0)["a"].reason
    held_back = decide([dataclasses.replace(job, is_held_back=True)], HOSTS, 0.0)["a"].reason
    assert taken.endswith("; it takes no more")
    assert held_back.endswith("; more once it has trained on 4")


# -- jobs that may have certain hosts only --------------------------------------------------


def test_a_job_of_one_host_gets_it_from_one_that_may_have_all() -> None:
    """Though that one is kept where it is otherwise, and both want all of the host."""
    here = Job("here", 1.0, LINEAR, 1e5, max_slots=4, min_slots=4, hosts=["h0"])
    anywhere = Job("anywhere", 0.0, LINEAR, 1e5, {"h0": 4}, max_slots=4, min_slots=4, hosts=None)
    decided = decide([anywhere, here], HOSTS[:2], 2.0)
    assert decided["here"].hosts == {"h0": 4}
    assert decided["anywhere"].hosts == {"h1": 4}


def test_who_waits_for_hosts_that_it_asks_for_is_told_of_those() -> None:
    jobs = [Job(name, float(n), LINEAR, 1e5, hosts={"h0"}) for n, name in enumerate("abcdef")]
    decided = decide([*jobs, Job("any", 9.0, LINEAR, 1e5, max_slots=16)], HOSTS, 10.0)
    assert slots_of(decided) == {**dict.fromkeys("abcd", 1), "e": 0, "f": 0, "any": 12}
    told = "waits: all 4 slots of the hosts that it asks for are worth more to 4 other jobs"
    assert decided["f"].reason == told
    large = Job("large", 0.0, LINEAR, 1e5, min_slots=5, max_slots=5, hosts={"h0", "gone"})
    reason = decide([large], HOSTS, 0.0)["large"].reason
    assert reason == "waits: it needs 5 slots, the hosts that it asks for have 4"


def test_what_jobs_of_some_hosts_leave_goes_to_others() -> None:
    pairs = [Job(n, 0.0, LINEAR, 1e5, min_slots=3, max_slots=3, hosts={"h0"}) for n in "ab"]
    late = [Job(f"late{n}", 9.0, LINEAR, 1e5) for n in range(13)]
    found = slots_of(decide([*pairs, *late], HOSTS, 10.0))
    assert sorted(found[name] for name in "ab") == [0, 3]
    assert all(found[job.name] == 1 for job in late), "one of them has the fourth slot of h0"


def test_nobody_overtakes_first_come_first_served_on_the_hosts_that_it_asks_for() -> None:
    jobs = [
        Job("first", 0.0, min_slots=3, max_slots=3, hosts={"h0"}),
        Job("large", 1.0, min_slots=8, max_slots=8, hosts={"h0", "h1"}),
        Job("small", 2.0, hosts={"h0"}),
        Job("elsewhere", 3.0, hosts={"h2"}),
        Job("any", 4.0),
    ]
    decided = slots_of(first_come_first_served(jobs, HOSTS, 10.0))
    assert decided == {"first": 3, "large": 0, "small": 0, "elsewhere": 1, "any": 0}


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_jobs_get_only_hosts_that_they_may_have_and_leave_no_slot_idle(data: st.DataObject) -> None:
    hosts = data.draw(clusters())
    choose: Policy = decide if data.draw(st.integers(0, 2)) else equal_shares
    names = st.lists(st.sampled_from([*(host.name for host in hosts), "gone"]), unique=True)
    jobs = [
        dataclasses.replace(job, hosts=data.draw(st.one_of(st.none(), names)))
        for job in data.draw(queues(hosts))
    ]
    decided = choose(jobs, hosts, 1000.0)
    slots = slots_of(decided)
    for host in hosts:
        assert sum(each.hosts.get(host.name, 0) for each in decided.values()) <= host.slots
    for job in jobs:
        allowed = {host.name for host in hosts if job.hosts is None or host.name in job.hosts}
        assert decided[job.name].hosts.keys() <= allowed
        assert all(count > 0 for count in decided[job.name].hosts.values())
        assert slots[job.name] == 0 or job.min_slots <= slots[job.name] <= job.max_slots
    room = {host.name: host.slots for host in hosts}
    for job in jobs:
        more = {**slots, job.name: job.min_slots}
        if not slots[job.name]:
            assert not can_be_placed(jobs, more, room), f"{job.name} waits for slots that are idle"
    if can_be_placed(jobs, {job.name: job.min_slots for job in jobs}, room):
        assert all(slots.values()), "nobody waits while there is room for all minimums"
    kept = [job for job in jobs if not job.preemptible]
    if can_be_placed(kept, {job.name: job.min_slots for job in kept}, room):
        assert all(slots[job.name] for job in kept)
    shuffled = data.draw(st.permutations(jobs))
    if choose is decide:
        assert decide(shuffled, hosts, 1000.0) == decided, "the order of the jobs means nothing"


def can_be_placed(jobs: list[Job], wanted: Mapping[str, int], room: Mapping[str, int]) -> bool:
    """Return whether each set of jobs wants at most what its hosts have (Hall's theorem)."""
    names = [*room]
    for chosen in itertools.product((False, True), repeat=len(names)):
        closed = {name for name, is_in in zip(names, chosen, strict=True) if is_in}
        inside = (
            wanted[job.name]
            for job in jobs
            if {name for name in names if job.hosts is None or name in job.hosts} <= closed
        )
        if sum(inside) > sum(room[name] for name in closed):
            return False
    return True


def test_a_job_that_may_have_two_hosts_does_not_starve() -> None:
    """Its weight grows while it waits, until it gets them from those that may have all."""
    others = [
        Job(f"o{n}", float(n), LINEAR, 1e6, {f"h{n // 4}": 1}, priority=4.0) for n in range(16)
    ]
    found = []
    for hours in range(12):
        waits = Job("two", 20.0, LINEAR, 1e6, hosts={"h0", "h1"}, priority=1.0 + hours)
        decided = decide([*others, waits], HOSTS, 3600.0 * hours + 20)
        found.append(decided["two"].hosts)
        assert sum(slots_of(decided).values()) == 16
    assert not found[0]
    assert found[-1].keys() <= {"h0", "h1"}
    assert found[-1]

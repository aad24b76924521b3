"""Heartbeats in, verdicts out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hvd_elastic.control.events import GenerationStuck, WorkerSilent
from hvd_elastic.control.progress import Activity, Position, ProgressWatch

MEMBERS = ["a", "b", "c"]
GENERATION = 3


def watch(**activities: Activity) -> ProgressWatch:
    made = ProgressWatch(failure_timeout_s=5.0)
    for worker in activities:
        made.store_heartbeat(worker, computes(0.0, step=0))
    made.stuck(GENERATION, list(activities))
    for worker, activity in activities.items():
        made.store_heartbeat(worker, activity)
    return made


def waits(seconds: float, longest_wait_s: float = 0.1) -> Activity:
    return Activity(
        generation=GENERATION,
        step=7,
        step_s=seconds + 0.1,
        waiting_s=seconds,
        longest_step_s=0.2,
        longest_wait_s=longest_wait_s,
    )


def computes(
    seconds: float, longest_step_s: float = 0.2, step: int = 7, line: str = ""
) -> Activity:
    return Activity(
        line=line,
        generation=GENERATION,
        step=step,
        step_s=seconds,
        longest_step_s=longest_step_s,
        longest_wait_s=0.1,
    )


def test_a_silent_worker_is_named_when_the_timeout_is_over() -> None:
    monitor = watch(a=Activity(silent_s=4.9), b=Activity(silent_s=5.0))
    assert monitor.silent() == [WorkerSilent("b", "gave no sign of life for 5.0 s")]
    monitor.forget("b")
    assert monitor.silent() == []


def test_the_longest_period_is_that_of_any_worker() -> None:
    assert watch().longest_period_s == 0.0
    periods = {"a": Activity(longest_period_s=2.0), "b": Activity(longest_period_s=3.0)}
    assert watch(**periods, c=Activity()).longest_period_s == 3.0


def test_a_worker_that_has_finished_may_be_silent_for_longer() -> None:
    monitor = watch(a=Activity(silent_s=59.0), b=Activity(silent_s=6.0))
    monitor.finished("a")
    assert [found.worker for found in monitor.silent()] == ["b"]
    monitor.store_heartbeat("a", Activity(silent_s=60.0))
    assert [found.worker for found in monitor.silent()] == ["a", "b"]


def test_nobody_is_stuck_while_one_computes() -> None:
    monitor = watch(a=waits(400), b=waits(400), c=computes(400))
    assert monitor.stuck(GENERATION, MEMBERS) == []


def test_nobody_is_stuck_while_nobody_waits() -> None:
    assert watch(a=computes(1e6)).stuck(GENERATION, ["a"]) == []


def test_a_generation_is_stuck_when_all_wait_for_each_other() -> None:
    monitor = watch(a=waits(5.0), b=waits(6.0), c=waits(5.2))
    found = monitor.stuck(GENERATION, MEMBERS)
    assert isinstance(found, GenerationStuck)
    assert found.generation == 3
    assert "all 3 workers have waited for each other for 5.0 s" in found.cause


def test_a_wait_in_the_generation_before_does_not_count() -> None:
    monitor = watch(a=waits(50), b=waits(50), c=waits(50))
    assert monitor.stuck(GENERATION + 1, MEMBERS) == []
    assert monitor.stuck(GENERATION + 1, ["a"]) == [], "not of the only survivor either"


def test_a_member_that_has_said_nothing_yet_is_not_waiting() -> None:
    assert watch(a=waits(50), b=waits(50)).stuck(GENERATION, MEMBERS) == []


def test_long_reductions_are_given_time_in_proportion() -> None:
    slow_network = [waits(30, longest_wait_s=8.0)] * 3
    assert watch(**dict(zip(MEMBERS, slow_network, strict=True))).stuck(GENERATION, MEMBERS) == []
    longer = [waits(40, longest_wait_s=8.0)] * 3
    monitor = watch(**dict(zip(MEMBERS, longer, strict=True)))
    assert isinstance(monitor.stuck(GENERATION, MEMBERS), GenerationStuck)


def test_the_first_reduction_is_given_as_long_as_gloo_gives_it() -> None:
    first = {name: waits(29.0, longest_wait_s=0.0) for name in MEMBERS}
    assert watch(**first).stuck(GENERATION, MEMBERS) == []


def test_the_first_step_of_a_generation_is_given_as_long() -> None:
    """Waits of before were for little data, or one rank's: many gradients may take 5 s longer."""
    monitor = watch(**dict.fromkeys(MEMBERS, waits(29)))
    assert isinstance(monitor.stuck(GENERATION, MEMBERS), GenerationStuck), "it has made steps"
    for worker in MEMBERS:
        monitor.store_heartbeat(worker, replace(waits(29), generation=GENERATION + 1))
    assert monitor.stuck(GENERATION + 1, MEMBERS) == []
    for worker in MEMBERS:
        monitor.store_heartbeat(worker, replace(waits(30), generation=GENERATION + 1))
    assert isinstance(monitor.stuck(GENERATION + 1, MEMBERS), GenerationStuck)


@pytest.mark.parametrize(
    ("longest_step_s", "patience_s"), [(0.2, 600.0), (100.0, 2000.0)], ids=["short", "long"]
)
def test_a_worker_that_makes_no_progress_is_given_up_in_the_end(
    longest_step_s: float, patience_s: float
) -> None:
    still = watch(a=waits(60), b=computes(patience_s - 1, longest_step_s), c=waits(60))
    assert still.stuck(GENERATION, MEMBERS) == []
    over = watch(a=waits(60), b=computes(patience_s, longest_step_s), c=waits(60))
    (found,) = over.stuck(GENERATION, MEMBERS)  # type: ignore[misc]
    assert found.worker == "b"
    assert "made no progress" in found.cause


def test_a_worker_that_the_others_wait_for_is_named_once_a_step() -> None:
    monitor = watch(a=waits(6), b=computes(5, line="train.py:41 (validate)"), c=waits(6))
    assert monitor.busy(GENERATION, MEMBERS) == [("b", 5, "train.py:41 (validate)")]
    assert monitor.busy(GENERATION, MEMBERS) == []
    monitor.store_heartbeat("b", computes(40, step=8))
    assert monitor.busy(GENERATION, MEMBERS) == [("b", 40, "")]


def test_members_that_have_left_the_generation_wait_for_those_that_have_not() -> None:
    left = Activity(generation=GENERATION + 1, step=7)
    monitor = watch(a=left, b=computes(5, line="train.py:30"))
    assert monitor.busy(GENERATION, ["a", "b"]) == [("b", 5, "train.py:30")]
    monitor = watch(a=left, b=Activity(generation=GENERATION + 1, step=7, step_s=9.0))
    assert monitor.busy(GENERATION, ["a", "b"]) == []


def test_a_step_of_the_usual_length_keeps_nobody_waiting() -> None:
    monitor = watch(a=waits(31), b=computes(31, longest_step_s=30))
    assert monitor.busy(GENERATION, ["a", "b"]) == []


def test_nobody_is_busy_where_nobody_waits() -> None:
    assert watch(a=computes(31), b=computes(31)).busy(GENERATION, ["a", "b"]) == []
    assert watch(a=computes(31)).busy(GENERATION, ["a"]) == []


def waits_for(name: str, step: int = 7, generation: int = GENERATION, **begun: int) -> Activity:
    """For 3 s, which is too short for the network to be suspected."""
    return Activity(
        generation=generation,
        step=step,
        step_s=3.1,
        waiting_s=3.0,
        longest_wait_s=0.1,
        line=f"train.py:{len(name)} (train)",
        waiting_for=name,
        begun=begun,
        progress=Position(step, 0, 0, 10 * step),
    )


def test_ranks_in_different_collectives_are_a_mistake_of_the_script() -> None:
    monitor = watch(
        a=waits_for("loss", gradients=7, loss=1),
        b=waits_for("gradients", gradients=8),
        c=waits_for("gradients", gradients=8),
    )
    found = monitor.stuck(GENERATION, MEMBERS)
    assert isinstance(found, GenerationStuck)
    assert found.by_script
    assert (
        "rank 0 (a) waits for loss at train.py:4 (train), after 7 steps; "
        "ranks 1 (b), 2 (c) wait for gradients at train.py:9 (train), after 7 steps. "
    ) in found.cause
    assert monitor.furthest(MEMBERS) == Position(7, 0, 0, 70)


def test_of_many_ranks_in_one_place_the_first_are_named() -> None:
    members = [f"n{number}:0.1" for number in range(8)]
    monitor = watch()
    monitor.store_heartbeat(members[0], waits_for("end", end=1))
    for worker in members[1:]:
        monitor.store_heartbeat(worker, waits_for("gradients", gradients=8))
    found = monitor.stuck(GENERATION, members)
    assert isinstance(found, GenerationStuck)
    assert "ranks 1 (n1:0), 2 (n2:0), 3 (n3:0), 4 (n4:0) and 3 more wait for" in found.cause


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(waits_for("gradients", gradients=7), id="whose data are on their way"),
        pytest.param(waits_for("loss", gradients=7, loss=1), id="in the same collective"),
        pytest.param(computes(100), id="that computes"),
        pytest.param(waits(3.0), id="that has not said where it is"),
        pytest.param(waits_for("x", generation=2, x=1), id="of another generation"),
    ],
)
def test_nobody_is_blamed_beside_a_rank(other: Activity) -> None:
    one = waits_for("loss", gradients=7, loss=1)
    assert watch(a=one, b=other).stuck(GENERATION, ["a", "b"]) == []


def test_nobody_is_blamed_while_one_of_many_may_go_on() -> None:
    apart = {"a": waits_for("loss", loss=1), "b": waits_for("gradients", gradients=1)}
    assert watch(**apart).stuck(GENERATION, MEMBERS) == []
    assert watch(**apart, c=computes(100)).stuck(GENERATION, MEMBERS) == []
    assert isinstance(watch(**apart).stuck(GENERATION, ["a", "b"]), GenerationStuck)

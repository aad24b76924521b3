from __future__ import annotations

from hvd_elastic.leader.steering import LastCheckpoint


def test_the_first_is_asked_at_once_and_everybody_alive_when_nothing_came_of_it() -> None:
    last = LastCheckpoint(100.0, 15.0, step=90)
    holders = ["a", "b", "c"]
    assert last.whom_to_ask([], 100.0) == []
    assert last.whom_to_ask(holders, 100.0) == ["a"]
    assert last.whom_to_ask(holders, 101.9) == []
    assert last.whom_to_ask(["b", "c"], 102.0) == ["b", "c"]
    assert last.whom_to_ask(["b", "c"], 106.9) == []
    assert last.whom_to_ask(["c"], 107.0) == ["c"]
    assert last.deadline == 115.0


def test_what_was_written_before_it_was_asked_for_does_not_count() -> None:
    last = LastCheckpoint(0.0, 15.0, step=90)
    assert not last.is_kept(60), "it was there already"
    last.written(60, 1.0)
    assert not last.is_kept(60), "it was on its way"
    last.written(92, 1.0)
    assert not last.is_kept(60), "not all shards of the other are there"
    assert last.is_kept(92)
    assert last.is_kept(95)


def test_survivors_may_be_a_step_behind_what_was_last_heard() -> None:
    last = LastCheckpoint(0.0, 15.0, step=90)
    last.survives_at(89)
    last.survives_at(95)
    last.written(89, 1.0)
    assert last.is_kept(89)


def test_the_ranks_agree_after_two_steps_however_long_those_take() -> None:
    last = LastCheckpoint(0.0, 15.0, step=90)
    last.wait_for_periods(10.0)
    last.wait_for_periods(0.0)  # of workers that are new
    assert last.deadline >= 15.0 + 2 * 10.0


def test_shards_that_are_still_being_written_are_waited_for_but_not_for_ever() -> None:
    last = LastCheckpoint(0.0, 15.0, step=90)
    last.written(89, 13.0)
    assert last.deadline == 15.0, "it was on its way"
    last.written(91, 14.0)
    waits_until = last.deadline
    assert waits_until >= 60.0
    last.written(92, 50.0)
    assert last.deadline == waits_until, "the others write again and again if one cannot"


def test_a_disk_that_is_full_does_not_prolong_the_wait() -> None:
    last = LastCheckpoint(0.0, 15.0, step=90)
    last.wait_for_periods(100.0)
    last.failed(10.0)
    last.wait_for_periods(100.0)
    last.written(91, 11.0)
    assert last.deadline == 25.0

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
    last.written(60)
    assert not last.is_kept(60), "it was on its way"
    last.written(92)
    assert not last.is_kept(60), "not all shards of the other are there"
    assert last.is_kept(92)
    assert last.is_kept(95)


def test_survivors_may_be_a_step_behind_what_was_last_heard() -> None:
    last = LastCheckpoint(0.0, 15.0, step=90)
    last.survives_at(89)
    last.survives_at(95)
    last.written(89)
    assert last.is_kept(89)

"""The machine when the script ends, well or not, or the run is stopped."""

from __future__ import annotations

import pytest

from hvd_elastic.control import commands as cmd
from hvd_elastic.control import events as ev
from hvd_elastic.control.commands import (
    Abort,
    Finish,
    KillWorker,
    Leave,
    StartWorker,
)
from hvd_elastic.control.state_machine import Phase
from tests.unit.control.play import Play, announced, members, start

# -- the script's own end ------------------------------------------------------------------


def test_script_error_ends_the_run_once_with_its_traceback():
    play = start("a", "b")
    (end,) = play.tell(ev.ScriptFailed("b:0.1", "Traceback ...\nValueError: bad data\n"))
    assert end == Finish("failed", "the training script failed in worker b:0: ValueError: bad data")
    assert play.kinds("script_failed") == [
        {"host": "b", "local_rank": 0, "traceback": "Traceback ...\nValueError: bad data\n"}
    ]
    assert play.tell(ev.ScriptFailed("a:0.1", "x"), ev.Tick()) == []
    assert play.machine.deadline() is None


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (0, "ended with exit status 0 without ever calling the run function of hvd_elastic"),
        (1, "ended with exit status 1 before training began"),
    ],
)
def test_script_that_ends_before_training(code, message):
    play = Play("a")
    play.tell(ev.AgentReady("a"))
    (end,) = play.ended("a:0.1", code)
    assert isinstance(end, Finish)
    assert end.status == "failed"
    assert message in end.message
    assert ("@hvd.run" in end.message) == (code == 0)


@pytest.mark.parametrize("code", [0, 1, 255])
def test_member_that_ends_by_itself_fails_the_run(code):
    play = start("a", "b")
    (end,) = play.ended("a:0.1", code)
    assert isinstance(end, Finish)
    assert "before its training function returned" in end.message


def test_exit_status_of_a_shell_that_reports_a_signal_is_a_death():
    play = start("a", "b")
    assert play.ended("b:0.1", 137) == [Abort(1, "worker b:0 was killed by signal 9")]


def test_newcomer_whose_script_fails_does_not_end_a_healthy_run():
    play = start("a")
    play.hosts("a", "b")
    play.tell(ev.AgentReady("b"))
    assert play.tell(ev.ScriptFailed("b:0.1", "FileNotFoundError: data")) == []
    assert play.ended("b:0.1", 1) == []
    assert play.machine.phase is Phase.RUNNING
    assert play.tell(ev.Tick(), after=0.5) == [StartWorker("b:0.2", "b", 0)]


def test_all_finish():
    play = start("a", "b")
    assert play.tell(ev.WorkerFinished("b:0.1"), ev.WorkerFinished("a:0.1")) == []
    assert play.ended("a:0.1") == []
    (end,) = play.ended("b:0.1")
    assert isinstance(end, Finish)
    assert end.status == "succeeded"
    assert play.tell(ev.Tick(), ev.StopRequested("late")) == []


def test_nobody_joins_any_more_once_somebody_finished():
    play = start("a", "b")
    play.hosts("a", "b", "c", "d")
    play.tell(ev.AgentReady("c"), ev.AgentReady("d"))
    play.ready("c:0.1")
    assert play.tell(ev.WorkerFinished("a:0.1")) == [Leave("c:0.1"), Leave("d:0.1")]
    assert play.ended("d:0.1", 1) == []  # whatever a standby does is of no interest
    assert play.tell(ev.Tick(), after=2) == []
    assert play.hosts("a", "b", "e") == []


def test_member_dies_while_others_finish():
    play = start("a", "b", "c", min_np=2)
    play.tell(ev.WorkerFinished("a:0.1"))
    assert play.ended("a:0.1") == []
    assert play.killed("c:0.1") == [Abort(1, "worker c:0 was killed by signal 9")]
    new = announced(play.broken("b:0.1", 99))
    assert [m.worker for m in new.members] == ["b:0.1"]  # min_np does not matter now
    assert new.root == "b:0.1"
    play.joined("b:0.1")
    play.tell(ev.WorkerFinished("b:0.1"))
    (end,) = play.ended("b:0.1")
    assert isinstance(end, Finish)
    assert end.status == "succeeded"


def test_rank_0_that_dies_before_its_end_fails_the_run():
    play = start("a", "b")
    play.tell(ev.WorkerFinished("b:0.1"))
    play.ended("b:0.1")
    (abort, end) = play.killed("a:0.1")
    assert isinstance(abort, Abort)
    assert isinstance(end, Finish)
    assert end.status == "failed"
    assert "killed by signal 9" in end.message


def test_rank_0_that_was_told_to_leave_need_not_come_to_the_end():
    play = start("a", "b")
    assert Leave("a:0.1") in play.hosts("b")
    play.tell(ev.WorkerFinished("b:0.1"))
    play.ended("a:0.1")
    (end,) = play.ended("b:0.1")
    assert isinstance(end, Finish)
    assert end.status == "succeeded"


def test_script_that_fails_after_training_fails_the_run():
    play = start("a")
    play.tell(ev.WorkerFinished("a:0.1"))
    (end,) = play.ended("a:0.1", 1)
    assert isinstance(end, Finish)
    assert end.status == "failed"
    assert "after training was done" in end.message


def test_training_ends_while_a_newcomer_is_being_taken_in():
    play = start("a", "b")
    play.hosts("a", "b", "c")
    play.tell(ev.AgentReady("c"))
    play.ready("c:0.1")
    assert play.tell(ev.WorkerFinished("a:0.1")) == [
        Leave("c:0.1"),
        KillWorker("c:0.1", "worker c:0 came when training was over"),
    ]
    assert play.killed("c:0.1") == []
    play.tell(ev.WorkerFinished("b:0.1"))
    play.ended("a:0.1")
    (end,) = play.ended("b:0.1")
    assert isinstance(end, Finish)
    assert end.status == "succeeded"


def starts_alone(**config) -> Play:
    """a trains alone; b, which the run is wanted on too, is still starting."""
    play = Play("a", "b", **config)
    play.tell(ev.AgentReady("a"), ev.AgentReady("b"))
    play.ready("a:0.1")
    assert members(play.tell(ev.Tick(), after=5)) == ["a:0.1"]
    play.joined("a:0.1")
    return play


def finish_of(commands: list[cmd.Command]) -> Finish:
    (end,) = commands
    assert isinstance(end, Finish)
    return end


def test_run_ends_well_though_its_second_worker_becomes_ready_after_training():
    play = starts_alone()
    assert play.tell(ev.WorkerFinished("a:0.1")) == [Leave("b:0.1")]
    assert play.ready("b:0.1") == []
    assert finish_of(play.ended("a:0.1")).status == "succeeded"


def test_run_does_not_wait_for_a_worker_that_starts_when_all_have_finished():
    play = start("a", "b")
    play.hosts("a", "b", "c")
    play.tell(ev.AgentReady("c"))
    assert play.tell(ev.WorkerFinished("a:0.1"), ev.WorkerFinished("b:0.1")) == [Leave("c:0.1")]
    play.ended("a:0.1")
    assert finish_of(play.ended("b:0.1")).status == "succeeded"


def test_worker_that_finished_while_it_was_told_to_leave_is_waited_for():
    play = start("a", "b")
    play.hosts("b")
    play.killed("b:0.1")  # the one that was to stay; its host's agent still answers
    play.tell(ev.WorkerFinished("a:0.1"))
    assert finish_of(play.ended("a:0.1")).status == "succeeded"


def test_worker_that_is_silent_after_its_end_is_named_when_it_is_killed():
    play = starts_alone()
    play.tell(ev.WorkerFinished("a:0.1"))
    kill, end = play.tell(ev.WorkerSilent("a:0.1", "gave no sign of life for 60.0 s"))
    assert isinstance(kill, KillWorker)
    assert end == Finish(
        "failed",
        "rank 0 did not come to its end: worker a:0 gave no sign of life for 60.0 s after its "
        "training function had returned; resume to complete the run",
    )


def test_member_whose_joining_is_told_late_is_not_taken_for_one_that_waits():
    play = start("b")
    play.hosts("a", "b")
    play.tell(ev.AgentReady("a"))
    assert members(play.ready("a:0.1")) == ["a:0.1", "b:0.1"]
    # Training is over at once; the connection to a is slower than that to b.
    play.joined("b:0.1")
    assert play.tell(ev.WorkerFinished("b:0.1")) == []
    assert play.ended("b:0.1") == []
    play.joined("a:0.1")
    play.tell(ev.WorkerFinished("a:0.1"))
    assert finish_of(play.ended("a:0.1")).status == "succeeded"


def test_member_that_joined_too_late_is_freed_when_the_others_finished():
    play = start("a", "b")
    play.hosts("a", "b", "c")
    play.tell(ev.AgentReady("c"))
    play.ready("c:0.1")
    play.tell(ev.WorkerFinished("a:0.1"))
    play.killed("c:0.1")
    play.ended("a:0.1")
    assert play.tell(ev.Tick(), after=60) == [Abort(2, "training is over for some of its members")]
    assert members(play.broken("b:0.1", 7)) == ["b:0.1"]


# -- stopping ------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["start", "forming", "running", "regrouping", "held"])
def test_stop_at_any_moment(moment):
    play = Play("a", "b", min_np=2) if moment == "start" else start("a", "b", min_np=2)
    if moment == "forming":
        play.hosts("a", "b", "c")
        play.tell(ev.AgentReady("c"))
        play.ready("c:0.1")
    elif moment == "regrouping":
        play.killed("b:0.1")
    elif moment == "held":
        play.hosts("a")
    assert play.tell(ev.StopRequested("Ctrl-C")) == [Finish("stopped", "Ctrl-C")]
    assert play.tell(ev.WorkerExited("a:0.1", 1, None), ev.AgentReady("c"), ev.Tick()) == []
    assert play.machine.deadline() is None

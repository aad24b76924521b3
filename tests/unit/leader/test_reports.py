"""What a leader makes of notices that hosts go."""

from __future__ import annotations

import time
from unittest.mock import Mock

import pytest

from hvd_elastic.control.endings import StopCause
from hvd_elastic.control.events import HostDraining, ScriptFailed, WorkerExited
from hvd_elastic.control.progress import Position
from hvd_elastic.leader.led_run import TrainingProgress
from hvd_elastic.leader.reports import Reports
from hvd_elastic.run_events import Metrics
from hvd_elastic.wire import messages as msg


@pytest.mark.parametrize("cause", [None, StopCause.TERMINATE])
def test_a_notice_is_acted_upon_a_moment_later_unless_the_run_stops_by_then(
    monkeypatch, cause: StopCause | None
) -> None:
    """Slurm's one signal ends leader and hosts; who leaves would take the state along."""
    monkeypatch.setattr("hvd_elastic.leader.reports.time", Mock(monotonic=lambda: 100.0))
    run, executor, stopping = Mock(), Mock(), Mock(cause=None)
    run.hostfile.hosts = {"a": None}
    reports = Reports(run, executor, Mock(reserve_s=10.0), Mock(), stopping)
    for host in ("a", "gone"):
        agent = Mock()
        agent.host.name = host
        reports.take_message(agent, msg.Notice("a test", 30.0))
    reports.drain_noticed_hosts(100.0)
    executor.tell.assert_not_called()
    stopping.cause = cause
    reports.drain_noticed_hosts(105.0)
    told = [call.args[0] for call in executor.tell.call_args_list]
    assert len(told) == (cause is None)
    for event in told:
        assert isinstance(event, HostDraining)
        assert (event.host, event.leave_in_s) == ("a", 30.0)
        assert event.train_for_s == 15.0, "less what has passed"
    reports.drain_noticed_hosts(110.0)
    assert len(executor.tell.call_args_list) == len(told), "once"


def test_a_notice_is_acted_upon_at_once_where_the_leader_does_not_stop_at_sigterm() -> None:
    run, executor, agent = Mock(), Mock(), Mock()
    agent.host.name = "a"
    run.hostfile.hosts = {"a": None}
    stopping = Mock(cause=None, hears_sigterm=False)
    reports = Reports(run, executor, Mock(reserve_s=10.0), Mock(), stopping)
    reports.take_message(agent, msg.Notice("a test", 30.0))
    reports.drain_noticed_hosts(time.monotonic())
    (event,) = (call.args[0] for call in executor.tell.call_args_list)
    assert event.host == "a"


@pytest.mark.parametrize("trains", [True, False])
def test_a_checkpoint_of_a_worker_that_waits_is_where_training_has_ended(trains: bool) -> None:
    """Else a run that has lost nothing is said to have stopped after "at least" so many steps."""
    run, executor = Mock(progress=TrainingProgress()), Mock()
    run.workers.places, run.agents.by_host = {"a:0.1": ("a", 0)}, {"a": Mock()}
    run.progress.passed(Position(89, 4, 0, 890))
    executor.machine.training = (2, ()) if trains else (0, ())
    reports = Reports(run, executor, Mock(), Mock(), Mock())
    said = msg.CheckpointWritten(
        shard={}, step=90, epoch=4, examples=900, path="", bytes=1, seconds=0.1, blocked_s=0.1
    )
    reports.take_of_worker("a:0.1", said)
    assert run.progress.reached.step == 90
    assert run.progress.is_exact is not trains


def test_what_a_script_reports_at_its_end_leaves_the_number_of_steps_exact() -> None:
    run = Mock(progress=TrainingProgress())
    reports = Reports(run, Mock(), Mock(), Mock(), Mock())
    last = Metrics(step=90, epoch=4, position=0, examples=900, size=1)
    reports.take_of_worker("a:0.1", last)
    assert not run.progress.is_exact
    reports.take_of_worker("a:0.1", msg.Finished(progress=Position(90, 4, 0, 900)))
    reports.take_of_worker("a:0.1", last)
    assert run.progress.is_exact
    further = Metrics(step=91, epoch=4, position=10, examples=910, size=1)
    reports.take_of_worker("a:0.1", further)
    assert not run.progress.is_exact


def test_a_worker_that_cannot_be_started_has_ended() -> None:
    """The slot of a newcomer, whose failure ends no run, would wait for it for ever."""
    run, executor = Mock(), Mock()
    run.workers.places, run.spec.command = {"b:0.1": ("b", 0)}, ("python", "x.py")
    agent = Mock()
    agent.host.name = "b"
    reports = Reports(run, executor, Mock(), Mock(), Mock())
    reports.take_message(agent, msg.WorkerNotStarted("b:0.1", "there is no x.py"))
    failed, exited = (call.args[0] for call in executor.tell.call_args_list)
    text = "the command 'python x.py' cannot be started on host b: there is no x.py"
    assert failed == ScriptFailed("b:0.1", text)
    assert exited == WorkerExited("b:0.1", code=127)

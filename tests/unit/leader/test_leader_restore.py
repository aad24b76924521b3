"""What a leader makes of a checkpoint that was brought, or was not; nothing is started."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hvd_elastic.checkpoint.manifests import complete_checkpoint
from hvd_elastic.checkpoint.sender import Brought
from hvd_elastic.control import events as ev
from hvd_elastic.control.commands import Announce, Finish, StartWorker
from hvd_elastic.control.progress import Position
from hvd_elastic.leader.leader import Leader
from hvd_elastic.leader.spec import RunSpec
from hvd_elastic.records.json_lines import Record, read_records
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.records.summary import summarize
from hvd_elastic.run_events import (
    HostSlots,
    Metrics,
    Restored,
    TrainingGoesOn,
    TrainingStopped,
    Warned,
)
from hvd_elastic.wire import messages as msg
from tests.unit.checkpoint.test_files import spooled
from tests.unit.records.made_events import summarized

HOSTS = ("a", "b")


class Agent:
    """The connection to one, which keeps what it is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: msg.LeaderToAgent) -> None:
        self.sent.append(message)

    def send_line(self, line: bytes) -> None:
        self.send(msgspec.json.decode(line, type=msg.LeaderToAgent))


class Resumed:
    """A leader that has just announced a generation on two hosts, and looks for a checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.shown: list[Any] = []
        self.folder = RunFolder.create("r1", root=folder)
        spec = RunSpec(("python", "train.py"), "/", audit=True)
        self.leader = Leader(
            spec, self.folder, {}, self.shown.append, lambda *_: None, resumed=True
        )
        self.agents = {host: Agent() for host in HOSTS}
        self.leader._run.agents.by_host.update(self.agents)  # type: ignore[arg-type]
        self.announced = self.announce()

    def announce(self) -> Announce:
        machine = self.leader._executor.machine
        machine.handle(ev.HostsChanged(tuple(HostSlots(host, 1) for host in HOSTS)), 0.0)
        started = [c for host in HOSTS for c in machine.handle(ev.AgentReady(host), 0.0)]
        workers = [c.worker for c in started if isinstance(c, StartWorker)]
        ready = [c for worker in workers for c in machine.handle(ev.WorkerReady(worker, 0.1), 0.0)]
        (announced,) = [command for command in ready if isinstance(command, Announce)]
        assert announced.restore
        return announced

    def audit(self) -> list[Record]:
        return read_records(self.folder.audit)

    def warnings(self) -> list[str]:
        return [event.message for event in self.shown if isinstance(event, Warned)]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Resumed]:
    resumed = Resumed(tmp_path)
    yield resumed
    resumed.leader._run.journal.close()


def test_the_host_that_took_it_is_the_root_and_the_record_comes_first(
    run: Resumed, tmp_path: Path
) -> None:
    info = complete_checkpoint(tmp_path / "c", [spooled(tmp_path / "c", 20, 0, 1)], keep=1)
    run.leader._executor._restore(run.announced, Brought(info, "b", "/spool/restore-1/step.json"))
    (restored,) = run.audit()
    assert (restored["kind"], restored["step"], restored["epoch"]) == ("restored", 20, 2)
    assert restored["generation"] == run.announced.generation
    for agent in run.agents.values():
        (message,) = agent.sent
        told = message.announcement
        assert (told.root_rank, told.restore) == (1, "/spool/restore-1/step.json")
        assert told.checkpoint == str(info.path), "what messages name is not the spool's copy"
    restored_by_root = Restored(20, 2, 0, 160, "/spool/restore-1/step.json")
    run.leader._reports.take_of_worker("b:0.1", restored_by_root)
    assert len(run.audit()) == 1, "steps may be on record by now, which stay valid"


def test_what_cannot_be_brought_ends_the_run_and_is_not_begun_anew(run: Resumed) -> None:
    run.leader._executor._restore(
        run.announced, Brought(error="checkpoint X cannot be brought to any host")
    )
    finish = run.leader._executor.finish
    assert finish is not None
    assert finish.status == "failed"
    assert finish.message == (
        "checkpoint X cannot be brought to any host. Nothing was removed or started again: fix "
        "that and resume with: hvd-elastic run --resume r1, or start a new run"
    )
    assert run.audit() == []
    assert not any(agent.sent for agent in run.agents.values())


def test_what_the_record_of_the_run_says_was_written_is_not_begun_anew(
    run: Resumed,
) -> None:
    sender = run.leader._fetching.sender
    run.leader._fetching.expect_checkpoint(summarize([]))
    assert sender._try_to_bring(HOSTS, "restore-1", lambda: True, lambda _: None) == Brought()
    past = [{"kind": "checkpoint", "step": step, "path": "/data/c.json"} for step in (90, 120)]
    run.leader._fetching.expect_checkpoint(summarized(past))
    brought = sender._try_to_bring(HOSTS, "restore-1", lambda: True, lambda _: None)
    assert (
        f"is found in {run.folder.checkpoints}, though that of step 120 was written"
        in brought.error
    )


def test_of_what_another_machine_led_nobody_here_knows_whether_it_had_one(run: Resumed) -> None:
    run.folder.write_run({**run.folder.read_run(), "began_elsewhere": True})
    run.leader._fetching.expect_checkpoint(summarize([]))
    brought = run.leader._fetching.sender._try_to_bring(
        HOSTS, "restore-1", lambda: True, lambda _: None
    )
    assert "though it was led by another machine, which may have written one" in brought.error


def test_only_where_there_is_none_training_begins_anew(run: Resumed) -> None:
    run.leader._executor._restore(run.announced, Brought())
    assert [record["step"] for record in run.audit()] == [0]
    assert run.warnings() == ["there is no complete checkpoint: training starts from scratch"]
    assert [agent.sent[0].announcement.restore for agent in run.agents.values()] == [None, None]


def test_what_was_called_off_meanwhile_leaves_no_record(run: Resumed) -> None:
    run.leader._executor.machine.handle(ev.GenerationStuck(run.announced.generation, "a test"), 1.0)
    run.leader._executor._restore(run.announced, Brought())
    run.leader._executor._restore(run.announced, Brought(error="a full disk"))
    assert run.leader._executor.finish is None
    assert run.audit() == []
    assert run.warnings() == []
    # Members that wait for the announcement learn from it that it is off.
    assert all(len(agent.sent) == 2 for agent in run.agents.values())


def test_an_early_end_that_no_survivor_knows_of_is_taken_back(run: Resumed) -> None:
    """Rank 0 has reported it, and died before another rank had agreed."""
    leader, done = run.leader, Finish("succeeded", "the training function returned")

    def hear(*messages: msg.Report) -> str:
        for message in messages:
            leader._reports.take_of_worker("a:0.1", message)
        return leader._outcome(done)

    ended = "training was stopped by the script: enough"
    stopped = TrainingStopped(8, 0, "enough")
    assert hear(msg.Joined(generation=1, step=0), stopped) == ended
    assert hear(msg.Joined(generation=2, step=8, stopped=True)) == ended
    assert hear(*[msg.Joined(generation=3, step=7)] * 2) == done.message
    assert summarize(run.shown).stopped_for == ""
    assert [event.step for event in run.shown if isinstance(event, TrainingGoesOn)] == [7]
    assert hear(stopped) == ended
    assert summarize(run.shown).stopped_for == "enough"


def test_a_broken_generation_tells_how_far_training_is(run: Resumed) -> None:
    """Metrics come four times a second, and steps more often."""

    def broken(worker: str, step: int, progress: Position | None) -> None:
        said = msg.Broken(generation=1, step=step, error="a test", progress=progress)
        run.leader._reports.take_of_worker(worker, said)

    broken("a:0.1", 8, Position(8, 1, 20, 80))
    broken("b:0.1", -1, None)
    broken("b:0.1", 7, Position(7, 1, 20, 80))
    progress = run.leader._run.progress
    assert (progress.reached, progress.is_exact) == (Position(8, 1, 20, 80), True)
    metrics = Metrics(9, 1, 30, 90, 2)
    run.leader._reports.take_of_worker("a:0.1", metrics)
    assert (progress.reached.step, progress.is_exact) == (9, False), "it may be at a later one"
    broken("a:0.1", 9, Position(9, 1, 30, 90))
    assert progress.is_exact

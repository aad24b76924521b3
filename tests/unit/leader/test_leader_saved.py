"""A leader fetches what the script saved before it lets a host go or the run end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from hvd_elastic.checkpoint import spool_collector
from hvd_elastic.control import commands as cmd
from hvd_elastic.control.endings import StopCause
from hvd_elastic.control.progress import Activity, Position
from hvd_elastic.leader.leader import Leader
from hvd_elastic.leader.spec import RunSpec
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.records.summary import summarize
from hvd_elastic.run_events import LogNote
from hvd_elastic.wire import messages as msg
from tests.paths import LIMIT_S
from tests.unit.checkpoint.test_saved import Host

DONE = cmd.Finish("succeeded", "the training function returned on every worker")


class Agent(Host):
    """An agent whose file is sent when the test opens the gate."""

    up = True
    is_gone = False

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.gate = threading.Event()
        self.before = lambda: self.gate.wait(LIMIT_S)
        self.beats = 0
        self.is_ending = False

    @property
    def last_heard(self) -> float:
        return time.monotonic()

    def send(self, message: msg.LeaderToAgent) -> None:
        if isinstance(message, msg.Release) and message.kind == "saved":
            super().send(message)

    def take_activities(self) -> dict[str, Activity]:
        return {}

    def beat(self, recorded_step: int | None) -> None:
        self.beats += 1

    def shutdown(self, grace_s: float) -> None:
        self.is_ending = True


class Run:
    """A leader whose host has a file of the script."""

    def __init__(self, folder: Path) -> None:
        self.shown: list[Any] = []
        self.folder = RunFolder.create("r1", root=folder / "runs")
        spec = RunSpec(("python", "train.py"), "/")
        self.leader = Leader(spec, self.folder, {}, self.shown.append, lambda *_: None)
        self.agent = Agent(folder / "a")
        self.leader._run.agents.by_host["a"] = self.agent  # type: ignore[assignment]
        self.leader._run.workers.places["a:0.1"] = ("a", 0)
        saved = self.agent.save("best.pt", b"best", step=7)
        self.leader._reports.take_of_worker("a:0.1", msg.FileSaved(saved, "/spool/best.pt", 0.25))

    @property
    def stored(self) -> bool:
        return (self.folder.saved / "best.pt").exists()

    def begin(self) -> threading.Thread:
        """Let the leader's loop run until it ends by itself."""
        self.leader._run.hostfile.changed = lambda now: False  # type: ignore[method-assign]
        loop = threading.Thread(target=self.leader._run.loop.run, daemon=True)
        loop.start()
        return loop

    def post(self, call: Callable[[], None]) -> None:
        """Have the loop call something, and wait for it."""
        done = threading.Event()
        self.leader._run.loop.post(call)
        self.leader._run.loop.post(done.set)
        assert done.wait(LIMIT_S)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.agent.gate.set()
    made.leader._run.journal.close()


def test_a_run_ends_when_its_files_have_arrived(run: Run) -> None:
    run.leader._executor.execute(DONE)
    loop = run.begin()
    run.leader._fetching._ended_at -= 2
    run.post(run.leader._fetching.end_loop_if_complete)
    assert loop.is_alive()
    assert not run.stored
    notes = [event.message for event in run.shown if isinstance(event, LogNote)]
    note = notes[0]  # others follow every few seconds
    assert note.startswith("training has ended; waiting for the file 'best.pt' that the script sav")
    assert "at step 7 (0 B of" in note
    run.agent.gate.set()
    loop.join(LIMIT_S)
    assert not loop.is_alive()
    assert run.stored
    assert run.leader._fetching.saved.missing() == ""
    summary = summarize(run.shown)
    assert (summary.saved["best.pt"].step, summary.saved["best.pt"].size_bytes) == (7, 4)


def test_a_second_request_to_stop_ends_the_wait(run: Run) -> None:
    run.leader._executor.execute(DONE)
    loop = run.begin()
    run.post(lambda: run.leader._stopping.ask(StopCause.INTERRUPT))
    assert loop.is_alive()
    run.leader._run.loop.post(lambda: run.leader._stopping.ask(StopCause.INTERRUPT))
    loop.join(LIMIT_S)
    assert not loop.is_alive()
    assert "it has not arrived" in run.leader._fetching.saved.missing()


def test_what_cannot_be_fetched_ends_the_wait_and_fails_the_run(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool_collector, "_LAST_TRIES_S", 0.0)
    monkeypatch.setattr(spool_collector, "_PAUSES_S", (0.0,))
    run.agent.why_not = "no such file"
    run.agent.gate.set()
    run.leader._executor.execute(DONE)
    loop = run.begin()
    loop.join(LIMIT_S)
    assert not loop.is_alive()
    ended = run.leader._fetching.with_missing(DONE)
    assert ended.status == "failed"
    assert ended.message.startswith("training has ended, and the file 'best.pt' that the script")
    stopped = run.leader._fetching.with_missing(cmd.Finish("stopped", "Ctrl-C"))
    assert (stopped.status, stopped.message[:16]) == ("stopped", "Ctrl-C; the file")


def test_a_training_without_the_checkpoint_of_its_end_has_failed_and_can_be_resumed(
    run: Run,
) -> None:
    fetching, progress = run.leader._fetching, run.leader._run.progress
    fetching.saved._wanted.clear()
    assert fetching.with_missing(DONE) == DONE, "a command takes no steps"
    progress.reached = Position(20, 1, 0, 160)
    fetching.checkpoints.newest_step = 10
    ended = fetching.with_missing(DONE)
    assert (ended.status, ended.message) == (
        "failed",
        "training has ended, and a rank has ended before its shard of step 20 was written",
    )
    for status in ("failed", "stopped"):
        assert fetching.with_missing(cmd.Finish(status, "why")) == cmd.Finish(status, "why")
    fetching.checkpoints.newest_step = 20
    assert fetching.with_missing(DONE) == DONE


def test_spools_are_emptied_by_the_status_that_is_reported(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training has succeeded, and a file of it is missing, so the run has failed."""
    leader, told = run.leader, list[bool]()
    leader._run.hostfile.changed = lambda now: False  # type: ignore[method-assign]
    leader._run.hostfile.read = lambda: None  # type: ignore[method-assign]
    monkeypatch.setattr(leader, "_hosts_changed", lambda: leader._executor.execute(DONE))
    monkeypatch.setattr(leader._stopping, "signals", nullcontext)
    monkeypatch.setattr(leader._run.agents, "end_agents", list)
    monkeypatch.setattr(
        leader._fetching, "empty_spools", lambda *, succeeded: told.append(succeeded)
    )
    run.agent.why_not = "no such file"
    run.agent.gate.set()
    monkeypatch.setattr(spool_collector, "_LAST_TRIES_S", 0.0)
    monkeypatch.setattr(spool_collector, "_PAUSES_S", (0.0,))
    assert leader.run().status == "failed"
    assert told == [False]


def test_a_host_that_leaves_keeps_its_agent_until_its_file_has_arrived(run: Run) -> None:
    run.leader._executor._stop_agent("a")
    assert "a" not in run.leader._run.agents.by_host
    run.begin()
    run.leader._next_tick = 0.0
    run.post(run.leader._tick)
    assert not run.agent.is_ending
    assert run.agent.beats, "or it would end for lack of a leader"
    run.agent.gate.set()
    while not run.agent.is_ending:
        run.post(run.leader._tick)
    assert run.stored
    run.leader._run.loop.post(run.leader._run.loop.stop)


def test_a_host_without_a_file_is_released_at_once(run: Run) -> None:
    other = Agent(run.folder.path.parent / "b")
    run.leader._run.agents.by_host["b"] = other  # type: ignore[assignment]
    run.leader._executor._stop_agent("b")
    assert other.is_ending

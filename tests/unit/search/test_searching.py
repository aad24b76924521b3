"""A search beside a real queue, whose runs are played."""

from __future__ import annotations

import getpass
import math
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_elastic import run_events as ev
from hvd_elastic.config import runs_folder
from hvd_elastic.errors import RunError
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.jobs.job import (
    Answer,
    Cancel,
    CancelCause,
    Cancelled,
    Hold,
    Job,
    JobRequest,
    JobStatus,
    Request,
    Submit,
)
from hvd_elastic.jobs.place import ClusterFolder
from hvd_elastic.jobs.queue import JobQueue
from hvd_elastic.jobs.requests import QueueRequests
from hvd_elastic.jobs.server import RefusedError
from hvd_elastic.jobs.store import JobStore
from hvd_elastic.records.events import append_event
from hvd_elastic.records.json_lines import EventLog
from hvd_elastic.search import searching
from hvd_elastic.search.searching import Search
from hvd_elastic.search.study import Definition, Study
from hvd_elastic.search.trials import Rules, TrialStatus

pytest.importorskip("optuna")


class Played:
    """A cluster with a queue; its daemon may be away, or end before it answers."""

    def __init__(self, home: Path, trials: int = 4, **rules: Any) -> None:
        self.place = ClusterFolder(home / "clusters" / "test")
        self.place.path.mkdir(parents=True)
        store = JobStore.create(self.place.database)
        self.queue = JobQueue(store, lambda *_: None)
        host: Any = SimpleNamespace(listed={"a": Host("a", 2)}, paused_by="", known={})
        self._requests = QueueRequests(
            self.place, (), (self.queue, store), (host,) * 5, host,
            host_rows=lambda: [{"state": "up", "slots": 2}, {"state": "lost", "slots": 8}],
            has_keeper=lambda _: True, show_limits=lambda: Answer(""),
        )  # fmt: skip
        self.is_away = False
        self.ends_after: type[Any] | None = None
        self.asked: list[Request] = []
        spec = {"command": ["train", "{lr}", "{trial}"], "cwd": "/", "checkpoint_folder": "s3://b"}
        request = JobRequest("digits", spec)
        definition = Definition(
            "acc", Rules("max", trials, **rules), request, str(self.place.path),
            ("lr=1e-4..1:log",), seed=1,
        )  # fmt: skip
        self.study = Study.create(definition)
        self.told: list[str] = []
        self.search = self.new_search()

    def new_search(self) -> Search:
        self.search = Search(Study.open(self.study.name), self.told.append)
        return self.search

    def ask(self, _: ClusterFolder, request: Request) -> Answer:
        if self.is_away:
            raise RunError("cluster test has no daemon")
        self.asked.append(request)
        try:
            answer = self._requests.answer(request, os.getuid())
        except RunError as error:
            raise RefusedError(str(error)) from error
        if self.ends_after is not None and isinstance(request, self.ends_after):
            self.ends_after, self.is_away = None, True
            raise RunError("the daemon ended before it answered")
        return answer

    def step(self) -> str:
        with self.search.study.lock():
            return self.search.step(1e9)

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.step()

    def job(self, number: int) -> Job:
        """Of a trial."""
        (job,) = self.queue.store.find(f"digits.{number}")
        return job

    def start(self, *numbers: int) -> None:
        for number in numbers:
            self.queue.started(self.queue.active[self.job(number).number], {"a": 1})

    def train(self, number: int, *reports: tuple[int, float], name: str = "acc") -> None:
        """Have the run of a trial report, at these numbers of examples."""
        folder = runs_folder() / self.job(number).run_id
        folder.mkdir(parents=True, exist_ok=True)
        with EventLog(folder / "events.jsonl") as log:
            append_event(log, ev.RescaleStarted(1, 0, 1, ["a"], [1], "start"))
            append_event(log, ev.RescaleFinished(1, 1, None))
            for examples, value in reports:
                append_event(
                    log, ev.Metrics(1, 0, 0, examples, 1, values={name: value}, reported=[name])
                )

    def end(self, number: int, status: JobStatus = JobStatus.SUCCEEDED, why: str = "") -> None:
        self.queue.ended(self.queue.active[self.job(number).number], status, why)

    def states(self) -> list[str]:
        return [trial.status.value for trial in self.search.trials]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Played]:
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path))

    def begin(**more: Any) -> Played:
        played = Played(tmp_path, **more)
        monkeypatch.setattr(searching, "ask_daemon", played.ask)
        return played

    return begin


def test_trials_are_jobs_and_as_many_as_slots(play: Callable[..., Played]) -> None:
    played = play()
    played.step()
    assert played.states() == ["waiting", "waiting"]
    first = played.job(0)
    assert first.request.words[0] == "train"
    assert first.request.words[2] == "0"
    assert first.request.spec["checkpoint_folder"] == "s3://b/digits.0"
    assert float(first.request.words[1]) == played.search.trials[0].params["lr"]
    played.start(0, 1)
    played.train(0, (100, 0.5))
    played.step()
    assert played.states()[:2] == ["running", "running"]
    played.end(0)
    played.step()
    played.step()
    assert played.states()[:1] == ["done"]
    assert len(played.states()) == 3
    assert played.search.trials[0].points[0].value == 0.5


def test_a_submission_that_was_cut_short_is_made_once(play: Callable[..., Played]) -> None:
    """The daemon has the job, or only the journal has the trial, and the search is a new one."""
    played = play(trials=3)
    played.ends_after = Submit
    assert played.step() == ""
    assert "the daemon ended before it answered. Trials that run continue meanwhile" in played.told
    played.step()
    assert len(played.told) == 2  # said once for each cause
    with played.study.lock():
        played.study.add_trial(played.study.trials())
    played.is_away = False
    played.new_search()
    for _ in range(3):
        played.step()
    assert sorted(job.name for job in played.queue.active.values()) == ["digits.0", "digits.1"]
    assert played.states() == ["waiting", "waiting"]


def test_rungs_hold_and_release_jobs_but_not_those_that_a_user_holds(
    play: Callable[..., Played],
) -> None:
    played = play(trials=4, rungs=2, reduction=2, max_examples=200.0)
    played.step()
    played.start(0, 1)
    played.train(0, (110, 0.2))
    played.train(1, (110, 0.9))
    played.step()
    assert played.job(0).request.hold == "search digits"
    assert not played.job(1).request.hold
    assert played.job(1).request.priority == 1.0 or played.job(1).request.priority > 1
    played.step()
    assert played.states()[0] == "held"
    assert played.job(1).request.priority > 1
    assert len(played.states()) == 2  # both slots are left to the one that goes on
    played.queue.hold([played.job(1).number], getpass.getuser())
    asked = len(played.asked)
    for _ in range(3):
        played.step()
    assert played.states()[1] == "held"
    assert played.job(1).request.hold == getpass.getuser()
    assert not [each for each in played.asked[asked:] if isinstance(each, (Hold, Cancel))]


def test_a_trial_that_fails_or_is_cancelled_costs_itself_alone(play: Callable[..., Played]) -> None:
    played = play(trials=4)
    played.step()
    played.start(0, 1)
    played.train(0, (100, 0.5))
    played.end(0)
    played.end(1, JobStatus.FAILED, "ValueError: broken")
    for _ in range(3):
        played.step()
    assert played.states() == ["done", "failed", "waiting", "waiting"]
    played.queue.cancel([played.job(2).number], "ann")
    played.start(3)
    played.train(3, (100, float("nan")))
    played.end(3)
    why = ""
    for _ in range(3):
        why = why or played.step()
    assert why
    assert played.states() == ["done", "failed", "stopped", "done"]
    assert played.search.trials[2].reason == "cancelled by ann"


def test_all_that_fail_end_the_study_with_their_cause(play: Callable[..., Played]) -> None:
    played = play(trials=20)
    for number, why in enumerate(["broken on line 3", "no such file", "broken on line 7"]):
        played.step()
        played.step()
        played.start(number)
        played.end(number, JobStatus.FAILED, why)
    said = "all 3 trials that have ended have failed, 2 of them alike: broken on line 3"
    with pytest.raises(RunError, match=said):
        played.steps(4)
    assert not played.queue.active
    played.study.stop_request.touch()
    played.new_search()
    assert played.step() == "stopped by its user"


def test_a_study_without_any_number_ends_with_an_error(play: Callable[..., Played]) -> None:
    played = play(trials=1)
    played.step()
    played.start(0)
    played.train(0, (100, math.nan))
    played.end(0)
    said = r"ended \(no trial is left to train\), and no trial has reported a number for acc"
    with pytest.raises(RunError, match=said):
        played.steps(3)
    assert played.states() == ["done"]


def test_trials_that_have_trained_and_all_fail_end_with_their_cause(
    play: Callable[..., Played],
) -> None:
    played = play(trials=2)
    played.step()
    played.start(0, 1)
    for number in (0, 1):
        played.train(number, (100, 0.5), name="loss")
        played.end(number, JobStatus.FAILED, f"not finite in step {number}")
    with pytest.raises(RunError, match="all 2 trials that have ended have failed: not finite"):
        played.steps(4)


def test_a_job_says_why_its_trial_was_ended(play: Callable[..., Played]) -> None:
    played = play(trials=3, rungs=2, reduction=2, max_examples=200.0)
    played.step()
    played.start(0, 1)
    played.train(0, (110, 0.2))
    played.train(1, (110, 0.9), (210, 0.95))
    played.step()
    done = played.job(1).request.cancelled
    assert done == Cancelled("search digits", CancelCause.TRAINED)
    played.end(1, done.cause.status, str(done))
    played.queue.put_back(played.job(0), "held")
    played.step()
    played.queue.cancel([played.job(2).number], "ann")
    played.steps(2)
    assert [(played.job(n).status.value, played.job(n).message) for n in range(3)] == [
        ("cancelled", "stopped at a rung by search digits"),
        ("succeeded", "trained to the last rung of search digits"),
        ("cancelled", "cancelled by ann"),
    ]
    played.step()
    ranked = {t.number: t for t in Search(Study.open("digits")).ranked(1e9)}
    assert [(ranked[n].status.value, ranked[n].reason) for n in range(3)] == [
        ("pruned", "pruned: place 2 of 2 at rung 1 of 2 (100 useful examples)"),
        ("done", "done: place 1 of 1 at rung 2 of 2 (200 useful examples)"),
        ("stopped", "cancelled by ann"),
    ]


def test_a_trial_at_a_rung_when_the_study_ends_was_stopped_there(
    play: Callable[..., Played],
) -> None:
    played = play(trials=2, rungs=2, reduction=2, max_examples=200.0)
    played.step()
    played.start(0, 1)
    played.train(1, (110, 0.9), (210, 0.95))
    played.step()
    played.end(1)
    played.train(0, (110, 0.2))  # it runs, and was not held yet
    played.step()
    cancelled = played.job(0).request.cancelled
    assert cancelled == Cancelled("search digits", CancelCause.AT_RUNG)


def test_a_metric_that_is_never_reported_is_told_after_the_first_trial(
    play: Callable[..., Played],
) -> None:
    played = play(trials=20)
    played.step()
    played.start(0)
    played.train(0, (100, 0.5), name="accuracy")
    played.end(0)
    said = "trial 0 has ended, and it never reported 'acc'; it reported accuracy"
    with pytest.raises(RunError, match=said):
        played.steps(4)
    assert not played.queue.active


def test_a_trial_that_trains_past_the_last_rung_without_the_metric_is_ended(
    play: Callable[..., Played],
) -> None:
    played = play(trials=2, max_examples=200.0)
    played.step()
    played.start(0)
    played.train(0, (250, 0.5), name="loss")
    played.step()
    assert played.job(0).stop is not None


def test_a_study_that_is_stopped_ends_its_jobs(play: Callable[..., Played]) -> None:
    played = play()
    played.step()
    played.study.stop_request.touch()
    assert played.step() == ""
    assert not played.queue.active
    assert played.step() == "stopped by its user"
    assert {(trial.status, trial.reason) for trial in played.search.trials} == {
        (TrialStatus.STOPPED, "stopped by its user")
    }


def test_a_job_that_ends_between_two_looks_is_written_down(
    play: Callable[..., Played], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A study whose last job had ended so was shown as one whose trials train."""
    played = play(trials=2)
    played.step()
    played.start(0, 1)
    played.study.stop_request.touch()
    played.step()
    played.end(0, JobStatus.CANCELLED)
    look = played.search.look

    def late(now: float) -> None:
        look(now)
        if played.job(1).status.active:
            played.end(1, JobStatus.CANCELLED)

    monkeypatch.setattr(played.search, "look", late)
    assert played.step() == "stopped by its user"
    assert [trial.status for trial in played.study.trials()] == [TrialStatus.STOPPED] * 2


def test_a_trial_that_was_never_submitted_ends_with_its_study(play: Callable[..., Played]) -> None:
    played = play()
    with played.study.lock():
        played.study.add_trial([])
    played.study.stop_request.touch()
    assert played.step() == "stopped by its user"
    assert [trial.status for trial in played.search.study.trials()] == [TrialStatus.STOPPED]
    assert not played.queue.store.find("digits.0")


def test_a_journal_that_is_damaged_ends_the_search(play: Callable[..., Played]) -> None:
    played = play()
    played.step()
    played.new_search()
    (played.study.folder / "journal.log").write_bytes(b'{"op_code": 99}\n')
    with pytest.raises(RunError, match=r"journal\.log cannot be read"):
        played.step()


def test_a_queue_that_cannot_be_read_is_waited_for(
    play: Callable[..., Played], monkeypatch: pytest.MonkeyPatch
) -> None:
    played = play()
    played.step()

    def locked(_: ClusterFolder) -> JobStore:
        raise RunError("another process has locked it")

    with monkeypatch.context() as patch:
        patch.setattr(searching, "open_queue", locked)
        assert played.step() == ""
    assert played.told[-1].startswith("another process has locked it.")
    assert played.step() == ""
    assert played.states() == ["waiting", "waiting"]

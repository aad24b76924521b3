"""Changes of the states of jobs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hvd_elastic.cli.jobs.queue import queue_lines
from hvd_elastic.errors import RunError, UsageError
from hvd_elastic.jobs.job import After, CancelCause, Job, JobKind, JobRequest, JobStatus, StopReason
from hvd_elastic.jobs.queue import JobQueue, ending_words, over_words
from hvd_elastic.jobs.store import JobStore

SPEC = {"command": ["python", "train.py"], "cwd": "/"}


class Recorded:
    """A queue, and the events that it records."""

    def __init__(self, path: Path) -> None:
        self.events: list[tuple[str, Mapping[str, Any]]] = []
        self.queue = JobQueue(
            JobStore.create(path), lambda kind, fields: self.events.append((kind, fields))
        )

    def add(self, *after: After) -> int:
        (job,) = self.queue.add_jobs([JobRequest("train", SPEC, after=after)], {})
        return job.number

    def end(self, number: int, status: JobStatus) -> None:
        job = self.queue.started(self.queue.active[number], {"a": 1})
        self.queue.ended(job, status, "")

    def ready(self) -> list[int]:
        return [job.number for job in self.queue.ready()]

    def status(self, number: int) -> JobStatus:
        return self.queue.store.jobs([number])[number].status


@pytest.fixture
def made(tmp_path: Path) -> Recorded:
    return Recorded(tmp_path / "queue.sqlite")


@pytest.mark.parametrize(
    ("outcome", "status", "runs"),
    [
        ("ok", JobStatus.SUCCEEDED, True),
        ("ok", JobStatus.FAILED, False),
        ("ok", JobStatus.CANCELLED, False),
        ("fail", JobStatus.FAILED, True),
        ("fail", JobStatus.SUCCEEDED, False),
        ("fail", JobStatus.CANCELLED, False),
        ("any", JobStatus.CANCELLED, True),
    ],
)
def test_job_waits_for_another(made: Recorded, outcome: str, status: JobStatus, runs: bool) -> None:
    first = made.add()
    second = made.add(After(outcome, first))
    assert made.ready() == [first]
    assert made.queue.active[second].reason.startswith(f"waits for job {first} to ")
    made.end(first, status)
    assert made.ready() == ([second] if runs else [])
    if not runs:
        ended = made.queue.store.jobs([second])[second]
        assert ended.status is JobStatus.CANCELLED
        assert f"job {first}" in ended.message
        assert made.events[-1][0] == "job_finished"


def test_a_request_with_a_token_adds_one_job_however_often_it_comes(made: Recorded) -> None:
    trial = JobRequest("digits.3", SPEC, token="5f")
    (first,) = made.queue.add_jobs([trial], {})
    again, other = made.queue.add_jobs([trial, JobRequest("digits.3", SPEC, token="60")], {})
    assert again.number == first.number != other.number
    made.end(first.number, JobStatus.FAILED)
    (again,) = made.queue.add_jobs([trial], {})
    assert again.number == first.number
    of_another_user = JobRequest("digits.3", SPEC, token="5f", user=12345)
    (job,) = made.queue.add_jobs([of_another_user], {})
    assert job.number not in (first.number, other.number)
    assert [kind for kind, _ in made.events].count("job_submitted") == 3


def test_held_job_waits_until_it_is_released(made: Recorded) -> None:
    first, second = made.add(), made.add()
    made.queue.started(made.queue.active[second], {"a": 1})
    waiting, running, plain, over = made.queue.hold([first, second], "ann")
    assert [job.number for job in waiting] == [first]
    assert [job.stop for job in running] == [StopReason.REQUEUE]
    assert not plain
    assert not over
    made.queue.put_back(running[0], running[0].reason)
    assert not made.ready()
    for number in (first, second):
        assert made.queue.active[number].reason.startswith("held by ann: ")
    made.queue.rest("the daemon was ended")
    again = JobQueue(JobStore.create(made.queue.store.path), lambda *_: None)
    assert not again.ready()
    assert [job.reason.partition(":")[0] for job in again.active.values()] == ["held by ann"] * 2
    before = again.active[first].queued_at
    released, free, _ = again.release([first])
    assert [job.number for job in released] == [first]
    assert not free
    (job,) = again.ready()
    assert job.number == first
    assert job.queued_at > before
    again.requeue([second], {}, None)
    assert [job.number for job in again.ready()] == [first, second]


def test_what_cannot_be_held_or_released(made: Recorded) -> None:
    number = made.add()
    with pytest.raises(RunError, match="job 1: not held"):
        made.queue.release([number])
    request = JobRequest("echo", SPEC, kind=JobKind.PLAIN)
    (plain,) = made.queue.add_jobs([request], {})
    made.queue.started(plain, {"a": 1})
    with pytest.raises(RunError, match="job 2: a plain command has no checkpoint"):
        made.queue.hold([plain.number], "ann")
    made.queue.started(made.queue.active[number], {"a": 1})
    made.queue.cancel([number], "ann")
    with pytest.raises(RunError, match="job 1: is being cancelled"):
        made.queue.hold([number], "ann")


def test_time_of_all_attempts_counts_until_the_limit(
    made: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("hvd_elastic.jobs.queue.time.time", lambda: now)
    (job,) = made.queue.add_jobs([JobRequest("train", SPEC, time_limit_s=100.0)], {})
    job = made.queue.started(job, {"a": 1})
    now += 60
    job = made.queue.put_back(job, "preempted")
    now += 500  # it waits
    job = made.queue.started(job, {"a": 1})
    now += 29
    job = made.queue.started(job, {"a": 1})  # another leader
    assert made.queue.limit_time(job, 100.0).stop is None
    assert made.events[-1][0] == "job_started"
    now += 2
    assert made.queue.limit_time(made.queue.limit_time(job, 100.0), 100.0).stop is None
    assert [kind for kind, _ in made.events].count("time_limit_near") == 1
    now += 10
    assert made.queue.limit_time(job, math.inf).stop is None
    job = made.queue.limit_time(job, 100.0, "group vision")
    assert job.stop is StopReason.TIME_LIMIT
    assert job.reason.startswith("time limit of 1 m 40 s of group vision: hvd-elastic requeue")
    assert made.queue.store.jobs([job.number])[job.number].ran_s == 89.0
    with pytest.raises(RunError, match="is being ended at its time limit"):
        made.queue.requeue([job.number], {}, None)
    with pytest.raises(RunError, match="job 1: is being ended at its time limit, so nothing"):
        made.queue.hold([job.number], "ann")
    job = made.queue.ended(job, JobStatus.FAILED, job.reason)
    (job,) = made.queue.requeue([job.number], {}, None)
    assert job.ran_s == 0.0


def test_held_job_in_the_queue() -> None:
    job = Job(3, JobRequest("a", SPEC, hold="ann"), "a-3-01ab", reason="held by ann")
    assert " held " in [*queue_lines([job], 0.0, None)][1]


def test_what_waits_in_vain_ends_along_the_chain(made: Recorded) -> None:
    first = made.add()
    second = made.add(After("ok", first))
    third = made.add(After("ok", second))
    made.end(first, JobStatus.FAILED)
    made.ready()
    made.ready()
    assert {made.status(number) for number in (second, third)} == {JobStatus.CANCELLED}


def test_unknown_and_circular_dependencies_are_refused(made: Recorded) -> None:
    with pytest.raises(UsageError, match="--after names job 99"):
        made.add(After("ok", 99))
    first = made.add()
    second = made.add(After("ok", first))
    third = made.add(After("any", second))
    with pytest.raises(UsageError, match=f"circle: job {first}, which waits for job {third}"):
        made.queue.requeue([first], {}, [After("ok", third)])
    with pytest.raises(UsageError, match="circle"):
        made.queue.requeue([first], {}, [After("ok", first)])
    assert made.queue.active[first].request.after == ()


def test_jobs_that_have_ended_do_not_wait_for_each_other_when_they_come_back(
    made: Recorded,
) -> None:
    """Each may wait for the other while that one has ended, but not both of them at once."""
    first = made.add()
    second = made.add(After("any", first))
    made.end(first, JobStatus.SUCCEEDED)
    made.end(second, JobStatus.SUCCEEDED)
    made.queue.requeue([first], {}, [After("any", second)])
    with pytest.raises(UsageError, match=f"circle: job {second}, which waits for job {first}"):
        made.queue.requeue([second], {}, None)
    made.end(first, JobStatus.SUCCEEDED)
    with pytest.raises(UsageError, match="circle"):
        made.queue.requeue([first, second], {}, None)
    assert made.queue.requeue([second], {}, None)


def test_cancel_ends_what_waits_and_asks_what_runs(made: Recorded) -> None:
    waiting, running = made.add(), made.add()
    job = made.queue.started(made.queue.active[running], {"a": 1})
    ended, stopping, _ = made.queue.cancel([waiting, running, waiting], "me")
    assert [each.number for each in ended] == [waiting]
    assert stopping[0].stop is StopReason.CANCEL
    assert stopping[0].held == job.held, "its slots are in use until its run has ended"
    with pytest.raises(RunError, match=r"job 1 \(train-1-\w+\) was cancelled already"):
        made.queue.cancel([waiting], "me")
    with pytest.raises(RunError, match="there is no job 7"):
        made.queue.cancel([7], "me")
    later = made.add()
    ended, _, over = made.queue.cancel([waiting, later], "me")
    assert [each.number for each in (*ended, *over)] == [later, waiting], "it had ended before"
    assert over_words(over).endswith("was cancelled already")


def test_plain_command_that_is_ended_writes_no_checkpoint(made: Recorded) -> None:
    trains = made.add()
    (plain,) = made.queue.add_jobs([JobRequest("sleep", SPEC, kind=JobKind.PLAIN, max_np=1)], {})
    for number in (trains, plain.number):
        made.queue.started(made.queue.active[number], {"a": 1})
    _, stopping, _ = made.queue.cancel([trains, plain.number], "me")
    assert [job.reason for job in stopping] == [
        "cancelled by me: ends after a checkpoint",
        "cancelled by me: is being ended",
    ]
    assert ending_words(stopping) == "ending job 1 after a checkpoint; ending job 2"


def test_requeue_takes_no_cancel_back(made: Recorded) -> None:
    waits, number = made.add(), made.add()
    made.end(waits, JobStatus.FAILED)
    made.queue.started(made.queue.active[number], {"a": 1})
    made.queue.cancel([number], "me")
    with pytest.raises(RunError, match=rf"job {number} \(train-2-\w+\) is being cancelled"):
        made.queue.requeue([waits, number], {"TOKEN": "secret"}, None)
    assert made.queue.active[number].stop is StopReason.CANCEL
    assert made.status(waits) is JobStatus.FAILED
    unchanged = made.queue.store.jobs([waits])[waits]
    assert made.queue.store.environment(unchanged) == {}
    made.queue.ended(made.queue.active[number], JobStatus.CANCELLED, "cancelled by me")
    made.queue.requeue([number], {}, None)
    assert made.status(number) is JobStatus.QUEUED
    assert made.queue.active[number].request.cancelled is None


def test_a_job_keeps_the_first_cause_of_its_end(made: Recorded) -> None:
    running, waiting = made.add(), made.add()
    made.queue.started(made.queue.active[running], {"a": 1})
    for cause in (CancelCause.AT_RUNG, CancelCause.USER):
        made.queue.cancel([running], "search", cause)
    cancelled = made.queue.active[running].request.cancelled
    assert str(cancelled) == "stopped at a rung by search"
    made.queue.cancel([waiting], "search", CancelCause.TRAINED)
    assert made.status(waiting) is JobStatus.SUCCEEDED


def test_requeue_of_a_job_that_runs_is_told_once_when_its_run_has_ended(made: Recorded) -> None:
    number = made.add()
    made.queue.started(made.queue.active[number], {"a": 1})
    (job,) = made.queue.requeue([number], {}, None)
    assert made.events[-1][0] == "job_started"
    made.queue.put_back(job, job.reason)
    assert [kind for kind, _ in made.events].count("job_requeued") == 1


def test_job_that_has_ended_is_queued_again_with_the_environment_of_its_requeuer(
    made: Recorded,
) -> None:
    number = made.add()
    made.end(number, JobStatus.FAILED)
    assert made.queue.store.jobs([number])[number].failures == 1
    (job,) = made.queue.requeue([number], {"NEW": "1"}, None)
    assert (job.status, job.failures) == (JobStatus.QUEUED, 0)
    assert made.queue.store.environment(job) == {"NEW": "1"}
    assert made.ready() == [number]


def test_job_that_comes_back_joins_the_queue_at_its_end(
    made: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def at(now: float) -> None:
        monkeypatch.setattr("hvd_elastic.jobs.queue.time.time", lambda: now)

    at(100.0)
    number = made.add()
    assert made.queue.active[number].queued_at == 100.0
    job = made.queue.started(made.queue.active[number], {"a": 1})
    at(200.0)
    made.queue.put_back(job, "preempted")
    stored = made.queue.store.jobs([number])[number]
    assert (stored.submitted_at, stored.queued_at) == (100.0, 200.0)
    at(300.0)
    (waits,) = made.queue.requeue([number], {}, None)
    assert waits.queued_at == 200.0, "it waited already"
    made.end(number, JobStatus.FAILED)
    at(400.0)
    (again,) = made.queue.requeue([number], {}, None)
    assert again.queued_at == 400.0


def test_time_before_the_awaited_job_ends_is_no_time_in_the_queue(
    made: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = made.add()
    second = made.add(After("ok", first))
    made.ready()
    made.end(first, JobStatus.SUCCEEDED)
    later = made.queue.active[second].submitted_at + 36_000.0
    monkeypatch.setattr("hvd_elastic.jobs.queue.time.time", lambda: later)
    (job,) = made.queue.ready()
    assert job.queued_at == later
    monkeypatch.setattr("hvd_elastic.jobs.queue.time.time", lambda: later + 60.0)
    assert made.queue.ready() == [job]


def test_another_daemon_finds_everything(made: Recorded, tmp_path: Path) -> None:
    number = made.add()
    made.queue.started(made.queue.active[number], {"a": 2})
    made.queue.set_priority([number], 3.0)
    later = Recorded(tmp_path / "queue.sqlite").queue
    job = later.active[number]
    assert (job.held, job.attempts) == ({"a": 2}, 1)
    assert job.request.priority == 3.0
    assert later.store.environment(job) == {}


def test_jobs_that_wait_when_the_cluster_is_taken_down_say_so(made: Recorded) -> None:
    first = made.add()
    after = made.add(After("ok", first))
    running = made.queue.started(made.queue.active[first], {"a": 1})
    made.ready()
    assert made.queue.active[after].reason.endswith("it is running")
    made.queue.put_back(running, "the cluster was taken down")
    made.queue.rest("the cluster was taken down")
    assert made.queue.active[first].reason == "the cluster was taken down"
    assert made.queue.active[after].reason.endswith("it is queued")


def test_queue_tells_command_priority_and_hosts_in_eighty_columns() -> None:
    words: dict[str, Any] = {
        "command": ["python", "train.py", *(f"--option-{n}" for n in range(9))]
    }
    request = JobRequest("resnet", words, priority=2.0)
    times: Any = {"submitted_at": 100.0, "started_at": 110.0}
    runs = Job(1, request, "resnet-1-3f2a", JobStatus.RUNNING, "r" * 99, held={"n1": 2}, **times)
    over = Job(2, request, "resnet-2-91c0", JobStatus.FAILED, "", "broken", ended_at=160.0, **times)
    lines = [*queue_lines([runs, over], 7300.0, 80)]
    assert max(map(len, lines)) == 80
    assert lines[1].split() == [
        *["1", "resnet-1-3f2a", "running", "2", "2", "2", "h", "00", "m", "n1:", "2"]
    ]
    assert lines[2].split()[:2] == ["python", "train.py"]
    assert "1 m 00 s" in lines[3], "the age of a job that has ended does not grow"
    assert lines[4].endswith("· broken")
    assert " ".join(words["command"]) in [*queue_lines([runs], 7300.0, None)][2]
    shell = Job(
        3, JobRequest("sh", {"command": ["sh", "-c", "true; exit 3"]}), "sh-3-01ab", **times
    )
    assert "sh -c 'true; exit 3'" in [*queue_lines([shell], 7300.0, None)][2]


def test_users_are_told_of_a_job_that_is_held_for_long_and_of_its_lost_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr("hvd_elastic.jobs.queue.time.time", lambda: clock[0])
    emitted: list[str] = []
    told: list[tuple[int, str, Mapping[str, Any], Mapping[str, str]]] = []
    queue = JobQueue(
        JobStore.create(tmp_path / "queue.sqlite"),
        lambda kind, _fields: emitted.append(kind),
        lambda job, kind, fields, variables: told.append((job.number, kind, fields, variables)),
        notify_held_s=100.0,
    )
    held = JobRequest("held", SPEC, notify=True, notify_held_s=30.0, hold="ann")
    runs = JobRequest("runs", SPEC, notify=True)
    queue.add_jobs([held, runs, JobRequest("quiet", SPEC, hold="ann")], {"A": "1"})
    queue.started(queue.active[2], {"a": 1})
    queue.tell_lost("b", "no answer")
    queue.tell_lost("a", "no answer")
    named = {"job": 2, "name": "runs", "run_id": queue.active[2].run_id}
    assert told == [(2, "host_lost", {**named, "host": "a", "cause": "no answer"}, {"A": "1"})]
    for clock[0] in (1029.0, 1031.0, 1040.0):
        queue.ready()
    assert [(number, kind) for number, kind, *_ in told[1:]] == [(1, "job_held_long")]
    assert told[1][2]["held_s"] == 31.0
    queue.release([1])
    clock[0] = 2000.0
    queue.hold([1], "bob")
    queue.ready()
    assert len(told) == 2
    assert emitted.count("job_held_long") == 2, "that of up --notify counts for all jobs"
    queue.cancel([1, 3], "ann")
    assert [(number, kind) for number, kind, *_ in told[2:]] == [(1, "job_finished")]
    assert told[2][3] == {"A": "1"}, "though it is removed with the end of the job"


def test_a_run_that_ended_before_it_was_looked_at_ended_then(
    made: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("hvd_elastic.jobs.queue.time.time", lambda: now)
    requests = [JobRequest("train", SPEC, time_limit_s=100.0)] * 2
    first, second = (made.queue.started(job, {"a": 1}) for job in made.queue.add_jobs(requests, {}))
    now += 5000  # nobody looks
    assert made.queue.limit_time(first, 100.0, ended_at=1095.0).stop is None
    assert "time_limit_near" not in [kind for kind, _ in made.events]
    assert made.queue.limit_time(first, 100.0, ended_at=1101.0).stop is StopReason.TIME_LIMIT
    ended = made.queue.ended(first, JobStatus.SUCCEEDED, "", 1095.0)
    assert (ended.ended_at, made.events[-1][1]["ended"]) == (1095.0, 1095.0)
    waits = made.queue.put_back(second, "failed", failed=True, at=1095.0)
    assert (waits.ran_s, made.events[-1][1]["ended"]) == (95.0, 1095.0)

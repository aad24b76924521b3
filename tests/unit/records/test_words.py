"""The words of every state of a run and of a job, against a table that people can read."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvd_elastic.cli.jobs.queue import queue_lines, why_rows
from hvd_elastic.jobs.job import After, Job, JobKind, JobRequest, JobStatus, StopReason
from hvd_elastic.records.wording import (
    ENDED,
    GOES_ON,
    READING,
    Narrator,
    run_sentences,
    run_state,
    status_rows,
)
from tests.unit.records.made_events import made, summarized

TABLE = Path(__file__).with_name("words.md")
PACKAGE = Path(__file__).parents[3] / "hvd_elastic"
BEGIN = 1_790_000_000.0
NOW = BEGIN + 300.0


def event(at_s: float, kind: str, **fields: Any) -> dict[str, Any]:
    return {"t": BEGIN + at_s, "kind": kind, **fields}


STARTED = event(0, "run_started", run_id="net-3", hosts=[["a", 1], ["b", 1]], min_np=1)
COMMAND = event(0, "run_started", run_id="net-3", hosts=[["a", 1]], min_np=1, plain=True)
TRAINS = [
    STARTED,
    event(1, "rescale_started", generation=1, from_size=0, to_size=2, reason="start on 2 hosts"),
    event(9, "rescale_finished", generation=1, size=2),
    event(60, "metrics", step=120, epoch=3, examples=7200, loss=0.41, throughput=812.4),
]


def ended(status: str, message: str, **fields: Any) -> dict[str, Any]:
    numbers = {"run_id": "net-3", "steps": 120, "examples": 7200, "checkpoint_step": 100}
    numbers |= {"led_elsewhere": False, **fields}
    return event(61, "run_finished", epochs=3, status=status, message=message, **numbers)


WAITS = event(2, "waiting", reason="waiting for 2 workers: host b is lost: no answer within 5 s")
STOPS = event(60, "training_stopped", step=120, rank=0, reason="no progress for 3 epochs")
ERROR = event(
    60, "script_failed", host="a", local_rank=0, traceback="  …\nValueError: no such file"
)
NO_STEPS: dict[str, Any] = {"steps": 0, "examples": 0}
RETURNED = "the training function returned on every worker"
RUNS: dict[str, tuple[list[dict[str, Any]], bool, float | None]] = {
    "its leader never wrote an event": ([], False, None),
    "its leader begins": ([], True, None),
    "it waits for hosts": ([STARTED, WAITS], True, None),
    "it trains": (TRAINS, True, None),
    "its leader hears from none of its hosts": (
        [*TRAINS, event(65, "leader_cut_off", silent_s=5.0, grace_s=60.0, tries_s=55.0)],
        True,
        None,
    ),
    "the leader is lost, the hosts train on": (TRAINS, False, BEGIN + 120),
    "the leader is lost, and so are the hosts": (TRAINS, False, None),
    "it has trained to the end": ([*TRAINS, ended("succeeded", RETURNED)], False, None),
    "the script stopped early": (
        [*TRAINS, STOPS, ended("succeeded", "stopped early")],
        False,
        None,
    ),
    "the script failed": (
        [*TRAINS, ERROR, ended("failed", "ValueError: bad")],
        False,
        None,
    ),
    "a user stopped it": ([*TRAINS, ended("stopped", "Ctrl-C")], False, None),
    "a plain command runs": ([COMMAND], True, None),
    "a plain command succeeded": (
        [
            COMMAND,
            ended(
                "succeeded",
                "the command ended with exit status 0 on host a",
                steps=0,
                examples=0,
            ),
        ],
        False,
        None,
    ),
    "a plain command failed": (
        [
            COMMAND,
            ended("failed", "the command ended with exit status 3 on host a", steps=0, examples=0),
        ],
        False,
        None,
    ),
}
"""Situations of a run: its events, whether its leader lives, and until when hosts train on."""

REQUEST = JobRequest("net", {"command": ["python", "train.py"]}, max_np=1)
JOB = Job(3, REQUEST, "net-3", submitted_at=BEGIN, queued_at=BEGIN)
RUNNING = replace(JOB, status=JobStatus.RUNNING, held={"a": 2}, attempts=1, started_at=BEGIN + 9)
ELASTIC = replace(RUNNING, request=replace(REQUEST, min_np=2, max_np=None))
PLAIN = replace(RUNNING, request=replace(REQUEST, kind=JobKind.PLAIN), held={"a": 1})
LIMITED = "time limit of 8 h: hvd-elastic requeue 3 resumes it from its checkpoint"
JOBS = {
    "waits for slots": replace(JOB, reason="waits: all 4 slots are worth more to 2 other jobs"),
    "came later than others": replace(
        JOB, reason="waits: all 4 slots are held by 2 jobs that came earlier"
    ),
    "waits, and its start is known": replace(
        JOB, eta=NOW + 90, reason="waits until net-1 has left"
    ),
    "waits for another job": replace(
        JOB,
        request=replace(REQUEST, after=(After("ok", 2),)),
        reason="waits for job 2 to succeed; it is running",
    ),
    "waits again after a failure": replace(
        JOB,
        request=replace(REQUEST, retries=2),
        attempts=2,
        failures=1,
        reason="runs again: exit status 1",
    ),
    "waits again after it was preempted": replace(JOB, attempts=2, reason="preempted"),
    "trains, and its end is not known": replace(ELASTIC, reason="starts with 2 slots on 1 host"),
    "trains, and its end is known": replace(ELASTIC, eta=NOW + 3600, reason="keeps 2 slots"),
    "has a deadline": replace(
        ELASTIC, request=replace(ELASTIC.request, max_np=4, deadline=NOW + 7200)
    ),
    "runs a plain command": PLAIN,
    "has a fixed number of slots": replace(
        RUNNING, request=replace(REQUEST, kind=JobKind.FIXED, min_np=2, max_np=2)
    ),
    "trains, and is being cancelled": replace(
        ELASTIC, stop=StopReason.CANCEL, reason="cancelled by ann: ends after a checkpoint"
    ),
    "is a plain command that is being cancelled": replace(
        PLAIN, stop=StopReason.CANCEL, reason="cancelled by ann: is being ended"
    ),
    "trains, and goes back into the queue": replace(
        ELASTIC, stop=StopReason.REQUEUE, reason="asked to by requeue"
    ),
    "trains, and has reached its time limit": replace(
        ELASTIC, stop=StopReason.TIME_LIMIT, reason=LIMITED
    ),
    "has succeeded": replace(
        JOB, status=JobStatus.SUCCEEDED, ended_at=BEGIN + 70, attempts=1, message=RETURNED
    ),
    "has failed as often as it may": replace(
        JOB,
        status=JobStatus.FAILED,
        request=replace(REQUEST, retries=1),
        ended_at=BEGIN + 70,
        attempts=2,
        failures=2,
        message="exit status 1: ValueError: no such file",
    ),
    "has ended at its time limit": replace(
        JOB, status=JobStatus.FAILED, ended_at=BEGIN + 70, attempts=1, failures=1, message=LIMITED
    ),
    "was cancelled": replace(
        JOB, status=JobStatus.CANCELLED, ended_at=BEGIN + 70, message="cancelled by ann"
    ),
}
"""Situations of a job."""


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def test_words_of_every_state_are_those_of_the_table() -> None:
    told = "\n".join(table_lines()) + "\n"
    assert told == TABLE.read_text(encoding="utf-8"), f"is this better? Then write it to {TABLE}"


def test_table_has_every_state_of_a_run_and_of_a_job() -> None:
    flags = itertools.product((False, True), (False, True), (None, NOW))
    statuses = ("unknown", "running", "succeeded", "failed", "stopped")
    possible = {
        run_state(status, alive=alive, waiting=waiting, until=until)
        for status, (alive, waiting, until) in itertools.product(statuses, flags)
    }
    assert possible == {*GOES_ON, *ENDED, "starting", "never began"}
    assert {state_of(*found) for found in RUNS.values()} == possible
    assert {job.status for job in JOBS.values()} == set(JobStatus)
    assert {job.request.kind for job in JOBS.values()} == set(JobKind)
    assert {job.stop for job in JOBS.values()} == {None, *StopReason}


def test_table_has_one_term_for_each_thing() -> None:
    not_ours = r"process|(?<!this )machine|node|standby|member|World size|1 to 1|failed 0|1 slots"
    not_ours += r"|left / left"
    assert re.findall(not_ours, TABLE.read_text(encoding="utf-8")) == []


def test_sizes_are_formatted_in_one_place() -> None:
    own = re.compile(r"1e[3-9](:[^}]*)?\} ?[kMG]B|<< (10|20|30)(:[^}]*)?\} ?[kMG]i?B")
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if own.search(path.read_text(encoding="utf-8"))
    }
    sent_to_hosts = {"programs/copy/comparison.py"}  # with the standard library alone
    assert found == sent_to_hosts


def state_of(events: list[dict[str, Any]], alive: bool, until: float | None) -> str:
    run = summarized(events)
    return run_state(run.status, alive=alive, waiting=bool(run.waiting), until=until)


def table_lines() -> Iterator[str]:
    yield "# The words of every state"
    yield ""
    yield "`test_words.py` compares this file with what the commands and pages say."
    yield ""
    yield "## A run, when"
    for title, (events, alive, until) in RUNS.items():
        run, state = summarized(events), state_of(events, alive, until)
        run.run_id = "net-3"
        narrator = Narrator()
        yield f"\n### {title}\n\n```"
        yield f"list       {state}"
        for label, text in status_rows(run, state, until, "", NOW):
            if label in ("status", "started", "progress", "failure"):
                yield f"{label:<10} {text}"
        yield from (f"page       {text}" for text in run_sentences(run, state))
        lines = [line for each in events for line in narrator.tell(made(each))]
        yield from (f"terminal   {text}" for line in lines for text in line.text.splitlines())
        yield "```"
    yield f"\n### a page has not read all its events\n\n```\npage       {reading_words()}\n```"
    yield ""
    yield "## A job that"
    for title, job in JOBS.items():
        yield f"\n### {title}\n\n```"
        yield from queue_lines([job], NOW, None)
        awaits = bool(job.request.after)
        yield from (f"{label:<10} {text}" for label, text in why_rows(job, awaits, NOW))
        yield "```"


def reading_words() -> str:
    return run_sentences(summarized(TRAINS), READING)[0]


def test_hosts_of_a_run_that_waits_or_is_over_are_not_said_to_be_in_use() -> None:
    leaves = event(61, "host_draining", host="a", cause="a test", leave_in_s=5.0)
    waits = [*TRAINS, leaves, event(66, "waiting", reason="waiting for hosts")]
    rows = dict(status_rows(summarized(waits), "waiting", None, "", NOW))
    assert rows["progress"] == "step 120 · epoch 3 · loss 0.41"
    assert rows["draining"] == "a: being left, overdue (a test)"
    over = summarized([*waits, ended("stopped", "stop command")])
    assert "draining" not in dict(status_rows(over, "stopped", None, "", NOW))

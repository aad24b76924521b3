"""The database of a queue: what is kept, what is removed, and what is refused."""

from __future__ import annotations

import contextlib
import sqlite3
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvd_elastic.jobs.job import After, Job, JobRequest, JobStatus, StopReason
from hvd_elastic.jobs.store import VERSION, JobStore, StoreError, _explained
from tests.small_disk import mounted

SPEC = {"command": ["python", "train.py"], "cwd": "/"}


def request(name: str = "train", **more: object) -> JobRequest:
    return JobRequest(name, SPEC, **more)  # type: ignore[arg-type]


@pytest.fixture
def store(tmp_path: Path) -> JobStore:
    return JobStore.create(tmp_path / "queue.sqlite")


def test_jobs_are_read_as_they_were_written(store: JobStore) -> None:
    asked = request(after=(After("ok", 1),), priority=2.0, deadline=5.0, array_index=3)
    (job,) = store.add_jobs([asked], {"A": "b"}, now=1.0)
    assert job.run_id.startswith("train-1-")
    changed = replace(
        job,
        status=JobStatus.RUNNING,
        stop=StopReason.CANCEL,
        held={"a": 2},
        eta=7.5,
        reason="because",
        started_at=2.0,
        attempts=1,
    )
    store.save([changed])
    again = JobStore.read_only(store.path)
    assert again.active() == [changed]
    assert again.environment(changed) == {"A": "b"}


def test_history_stays_and_the_environment_of_an_ended_job_does_not(store: JobStore) -> None:
    jobs = store.add_jobs([request() for _ in range(3)], {"TOKEN": "s3cret-value"}, now=1.0)
    ended = [replace(job, status=JobStatus.CANCELLED, message="cancelled") for job in jobs[:2]]
    store.save(ended)
    assert [job.number for job in store.active()] == [3]
    assert [job.number for job in store.ended()] == [2, 1]
    assert store.environment(jobs[2]) == {"TOKEN": "s3cret-value"}
    store.save([replace(jobs[2], status=JobStatus.SUCCEEDED)])
    for path in store.path.parent.iterdir():
        assert b"s3cret-value" not in path.read_bytes(), path


def test_only_its_owner_may_read_the_database(store: JobStore) -> None:
    store.add_jobs([request()], {}, now=1.0)
    for path in store.path.parent.glob("queue.sqlite*"):
        assert path.stat().st_mode & 0o077 == 0, path


def test_find_by_number_run_id_and_name(store: JobStore) -> None:
    store.add_jobs([request("a"), request("b"), request("a")], {}, now=1.0)

    def found(words: str) -> list[int]:
        return [job.number for job in store.find(words)]

    assert (found("2"), found("a-3"), found("a"), found("c")) == ([2], [3], [1, 3], [])
    assert store.numbers(2, 9) == store.numbers(2, 10**30) == [2, 3]
    assert found("9" * 30) == []


@pytest.mark.parametrize(("version", "which"), [(1, "an earlier"), (VERSION + 1, "a newer")])
def test_a_database_of_another_format_is_refused_and_left_alone(
    store: JobStore, version: int, which: str
) -> None:
    store.close()
    with contextlib.closing(sqlite3.connect(store.path)) as connection:
        connection.execute(f"PRAGMA user_version = {version}")
    for opened in (JobStore.create, JobStore.read_only):
        with pytest.raises(StoreError, match=f"{which} hvd_elastic .format {version}, this one"):
            opened(store.path)


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    path = tmp_path / "queue.sqlite"
    path.write_text("not a database, but long enough to be looked at as one" * 30)
    with pytest.raises(StoreError, match=r"queue\.sqlite cannot be used: it is damaged"):
        JobStore.create(path)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ("database or disk is full", "the disk is full or broken"),
        ("file is not a database", "it is damaged"),
        ("database table is locked", "another process has locked it"),
        ("attempt to write a readonly database", "mend the permissions"),
    ],
)
def test_errors_without_a_code_are_explained_too(tmp_path: Path, told: str, words: str) -> None:
    """As those of Python 3.10 are."""
    with pytest.raises(StoreError, match=words), _explained(tmp_path):
        raise sqlite3.OperationalError(told)


def test_a_reader_that_is_not_closed_ends_in_any_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    JobStore.create(tmp_path / "queue.sqlite").close()
    readers = [JobStore.read_only(tmp_path / "queue.sqlite")]
    errors: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", errors.append)
    thread = threading.Thread(target=readers.clear)
    thread.start()
    thread.join()
    assert not errors


def test_missing_database_says_how_to_start(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="hvd-elastic up HOSTFILE"):
        JobStore.read_only(tmp_path / "queue.sqlite")


def test_full_disk_changes_nothing_and_is_told(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "256k") as folder:
        store = JobStore.create(folder / "queue.sqlite")
        (first,) = store.add_jobs([request()], {}, now=1.0)

        def fill() -> None:
            for number in range(1000):
                store.add_jobs([request() for _ in range(100)], {"N": str(number)}, now=1.0)

        with pytest.raises(StoreError, match="the disk is full or broken"):
            fill()
        count = len(store.active())
        assert count % 100 == 1, "a submission is written as a whole or not at all"
        with pytest.raises(StoreError):
            store.save([replace(job, reason="x" * 2000) for job in store.active()])
        assert store.find("1") == [first]
        store.close()


def test_job_is_immutable() -> None:
    with pytest.raises(AttributeError):
        Job(1, request(), "a-1").reason = "b"  # type: ignore[misc]

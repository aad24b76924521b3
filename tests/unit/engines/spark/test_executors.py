"""The jobs that give hosts, with a session whose jobs fail or wait."""

# ruff: noqa: N802  (the names are those of Spark)

from __future__ import annotations

import copy
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hvd_elastic.engines.dial_in.hosts import DialInHosts, HostProcess
from hvd_elastic.engines.spark import executors
from hvd_elastic.engines.spark.executors import Executors, Request
from hvd_elastic.errors import RunError
from tests.paths import LIMIT_S


class Session:
    """As much of a Spark session as is asked; ``room`` tasks can run at a time."""

    def __init__(self, room: int, error: str = "", master: str = "local[2]") -> None:
        self.conf: Any = {"spark.master": master}
        self.sparkContext = self
        self._jsc: Session | None = self
        self.room, self._error = room, error
        self.cancelled = threading.Event()

    def range(self, *_: int) -> Session:
        return self

    def mapInArrow(self, *_: Any) -> Session:
        return self

    def collect(self) -> None:
        if self._error:
            raise ValueError(self._error)
        self.cancelled.wait(LIMIT_S)

    def addJobTag(self, *_: str) -> None: ...

    def setInterruptOnCancel(self, *_: bool) -> None: ...

    def getLocalProperty(self, _: str) -> None: ...

    def setLocalProperty(self, *_: str) -> None: ...

    def cancelJobsWithTag(self, _: str) -> None:
        self.cancelled.set()

    def isStopped(self) -> bool:
        return False

    def sc(self) -> Any:
        found = copy.copy(self)
        found.conf = lambda: self
        return found

    def getInt(self, name: str, default: int) -> int:
        return int(self.conf.get(name, default))

    def getTimeAsSeconds(self, name: str, default: str) -> int:
        return int(self.conf.get(name, default).removesuffix("s"))

    def resourceProfileManager(self) -> Session:
        return self

    def defaultResourceProfile(self) -> None: ...

    def maxNumConcurrentTasks(self, _: Any) -> int:
        return self.room


@pytest.fixture
def hosts(tmp_path: Path) -> Any:
    made = DialInHosts(tmp_path / "hosts", "127.0.0.1", lambda _: None)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    for name in ("_AGAIN_S", "_END_S"):
        monkeypatch.setattr(executors, name, 0.05)
    monkeypatch.setattr(executors, "_as_here", lambda _, target: target)


def fails(check: Any) -> RunError:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        try:
            check()
        except RunError as error:
            return error
        time.sleep(0.02)
    raise AssertionError("nothing was raised")


def test_jobs_that_fail_are_told_with_the_reason(hosts):
    session = Session(2, "ModuleNotFoundError: No module named 'hvd_elastic'")
    with Executors(session, hosts, Request(2, 1, 1, use_gpu=False)) as check:
        assert "no package 'hvd_elastic'" in str(fails(check))


def test_too_little_room_is_told_and_waiting_jobs_are_cancelled(hosts):
    session = Session(1)
    with Executors(session, hosts, Request(4, 3, 2, use_gpu=False)) as check:
        text = str(fails(check))
    assert "6 processes wanted, and the executors of the cluster have room for 1 task" in text
    assert session.cancelled.is_set()


def test_executors_that_register_late_are_waited_for_as_spark_does(hosts):
    session = Session(0, master="spark://master:7077")
    with Executors(session, hosts, Request(1, 1, 1, use_gpu=False)) as check:
        check()  # for 40 times 15 s, by Spark's own settings
        session.room = 1
        check()
    session = Session(0, master="yarn")
    session.conf["spark.scheduler.barrier.maxConcurrentTasksCheck.interval"] = "0s"
    with Executors(session, hosts, Request(1, 1, 1, use_gpu=False)) as check:
        assert "have room for 0 tasks" in str(fails(check))


def test_no_other_host_takes_the_place_of_one_that_the_run_has_left(hosts):
    session, begun, ends = Session(2), list[int](), threading.Semaphore(0)

    def collect() -> None:
        begun.append(1)
        ends.acquire(timeout=LIMIT_S)

    session.collect = collect  # type: ignore[method-assign]
    jobs = Executors(session, hosts, Request(2, 1, 1, use_gpu=False))
    with jobs:
        left, kept = (HostProcess(hosts.dial_in.invitation, name, 1) for name in "ab")
        hosts.wait_for(2, lambda: None, 0.0, 2)
        hosts.release_host("a")
        left.wait()
        assert [each.host.name for each in hosts.hosts] == ["b"]
        ends.release()
        deadline = time.monotonic() + LIMIT_S
        while all(thread.is_alive() for thread in jobs._threads) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert [thread.is_alive() for thread in jobs._threads].count(True) == 1
        hosts.release_host("b")  # the last one may be given back
        assert not kept.ended
        kept.close()
        ends.release()
    assert not hosts.take_released()


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "[SPARK_JOB_CANCELLED] Job 4 cancelled as part of cancellation of all jobs SQLSTATE: X",
            "Job 4 cancelled as part of cancellation of all jobs, which ends the training",
        ),
        (
            "SparkException: Job 0 cancelled part of cancelled job group mine\n\tat org.apache",
            "Job 0 cancelled part of cancelled job group mine, which ends the training",
        ),
        ("(org.apache.spark.sql.connect) [OPERATION_CANCELED] Operation has been", "CANCELED"),
    ],
)
def test_jobs_that_are_cancelled_end_the_training_and_are_not_submitted_again(hosts, said, told):
    session = Session(2, said)
    with Executors(session, hosts, Request(1, 1, 1, use_gpu=False)) as check:
        process = HostProcess(hosts.dial_in.invitation, "a", 1)
        hosts.wait_for(1, lambda: None, 0.0, 1)  # also where there were enough
        assert told in str(fails(check))
        process.close()


def test_a_session_that_is_stopped_ends_the_training(hosts):
    session = Session(2)
    with Executors(session, hosts, Request(1, 1, 1, use_gpu=False)) as check:
        check()
        session._jsc = None  # as SparkSession.stop() does
        assert "the Spark session was stopped" in str(fails(check))
        session.cancelled.set()


def test_room_may_shrink_once_there_were_enough_hosts(hosts):
    session = Session(0)
    with Executors(session, hosts, Request(1, 1, 1, use_gpu=False)) as check:
        process = HostProcess(hosts.dial_in.invitation, "a", 1)
        hosts.wait_for(1, lambda: None, 0.0, 1)
        check()
        process.close()
        time.sleep(0.1)
        check()

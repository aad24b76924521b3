"""The jobs that give hosts, with a session whose jobs fail or wait."""

# ruff: noqa: N802  (the names are those of Spark)

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hvd_elastic.engines.dialled_hosts import DialledHosts
from hvd_elastic.engines.host_process import HostProcess
from hvd_elastic.errors import RunError
from hvd_elastic.spark import executors
from hvd_elastic.spark.executors import Executors, Request

LONG_S = 30.0


class Session:
    """As much of a Spark session as is asked; ``room`` tasks can run at a time."""

    def __init__(self, room: int, error: str = "") -> None:
        self.conf: dict[str, str] = {}
        self.sparkContext = self._jsc = self
        self._room, self._error = room, error
        self.cancelled = threading.Event()

    def range(self, *_: int) -> Session:
        return self

    def mapInArrow(self, *_: Any) -> Session:
        return self

    def collect(self) -> None:
        if self._error:
            raise ValueError(self._error)
        self.cancelled.wait(LONG_S)

    def setJobGroup(self, *_: Any, **__: Any) -> None: ...

    def cancelJobGroup(self, _: str) -> None:
        self.cancelled.set()

    def sc(self) -> Session:
        return self

    def resourceProfileManager(self) -> Session:
        return self

    def defaultResourceProfile(self) -> None: ...

    def maxNumConcurrentTasks(self, _: Any) -> int:
        return self._room


@pytest.fixture
def hosts(tmp_path: Path) -> Any:
    made = DialledHosts(tmp_path / "hosts", "127.0.0.1", lambda _: None)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    for name in ("_AGAIN_S", "_END_S", "_REGISTER_S"):
        monkeypatch.setattr(executors, name, 0.05)


def fails(check: Any) -> RunError:
    deadline = time.monotonic() + LONG_S
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


def test_room_may_shrink_once_there_were_enough_hosts(hosts):
    session = Session(0)
    with Executors(session, hosts, Request(1, 1, 1, use_gpu=False)) as check:
        process = HostProcess(hosts.dial_in.invitation, "a", 1)
        hosts.wait_for(1, lambda: None, 0.0, 1)
        check()
        process.close()
        time.sleep(0.1)
        check()

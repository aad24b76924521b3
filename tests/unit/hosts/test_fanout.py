from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from hvd_elastic.errors import HostUnreachableError, SshError
from hvd_elastic.hosts import fanout
from hvd_elastic.hosts.fanout import Outcome, Stopper, fan_out
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.hosts.process import CommandTimeoutError
from tests.paths import LIMIT_S
from tests.waiting import Clock

HOSTS = [Host(f"node{number}") for number in range(1, 9)]


def test_every_host_has_its_own_outcome() -> None:
    def task(host: Host, stopper: Stopper) -> str:
        if host.name == "node2":
            raise HostUnreachableError("no route")
        if host.name == "node3":
            raise CommandTimeoutError("too slow", b"", b"")
        if host.name == "node4":
            raise SshError("refused")
        if host.name == "node5":
            raise ZeroDivisionError("a defect")
        return host.name

    results = {
        result.host.name: result
        for result in fan_out(
            HOSTS,
            task,
            assess=lambda name: (
                (Outcome.FAILED, "status 1") if name == "node6" else (Outcome.OK, "")
            ),
        )
    }
    assert len(results) == 8
    outcomes = {name: result.outcome for name, result in results.items() if not result.ok}
    assert outcomes == {
        "node2": Outcome.UNREACHABLE,
        "node3": Outcome.TIMED_OUT,
        "node4": Outcome.FAILED,
        "node5": Outcome.FAILED,
        "node6": Outcome.FAILED,
    }
    assert "ZeroDivisionError: a defect" in results["node5"].error
    assert (results["node6"].error, results["node6"].value) == ("status 1", "node6")
    assert results["node1"].answer == "node1"


def test_no_more_than_fanout_at_a_time() -> None:
    lock = threading.Lock()
    running = most = 0
    pair = threading.Barrier(2)

    def task(host: Host, stopper: Stopper) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        pair.wait(LIMIT_S)
        with lock:
            running -= 1

    assert sum(result.ok for result in fan_out(HOSTS, task, fanout=2)) == 8
    assert most == 2


def test_a_hung_host_holds_nobody_up_and_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(fanout, "time", SimpleNamespace(monotonic=clock))
    hung = threading.Event()
    stopped = threading.Event()

    def task(host: Host, stopper: Stopper) -> str:
        if host.name == "node1":
            stopper.add_action(stopped.set)
            clock.now += 3.0  # for this host alone, however long the others really take
            hung.wait(LIMIT_S)
        return host.name

    results = list(fan_out(HOSTS, task, fanout=1, timeout_s=3.0))
    hung.set()
    assert [result.outcome for result in results] == [Outcome.TIMED_OUT, *[Outcome.OK] * 7]
    assert "node1: not done within 3 s" in results[0].error
    assert stopped.wait(LIMIT_S)


def test_results_come_as_they_end() -> None:
    gate = threading.Event()

    def task(host: Host, stopper: Stopper) -> str:
        if host.name == "node1":
            assert gate.wait(LIMIT_S)
        return host.name

    names = []
    for result in fan_out(HOSTS, task):
        names.append(result.host.name)
        if len(names) == 7:
            gate.set()
    assert names[-1] == "node1"


def test_who_stops_listening_stops_the_tasks() -> None:
    stopped: list[str] = []
    started = threading.Barrier(4)
    hold = threading.Event()

    def task(host: Host, stopper: Stopper) -> str:
        started.wait(LIMIT_S)
        if host.name != "node1":
            stopper.add_action(lambda: stopped.append(host.name))
            stopper.add_action(hold.set)
            hold.wait(LIMIT_S)
            time.sleep(0)
        return host.name

    results = fan_out(HOSTS, task, fanout=4)
    assert next(results).host.name == "node1"
    # The fourth place went to node5, which waits at the barrier and is never stopped by an action.
    results.close()  # type: ignore[attr-defined]
    assert hold.wait(LIMIT_S)
    started.abort()
    assert set(stopped) <= {"node2", "node3", "node4"}


def test_an_action_added_after_the_stop_runs_at_once() -> None:
    stopper = Stopper()
    seen: list[int] = []
    stopper.add_action(lambda: seen.append(1))
    stopper.add_action(lambda: seen.append(2))
    stopper.stop()
    stopper.add_action(lambda: seen.append(3))
    assert seen == [2, 1, 3]


def test_a_fanout_of_nothing() -> None:
    with pytest.raises(ValueError, match="fanout is 0"):
        list(fan_out(HOSTS, lambda host, stopper: None, fanout=0))
    assert list(fan_out([], lambda host, stopper: None)) == []

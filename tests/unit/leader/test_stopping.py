"""Which signals stop a run, and which hosts it is asked to leave."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_elastic.control.endings import StopCause
from hvd_elastic.control.events import HostDraining, HostReturned, StopRequested
from hvd_elastic.control.progress import Position
from hvd_elastic.control.state_machine import Phase
from hvd_elastic.leader.spec import RunSpec
from hvd_elastic.leader.steering import Stopping, drain

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("nohup", [True, False])
def test_a_hang_up_stops_a_run_unless_it_was_started_by_nohup(nohup: bool) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
    unused: Any = None
    with Stopping(unused, unused, unused, unused, unused).signals():
        caught = {number for number in NUMBERS if callable(signal.getsignal(number))}
    assert caught == {signal.SIGINT, signal.SIGTERM, *(() if nohup else (signal.SIGHUP,))}


def test_a_leader_that_has_sigterm_blocked_does_not_hear_it() -> None:
    unused: Any = None
    heard = []
    for blocked in ((), (signal.SIGTERM,)):
        stopping = Stopping(unused, unused, unused, unused, unused)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        try:
            with stopping.signals():
                heard.append(stopping.hears_sigterm)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert heard == [True, False]


def test_a_stop_waits_for_the_last_checkpoint_as_long_as_steps_and_writing_take() -> None:
    told: list[Any] = []
    holders = [SimpleNamespace(name="a", step=90)]
    run: Any = SimpleNamespace(
        spec=RunSpec(("train",), "/", failure_timeout_s=5.0),
        progress=SimpleNamespace(reached=Position(90, 0, 0, 90), is_known=True),
        journal=SimpleNamespace(emit=lambda _: None),
    )
    executor: Any = SimpleNamespace(
        finish=None,
        machine=SimpleNamespace(state_holders=holders, phase=Phase.RUNNING),
        say=lambda *_: None,
        tell=told.append,
    )
    failover: Any = SimpleNamespace(leads=True)
    fetching: Any = SimpleNamespace(reserve_s=20.0)
    liveness: Any = SimpleNamespace(longest_period_s=10.0)
    stopping = Stopping(run, executor, failover, fetching, liveness)
    before = time.monotonic()
    stopping.ask(StopCause.COMMAND)
    asked = time.monotonic()
    stopping.ask_for_last_checkpoint(before + 20.0 + 5.0 + 2 * 10.0)
    assert told == []
    stopping.ask_for_last_checkpoint(asked + 3600.0)
    assert [type(event) for event in told] == [StopRequested]


def test_a_run_leaves_a_host_that_is_named_in_another_case() -> None:
    hosts = ["login", "GPU1.example"]
    answer = drain({"host": "gpu1.Example"}, hosts, [], reserve_s=0.0)
    assert isinstance(answer.event, HostDraining)
    assert answer.event.host == hosts[1]
    assert drain({"host": "gpu1.EXAMPLE", "undo": True}, hosts, hosts, 0.0).event == HostReturned(
        hosts[1]
    )
    assert not drain({"host": "gpu1"}, hosts, [], reserve_s=0.0).ok

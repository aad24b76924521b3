"""How a leader logs in to many hosts and sends to them; nothing is started."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.hosts.ssh import LocalConnection
from hvd_elastic.leader.agents.agents import Agents
from hvd_elastic.leader.agents.connection import AgentConnection, Sender
from hvd_elastic.leader.spec import RunSpec
from hvd_elastic.wire.framing import encode
from tests.unit.wire.wire_samples import leader_hello

TIMEOUT_S = 60


class Pipe:
    """The input of an agent, whose writes wait for the gate."""

    def __init__(self) -> None:
        self.gate, self.ready = threading.Event(), True
        self.written: list[tuple[bytes, threading.Thread]] = []
        self.changed = threading.Condition()
        self.began = threading.Event()

    def is_ready(self) -> bool:
        return self.ready

    def write(self, line: bytes) -> None:
        self.began.set()
        assert self.gate.wait(TIMEOUT_S)
        with self.changed:
            self.written.append((line, threading.current_thread()))
            self.changed.notify_all()

    def wait_for(self, *lines: bytes) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.lines == list(lines), TIMEOUT_S), self.lines

    @property
    def lines(self) -> list[bytes]:
        return [line for line, _ in self.written]


class Process:
    """An agent's process that says nothing until it is closed."""

    stderr_tail = b""

    def __init__(self) -> None:
        self.stdin, self.stdout, self._over = Pipe(), self, threading.Event()

    def read(self) -> bytes:
        assert self._over.wait(TIMEOUT_S)
        return b""

    def wait(self, _: float) -> int:
        return 0

    wait_drained = wait

    def close(self) -> None:
        self.stdin.gate.set()
        self._over.set()


class Connection:
    python, alive = None, True

    def __init__(self) -> None:
        self.process = Process()

    def start(self, _: str, on_stdout: Callable[[bytes], None]) -> Process:
        return self.process

    def close(self) -> None: ...


HELLO = encode(leader_hello())
Open = Callable[[], tuple[AgentConnection, Pipe]]


@pytest.fixture
def open_agent() -> Iterator[Open]:
    """Opens a connection whose hello is on its way."""
    sender, opened = Sender(), list[AgentConnection]()
    ends: list[Connection] = []

    def connect(*_: Any) -> Any:
        ends.append(Connection())
        return ends[-1]

    def start() -> tuple[AgentConnection, Pipe]:
        arguments = Host("b", slots=1), connect, "python3", leader_hello()
        logins = threading.Semaphore()
        opened.append(AgentConnection(*arguments, lambda *_: None, logins, sender))
        while len(ends) < len(opened):
            time.sleep(0.001)
        pipe = ends[-1].process.stdin
        assert pipe.began.wait(TIMEOUT_S)
        return opened[-1], pipe

    yield start
    for agent in opened:
        agent.drop()
        assert agent.wait_gone(TIMEOUT_S)


def test_lines_keep_their_order_whether_they_had_to_wait_or_not(open_agent: Open) -> None:
    agent, pipe = open_agent()
    agent._outgoing.pass_on(b"1\n")
    agent._outgoing.pass_on(b"2\n")
    assert pipe.lines == [], "the hello is not written yet"
    pipe.gate.set()
    pipe.wait_for(HELLO, b"1\n", b"2\n")
    long = b"3" * 5000
    for line in (long, b"4\n"):
        agent._outgoing.pass_on(line)
    pipe.wait_for(HELLO, b"1\n", b"2\n", long, b"4\n")


def test_a_line_for_which_there_is_room_is_written_at_once(open_agent: Open) -> None:
    agent, pipe = open_agent()
    pipe.gate.set()
    pipe.wait_for(HELLO)
    while agent._outgoing.waiting:
        time.sleep(0.001)
    agent._outgoing.pass_on(b"1\n")
    assert pipe.written[-1] == (b"1\n", threading.current_thread())


def test_a_host_that_takes_nothing_keeps_no_other_waiting(open_agent: Open) -> None:
    (stuck, full), (other, pipe) = open_agent(), open_agent()
    full.ready = False
    pipe.gate.set()
    for agent in (stuck, other):
        agent.send_line(b"1\n")
    pipe.wait_for(HELLO, b"1\n")
    assert full.lines == []
    full.gate.set()
    full.wait_for(HELLO, b"1\n")


def test_a_full_pipe_has_no_room() -> None:
    process = LocalConnection(Host("localhost", slots=1)).start("exec sleep 60")
    try:
        assert process.stdin.is_ready()
        while process.stdin.is_ready():
            process.stdin.write(bytes(4096))  # never waits, or this test would
    finally:
        process.stop()
    assert not process.stdin.is_ready(), "it is closed"


def test_so_many_hosts_log_in_at_a_time_and_no_more() -> None:
    now, most = 0, 0
    counting = threading.Lock()

    def connect(*_: Any) -> Any:
        nonlocal now, most
        with counting:
            now += 1
            most = max(most, now)
        time.sleep(0.02)
        with counting:
            now -= 1
        raise OSError("not today")

    logins, sender = threading.Semaphore(3), Sender()
    arguments = connect, "python3", leader_hello(), lambda *_: None, logins, sender
    agents = [AgentConnection(Host(f"h{number}"), *arguments) for number in range(12)]
    for agent in agents:
        assert agent.wait_gone(TIMEOUT_S)
    assert most == 3


def test_many_hosts_send_heartbeats_less_often_but_three_in_each_timeout() -> None:
    def interval(hosts: int, failure_timeout_s: float = 10.0) -> float:
        spec = RunSpec(("true",), "/", failure_timeout_s=failure_timeout_s)
        return Agents(spec, {}, lambda *_: None).heartbeat_s(hosts)

    assert [interval(hosts) for hosts in (1, 100, 256, 5000)] == [1.0, 1.0, 2.56, 3.0]
    assert interval(2, 3.0) == pytest.approx(0.3)
    assert interval(256, 3.0) == pytest.approx(1.0)


def test_the_leader_sends_two_heartbeats_in_each_timeout() -> None:
    agents = Agents(RunSpec(("true",), "/", failure_timeout_s=6.0), {}, lambda *_: None)
    hosts = 1000
    sent: list[float] = []
    now = 0.0

    class Up:
        def beat(self, _: int | None) -> None:
            sent.append(now)

    up: Any = Up()
    agents.by_host.update({f"h{number}": up for number in range(hosts)})
    while now < 12.5:
        agents.beat(now, None)
        now += 0.25
    assert sorted(set(sent)) == [0.0, 3.0, 6.0, 9.0, 12.0]
    assert len(sent) == 5 * hosts

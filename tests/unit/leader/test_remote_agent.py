"""The leader's end of a connection, whatever comes from the other one; nothing is started."""

from __future__ import annotations

import contextlib
import io
import platform
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hvd_elastic.control.events import AgentFailed
from hvd_elastic.control.progress import Activity
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.leader.agents.connection import AgentConnection, Sender
from hvd_elastic.leader.leader import Leader
from hvd_elastic.leader.spec import RunSpec
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.run_events import HostLost
from hvd_elastic.wire import messages as msg
from hvd_elastic.wire.framing import encode
from tests.paths import LIMIT_S
from tests.unit.wire.wire_samples import agent_hello, leader_hello

HELLO = encode(agent_hello(python=platform.python_version()))


class Process:
    """An agent's process that has written all it will ever write."""

    def __init__(self, output: bytes, stderr: bytes = b"") -> None:
        self.stdin, self.stdout, self.stderr_tail = io.BytesIO(), io.BytesIO(), stderr
        self.output = output

    def wait(self, _: float) -> int:
        return 1

    wait_drained = wait

    def close(self) -> None: ...


class Connection:
    python, alive = None, True

    def __init__(self, process: Process) -> None:
        self._process = process

    def start(self, _: str, on_stdout: Callable[[bytes], None]) -> Process:
        with contextlib.suppress(EOFError):
            on_stdout(self._process.output)
        return self._process

    def close(self) -> None: ...


def heard(
    output: bytes,
    stderr: bytes = b"",
    on: list[AgentConnection] | None = None,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """What is posted of an agent that writes this; ``on`` gets the connection."""
    process = Process(output, stderr)
    posted: queue.Queue[Any] = queue.Queue()
    connection = AgentConnection(
        Host("b", slots=1),
        lambda _: Connection(process),  # type: ignore[arg-type,return-value]
        *("python3", leader_hello(env=env or {})),
        lambda _, message: posted.put(message),
        threading.Semaphore(),
        Sender(),
    )
    if on is not None:
        on.append(connection)
    found = [posted.get(timeout=LIMIT_S)]
    while not isinstance(found[-1], AgentFailed):
        found.append(posted.get(timeout=LIMIT_S))
    return found


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"\x80\x04.\xff", "host b: its agent sent a line that is not JSON"),
        (b'{"ev": "beat", "workers": {', "host b: its agent sent a line that is not JSON"),
        (b'{"ev": "steal"}', "with ev 'steal'; valid are beat, hardware, hello, host_sample, "),
        (b'{"ev": "log", "worker": "w", "data": 7}', "wrong message 'log': Expected `str`"),
        (b'{"ev": "worker", "worker": "w", "message": {"kind": "x"}}', "Invalid value 'x'"),
    ],
)
def test_an_agent_that_sends_what_is_no_message_is_given_up(line: bytes, words: str) -> None:
    later = encode(msg.AgentBeat({}))
    hello, down = heard(HELLO + line + b"\n" + later)
    assert isinstance(hello, msg.AgentHello)
    assert words in down.cause
    assert not down.fatal, "it is tried again"


@pytest.mark.parametrize(
    ("spool", "home", "expected"),
    [
        ("/etc", None, "…/spool/unit/node1"),
        ("spool/unit/node1", None, "…/spool/unit/node1"),
        ("/home/u/spool/unit/node1/..", None, "…/spool/unit/node1"),
        ("/home/u/spool/unit/node2", None, "…/spool/unit/node1"),
        ("/home/u/spool/unit/node1", "/data/h", "/data/h/spool/unit/node1"),
    ],
)
def test_a_host_whose_agent_names_another_folder_than_the_run_s_is_not_used(
    spool: str, home: str | None, expected: str
) -> None:
    """The leader would read, write and remove files there."""
    env = {} if home is None else {"HVD_ELASTIC_HOME": home}
    hello = encode(agent_hello(python=platform.python_version(), spool=spool))
    (failed,) = heard(hello, env=env)
    assert f"files of the run in {spool}, which is not {expected}" in failed.cause
    assert failed.fatal, "trying again is of no use"


@pytest.mark.parametrize(
    ("alive", "cause"),
    [(True, "the agent ended: Killed"), (False, "its connection broke")],
)
def test_a_lost_connection_is_not_taken_for_the_end_of_the_agent(
    alive: bool, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Connection, "alive", alive)
    assert heard(HELLO, b"Killed\n")[-1].cause == cause


def test_what_a_shell_prints_before_the_agent_speaks_is_passed_over() -> None:
    noise = b'Welcome to b\n{"motd": 1}\n[]\n{"ev":' + b"[" * 200_000 + b"\n"
    warning = msg.AgentWarning("it works")
    hello, heard_later, _ = heard(noise + HELLO + encode(warning))
    assert isinstance(hello, msg.AgentHello)
    assert heard_later == warning


def test_heartbeats_wait_to_be_taken_and_wake_nobody() -> None:
    beats = [msg.AgentBeat({"w": Activity(step=step)}) for step in (1, 2)]
    connections: list[AgentConnection] = []
    hello, down = heard(HELLO + b"".join(map(encode, beats)), on=connections)
    assert isinstance(hello, msg.AgentHello)
    assert isinstance(down, AgentFailed)
    (connection,) = connections
    assert connection.take_activities() == {"w": Activity(step=2)}
    assert connection.take_activities() == {}, "each counts once"


@pytest.mark.parametrize("fields", [b"", b', "python": "%s"' % platform.python_version().encode()])
def test_the_hello_of_another_version_is_told_as_that(fields: bytes) -> None:
    line = b'{"ev": "hello", "protocol": 3, "version": "0.0.1"%s, "swept": "no number"}\n' % fields
    (down,) = heard(line)
    assert down.fatal
    assert "host b has " in down.cause
    if fields:
        assert "host b has hvd_elastic 0.0.1 (protocol 3), the leader has" in down.cause


@pytest.mark.parametrize(
    ("stderr", "words"),
    [
        (
            b"'hvd_elastic.agent.agent' (ModuleNotFoundError: No module named 'hvd_elastic')",
            "python3 has no package hvd_elastic. Install it there",
        ),
        (
            b"  import msgspec\nModuleNotFoundError: No module named 'msgspec'",
            "the agent cannot start: ModuleNotFoundError: No module named 'msgspec'. The env",
        ),
    ],
)
def test_a_package_that_a_host_lacks_is_named(stderr: bytes, words: str) -> None:
    (down,) = heard(b"", stderr)
    assert down.fatal
    assert words in down.cause


def test_a_run_loses_the_host_of_such_an_agent_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shown: list[Any] = []
    folder = RunFolder.create("r1", root=tmp_path)
    leader = Leader(RunSpec(("true",), "/", slots=1), folder, {}, shown.append, lambda *_: None)

    class Up:
        host, up, acted_upon, info = Host("localhost", slots=1), True, 0, agent_hello()
        started_at = 0.0

        def send(self, _: msg.LeaderToAgent) -> None: ...

    agent: Any = Up()
    by_host = leader._run.agents.by_host
    monkeypatch.setattr(
        leader._run.agents, "start", lambda name, *_, **__: by_host.update({name: agent})
    )
    leader._run.hostfile.read()
    leader._hosts_changed()
    leader._heard(agent, agent_hello())
    cause = "host localhost: its agent sent a message with ev 'steal'"
    leader._heard(agent, AgentFailed("localhost", cause))
    (lost,) = [event for event in shown if isinstance(event, HostLost)]
    assert lost.cause == cause
    assert leader._executor.finish is None

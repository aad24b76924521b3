"""The agent of a kept host, spoken to in frames, without ssh."""

from __future__ import annotations

import marshal
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvd_elastic.hosts.programs.keep_wire import (
    CLOSE,
    DRAINED,
    ERR,
    EXIT,
    FORGET,
    INPUT,
    MARK,
    OUT,
    OVER,
    REFUSED,
    ROOM,
    START,
    WINDOW_BYTES,
    Frames,
    frame,
    pack_number,
    unpack_number,
)
from tests.ssh.tools import is_alive, wait_until

PROGRAM = "from hvd_elastic.hosts.programs.keep_commands import main; main()"


class Agent:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._frames = Frames()
        self._found: list[tuple[int, int, bytes]] = []
        self._number = 0
        assert self.process.stdout is not None
        assert self.process.stdin is not None
        self._out, self._in = self.process.stdout.fileno(), self.process.stdin
        begins = b""
        while not begins.endswith(MARK):
            begins += os.read(self._out, 1)

    def begin(self, command: str, cwd: str = "", feeds: bool = False) -> int:
        self._number += 1
        hold = (command.encode(), {b"NAME": b"it's"}, cwd.encode(), feeds, 0.5)
        self.say(START, self._number, marshal.dumps({"keep_s": 60.0, "hold": hold, "argv": []}, 2))
        return self._number

    def say(self, kind: int, number: int, payload: bytes = b"") -> None:
        self._in.write(frame(kind, number, payload))

    def hear(self) -> tuple[int, int, bytes]:
        while not self._found:
            data = os.read(self._out, 1 << 16)
            assert data, "the agent has ended"
            self._found = self._frames.feed(data)
        return self._found.pop(0)

    def result(self, number: int) -> tuple[int, str]:
        """Exit status, and what it wrote, or why it did not begin."""
        code, text = None, b""
        last: list[int] = []
        while not last or last[-1] != OVER:
            kind, of, payload = self.hear()
            assert of == number
            last.append(kind)
            text += payload if kind in (OUT, ERR, REFUSED) else b""
            code = unpack_number(payload) if kind == EXIT else code
        assert code is not None
        assert last.count(DRAINED) <= 1
        return code, text.decode()

    def run(self, command: str, cwd: str = "", feeds: bool = False) -> tuple[int, str]:
        return self.result(self.begin(command, cwd, feeds))


@pytest.fixture
def agent() -> Iterator[Agent]:
    agent = Agent()
    yield agent
    agent.process.stdin.close()  # type: ignore[union-attr]
    agent.process.wait(60)
    agent.process.stdout.close()  # type: ignore[union-attr]


def test_one_holder_holds_what_leaves_nothing(agent: Agent, tmp_path: Path) -> None:
    begun = [agent.run("echo $PPID $PWD $NAME; pwd >&2; exit 3")]
    holder, folder = int(begun[0][1].split()[0]), str(Path.cwd())
    assert begun == [(3, f"{holder} {folder} it's\n{folder}\n")]
    assert agent.run("pwd; echo $PPID", str(tmp_path)) == (0, f"{tmp_path}\n{holder}\n")
    assert agent.run("kill -TERM $$") == (143, "")
    # What has detached and ended is nothing that is left.
    assert agent.run("(setsid true &) ; wait; sleep 0.2; pwd; echo $PPID") == (
        0, f"{folder}\n{holder}\n",
    )  # fmt: skip
    code, text = agent.run("sleep 100 >/dev/null 2>&1 & echo $! $PPID")
    left, same = map(int, text.split())
    assert (code, same) == (0, holder)
    assert is_alive(left)
    _, other = agent.run("echo $PPID")
    assert int(other) != holder
    assert is_alive(left)
    os.kill(left, signal.SIGKILL)


def test_why_a_command_does_not_begin(agent: Agent) -> None:
    assert agent.run("true", "/none") == (1, "/none: No such file or directory")
    assert agent.run("a\0b") == (1, "the command: embedded null byte")
    assert agent.run("echo on") == (0, "on\n")


def test_the_end_of_a_command_is_the_end_of_what_it_started(agent: Agent) -> None:
    command = "env -i setsid sleep 100 & echo $!; sleep 100 & echo $!; echo $PPID; wait"
    for kind in (CLOSE, FORGET):
        number = agent.begin(command)
        text = b""
        while text.count(b"\n") < 3:
            text += agent.hear()[2]
        *pids, holder = map(int, text.split())
        agent.say(kind, number)
        code, _ = agent.result(number)
        assert code == 128 + signal.SIGTERM
        assert not any(map(is_alive, pids))
        wait_until(lambda pid=holder: not is_alive(pid), "the holder's end")


def test_commands_side_by_side_and_a_holder_that_is_killed(agent: Agent) -> None:
    first = agent.begin("echo $PPID; cat; echo end", feeds=True)
    (kind, _, text) = agent.hear()
    assert kind == OUT
    _, other = agent.run("echo $PPID")
    assert other.encode() != text
    agent.say(INPUT, first, b"\0\0\0\3one")
    agent.say(INPUT, first, bytes(4))
    assert agent.result(first) == (0, "oneend\n")
    assert agent.run("echo $PPID") == (0, other)
    # What comes of an input when nobody reads it any more must not be taken for anything else.
    assert agent.run("exec <&-; echo $PPID", feeds=True) == (0, other)
    _, idle = agent.run("echo $PPID")
    assert idle != other
    os.kill(int(idle), signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{int(idle)}").exists(), "the holder's end")
    assert agent.run("echo on") == (0, "on\n")


def test_a_holder_is_anothers_while_output_of_its_last_command_waits(agent: Agent) -> None:
    """As where a call's output is read slowly and another call is made meanwhile."""
    size = WINDOW_BYTES + (1 << 15)
    first = agent.begin(f"echo $PPID; head -c {size} /dev/zero")
    text, ended, kind = b"", False, EXIT
    while not ended or len(text) < WINDOW_BYTES:
        kind, of, payload = agent.hear()
        assert of == first
        text += payload if kind == OUT else b""
        ended = ended or kind == EXIT
    holder = text.split(b"\n")[0].decode()
    assert agent.run("echo $PPID; exit 3") == (3, f"{holder}\n")
    agent.say(ROOM, first, pack_number(WINDOW_BYTES))
    while kind != OVER:
        kind, of, payload = agent.hear()
        assert of == first
        text += payload if kind == OUT else b""
    assert len(text) == len(holder) + 1 + size


def test_the_end_of_the_agent_is_the_end_of_all(agent: Agent) -> None:
    agent.begin("setsid sleep 100 & echo $!; wait")
    pid = int(agent.hear()[2])
    agent.process.kill()
    wait_until(lambda: not is_alive(pid), "the command's end")

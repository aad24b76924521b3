"""A node of a copy as a process of its own, and what the leader reads from one."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_elastic.hosts.connection import SshOptions
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.hosts.process import ByteStream
from hvd_elastic.tools.copy import session as copy_session
from hvd_elastic.tools.copy.job import CopyJob, CopySettings
from hvd_elastic.tools.copy.session import CopySession
from tests.paths import LIMIT_S

SLOW = """
import time
from hvd_elastic.programs.copy import node

class Slow(node.Node):
    def open_session(self):
        before = self._heard
        self.say("hello")
        while self._heard == before:
            time.sleep(0.01)
        self.say("heard")

    def obey(self, do, message):
        self.say(do, size=len(message["text"]))

Slow({}).run()
"""


@pytest.mark.parametrize("command", [b'{"do": "a", "text": ""}\n', b'{"do": "a", "text": "'])
def test_the_leader_is_heard_while_a_node_works(command: bytes) -> None:
    """Also by a part of a message that is long."""
    text = b"" if command.endswith(b"\n") else b"x" * (1 << 17)
    end = b'"}\n' if text else b""
    with subprocess.Popen(
        [sys.executable, "-c", SLOW], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as node:
        assert node.stdin is not None
        assert node.stdout is not None
        said = (message for line in node.stdout if (message := json.loads(line))["say"] != "at")
        assert next(said)["say"] == "hello"
        node.stdin.write(command + text)
        node.stdin.flush()
        assert next(said, {"say": "it has ended"})["say"] == "heard"
        node.stdin.write(end)
        node.stdin.close()
        assert next(said) == {"say": "a", "size": len(text)}


def test_a_message_that_is_longer_than_the_buffer_of_the_leader_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = CopySession(CopyJob([Host("a")], "/set", "/data/set", SshOptions(), CopySettings()))
    message = {"say": "digests", "digests": "x" * 1000}
    stdout = ByteStream(limit=100)
    process: Any = SimpleNamespace(
        stdout=stdout, stdin=SimpleNamespace(write=len), wait=lambda _: 0, last_line=""
    )
    monkeypatch.setattr(copy_session, "start_program", lambda *_: process)
    node = session._nodes["a"]
    node.connection = SimpleNamespace(close=lambda: None)  # type: ignore[assignment]

    def write() -> None:
        data = b"Welcome!\n" + json.dumps(message).encode() + b"\n"
        for at in range(0, len(data), 10):
            stdout.put(data[at : at + 10])
        stdout.mark_end()

    threading.Thread(target=write, daemon=True).start()
    session._open(node)
    assert session._events.get(timeout=LIMIT_S) == (node, message)

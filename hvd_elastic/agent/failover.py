"""How an agent that lost its leader meets the agent process that the next leader has started.

The running agent listens on a unix socket in the abstract namespace, named after run, host and
user. A newly started agent process looks there first. If somebody answers, it either has the old
one end (the leader has given it up), or hands over its own standard input and output: from then on
the old agent, with its running workers, talks to the new leader, and the new process merely stays
until the old one ends.
"""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import socket
import struct
from dataclasses import dataclass
from typing import Literal

from hvd_elastic.wire.framing import Message, decode, encode, peer_uid

__all__ = ["Caller", "answer_caller", "call_predecessor", "listen_for_successors"]

_ANSWER_S = 8.0
_MAX_HELLO_BYTES = 16 << 20

Answer = Literal["nobody", "ended", "taken", "refused"]


@dataclass
class Caller:
    """A newly started agent process at the door.

    Attributes:
        connection: to it; it notices when this is closed.
        hello: the new leader's first message.
        rest: what of the leader's words it had already read.
        input, output: its standard input and output.
    """

    connection: socket.socket
    hello: Message
    rest: bytes
    input: int
    output: int

    def refuse(self, led: Message) -> None:
        """Send it away; ``led``: who leads this run already."""
        self._answer({"answer": "refused", "led": led})
        self.close()

    def accept(self) -> None:
        """Its pipes are ours from now on."""
        self._answer({"answer": "taken"})

    def close(self) -> None:
        """Let go of what it handed over."""
        self.connection.close()
        for descriptor in (self.input, self.output):
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _answer(self, message: Message) -> None:
        with contextlib.suppress(OSError):
            self.connection.sendall(encode(message))


def _address(run_id: str, host: str) -> str:
    return f"\0hvd_elastic/{run_id}/{host}/{os.getuid()}/agent"


def listen_for_successors(run_id: str, host: str) -> socket.socket:
    """The socket where the next agent process of this run and host finds this one."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(_address(run_id, host))
    listener.listen(4)
    listener.setblocking(False)
    return listener


def answer_caller(listener: socket.socket) -> Caller | None:
    """Who is at the door; None when it went away, or is not ours.

    The caller sends everything at once, so this waits for next to nothing.
    """
    try:
        connection, _ = listener.accept()
    except OSError:
        return None
    descriptors: list[int] = []
    try:
        connection.settimeout(_ANSWER_S)
        if peer_uid(connection) != os.getuid():
            raise ValueError("another user")
        data, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 2)
        while not data.endswith(b"\n"):
            more = connection.recv(1 << 16)
            if not more or len(data) > _MAX_HELLO_BYTES:
                raise ValueError("no complete message")
            data += more
        message = decode(data)
        hello, rest = message["hello"], base64.b64decode(message["rest"])
        read, write = descriptors
    except (OSError, ValueError, KeyError):
        connection.close()
        for descriptor in descriptors:
            os.close(descriptor)
        return None
    return Caller(connection, hello, rest, read, write)


def call_predecessor(hello: Message, rest: bytes, output: int) -> tuple[Answer, Message]:
    """Look for a running agent of the same run, host and user, and settle who goes on.

    Blocks; nothing else has begun in this process.

    Args:
        hello: the leader's first message; ``take_over`` says what it wants of an old agent.
        rest: what was read of the leader's words after it.
        output: descriptor of this process's way to the leader.

    Returns:
        What became of it, and after a refusal who leads this run already. After ``taken`` this
        call has lasted until the old agent ended.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_ANSWER_S)
        try:
            connection.connect(_address(hello["run_id"], hello["host"]))
        except OSError:
            return "nobody", {}
        try:
            text = encode({"hello": hello, "rest": base64.b64encode(rest).decode()})
            socket.send_fds(connection, [text[:1]], [0, output])
            connection.sendall(text[1:])
            answer = _read_line(connection)
        except OSError:  # it stands still, or died at this moment
            answer = b""
            _kill_peer(connection)
        if not answer:
            return "ended", {}
        message = decode(answer)
        if message["answer"] == "refused":
            return "refused", message["led"]
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        # While this process lives, so does the ssh channel with the pipes it handed over.
        connection.settimeout(None)
        with contextlib.suppress(OSError):
            connection.recv(1)
        return "taken", {}


def _read_line(connection: socket.socket) -> bytes:
    """The answer; empty when the old agent ended instead."""
    data = b""
    while not data.endswith(b"\n"):
        more = connection.recv(1 << 12)
        if not more:
            return b""
        data += more
    return data


def _kill_peer(connection: socket.socket) -> None:
    """The old agent does not answer: its end ends its workers too (parent-death signal)."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, uid, _ = struct.unpack("3i", credentials)
    if uid == os.getuid() and pid > 1:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

"""How an agent that lost its leader meets the agent process that the next leader has started.

The running agent listens on a unix socket in the abstract namespace, named after run, host and
user. A newly started agent process looks there first. If somebody answers, it either has the old
one end (the leader has given it up), or hands over its own standard input and output: from then on
the old agent, with its running workers, talks to the new leader, and the new process merely stays
until the old one ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from hvd_elastic.agent.spool import Spool
from hvd_elastic.agent.workers import Worker, Workers
from hvd_elastic.wire import messages as msg
from hvd_elastic.wire.framing import MessageDecoder, ProtocolError, encode, peer_uid

_ANSWER_S = 8.0
_LOOK_S = 0.1
_WRITE_PATIENCE_S = 300.0
"""So long nothing may be seen of a checkpoint on its way: a disk may take it all at the end."""
_MAX_HELLO_BYTES = 16 << 20


class _Call(msgspec.Struct, tag="call"):
    """What a newly started agent process says at the door; its pipes come with it."""

    hello: msg.LeaderHello
    rest: bytes


class Taken(msgspec.Struct, tag_field="ev", tag="taken"):
    """The running agent follows the new leader."""


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
    hello: msg.LeaderHello
    rest: bytes
    input: int
    output: int

    def refuse(self, led: msg.LeaderIdentity) -> None:
        """Send it away; ``led``: who leads this run already."""
        self._answer(msg.Refused(led))
        self.close()

    def accept(self) -> None:
        """Say that its pipes are ours from now on."""
        self._answer(Taken())

    def close(self) -> None:
        """Let go of what it handed over."""
        self.connection.close()
        for descriptor in (self.input, self.output):
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _answer(self, message: msg.Refused | Taken) -> None:
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
        calls: MessageDecoder[_Call] = MessageDecoder(_Call, "an agent process")
        call = calls.decode(data)
        read, write = descriptors
    except (OSError, ValueError, ProtocolError):
        connection.close()
        for descriptor in descriptors:
            os.close(descriptor)
        return None
    return Caller(connection, call.hello, call.rest, read, write)


def call_predecessor(
    hello: msg.LeaderHello, rest: bytes, output: int
) -> Taken | msg.Refused | None:
    """Look for a running agent of the same run, host and user, and settle who goes on.

    Blocks; nothing else has begun in this process.

    Args:
        hello: the leader's first message; ``take_over`` says what it wants of an old agent.
        rest: what was read of the leader's words after it.
        output: descriptor of this process's way to the leader.

    Returns:
        The answer of the running agent; after Taken this call has lasted until that agent ended.
        None where there is no agent any more.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_ANSWER_S)
        try:
            connection.connect(_address(hello.run_id, hello.host))
        except OSError:
            return None
        try:
            text = encode(_Call(hello, rest))
            socket.send_fds(connection, [text[:1]], [0, output])
            connection.sendall(text[1:])
            answer = _read_line(connection)
        except OSError:  # it stands still, or died at this moment
            answer = b""
            _kill_peer(connection)
        if not answer:
            return None
        answers: MessageDecoder[Any] = MessageDecoder(Taken | msg.Refused, "the running agent")
        settled: Taken | msg.Refused = answers.decode(answer)
        if isinstance(settled, msg.Refused):
            return settled
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        # While this process lives, so does the ssh channel with the pipes it handed over.
        connection.settimeout(None)
        with contextlib.suppress(OSError):
            connection.recv(1)
        return settled


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


async def write_last_checkpoint(
    workers: Workers, spool: Spool, timeout_s: float, call_off: Callable[[], None]
) -> None:
    """Ask for a checkpoint, and wait for the share of every worker here.

    All ranks of all hosts take it at the same step, whoever asked first, and write on when the
    others are gone; so it is whole when each host has waited for its own.

    Args:
        workers: of this host.
        spool: where they write.
        timeout_s: a worker that is silent for so long is dead.
        call_off: breaks off the collectives of the generation.
    """
    for worker in workers:
        if worker.is_member:
            worker.has_answered = False
            worker.send(msg.SaveState())
    seen: list[object] = []
    since, was_called_off = time.monotonic(), False

    def is_awaited(worker: Worker) -> bool:
        lives = worker.silent_s(time.monotonic()) <= timeout_s
        return worker.is_member and not worker.has_answered and lives

    while any(map(is_awaited, workers)):
        # What changes while steps are finished, or files become longer.
        said = [(each.name, each.has_answered, each.activity.step) for each in workers]
        signs = [spool.size_bytes(), *said]
        if signs != seen:
            seen, since = signs, time.monotonic()
        nothing_s = time.monotonic() - since
        if nothing_s >= _WRITE_PATIENCE_S:
            return
        longest_s = max((each.activity.longest_step_s for each in workers), default=0.0)
        if nothing_s >= max(3 * timeout_s, 2 * longest_s) and not was_called_off:
            # They wait for another host, which is gone, say: out of its step each of them writes
            # the whole state.
            was_called_off = True
            call_off()
        await asyncio.sleep(_LOOK_S)

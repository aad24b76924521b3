"""Takeover of an agent by the next leader, and the last checkpoint without a leader.

The agent listens on a unix socket in the spool of its run and host, a folder that no other user can
enter. When a new leader starts an agent process on the host, that process connects to the socket
first, and both ask the kernel for the other's user before they send anything. If an agent answers,
there are two cases. The new leader does not want it: then the old agent ends. Or the
new process hands its own standard input and output to the old agent, which from then on talks to
the new leader, with its workers still running; the new process only waits until the old agent ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from hvd_elastic.agent.spool import Spool
from hvd_elastic.agent.worker import Worker
from hvd_elastic.agent.workers import Workers
from hvd_elastic.errors import RunError
from hvd_elastic.own_files import socket_in
from hvd_elastic.programs.peers import connect_own, peer_uid
from hvd_elastic.records.process_lock import take_lock
from hvd_elastic.wire import messages as msg
from hvd_elastic.wire.framing import MessageDecoder, ProtocolError, encode

# Maximum wait for the other agent process, after which it counts as suspended or dead: shorter for
# one whose workers end in any case. A leader that takes over waits longer for its hosts.
_ANSWER_S = 8.0
_LIVE_ANSWER_S = 30.0
_END_S = 5.0
"""Longest wait for the end of an agent that was killed [s]."""
_SOCKET = "agent"
# Interval at which the progress of the last checkpoint is checked.
_LOOK_S = 0.1
_WRITE_PATIENCE_S = 300.0
"""Maximum wait without any progress of a checkpoint; a disk may write all data at the end."""
# A leader's hello with the environment of a run is much smaller.
_MAX_HELLO_BYTES = 16 << 20


class _Call(msgspec.Struct, tag="call"):
    """Message of a newly started agent process to the running one; its pipes come with it."""

    hello: msg.LeaderHello
    rest: bytes


class Taken(msgspec.Struct, tag_field="ev", tag="taken"):
    """Answer: the running agent has switched to the new leader."""


@dataclass
class Caller:
    """A newly started agent process that has connected to this one.

    Attributes:
        connection: connection to it; when this closes, it ends.
        hello: first message of the new leader.
        rest: bytes that it had read from the leader after that message.
        input, output: descriptors of its standard input and output.
    """

    connection: socket.socket
    hello: msg.LeaderHello
    rest: bytes
    input: int
    output: int

    def refuse(self, led: msg.LeaderIdentity) -> None:
        """Refuse the caller, because the leader ``led`` leads this run."""
        self._answer(msg.Refused(led))
        self.close()

    def accept(self) -> None:
        """Tell the caller that this agent uses its pipes from now on."""
        self._answer(Taken())

    def close(self) -> None:
        """Close the connection and the pipes that the caller handed over."""
        self.connection.close()
        for descriptor in (self.input, self.output):
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _answer(self, message: msg.Refused | Taken) -> None:
        with contextlib.suppress(OSError):
            self.connection.sendall(encode(message))


def listen_for_successors(spool: Path) -> socket.socket:
    """Return the socket on which the next agent process of this run and host finds this one.

    Raises:
        RunError: an agent of the run listens already, which was started at the same time.
        StrangerError: the folder is not this user's alone.
        OSError: its file system has no room, or does not know sockets.
    """
    with _only_one(spool), socket_in(spool, _SOCKET) as address:
        try:
            connect_own(address, _ANSWER_S).close()
        except OSError:
            Path(address).unlink(missing_ok=True)  # of an agent that was killed
        else:
            raise RunError("another agent of this run was started on this host at the same time")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(address)
            listener.listen(4)
            listener.setblocking(False)
        except BaseException:
            listener.close()
            raise
        return listener


@contextlib.contextmanager
def _only_one(spool: Path) -> Iterator[None]:
    """Hold a lock in the folder, if its file system knows locks."""
    lock = None
    with contextlib.suppress(OSError):
        lock = take_lock(spool / f"{_SOCKET}.lock")
    with lock or contextlib.nullcontext():
        yield


async def read_caller(connection: socket.socket) -> Caller | None:
    """Read the message of who has connected; None if it is gone, invalid or another user's.

    A caller may be suspended before it has sent everything.
    """
    calls: MessageDecoder[_Call] = MessageDecoder(_Call, "an agent process")
    descriptors: list[int] = []
    connection.setblocking(False)
    try:
        if peer_uid(connection) != os.getuid():
            raise ValueError("another user")
        data = await asyncio.wait_for(_read_call(connection, descriptors), _LIVE_ANSWER_S)
        call = calls.decode(data)
        read, write = descriptors
    except (OSError, ValueError, ProtocolError, asyncio.TimeoutError):
        connection.close()
        for descriptor in descriptors:
            os.close(descriptor)
        return None
    except asyncio.CancelledError:
        # This process ends, for which the caller waits: it would kill one that closed too early.
        connection.detach()
        raise
    return Caller(connection, call.hello, call.rest, read, write)


async def _read_call(connection: socket.socket, descriptors: list[int]) -> bytes:
    """Return the message of a caller, and add the descriptors that come with it."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(connection, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(connection)
    data, found, _, _ = socket.recv_fds(connection, 1 << 16, 2)
    descriptors += found
    while not data.endswith(b"\n"):
        more = await loop.sock_recv(connection, 1 << 16)
        if not more or len(data) > _MAX_HELLO_BYTES:
            raise ValueError("no complete message")
        data += more
    return data


def call_predecessor(
    spool: Path, hello: msg.LeaderHello, rest: bytes, output: int
) -> Taken | msg.Refused | None:
    """Find a running agent of the same run, host and user, and agree which process continues.

    Blocks; nothing else runs in this process yet.

    Args:
        hello: first message of the leader; ``take_over`` says whether an old agent shall continue.
        rest: bytes read from the leader after that message.
        output: descriptor of this process's pipe to the leader.

    Returns:
        The answer of the running agent; after Taken, this returns only when that agent has ended.
        None if no agent is running any more.

    Raises:
        StrangerError: the folder, or what listens there, is another user's. Nothing was sent.
    """
    try:
        with socket_in(spool, _SOCKET) as address:
            connection = connect_own(address, _LIVE_ANSWER_S if hello.take_over else _ANSWER_S)
    except OSError:
        return None
    with connection:
        try:
            text = encode(_Call(hello, rest))
            socket.send_fds(connection, [text[:1]], [0, output])
            connection.sendall(text[1:])
            answer = _read_line(connection)
        except OSError:  # it is suspended, or has just died
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
        # While this process lives, the ssh channel with the pipes that it handed over stays open.
        connection.settimeout(None)
        with contextlib.suppress(OSError):
            connection.recv(1)
        return settled


def _read_line(connection: socket.socket) -> bytes:
    """Return the answer; empty if the old agent ended instead."""
    data = b""
    while not data.endswith(b"\n"):
        more = connection.recv(1 << 12)
        if not more:
            return b""
        data += more
    return data


def _kill_peer(connection: socket.socket) -> None:
    """Kill an old agent that does not answer; its workers die with it (parent-death signal).

    Returns after its end: until then its socket looks like that of an agent that lives.
    """
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, uid, _ = struct.unpack("3i", credentials)
    if uid == os.getuid() and pid > 1:
        ends: Any = connection
        with contextlib.suppress(OSError, AttributeError):  # before Linux 5.3, or built for it
            ends = os.pidfd_open(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        select.select([ends], [], [], _END_S)
        if ends is not connection:
            os.close(ends)


async def write_last_checkpoint(
    workers: Workers, spool: Spool, timeout_s: float, call_off: Callable[[], None]
) -> None:
    """Request a checkpoint and wait until every worker of this host has written its share.

    All ranks of all hosts take it at the same step, whoever requests it first, and finish writing
    even if others have ended. So it is complete when each host has waited for its own workers.

    Args:
        timeout_s: a worker without a sign of life for this time is dead [s].
        call_off: aborts the collectives of the generation.
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
        # These values change while steps are finished or files grow.
        said = [(each.name, each.has_answered, each.activity.step) for each in workers]
        signs = [spool.size_bytes(), *said]
        if signs != seen:
            seen, since = signs, time.monotonic()
        nothing_s = time.monotonic() - since
        if nothing_s >= _WRITE_PATIENCE_S:
            return
        longest_s = max((each.activity.longest_period_s for each in workers), default=0.0)
        if nothing_s >= max(3 * timeout_s, 2 * longest_s) and not was_called_off:
            # They probably wait for another host that is gone. After the step is aborted, each of
            # them writes the whole state.
            was_called_off = True
            call_off()
        await asyncio.sleep(_LOOK_S)

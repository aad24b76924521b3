"""The agent's connection to its leader, and its messages that the leader has not acknowledged.

A leader that is killed has received more messages than it has acted upon. So the agent numbers its
messages and keeps each until the leader acknowledges it. It also tracks what the leader knows of
its workers from the acknowledged ones. The next leader gets that knowledge and then the
unacknowledged messages: for it nothing is lost, some events are only late.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable
from typing import IO, Any

from msgspec.structs import replace

from hvd_elastic.control.commands import Announce, Member
from hvd_elastic.control.events import FoundWorker
from hvd_elastic.run_events import BatchPlan, Shares
from hvd_elastic.wire import messages as msg
from hvd_elastic.wire.framing import MAX_LINE_BYTES, MessageDecoder, ProtocolError, encode


class LeaderLink:
    """Connection to the leader: sends and receives messages, and measures its silence."""

    def __init__(self) -> None:
        self.is_open = False
        self._heard = time.monotonic()
        self._word = asyncio.Event()
        self._decoder: MessageDecoder[msg.LeaderToAgent] = MessageDecoder(
            msg.LeaderToAgent, "the leader"
        )

    async def open(self, commands: IO[Any], output: IO[bytes], unread: bytes = b"") -> None:
        """Connect to a leader through two pipes; ``unread`` was already read from the first."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        self._input, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), commands
        )
        transport, protocol = await loop.connect_write_pipe(
            asyncio.streams.FlowControlMixin, output
        )
        self._reader, self._writer = reader, asyncio.StreamWriter(transport, protocol, None, loop)
        if unread:
            reader.feed_data(unread)
        self.is_open = True
        self._heard = time.monotonic()

    def close(self) -> None:
        self._word.set()
        if self.is_open:
            self.is_open = False
            self._writer.close()
            self._input.close()

    def send(self, message: msg.AgentToLeader) -> None:
        """Send a message; it is dropped if there is no leader."""
        if self.is_open and not self._writer.is_closing():
            self._writer.write(encode(message))

    async def messages(self) -> AsyncIterator[msg.LeaderToAgent]:
        """Yield the leader's messages until the connection is lost.

        Raises:
            ProtocolError: the leader sent a line that is not a message.
            OSError: the connection is broken.
        """
        while line := await read_line(self._reader, "the leader"):
            self._heard = time.monotonic()
            self._word.set()
            yield self._decoder.decode(line)

    def unread(self) -> bytes:
        """Return the bytes that have arrived and were not read yet."""
        return bytes(self._reader._buffer)  # type: ignore[attr-defined]

    def silent_s(self) -> float:
        """Return the time since the leader's last message [s]."""
        return time.monotonic() - self._heard

    def discount(self, seconds: float) -> None:
        """Subtract a time in which this process was suspended [s]."""
        self._heard += seconds

    async def wait_for_word(self, timeout_s: float) -> None:
        """Wait until the leader sends a message or the time is over."""
        self._word.clear()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._word.wait(), timeout_s)


async def read_line(reader: asyncio.StreamReader, sender: str) -> bytes:
    """Return the next line; b"" at the end, also if the last line is incomplete.

    Raises:
        ProtocolError: the line is too long.
    """
    try:
        line = await reader.readline()
    except ValueError:
        raise ProtocolError(f"{sender} sent a line of more than {MAX_LINE_BYTES} bytes") from None
    return line if line.endswith(b"\n") else b""


# Maximum output of workers that is kept while there is no leader.
_MAX_LOG_BYTES = 32 << 20
MOST_ON_THE_WAY = 4 << 20
"""Output of workers that a leader may have to take yet before they wait for it [bytes]."""
_LASTING = (msg.Dataset, BatchPlan, Shares)
"""Kinds of messages that workers send once; each holds until the next one of its kind."""


class UnacknowledgedLog:
    """Log of one agent: what its leader knows of the workers, and unacknowledged messages."""

    def __init__(self) -> None:
        self._workers: dict[str, FoundWorker] = {}
        self._unacknowledged: deque[msg.AgentToLeader] = deque()
        self._log_bytes = 0
        self._last = 0
        self._generation = 0
        self._members: tuple[Member, ...] = ()
        self._lasting: dict[type, msg.WorkerSaid] = {}
        """Last message of each kind of ``_LASTING``."""

    # -- what the leader asked for ---------------------------------------------------------

    def started(self, worker: str, host: str, slot: int) -> None:
        """Record that the leader requested a worker."""
        self._workers[worker] = FoundWorker(worker, host, slot)

    def announced(self, order: Announce, here: Iterable[str]) -> None:
        """Record that a generation was announced; ``here``: its members on this host."""
        self._generation, self._members = order.generation, order.members
        for name in here:
            if name not in self._workers:
                continue
            # The leader knew all messages that led to this, even if it has not acknowledged them.
            kept = deque[msg.AgentToLeader]()
            for message in self._unacknowledged:
                if _where_it_stands(message) == name:
                    self._apply(message)
                else:
                    kept.append(message)
            self._unacknowledged = kept
            self._change(name, generation=order.generation, waiting=False)

    def told_to_leave(self, worker: str) -> None:
        """Record that the leader told a worker to leave."""
        self._change(worker, leaving=True)

    def killed(self, worker: str, reason: str) -> None:
        """Record that the leader had a worker killed."""
        self._change(worker, leaving=True, killed=reason)

    # -- messages to the leader ------------------------------------------------------------

    def number(self, message: msg.AgentToLeader) -> msg.AgentToLeader:
        """Number a message and keep it until it is acknowledged; return it."""
        self._last += 1
        message.seq = self._last
        if isinstance(message, msg.WorkerSaid) and isinstance(message.message, _LASTING):
            self._lasting[type(message.message)] = message
        if isinstance(message, msg.Log):
            if self._log_bytes + len(message.data) > _MAX_LOG_BYTES:
                return message  # output of workers is the least important message to keep
            self._log_bytes += len(message.data)
        self._unacknowledged.append(message)
        return message

    @property
    def has_room(self) -> bool:
        """Return whether the leader has little output of workers to take yet."""
        return self._log_bytes < MOST_ON_THE_WAY

    def acknowledged(self, number: int) -> None:
        """Drop all messages up to ``number``, which the leader has acted upon."""
        while self._unacknowledged and self._unacknowledged[0].seq <= number:
            message = self._unacknowledged.popleft()
            if isinstance(message, msg.Log):
                self._log_bytes -= len(message.data)
            self._apply(message)

    @property
    def any_finished(self) -> bool:
        """Return whether a worker has finished its training, which the next leader must know."""
        return any(worker.finished for worker in self._workers.values()) or any(
            isinstance(message, msg.WorkerSaid) and isinstance(message.message, msg.Finished)
            for message in self._unacknowledged
        )

    # -- for the next leader ---------------------------------------------------------------

    def changed_leader(self) -> None:
        """Tell again what is told once: the records of another machine begin without it."""
        rank_0 = self._members[0].worker if self._members else ""
        for said in list(self._lasting.values()):
            if isinstance(said.message, msg.Dataset):
                self.number(msg.PastReading(said.message))
            elif said.worker == rank_0:  # else a rank of another host has told it since
                self.number(msg.WorkerSaid(said.worker, said.message))

    def snapshot(self, untold: int) -> msg.HeldRun:
        """Return the last leader's knowledge of this host's workers and of the generation.

        Args:
            untold: number of unacknowledged messages that are sent after it.
        """
        return msg.HeldRun(self._generation, self._members, tuple(self._workers.values()), untold)

    def unacknowledged(self) -> list[msg.AgentToLeader]:
        """Return the messages that it has not acknowledged, in order."""
        return list(self._unacknowledged)

    def unacknowledged_readings(self) -> list[msg.Reading]:
        """Return the unacknowledged messages about what was read of the dataset (``--audit``)."""
        said = (
            message.message
            for message in self._unacknowledged
            if isinstance(message, (msg.WorkerSaid, msg.PastReading))
        )
        return [reading for reading in said if isinstance(reading, (msg.Dataset, msg.Used))]

    def _change(self, worker: str, **fields: object) -> None:
        if worker in self._workers:
            self._workers[worker] = replace(self._workers[worker], **fields)

    def _apply(self, message: msg.AgentToLeader) -> None:
        match message:
            case msg.WorkerEnded(worker=name) | msg.WorkerNotStarted(worker=name):
                self._workers.pop(name, None)
            case msg.WorkerSaid(worker=name, message=said) if name in self._workers:
                known = self._workers[name]
                match said:
                    case msg.Ready():
                        self._change(name, ready=True)
                    case msg.Joined(generation=generation):
                        joined = max(known.joined, generation)
                        self._change(name, joined=joined, holds_state=True, step=0, state=0)
                    case msg.Broken() | msg.Held():
                        self._change(
                            name,
                            waiting=said.generation >= known.generation,
                            holds_state=known.holds_state and said.step >= 0,
                            step=max(said.step, 0),
                            state=said.state,
                        )
                    case msg.Finished():
                        self._change(name, finished=True)


def _where_it_stands(message: msg.AgentToLeader) -> str | None:
    """Return the worker that reports its position in a generation; None for other messages."""
    if isinstance(message, msg.WorkerSaid):
        if isinstance(message.message, (msg.Ready, msg.Standing)):
            return message.worker
    return None

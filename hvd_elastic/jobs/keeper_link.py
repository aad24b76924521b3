"""What daemon and keeper say to each other, and the two ends of their connection."""

from __future__ import annotations

import contextlib
import socket
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from hvd_elastic.wire.framing import LineSplitter, MessageDecoder, encode

_Number = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_MOST_READS = 64
"""Reads in a row from one connection, while others wait."""


class Follow(msgspec.Struct, tag="follow"):
    """Report on a run that an earlier keeper has started.

    ``offset`` is what the daemon has read of its events [bytes], ``hosts`` the hostfile of its
    leader; None: it has no leader.
    """

    run_id: str
    attempt: int
    offset: int
    hosts: str | None


class Lead(msgspec.Struct, tag="lead"):
    """Start a leader for a run, or one that leads it on.

    ``fields`` are those of its specification. With a ``secret``, this user's file of that name has
    the rest of the specification, and the environment.
    """

    run_id: str
    attempt: int
    offset: int
    hosts: str
    fields: dict[str, Any]
    cluster: str
    job: int
    environment: dict[str, str]
    secret: str | None = None


class Grant(msgspec.Struct, tag="grant"):
    """Give a run other slots: the hostfile that its leader watches."""

    run_id: str
    hosts: str


class StopRun(msgspec.Struct, tag="stop"):
    """Ask the leader of a run to end it with a last checkpoint."""

    run_id: str
    reason: str


class Forget(msgspec.Struct, tag="forget"):
    """Report on a run no more: it has ended."""

    run_id: str


class Tell(msgspec.Struct, tag="tell"):
    """Tell the user of an event of a job, by the command of its specification.

    ``fields`` and ``environment`` are of the job, unless this user's file ``secret`` has them.
    """

    run_id: str
    event: dict[str, Any]
    fields: dict[str, Any]
    environment: dict[str, str]
    secret: str | None = None


class Leave(msgspec.Struct, tag="leave"):
    """End, as the user has no job left."""


ToKeeper = Follow | Lead | Grant | StopRun | Forget | Tell | Leave


class News(msgspec.Struct, tag="news"):
    """What is new of a run.

    Attributes:
        offset: end of ``lines`` in the file of the events [bytes].
        lines: new events.
        is_all: whether there are no more of them now.
        led: whether a process leads the run, or is about to.
        is_own: whether this keeper has started the leader of this attempt, and it was not killed.
        last_line: what a leader that this keeper started has written last; empty while it lives.
        pid: process id of the leader; 0: none, or not known.
    """

    run_id: str
    attempt: int
    offset: _Number
    lines: list[str]
    is_all: bool
    led: bool
    is_own: bool
    last_line: str = ""
    pid: _Number = 0


class Trouble(msgspec.Struct, tag="trouble"):
    """Something that the keeper cannot do now, and tries again."""

    message: str


FromKeeper = News | Trouble
Message = TypeVar("Message")


class Link(Generic[Message]):
    """An end of the connection of daemon and keeper.

    Args:
        connection: it; what is sent without blocking waits here until the other end reads.
        union: types of the messages that come from the other end.
        sender: who sends them, for error messages.

    Attributes:
        received: bytes that have come so far.
    """

    def __init__(self, connection: socket.socket, union: Any, sender: str) -> None:
        self._connection = connection
        self._decoder: MessageDecoder[Message] = MessageDecoder(union, sender)
        self._lines = LineSplitter(sender)
        self._unsent = bytearray()
        self.received = 0

    def fileno(self) -> int:
        """Return the descriptor of the connection."""
        return self._connection.fileno()

    def send(self, *messages: object) -> None:
        """Send messages, and what could not be sent before."""
        for message in messages:
            self._unsent += encode(message)
        # What the other end does not take now is sent later; that it is gone, receive() tells.
        with contextlib.suppress(OSError):
            while self._unsent:
                del self._unsent[: self._connection.send(self._unsent)]

    def receive(self) -> list[Message] | None:
        """Return the messages that are there; None: the other end is gone.

        Raises:
            ProtocolError: what came is no message.
        """
        found: list[Message] = []
        for _ in range(_MOST_READS):
            try:
                data = self._connection.recv(1 << 20, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:  # it was killed with unread messages
                data = b""
            if not data:
                return found or None  # the next call tells that it is gone
            self.received += len(data)
            found += map(self._decoder.decode, self._lines.feed(data))
        return found

    @property
    def unsent(self) -> int:
        """Bytes that the other end has not taken yet."""
        return len(self._unsent)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

"""The agent's connection to its leader, over any pair of byte streams."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import IO, Any

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
        """Close the connection."""
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

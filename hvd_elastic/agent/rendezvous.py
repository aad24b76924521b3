"""Gloo's rendezvous for one generation: a key-value store on the loopback address.

Horovod's own rendezvous server listens on every interface, accepts data from anyone and unpickles
some of it (CVE-2024-10190, CVE-2026-31234). This one does not listen on a network: each agent
serves its own workers on 127.0.0.1, and their values are sent to the other hosts over the existing
ssh channels. Values are opaque bytes and are never decoded. Processes of other users are refused.

A ``GET`` waits until its key exists, so clients need not poll. When the generation is called off,
every wait ends with status 410.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import struct
from collections.abc import Callable
from typing import NamedTuple

from hvd_elastic.programs.peers import loopback_peer_uid
from hvd_elastic.wire import messages as msg
from hvd_elastic.wire.framing import decompress

_REQUEST = re.compile(rb"(GET|PUT|DELETE) /([\w.:-]{1,256})/([\w.:-]{1,256}) HTTP/1\.[01]")
_LENGTH = re.compile(rb"content-length:\s*(\d{1,9})", re.IGNORECASE)
# Limits far above what Gloo needs, so that a faulty client cannot fill the memory.
_MAX_VALUE_BYTES = 1 << 20
_MAX_KEYS = 1 << 17
_REQUEST_TIMEOUT_S = 10.0
# Before Gloo sends its addresses, it requests the host names of all lower ranks, to count the ranks
# on its own host. Its TCP transport never uses that count. So names of other hosts are not waited
# for, because training is paused during a rescale.
_HOST_NAME = "rank_"
# An address of Gloo's is a sockaddr_storage, whose rest is unset, and a number of 8 bytes.
_STORAGE_BYTES = 128
_ADDRESS_BYTES = _STORAGE_BYTES + 8
_SOCKADDR_BYTES = {struct.pack("=H", socket.AF_INET): 16, struct.pack("=H", socket.AF_INET6): 28}
_REASONS = {200: "OK", 400: "Bad Request", 403: "Forbidden", 410: "Gone", 413: "Too Large"}


class Value(NamedTuple):
    """Value of a key, or the part of it that the workers of this host read.

    Attributes:
        part: the known bytes.
        begin: where they begin in the value.
        size: length of the value, at least that of the part.
    """

    part: bytes
    begin: int = 0
    size: int = 0

    def whole(self) -> bytes:
        """Return the value, with zeros in place of what is not known."""
        return (bytes(self.begin) + self.part).ljust(self.size, b"\0")


def without_leftovers(value: bytes) -> bytes:
    """Return Gloo's socket addresses with zeros where Gloo leaves memory unset.

    Addresses then compress to a tenth, and other hosts see nothing of the process's memory. What
    does not have the form of such addresses is returned as it is.
    """
    used = _SOCKADDR_BYTES.get(value[:2])
    starts = range(0, len(value), _ADDRESS_BYTES)
    regular = len(value) % _ADDRESS_BYTES == 0 and len({value[at : at + 2] for at in starts}) == 1
    if used is None or not regular:
        return value
    unset = bytes(_STORAGE_BYTES - used)
    return b"".join(
        value[at : at + used] + unset + value[at + _STORAGE_BYTES : at + _ADDRESS_BYTES]
        for at in starts
    )


_ANOTHER_HOST = Value(b"another host")


class GenerationStore:
    """Serves the keys of one generation to the workers of one host.

    Args:
        forward: called with (scope, key, value) for each key that other hosts need too.
    """

    def __init__(self, forward: Callable[[str, str, bytes], None]) -> None:
        self._forward = forward
        self._values: dict[tuple[str, str], Value] = {}
        self._changed = asyncio.Event()
        self._called_off = False
        self._server: asyncio.Server | None = None
        self.port = 0

    async def open(self) -> int:
        """Listen on a free port of 127.0.0.1 and return the port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 16)
        self.port = self._server.sockets[0].getsockname()[1]
        return self.port

    def put(self, scope: str, key: str, value: bytes) -> None:
        self._values[scope, key] = Value(value)
        self._wake()

    def put_addresses(self, message: msg.PutAddresses) -> None:
        """Store the addresses that the ranks of all other hosts have put for those of this host.

        Raises:
            ProtocolError: the addresses are damaged.
        """
        values, ranks = decompress(message.values), message.ranks
        first, count = message.first, message.count
        others = [*range(first), *range(first + count, ranks)]
        length = len(values) // len(others)
        size = length // count * (ranks - 1)
        for number, rank in enumerate(others):
            # A rank has no address for itself, so those for later ranks come one place earlier.
            begin = (first - (first > rank)) * (length // count)
            part = values[number * length : (number + 1) * length]
            self._values[message.scope, str(rank)] = Value(part, begin, size)
        self._wake()

    def call_off(self) -> None:
        """End all waits, current and future ones, with status 410."""
        self._called_off = True
        self._wake()

    def close(self) -> None:
        """Stop listening and end all waits."""
        self.call_off()
        if self._server is not None:
            self._server.close()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            peer, own = writer.get_extra_info("peername"), writer.get_extra_info("sockname")
            status, body = 403, b""
            # The address of a peer that is gone already cannot be trusted.
            if peer is not None and loopback_peer_uid(peer, own) == os.getuid():
                status, body = await self._answer(reader)
            head = f"HTTP/1.0 {status} {_REASONS[status]}\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError):
            pass  # the client is gone or does not speak HTTP, so it gets no answer
        except asyncio.CancelledError:
            pass  # this agent ends; Python 3.11 and older would print a traceback
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[int, bytes]:
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _REQUEST_TIMEOUT_S)
        request = _REQUEST.match(head)
        if request is None:
            return 400, b""
        method = request[1]
        scope, key = request[2].decode(), request[3].decode()
        length = _LENGTH.search(head)
        size = int(length[1]) if length else 0
        if size > _MAX_VALUE_BYTES or len(self._values) >= _MAX_KEYS:
            return 413, b""
        body = await asyncio.wait_for(reader.readexactly(size), _REQUEST_TIMEOUT_S)
        if method == b"PUT":
            if self._called_off:
                return 410, b""
            self.put(scope, key, body)
            # Keys under local_<host> are for this host's workers only.
            if not scope.startswith("local_") and not key.startswith(_HOST_NAME):
                self._forward(scope, key, without_leftovers(body))
        elif method == b"GET":
            if key.startswith(_HOST_NAME) and not self._called_off:
                return 200, self._values.get((scope, key), _ANOTHER_HOST).whole()
            return await self._wait_for(scope, key)
        # DELETE needs no action: the store of a generation is dropped as a whole.
        return 200, b""

    async def _wait_for(self, scope: str, key: str) -> tuple[int, bytes]:
        while not self._called_off:
            value = self._values.get((scope, key))
            if value is not None:
                return 200, value.whole()
            await self._changed.wait()
        return 410, b""

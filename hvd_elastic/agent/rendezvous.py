"""The rendezvous of one generation, as Gloo sees it: a key-value store on the loopback address.

Horovod's own rendezvous server listens on every interface, takes what anyone sends and unpickles
some of it (CVE-2024-10190, CVE-2026-31234). Here nothing listens on a network: each agent serves
its own workers on 127.0.0.1, and what they put travels to the other hosts over the ssh channels
that exist anyway. Values are opaque bytes and are never decoded. A process of another user on the
same host is refused.

A ``GET`` waits until its key is there, so nobody polls; when the generation is called off, every
wait ends with 410.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable

from hvd_elastic.agent.loopback_peer import loopback_peer_uid

_REQUEST = re.compile(rb"(GET|PUT|DELETE) /([\w.:-]{1,256})/([\w.:-]{1,256}) HTTP/1\.[01]")
_LENGTH = re.compile(rb"content-length:\s*(\d{1,9})", re.IGNORECASE)
_MAX_VALUE_BYTES = 1 << 20
_MAX_KEYS = 1 << 17
_REQUEST_TIMEOUT_S = 10.0
# Before it gives its addresses, Gloo asks for the host name of every lower rank, to count the ranks
# of its own host. Its TCP transport never reads that count, so nobody waits for the names to
# travel while training stands still in a rescale.
_HOST_NAME = "rank_"
_ANOTHER_HOST = b"another host"
_REASONS = {200: "OK", 400: "Bad Request", 403: "Forbidden", 410: "Gone", 413: "Too Large"}


class GenerationStore:
    """Serves one generation's keys to the workers of one host.

    Args:
        forward: called with (scope, key, value) for each key that other hosts need too.
    """

    def __init__(self, forward: Callable[[str, str, bytes], None]) -> None:
        self._forward = forward
        self._values: dict[tuple[str, str], bytes] = {}
        self._changed = asyncio.Event()
        self._called_off = False
        self._server: asyncio.Server | None = None
        self.port = 0

    async def open(self) -> int:
        """Listen on a free port of 127.0.0.1 and return it."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 16)
        self.port = self._server.sockets[0].getsockname()[1]
        return self.port

    def put(self, scope: str, key: str, value: bytes) -> None:
        """A key that another host's worker has put."""
        self._values[scope, key] = value
        self._wake()

    def call_off(self) -> None:
        """End every wait, now and from now on, with 410."""
        self._called_off = True
        self._wake()

    def close(self) -> None:
        """Stop listening and end every wait."""
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
            # A peer that has already gone has no name, and none that can be trusted.
            if peer is not None and loopback_peer_uid(peer, own) == os.getuid():
                status, body = await self._answer(reader)
            head = f"HTTP/1.0 {status} {_REASONS[status]}\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError):
            pass  # the client went away or spoke no HTTP: nothing to tell it
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
            # Keys under local_<host> concern this host's workers alone.
            if not scope.startswith("local_") and not key.startswith(_HOST_NAME):
                self._forward(scope, key, body)
        elif method == b"GET":
            if key.startswith(_HOST_NAME) and not self._called_off:
                return 200, self._values.get((scope, key), _ANOTHER_HOST)
            return await self._wait_for(scope, key)
        # DELETE: Gloo tidies up after itself; a generation's store is dropped as a whole.
        return 200, b""

    async def _wait_for(self, scope: str, key: str) -> tuple[int, bytes]:
        while not self._called_off:
            value = self._values.get((scope, key))
            if value is not None:
                return 200, value
            await self._changed.wait()
        return 410, b""

"""The rendezvous store of one generation, spoken to over real sockets."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from hvd_elastic.agent.rendezvous import GenerationStore, without_leftovers
from hvd_elastic.programs.peers import loopback_peer_uid
from tests.paths import LIMIT_S

TIMEOUT_S = LIMIT_S

Forwarded = list[tuple[str, str, bytes]]
Dialogue = Callable[[GenerationStore, Forwarded], Awaitable[None]]


def with_store(dialogue: Dialogue) -> None:
    async def body() -> None:
        forwarded: Forwarded = []
        store = GenerationStore(lambda *key: forwarded.append(key))
        await store.open()
        try:
            await asyncio.wait_for(dialogue(store, forwarded), TIMEOUT_S)
        finally:
            store.close()

    asyncio.run(body())


async def say(store: GenerationStore, request: bytes) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", store.port)
    try:
        writer.write(request)
        await writer.drain()
        answer = await reader.read()
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


def put(key: str, value: bytes) -> bytes:
    return f"PUT {key} HTTP/1.0\r\nContent-Length: {len(value)}\r\n\r\n".encode() + value


def get(key: str) -> bytes:
    return f"GET {key} HTTP/1.0\r\n\r\n".encode()


def test_what_is_put_is_got_and_forwarded_unless_it_is_the_hosts_own() -> None:
    async def dialogue(store: GenerationStore, forwarded: Forwarded) -> None:
        value = bytes(range(256)) * 3
        assert await say(store, put("/global/0", value)) == (200, b"")
        assert await say(store, put("/local_node1/0", b"mine")) == (200, b"")
        assert await say(store, get("/global/0")) == (200, value)
        assert await say(store, get("/local_node1/0")) == (200, b"mine")
        assert await say(store, b"DELETE /global/0 HTTP/1.0\r\n\r\n") == (200, b"")
        assert forwarded == [("global", "0", value)]

    with_store(dialogue)


def test_a_get_waits_for_what_another_host_puts() -> None:
    async def dialogue(store: GenerationStore, forwarded: Forwarded) -> None:
        waiting = [asyncio.create_task(say(store, get("/global/1"))) for _ in range(3)]
        await say(store, put("/global/2", b"other"))  # wakes them for nothing
        assert not any(task.done() for task in waiting)
        store.put("global", "1", b"from afar")
        assert await asyncio.gather(*waiting) == [(200, b"from afar")] * 3
        assert [key for _, key, _ in forwarded] == ["2"], "what came from afar is not sent back"

    with_store(dialogue)


def test_nobody_waits_for_the_host_names_that_gloo_asks_for() -> None:
    async def dialogue(store: GenerationStore, forwarded: Forwarded) -> None:
        assert await say(store, get("/global/rank_0")) == (200, b"another host")
        assert await say(store, put("/global/rank_1", b"node1")) == (200, b"")
        assert await say(store, get("/global/rank_1")) == (200, b"node1")
        assert not forwarded
        store.call_off()
        assert (await say(store, get("/global/rank_0")))[0] == 410

    with_store(dialogue)


def test_calling_off_ends_every_wait_now_and_later() -> None:
    async def dialogue(store: GenerationStore, _: Forwarded) -> None:
        waiting = asyncio.create_task(say(store, get("/global/1")))
        await say(store, put("/global/0", b"x"))
        store.call_off()
        assert (await waiting)[0] == 410
        assert (await say(store, get("/global/0")))[0] == 410
        assert (await say(store, put("/global/1", b"late")))[0] == 410

    with_store(dialogue)


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"POST /global/0 HTTP/1.0\r\n\r\n", 400),
        (b"GET / HTTP/1.0\r\n\r\n", 400),
        (b"GET /a/b/c HTTP/1.0\r\n\r\n", 400),
        (b"GET /../../etc/passwd HTTP/1.0\r\n\r\n", 400),
        (b"GET /global/%2e%2e HTTP/1.0\r\n\r\n", 400),
        (b"GET /global/" + b"k" * 300 + b" HTTP/1.0\r\n\r\n", 400),
        (b"\x80\x04\x95\r\n\r\n", 400),
        (b"PUT /global/0 HTTP/1.0\r\nContent-Length: 99999999\r\n\r\n", 413),
    ],
)
def test_what_is_no_request_of_gloo_is_refused(request_bytes: bytes, status: int) -> None:
    async def dialogue(store: GenerationStore, forwarded: Forwarded) -> None:
        assert await say(store, request_bytes) == (status, b"")
        assert not forwarded

    with_store(dialogue)


def test_endless_headers_end_the_connection_and_not_the_store() -> None:
    async def dialogue(store: GenerationStore, _: Forwarded) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", store.port)
        writer.write(b"GET /global/0 HTTP/1.0\r\n" + b"x: y\r\n" * 40_000)
        try:
            assert await reader.read() == b""
        except ConnectionError:
            pass  # how it is ended is the kernel's choice
        finally:
            writer.close()
        assert (await say(store, put("/global/0", b"x")))[0] == 200

    with_store(dialogue)


class Exploit:
    """What the published attacks on Horovod's rendezvous send: code that runs when unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.marker}'",)


def test_a_pickle_is_only_bytes(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    value = pickle.dumps(Exploit(marker))

    async def dialogue(store: GenerationStore, forwarded: Forwarded) -> None:
        assert (await say(store, put("/worker_addresses/0", value)))[0] == 200
        assert await say(store, get("/worker_addresses/0")) == (200, value)
        assert forwarded == [("worker_addresses", "0", value)]

    with_store(dialogue)
    assert not marker.exists()


def test_the_kernel_says_who_the_peer_is() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as client:
            names = client.getsockname(), server.getsockname()
            assert loopback_peer_uid(*names) == os.getuid()
        assert loopback_peer_uid(*names) is None, "closed sockets belong to nobody we trust"


def as_nobody(port: int, *, leave: str = "") -> bytes:
    """Speak to the store as another user; returns what it answered."""
    program = (
        "import os, socket, struct, sys\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "s = socket.socket(); s.settimeout(10)\n"
        f"s.connect(('127.0.0.1', {port}))\n"
        f"s.sendall({put('/global/0', b'evil')!r})\n"
    )
    if leave == "reset":
        program += "s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))\n"
    program += "s.close()\n" if leave else "os.write(1, s.recv(1000))\n"
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(write, 1)
            os.execv(sys.executable, [sys.executable, "-S", "-E", "-c", program])
        finally:
            os._exit(70)
    os.close(write)
    try:
        answer = os.read(read, 1000)
        _, status = os.waitpid(pid, 0)
    finally:
        os.close(read)
    assert status == 0
    return answer


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="to be another user needs root")


@pytest.mark.root
@needs_root
def test_another_user_is_refused() -> None:
    async def dialogue(store: GenerationStore, forwarded: Forwarded) -> None:
        answer = await asyncio.to_thread(as_nobody, store.port)
        assert answer.startswith(b"HTTP/1.0 403 ")
        assert not forwarded
        waiting = asyncio.create_task(say(store, get("/global/0")))
        assert await say(store, put("/global/0", b"good")) == (200, b"")
        assert await waiting == (200, b"good")

    with_store(dialogue)


@pytest.mark.root
@needs_root
@pytest.mark.parametrize("leave", ["close", "reset"])
def test_another_user_who_sends_and_goes_before_anyone_looks_is_refused(leave: str) -> None:
    """The kernel shows closed sockets as root's: an agent of root must not believe it."""

    async def dialogue(store: GenerationStore, forwarded: Forwarded) -> None:
        # The loop stands still meanwhile, as it does when the host is busy.
        as_nobody(store.port, leave=leave)
        deadline = asyncio.get_running_loop().time() + TIMEOUT_S
        while _states(store.port) & {"04"}:  # until its end was told and acknowledged
            assert asyncio.get_running_loop().time() < deadline
        assert await say(store, put("/global/1", b"good")) == (200, b"")
        assert forwarded == [("global", "1", b"good")]

    with_store(dialogue)


def _states(port: int) -> set[str]:
    """States of the connections whose server side is ``port``, seen from the clients."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    rows = [line.split() for line in lines]
    return {row[3] for row in rows if row[2].endswith(f":{port:04X}") and row[3] != "0A"}


@pytest.mark.parametrize(("family", "used"), [(socket.AF_INET, 16), (socket.AF_INET6, 28)])
def test_other_hosts_see_addresses_and_nothing_else_of_a_ranks_memory(
    family: int, used: int
) -> None:
    """Gloo sends a sockaddr_storage of which it has set a part, and a number."""
    head = family.to_bytes(2, sys.byteorder)
    addresses = [head + bytes([number]) * 126 + b"\xff" * 8 for number in (1, 2, 3)]
    kept = [a[:used] + bytes(128 - used) + a[128:] for a in addresses]
    assert without_leftovers(b"".join(addresses)) == b"".join(kept)


@pytest.mark.parametrize(
    "value",
    [b"", b"x", bytes(136), b"\x02\x00" + bytes(135), b"\x02\x00" + b"x" * 134 + b"y" * 136],
)
def test_what_does_not_have_the_form_of_addresses_is_forwarded_as_it_is(value: bytes) -> None:
    assert without_leftovers(value) == value

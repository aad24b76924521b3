"""The loop that accepts connections, and what strangers do to it."""

from __future__ import annotations

import queue
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hvd_elastic.programs import accept_peers as module
from hvd_elastic.programs.accept_peers import accept_peers

PACKAGE = Path(module.__file__).parents[1]
TIMEOUT_S = 60
KEY = b"key"

SERVER = f"""
import resource, socket
resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
from {module.__name__} import accept_peers
def admit(plain):
    if plain.recv(3) != b"key":
        raise ValueError
    return plain
listener = socket.create_server(("127.0.0.1", 0), backlog=200)
print(listener.getsockname()[1], flush=True)
accept_peers(listener, admit, lambda peer: peer.sendall(b"welcome"))
"""


def admit(plain: socket.socket) -> socket.socket:
    shown = b""
    while len(shown) < len(KEY):
        shown += (more := plain.recv(len(KEY) - len(shown)))
        if not more:
            raise ConnectionResetError("gone")
    if shown != KEY:
        raise ValueError("another key")
    return plain


def welcome(peer: socket.socket) -> None:
    with peer:
        peer.sendall(b"welcome")


@pytest.fixture
def refusals() -> queue.Queue[str]:
    return queue.Queue()


@pytest.fixture
def address(
    refusals: queue.Queue[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, int]]:
    monkeypatch.setattr(module, "MOST_STRANGERS", 8)
    listener = socket.create_server(("127.0.0.1", 0), backlog=200)
    found: tuple[str, int] = listener.getsockname()
    loop = threading.Thread(
        target=accept_peers,
        args=(
            listener,
            admit,
            welcome,
            lambda _, error: refusals.put(str(error)),
        ),
    )
    loop.start()
    yield found
    listener.shutdown(socket.SHUT_RDWR)
    loop.join(TIMEOUT_S)
    listener.close()
    assert not loop.is_alive(), "it ends with its listener"


def is_let_in(address: tuple[str, int]) -> bool:
    with socket.create_connection(address, TIMEOUT_S) as peer:
        peer.sendall(KEY)
        return peer.recv(100) == b"welcome"


def is_ended(stranger: socket.socket) -> bool:
    stranger.settimeout(TIMEOUT_S)
    try:
        return stranger.recv(1) == b""
    except ConnectionResetError:
        return True


def test_peers_are_let_in_and_others_refused(
    address: tuple[str, int], refusals: queue.Queue[str]
) -> None:
    with socket.create_connection(address, TIMEOUT_S) as stranger:
        stranger.sendall(b"yek")
        assert is_ended(stranger)
    assert is_let_in(address)
    assert refusals.get(timeout=TIMEOUT_S) == "another key"  # told after its connection is closed
    assert refusals.empty()


def test_the_oldest_of_too_many_strangers_makes_room(address: tuple[str, int]) -> None:
    silent = [socket.create_connection(address, TIMEOUT_S) for _ in range(28)]
    assert is_let_in(address)
    assert all(is_ended(stranger) for stranger in silent[:20])
    for stranger in silent:
        stranger.close()


def test_many_peers_that_come_at_the_same_moment_are_all_let_in(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is ended for another's sake."""
    for name in ("GRACE_S", "LIMIT_S"):
        monkeypatch.setattr(module, name, TIMEOUT_S)
    with ThreadPoolExecutor(40) as pool:
        assert all(pool.map(is_let_in, [address] * 200))


def test_a_stranger_that_dribbles_is_ended_when_its_time_is_over(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though each byte comes within the time limit of the one before."""
    monkeypatch.setattr(module, "LIMIT_S", 0.3)
    began = time.monotonic()
    with socket.create_connection(address, TIMEOUT_S) as stranger:
        stranger.sendall(b"k")
        assert is_ended(stranger)
        assert time.monotonic() - began >= 0.3


def test_a_process_that_may_open_few_files_lives_through_a_flood_of_silent_strangers() -> None:
    program = [sys.executable, "-S", "-c", SERVER]
    env = {"PYTHONPATH": str(PACKAGE.parent)}
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, env=env) as server:
        assert server.stdout is not None
        address = ("127.0.0.1", int(server.stdout.readline()))
        silent = [socket.create_connection(address, TIMEOUT_S) for _ in range(40)]
        assert is_let_in(address)
        for stranger in silent:
            stranger.close()
        server.kill()


def test_every_port_of_ours_is_served_by_it() -> None:
    """But for those that only their own user can reach, and those of asyncio and http.server."""
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if re.search(r"\.accept\(\)", path.read_text(encoding="utf-8"))
    }
    others = {
        "agent/agent.py",
        "jobs/keepers.py",
        "jobs/server.py",
        "worker/debugging/breakpoints.py",
    }
    assert found == {"programs/accept_peers.py", *others}

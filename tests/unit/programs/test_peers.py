"""Both ways of finding out who is at the other end say the same."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import pytest

from hvd_elastic.programs import peers

Address = tuple[str, int]
Way = Callable[[Address, Address], int | None]


@pytest.mark.parametrize("way", [peers.loopback_peer_uid, peers._look_up])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_owner_of_an_open_connection_and_nobody_of_a_closed_one(way: Way, host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family)
    except OSError as error:
        pytest.skip(f"{host}: {error.strerror}")
    with listener as server:
        with socket.create_connection(server.getsockname()[:2]) as client:
            peer, own = client.getsockname(), server.getsockname()
            assert way(peer, own) == os.getuid()
        accepted, _ = server.accept()
        with accepted:
            assert way(peer, own) is None
        assert way(peer, own) is None


def test_a_listening_socket_is_no_peer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        assert peers.loopback_peer_uid(address, ("127.0.0.1", 1)) is None


def test_the_kernel_s_table_serves_where_it_cannot_be_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> int:
        raise OSError("no inet_diag")

    monkeypatch.setattr(peers, "_ask_kernel", refuse)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        found = peers.loopback_peer_uid(client.getsockname(), server.getsockname())
        assert found == os.getuid()

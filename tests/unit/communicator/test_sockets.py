from __future__ import annotations

import socket
import threading

import pytest

from hvd_elastic.communicator.sockets import RingSockets

TIMEOUT_S = 90


def pair(listener: socket.socket | None = None) -> tuple[socket.socket, socket.socket]:
    """Two ends of a TCP connection, the first one that of a peer."""
    with listener or socket.create_server(("127.0.0.1", 0)) as server:
        own = socket.create_connection(server.getsockname(), timeout=TIMEOUT_S)
        peer, _ = server.accept()
        peer.settimeout(TIMEOUT_S)
        return peer, own


def test_shuts_down_what_was_opened_for_the_ring_and_nothing_else() -> None:
    sockets = RingSockets()
    before = pair()
    with sockets.opening():
        ring = pair()
    after = pair()
    sockets.shut()
    assert ring[0].recv(1) == b""
    for peer, own in (before, after):
        own.sendall(b"x")
        assert peer.recv(1) == b"x"
    for end in (*before, *ring, *after):
        end.close()


def test_an_abort_amid_the_making_reaches_sockets_that_are_opened_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All but the connection to the rendezvous store, which ends its requests itself."""
    sockets = RingSockets()
    server = socket.create_server(("127.0.0.1", 0))
    address, port = server.getsockname()
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", address)
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", str(port))
    listener = socket.create_server(("127.0.0.1", 0))  # one opened later is shut down too
    with sockets.opening():
        store = socket.create_connection((address, port))
        sockets.abort()
        ring = pair(listener)
        assert ring[0].recv(1) == b""
        store.sendall(b"x")  # raises once the socket is shut down
    for thread in threading.enumerate():
        if thread.name == "hvd_elastic-abort":
            thread.join(TIMEOUT_S)
    for end in (*ring, store, server):
        end.close()

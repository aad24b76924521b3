"""Measurements of the network, for peers of the same check alone."""

from __future__ import annotations

import socket
import struct

import pytest

from hvd_elastic.programs import probe_network
from hvd_elastic.programs.probe_network import PING, TOKEN_BYTES, Probe
from tests.paths import LIMIT_S


def test_a_peer_without_the_token_is_served_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_network, "SILENCE_S", LIMIT_S)
    token = bytes(range(TOKEN_BYTES))
    probe = Probe()
    found = probe.listen({"token": token.hex(), "seconds": 0.1, "address": "127.0.0.1"})
    port = int(str(found["port"]))
    for shown, answer in ((token, b"+!"), (token[::-1], b""), (bytes(TOKEN_BYTES), b"")):
        with socket.create_connection(("127.0.0.1", port), 20) as peer:
            peer.sendall(shown + PING + b"!")
            got = b""
            try:
                while len(got) < 2 and (piece := peer.recv(2)):
                    got += piece
            except ConnectionResetError:
                pass
            assert got == answer
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

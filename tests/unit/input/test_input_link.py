"""The link between a rank and an input host."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from hvd_elastic.hosts.certificate import make_certificate
from hvd_elastic.input.link import (
    Batch,
    Failed,
    Link,
    LinkError,
    Offer,
    Want,
    accept,
    connect,
)
from hvd_elastic.input.server import serve_port
from tests.paths import LIMIT_S


class Numbers:
    """A source whose batch is the epoch and the indices."""

    examples = 100

    def __init__(self) -> None:
        self.fields: Mapping[str, int] = {}

    def start(self, number: int, count: int) -> None:
        pass

    def make(self, epoch: int, indices: Sequence[int]) -> Any:
        if 13 in indices:
            raise ValueError("13 cannot be read")
        return bytes([epoch, *indices])

    def make_here(self, epoch: int, indices: Sequence[int]) -> Any:
        return self.make(epoch, indices)

    def pack(self, batch: Any) -> list[Any]:
        return [batch, b""]

    def unpack(self, buffers: list[Any]) -> Any:
        return bytes(buffers[0])


@pytest.fixture(scope="module")
def certificate() -> str:
    return make_certificate()


@pytest.fixture
def port(certificate: str) -> Iterator[int]:
    """A port on which a thread reads for ranks."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                serve_port(listener, certificate, Numbers())

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def test_a_rank_gets_what_it_asks_for(port: int, certificate: str) -> None:
    link = connect("127.0.0.1", port, certificate, "host h")
    assert link.receive()[0] == Offer(100)
    link.send(Want(1, 2, [3, 4]))
    link.send(Want(2, 2, [5]))
    for number, indices in ((1, [3, 4]), (2, [5])):
        answer, buffers = link.receive()
        assert isinstance(answer, Batch)
        assert (answer.number, answer.indices) == (number, indices)
        assert [bytes(each) for each in buffers] == [bytes([2, *indices]), b""]
    link.close()


def test_an_error_of_the_data_set_is_an_answer(port: int, certificate: str) -> None:
    link = connect("127.0.0.1", port, certificate, "host h")
    link.receive()
    link.send(Want(1, 0, [13]))
    answer, _ = link.receive()
    assert isinstance(answer, Failed)
    assert "ValueError: 13 cannot be read" in answer.error
    link.close()


def test_who_has_another_certificate_learns_nothing(port: int) -> None:
    with (
        pytest.raises(OSError, match=r"(?i)certificate|closed|alert|reset"),
        contextlib.closing(connect("127.0.0.1", port, make_certificate(), "host h")) as link,
    ):
        link.receive()


def test_who_has_no_certificate_learns_nothing(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as plain:
        plain.settimeout(LIMIT_S)
        plain.sendall(b"\0" * 64)
        with contextlib.suppress(OSError):
            got = plain.recv(1 << 16)
            assert b"offer" not in got


def test_a_rank_refuses_a_host_with_another_certificate(certificate: str) -> None:
    """Whoever took over the address of an input host cannot send a rank anything to unpickle."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                serve_port(listener, make_certificate(), Numbers())

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
            connect("127.0.0.1", listener.getsockname()[1], certificate, "host h")
        listener.shutdown(socket.SHUT_RDWR)


def test_a_connection_that_is_reset_before_the_handshake_is_closed(certificate: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        rank = socket.create_connection(listener.getsockname())
        plain, _ = listener.accept()
        number = plain.fileno()
        rank.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        rank.close()  # sends a reset
        with pytest.raises(ConnectionResetError) as raised:
            accept(plain, certificate)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)
        del raised  # until here its traceback holds whatever has the descriptor


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    own, other = socket.socketpair()
    with own, other:
        yield own, other


def test_a_connection_cut_in_the_middle_of_a_frame_is_an_error(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    own, other = pair
    Link(own, "x").send(Batch(1, [1], 0.1), [b"0123456789"])
    sent = other.recv(1 << 16)
    other.sendall(sent[:-1])
    other.close()
    with pytest.raises(ConnectionResetError, match="host h has closed the connection"):
        Link(own, "host h").receive()


@pytest.mark.parametrize(
    "sent",
    [
        struct.pack("!II", 1 << 30, 0),
        struct.pack("!II", 2, 1) + struct.pack("!Q", 1 << 60),
        struct.pack("!II", 2, 0) + b"{}",
        struct.pack("!II", 3, 0) + b"[1]",
    ],
)
def test_an_invalid_frame_is_refused_before_memory_is_taken(
    pair: tuple[socket.socket, socket.socket], sent: bytes
) -> None:
    own, other = pair
    other.sendall(sent)
    with pytest.raises(LinkError, match="host h"):
        Link(own, "host h").receive()

"""Frames between a rank and a process that reads for it, over TLS or a local socket.

A frame is a message of this module and any number of buffers. The message is decoded into its type
and nothing else. The buffers are a batch, which its receiver unpickles; so a rank reads from an
input host only after both have shown the certificate of the run.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Sequence
from typing import Any

import msgspec

from hvd_elastic import __version__
from hvd_elastic.errors import HvdElasticError
from hvd_elastic.programs.tls import TlsSocket, read_exactly

_HEAD = struct.Struct("!II")
_SIZE = struct.Struct("!Q")
_MAX_HEADER = 64 << 20
_MAX_BUFFERS = 1 << 16
_MAX_BATCH = 1 << 36
"""Limits of what a peer may announce, far above any batch."""
_CONNECT_S = 5.0
_SEND_S = 10.0
"""Time after which a peer that takes nothing, or is gone, is given up [s]."""


class LinkError(HvdElasticError):
    """A peer of the input link cannot be used, or sent something invalid."""


class _Frame(msgspec.Struct, tag_field="kind", forbid_unknown_fields=True):
    """Message of a frame."""


class Offer(_Frame, tag="offer"):
    """First message of a process that reads: its version, and what its dataset is.

    ``fields``: see :class:`~hvd_elastic.worker.checks.data_digest.DataDigest`.
    """

    examples: int
    version: str = __version__
    fields: dict[str, int] = {}


class Want(_Frame, tag="want"):
    """A rank asks for a batch of the examples with these dataset indices.

    ``held_back``: the rank had enough batches ahead, and asks for this one later for that reason.
    """

    number: int
    epoch: int
    indices: list[int]
    held_back: bool = False


class Batch(_Frame, tag="batch"):
    """A batch, in the buffers of the frame; ``indices`` were read for it.

    ``busy_s`` is the time that it took to make, the wait for the turn of its connection included,
    ``cpu_s`` the processor time and ``delay_s`` the wait for a core in it [s]. ``link_s`` is the
    time before it in which nothing was made since the link had not carried the batch before, or
    the request [s]. ``sizes`` are those of the buffers before they were compressed [bytes]; empty:
    they were not.
    """

    number: int
    indices: list[int]
    cpu_s: float
    delay_s: float = 0.0
    busy_s: float = 0.0
    link_s: float = 0.0
    sizes: list[int] = []


class Failed(_Frame, tag="failed"):
    """The dataset, transform or collate function has raised an exception."""

    number: int
    error: str


_decoder = msgspec.json.Decoder(Offer | Want | Batch | Failed)


class Link:
    """Sends and receives frames over a connected socket, in one thread.

    Args:
        connected: socket or TLS connection.
        peer: name of the other side, for errors.
    """

    def __init__(self, connected: socket.socket | TlsSocket, peer: str) -> None:
        self._socket = connected
        self._peer = peer

    def send(self, message: _Frame, buffers: Sequence[Any] = ()) -> None:
        """Send a frame.

        Raises:
            OSError: the peer is gone, or takes nothing for long.
        """
        header = msgspec.json.encode(message)
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        sizes = b"".join(_SIZE.pack(view.nbytes) for view in views)
        self._socket.sendall(_HEAD.pack(len(header), len(views)) + sizes + header)
        for view in views:
            self._socket.sendall(view)

    def receive(self) -> tuple[Any, list[memoryview]]:
        """Return the message of the next frame, and its buffers, which may be written to.

        Raises:
            OSError: the peer is gone.
            LinkError: the frame is invalid.
        """
        header_bytes, count = _HEAD.unpack(self._read(_HEAD.size))
        if header_bytes > _MAX_HEADER or count > _MAX_BUFFERS:
            raise LinkError(f"{self._peer} sent no valid frame")
        sizes = [size for (size,) in _SIZE.iter_unpack(self._read(count * _SIZE.size))]
        if sum(sizes) > _MAX_BATCH:
            raise LinkError(f"{self._peer} announced a batch of {sum(sizes)} bytes")
        try:
            message = _decoder.decode(self._read(header_bytes))
        except (ValueError, RecursionError) as error:
            raise LinkError(f"{self._peer} sent no valid frame: {error}") from error
        return message, [self._read(size) for size in sizes]

    def _read(self, size: int) -> memoryview:
        return read_exactly(self._socket, size, self._peer)

    def cut(self) -> None:
        """Make what another thread sends or receives fail; that thread closes the link."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def connect(address: str, port: int, certificate: str, peer: str) -> Link:
    """Return a link to a process on an input host, after both have shown the certificate.

    Raises:
        OSError: it cannot be reached, or has another certificate.
    """
    plain = socket.create_connection((address, port), _CONNECT_S)
    return _secured(plain, certificate, peer, client=True)


def accept(plain: socket.socket, certificate: str) -> Link:
    """Return the link of a rank that has connected, after both have shown the certificate.

    Raises:
        OSError: it has another certificate, or none.
    """
    return _secured(plain, certificate, "a rank", client=False)


def _secured(plain: socket.socket, certificate: str, peer: str, *, client: bool) -> Link:
    secure = TlsSocket(plain, certificate, client=client, limit_s=_CONNECT_S)
    secure.has_begun(_SEND_S)
    return Link(secure, peer)

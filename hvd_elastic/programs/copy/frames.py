"""The protocol between the nodes of a copy: frames, authentication and encryption.

A link is a TCP connection from the feeding node to the node that is fed. Both prove that they know
a secret that the leader sent them over ssh. With TLS, both also show the certificate of this copy
and accept no other.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import io
import json
import os
import socket
import struct
import sys
import zlib
from typing import Any, BinaryIO, Callable  # noqa: UP035  # Python 3.7 has no others

from hvd_elastic.programs.tls import TlsSocket

HEADER = struct.Struct("!BIQI")  # kind, index of the file, offset, bytes of payload
# Kinds of frames: piece of a file, its end, a whole small file, a file that fails, the end of all.
DATA, END, WHOLE, GONE, LAST = 1, 2, 3, 4, 5
# Added to the kind of a frame with compressed payload.
PACKED = 0x80
# A frame is forwarded only when it is complete, so larger ones add delay at every hop of a chain.
FRAME_BYTES = 1 << 16
DIGEST_BYTES = 32
# The largest payload: data, its digest, and the byte that tells its origin.
MOST_BYTES = FRAME_BYTES + DIGEST_BYTES + 1
NONCE_BYTES = 32
# Limit for the authentication of a link.
HANDSHAKE_S = 10.0
# Limit for a TCP connection to one address.
CONNECT_S = 5.0
LIST_BYTES = struct.Struct("!I")
# Limits the memory that a faulty peer can claim; a list of ten million files is smaller.
MOST_LISTED_BYTES = 1 << 28
LINK_BUFFER_BYTES = 1 << 17
TCP_NOTSENT_LOWAT = 25  # a constant of Python's socket module only since 3.12
# Maximum of unsent data in the kernel's buffer of a link.
UNSENT_BYTES = 1 << 18


class LinkError(Exception):
    """A link cannot be used; the message says why."""


def pack(value: Any) -> str:
    """Return a JSON value as compressed text without line breaks."""
    return base64.b64encode(zlib.compress(json.dumps(value).encode("ascii"), 6)).decode("ascii")


def unpack(text: str) -> Any:
    """Return the value that :func:`pack` was given."""
    return json.loads(zlib.decompress(base64.b64decode(text)).decode("ascii"))


def make_frame(kind: int, index: int, offset: int = 0, payload: bytes = b"") -> bytes:
    """Return the bytes of one frame."""
    return HEADER.pack(kind, index, offset, len(payload)) + payload


def read_exactly(file: BinaryIO, size: int) -> bytes:
    """Read exactly ``size`` bytes.

    Raises:
        LinkError: the other side closed the connection before.
    """
    data = file.read(size)
    if len(data) != size:
        raise LinkError("the connection was closed")
    return data


def read_frame(file: BinaryIO) -> tuple[int, int, int, bytes]:
    """Read the next frame; return its kind, index, offset and payload.

    Raises:
        LinkError: the connection is closed, or the data is not a frame.
    """
    kind, index, offset, size = HEADER.unpack(read_exactly(file, HEADER.size))
    if size > MOST_BYTES or not DATA <= kind & ~PACKED <= LAST:
        raise LinkError("what arrives is no frame")
    return kind, index, offset, read_exactly(file, size)


def unpack_payload(payload: bytes) -> bytes:
    """Return the uncompressed payload, which is never larger than a frame may be.

    Raises:
        LinkError: the data is damaged or too large.
    """
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(payload, MOST_BYTES)
    except zlib.error as error:
        raise LinkError("a packed frame is damaged") from error
    if unpacker.unconsumed_tail or not unpacker.eof:
        raise LinkError("a packed frame is damaged")
    return data


class _Incoming(io.RawIOBase):
    """Raw stream of the data that arrives on a link, for a buffered reader."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return int(self._channel.recv_into(buffer))


class Link:
    """An authenticated connection to another node.

    Attributes:
        file: buffered reader of the data that arrives.
        dropped: whether this side has given up the link.
        dropped_for_another: whether another link has replaced it.
    """

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self.file: Any = io.BufferedReader(_Incoming(channel), LINK_BUFFER_BYTES)
        self.dropped = False
        self.dropped_for_another = False

    def send(self, data: bytes) -> None:
        """Send all of the data; blocks until the other side has taken it."""
        self._channel.sendall(data)

    def send_list(self, value: Any) -> None:
        """Send a JSON value of any length."""
        data = zlib.compress(json.dumps(value).encode("ascii"), 1)
        self.send(LIST_BYTES.pack(len(data)) + data)

    def read_list(self) -> Any:
        """Receive the value that the other side gave to :meth:`send_list`."""
        (size,) = LIST_BYTES.unpack(read_exactly(self.file, LIST_BYTES.size))
        if size > MOST_LISTED_BYTES:
            raise LinkError("what arrives is no list")
        return json.loads(zlib.decompress(read_exactly(self.file, size)).decode("ascii"))

    def drop(self) -> None:
        """Shut the connection down; threads that are reading or writing it get an error."""
        self.dropped = True
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Shut the connection down and close its socket."""
        self.drop()
        self._channel.close()


def connect(
    addresses: list[tuple[str, int]],
    secret: bytes,
    certificate: str | None,
    reached: Callable[[], None] = lambda: None,
) -> Link:
    """Connect to the first of the addresses that answers and return the link; the caller feeds.

    Args:
        addresses: addresses on which the other node listens.
        secret, certificate: what both nodes know.
        reached: called when a connection is made, before the other side has proved who it is.

    Raises:
        LinkError: no address answers, or another program does; names each and the reason.
    """
    reasons = []
    for address, port in addresses:
        try:
            sock = socket.create_connection((address, port), CONNECT_S)
        except OSError as error:
            reasons.append(f"{address} port {port}: {error.strerror or error}")
            continue
        reached()
        try:
            return _secure(sock, secret, certificate, feeds=True)
        except (OSError, LinkError) as error:
            reasons.append(f"{address} port {port}: {error}")
    raise LinkError("; ".join(reasons))


def accept(sock: socket.socket, secret: bytes, certificate: str | None) -> Link:
    """Authenticate an accepted connection and return the link; the other end feeds.

    Raises:
        LinkError, OSError: the other end is not a node of this copy, or does not answer.
    """
    return _secure(sock, secret, certificate, feeds=False)


def _secure(sock: socket.socket, secret: bytes, certificate: str | None, feeds: bool) -> Link:
    try:
        sock.settimeout(HANDSHAKE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if sys.platform == "linux":
            # Unsent data in the kernel's buffer is lost when the feeder changes; keep it small.
            sock.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        if certificate is None:
            link = Link(sock)
            _prove(link, secret, feeds)
            sock.settimeout(None)
        else:
            secured = TlsSocket(sock, certificate, client=feeds, limit_s=HANDSHAKE_S)
            link = Link(secured)
            _prove(link, secret, feeds)
            secured.has_begun()
        return link
    except BaseException:
        sock.close()
        raise


def _prove(link: Link, secret: bytes, feeds: bool) -> None:
    """Exchange proofs that both sides know the secret, without sending the secret itself."""

    def proof(role: bytes, first: bytes, second: bytes) -> bytes:
        return hmac.new(secret, role + first + second, hashlib.sha256).digest()

    own, other = (b"feeds", b"is fed") if feeds else (b"is fed", b"feeds")
    mine = os.urandom(NONCE_BYTES)
    link.send(mine)
    theirs = read_exactly(link.file, NONCE_BYTES)
    link.send(proof(own, theirs, mine))
    shown = read_exactly(link.file, DIGEST_BYTES)
    if not hmac.compare_digest(shown, proof(other, mine, theirs)):
        raise LinkError("who answers is no node of this copy")

"""What the nodes of a copy say to one another: frames, who is who, and encryption.

A link is a TCP connection from the node that feeds to the node that is fed. Both prove that they
know a secret that the leader handed them over ssh; in TLS both show, in addition, the throw-away
certificate of this copy, and accept no other.
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
import ssl
import struct
import sys
import tempfile
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, Callable  # noqa: UP035  # of Python 3.7

HEADER = struct.Struct("!BIQI")  # kind, index of the file, offset, bytes of payload
DATA, END, WHOLE, GONE, LAST = 1, 2, 3, 4, 5
PACKED = 0x80
# A frame is passed on when it is complete: larger ones make every hop of a chain later.
FRAME_BYTES = 1 << 16
DIGEST_BYTES = 32
MOST_BYTES = FRAME_BYTES + DIGEST_BYTES + 1
NONCE_BYTES = 32
HANDSHAKE_S = 10.0
CONNECT_S = 5.0
LIST_BYTES = struct.Struct("!I")
MOST_LISTED_BYTES = 1 << 28
LINK_BUFFER_BYTES = 1 << 17
TCP_NOTSENT_LOWAT = 25  # has a name since Python 3.12
UNSENT_BYTES = 1 << 18


class LinkError(Exception):
    """A link that cannot be used, and why."""


def pack(value: Any) -> str:
    """Any JSON value as a short text without line ends."""
    return base64.b64encode(zlib.compress(json.dumps(value).encode("ascii"), 6)).decode("ascii")


def unpack(text: str) -> Any:
    """The value that :func:`pack` was given."""
    return json.loads(zlib.decompress(base64.b64decode(text)).decode("ascii"))


def make_frame(kind: int, index: int, offset: int = 0, payload: bytes = b"") -> bytes:
    """One frame, ready to be sent."""
    return HEADER.pack(kind, index, offset, len(payload)) + payload


def read_exactly(file: BinaryIO, size: int) -> bytes:
    """So many bytes.

    Raises:
        LinkError: the other side closed before.
    """
    data = file.read(size)
    if len(data) != size:
        raise LinkError("the connection was closed")
    return data


def read_frame(file: BinaryIO) -> tuple[int, int, int, bytes]:
    """The next frame: kind, index, offset, payload.

    Raises:
        LinkError: there is none, or it is none of ours.
    """
    kind, index, offset, size = HEADER.unpack(read_exactly(file, HEADER.size))
    if size > MOST_BYTES or not DATA <= kind & ~PACKED <= LAST:
        raise LinkError("what arrives is no frame")
    return kind, index, offset, read_exactly(file, size)


def unpack_payload(payload: bytes) -> bytes:
    """The bytes of a packed payload, of which there are never more than a frame holds.

    Raises:
        LinkError: they are damaged, or too many.
    """
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(payload, MOST_BYTES)
    except zlib.error as error:
        raise LinkError("a packed frame is damaged") from error
    if unpacker.unconsumed_tail or not unpacker.eof:
        raise LinkError("a packed frame is damaged")
    return data


class _Tls:
    """TLS over a socket, many records to a system call (a wrapped socket makes two for each)."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, feeds: bool) -> None:
        self._sock = sock
        self._arrived, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._arrived, self._leaving, server_side=not feeds)
        self._until_done(self._tls.do_handshake)

    def recv(self, size: int) -> bytes:
        return bytes(self._until_done(self._tls.read, size))

    def sendall(self, data: bytes) -> None:
        self._tls.write(data)
        self._sock.sendall(self._leaving.read())

    def _until_done(self, action: Any, *arguments: Any) -> Any:
        while True:
            try:
                done = action(*arguments)
            except ssl.SSLWantReadError:
                done = None
            if self._leaving.pending:
                self._sock.sendall(self._leaving.read())
            if done is not None or (action == self._tls.do_handshake and self._tls.version()):
                return done
            data = self._sock.recv(LINK_BUFFER_BYTES)
            if not data:
                raise LinkError("the connection was closed")
            self._arrived.write(data)


class _Incoming(io.RawIOBase):
    """What arrives by a link, for a buffered reader."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._channel.recv(len(buffer))
        buffer[: len(data)] = data
        return len(data)


class Link:
    """An authenticated connection to another node.

    Attributes:
        file: for reading, buffered.
        dropped: whether this side has given it up.
        dropped_for_another: whether another link took its place.
    """

    def __init__(self, sock: socket.socket, channel: Any) -> None:
        self._sock = sock
        self._channel = channel
        self.file: Any = io.BufferedReader(_Incoming(channel), LINK_BUFFER_BYTES)
        self.dropped = False
        self.dropped_for_another = False

    def send(self, data: bytes) -> None:
        """All of it, however long the other side takes."""
        self._channel.sendall(data)

    def send_list(self, value: Any) -> None:
        """A JSON value of any length."""
        data = zlib.compress(json.dumps(value).encode("ascii"), 1)
        self.send(LIST_BYTES.pack(len(data)) + data)

    def read_list(self) -> Any:
        """What :meth:`send_list` was given at the other side."""
        (size,) = LIST_BYTES.unpack(read_exactly(self.file, LIST_BYTES.size))
        if size > MOST_LISTED_BYTES:
            raise LinkError("what arrives is no list")
        return json.loads(zlib.decompress(read_exactly(self.file, size)).decode("ascii"))

    def drop(self) -> None:
        """Ends it; threads that read or write it find that out."""
        self.dropped = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Drops it and gives back what it holds."""
        self.drop()
        self._sock.close()


def connect(
    addresses: list[tuple[str, int]],
    secret: bytes,
    certificate: str | None,
    reached: Callable[[], None] = lambda: None,
) -> Link:
    """A link to the first of the addresses that answers; the caller feeds.

    Args:
        addresses: where the other node listens.
        secret, certificate: what both know.
        reached: called when there is a connection, of which it is not known yet who answers.

    Raises:
        LinkError: none does, or it is another than expected; says which and why.
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
    """A link of an accepted connection, whose other end feeds.

    Raises:
        LinkError, OSError: it is not a node of this copy, or it says nothing.
    """
    return _secure(sock, secret, certificate, feeds=False)


def _secure(sock: socket.socket, secret: bytes, certificate: str | None, feeds: bool) -> Link:
    try:
        sock.settimeout(HANDSHAKE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if sys.platform == "linux":
            # What stands unsent in the kernel is lost when the feeder changes.
            sock.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        channel = sock if certificate is None else _Tls(sock, _context(certificate, feeds), feeds)
        link = Link(sock, channel)
        _prove(link, secret, feeds)
        sock.settimeout(None)
        return link
    except BaseException:
        sock.close()
        raise


def _prove(link: Link, secret: bytes, feeds: bool) -> None:
    """Both sides show that they know the secret, neither shows the secret."""

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


def _context(certificate: str, feeds: bool) -> ssl.SSLContext:
    """For one link: shows this certificate and accepts only the same."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if feeds else ssl.PROTOCOL_TLS_SERVER)
    context.check_hostname = False
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    begin = certificate.index("-----BEGIN CERTIFICATE-----")
    context.load_verify_locations(cadata=certificate[begin:])
    with _as_file(certificate) as path:
        context.load_cert_chain(path)
    return context


@contextlib.contextmanager
def _as_file(text: str) -> Iterator[str]:
    """A path under which OpenSSL finds the text; in memory alone where the kernel can do that."""
    data = text.encode("ascii")
    if hasattr(os, "memfd_create"):
        number = os.memfd_create("certificate")
        try:
            os.write(number, data)
            yield f"/proc/self/fd/{number}"
        finally:
            os.close(number)
        return
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        yield file.name

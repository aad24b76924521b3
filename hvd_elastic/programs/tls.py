"""Mutually authenticated TLS between processes that were all given the same certificate.

Python's own TLS socket is for one thread at a time, and makes a system call for each record of
16 KiB. :class:`TlsSocket` may be read by one thread while another one writes: a lock is held only
while bytes in memory are encrypted or decrypted, and never while the network is waited for.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

_PIECE_BYTES = 1 << 17
"""Most bytes that one system call sends or receives."""

_TCP_OPTIONS = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3))
"""An idle connection that was cut is noticed after about 10 s, if the leader is not faster."""


def keep_alive(plain: socket.socket) -> None:
    """Have the kernel look whether the peer is still there, and send small messages at once."""
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _TCP_OPTIONS:
        if hasattr(socket, name):
            plain.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def tls_context(certificate: str, *, client: bool) -> ssl.SSLContext:
    """Return a TLS context that shows this certificate and accepts no other.

    Args:
        certificate: private key and self-signed certificate, as PEM text.
        client: whether this side begins the handshake.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if client else ssl.PROTOCOL_TLS_SERVER)
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
    """Yield a path where OpenSSL can read the text; it is only in memory where possible."""
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


class TlsSocket:
    """A TLS connection between two processes that hold the same certificate.

    Args:
        plain: connected socket; it is closed if the handshake fails.
        certificate: private key and self-signed certificate, as PEM text.
        client: whether this side has connected.
        limit_s: time limit for the handshake, and for all that is received before
            :meth:`has_begun` [s].

    Raises:
        ssl.SSLError: the peer has another certificate, or none, or does not speak TLS.
        OSError: the peer is gone, or did not finish the handshake in time.

    Attributes:
        peer_address: address of the other end.
    """

    def __init__(
        self, plain: socket.socket, certificate: str, *, client: bool, limit_s: float
    ) -> None:
        self._socket = plain
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._memory = threading.Lock()
        """Held while the TLS state is used."""
        self._order = threading.Lock()
        """Held while data are encrypted and sent."""
        self._deadline: float | None = time.monotonic() + limit_s
        try:
            plain.settimeout(limit_s)
            keep_alive(plain)
            context = tls_context(certificate, client=client)
            self._tls: Any = context.wrap_bio(
                self._incoming, self._outgoing, server_side=not client
            )
            self._shake_hands()
            self.peer_address = str(plain.getpeername()[0])
        except BaseException:
            plain.close()
            raise

    def _shake_hands(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._socket.sendall(self._outgoing.read())
                if not self._read_socket():
                    raise ConnectionResetError("the peer has closed the connection") from None
                continue
            except ssl.SSLError:
                with contextlib.suppress(OSError):  # tells the peer why, if it is still there
                    self._socket.sendall(self._outgoing.read())
                raise
            self._socket.sendall(self._outgoing.read())
            return

    def has_begun(self, patience_s: float | None = None) -> None:
        """Lift the time limit of the beginning.

        Args:
            patience_s: time after which a peer that takes nothing, or is gone, is given up [s];
                None: never.
        """
        self._deadline = None
        self._socket.settimeout(None)
        if patience_s is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            limit_ms = int(1000 * patience_s)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)

    def sendall(self, data: bytes | memoryview) -> None:
        """Send all of the data; blocks while there is no room.

        Raises:
            OSError: the peer is gone.
        """
        view = memoryview(data)
        with self._order:
            for at in range(0, len(view), _PIECE_BYTES):
                with self._memory:
                    self._tls.write(view[at : at + _PIECE_BYTES])
                    encrypted = self._outgoing.read()
                self._socket.sendall(encrypted)

    def recv_into(self, buffer: memoryview) -> int:
        """Put what comes next into a buffer; return its size [bytes], 0 at the end.

        Raises:
            OSError: the peer is gone.
        """
        while True:
            with self._memory:
                try:
                    return int(self._tls.read(len(buffer), buffer))
                except ssl.SSLWantReadError:
                    pass
            if not self._read_socket():
                return 0

    def _read_socket(self) -> bool:
        """Take what has arrived; return whether the peer may send more."""
        if self._deadline is not None:
            self._socket.settimeout(max(0.001, self._deadline - time.monotonic()))
        data = self._socket.recv(_PIECE_BYTES)
        with self._memory:
            self._incoming.write(data)
        return bool(data)

    def fileno(self) -> int:
        """Return the descriptor of the socket; -1 once it is closed."""
        return self._socket.fileno()

    def shutdown(self, how: int = socket.SHUT_RDWR) -> None:
        """End the connection; what another thread sends or receives fails."""
        self._socket.shutdown(how)

    def close(self) -> None:
        """Close the connection, once no other thread uses it."""
        with contextlib.suppress(OSError):
            self.shutdown()
        self._socket.close()


def read_exactly(connected: Any, size: int, peer: str = "the peer") -> memoryview:
    """Return the next ``size`` bytes of a socket or a :class:`TlsSocket`, which may be written to.

    Raises:
        ConnectionResetError: the connection was closed before; names the peer.
        OSError: the peer is gone.
    """
    view = memoryview(bytearray(size))
    at = 0
    while at < size:
        got = connected.recv_into(view[at:])
        if not got:
            raise ConnectionResetError(f"{peer} has closed the connection")
        at += got
    return view

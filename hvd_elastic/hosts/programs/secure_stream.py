"""Frames over mutually authenticated TLS, which one thread may read while another one writes.

Python's own TLS socket is for one thread at a time. Here a lock is held only while bytes in memory
are encrypted or decrypted, and never while the network is waited for.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
import time
from enum import IntEnum

from hvd_elastic.hosts.programs.tls import keep_alive, tls_context

HANDSHAKE_S = 5.0
"""Time limit for a handshake, and for the first frame after it [s]."""
PATIENCE_S = 60.0
"""Time after which a peer that takes nothing is given up [s]."""
_HEAD = struct.Struct("!BI")
_PIECE_BYTES = 1 << 16
"""Most bytes of one frame that is sent."""
_MAX_FRAME_BYTES = 1 << 22


class Kind(IntEnum):
    """What a frame holds. An empty one of the first three is the end of that stream."""

    STDIN = 0
    STDOUT = 1
    STDERR = 2
    EXIT = 3
    MESSAGE = 4


class SecureStream:
    """A TLS connection between two processes that hold the same certificate.

    Args:
        plain: connected socket; it is closed if the handshake fails.
        certificate: private key and self-signed certificate, as PEM text.
        client: whether this side has connected.

    Raises:
        ssl.SSLError: the peer has another certificate, or none, or does not speak TLS.
        OSError: the peer is gone, or did not finish the handshake in time.

    Attributes:
        peer_address: address of the other end.
    """

    def __init__(self, plain: socket.socket, certificate: str, *, client: bool) -> None:
        self._socket = plain
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._memory = threading.Lock()
        """Held while the TLS state is used."""
        self._order = threading.Lock()
        """Held while a frame is encrypted and sent."""
        self._received = bytearray()
        self._deadline: float | None = time.monotonic() + HANDSHAKE_S
        try:
            plain.settimeout(HANDSHAKE_S)
            keep_alive(plain)
            self.peer_address = str(plain.getpeername()[0])
            context = tls_context(certificate, client=client)
            self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=not client)
            self._shake_hands()
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

    def has_begun(self, patience_s: float = PATIENCE_S) -> None:
        """Lift the time limit of the beginning; the first frame was sent or received.

        Args:
            patience_s: time after which a peer that takes nothing, or is gone, is given up [s].
        """
        self._deadline = None
        self._socket.settimeout(None)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            limit_ms = int(1000 * patience_s)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)

    def send(self, kind: Kind, data: bytes = b"") -> None:
        """Send data in as many frames as it needs, at least one; blocks while there is no room.

        Raises:
            OSError: the peer is gone.
        """
        view = memoryview(data)
        while True:
            piece, view = view[:_PIECE_BYTES], view[_PIECE_BYTES:]
            with self._order:
                with self._memory:
                    self._tls.write(_HEAD.pack(kind, len(piece)) + bytes(piece))
                    encrypted = self._outgoing.read()
                self._socket.sendall(encrypted)
            if not view:
                return

    def receive(self) -> tuple[Kind, bytes]:
        """Return the next frame; called by one thread.

        Raises:
            OSError: the peer is gone, or sent no valid frame.
        """
        kind, size = _HEAD.unpack(self._exactly(_HEAD.size))
        if size > _MAX_FRAME_BYTES or kind not in Kind._value2member_map_:
            raise ConnectionError("the peer sent no valid frame")
        return Kind(kind), self._exactly(size)

    def _exactly(self, size: int) -> bytes:
        while len(self._received) < size:
            data = self._decrypted()
            if not data:
                raise ConnectionResetError("the peer has closed the connection")
            self._received += data
        taken = bytes(self._received[:size])
        del self._received[:size]
        return taken

    def _decrypted(self) -> bytes:
        while True:
            with self._memory:
                try:
                    return self._tls.read(_PIECE_BYTES)
                except ssl.SSLWantReadError:
                    pass
            if not self._read_socket():
                return b""

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

    def cut(self) -> None:
        """End the connection; what another thread sends or receives fails."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection, once no other thread uses it."""
        self.cut()
        self._socket.close()


def dial(address: str, port: int, certificate: str) -> SecureStream:
    """Return a connection to a process that listens, after both have shown the certificate.

    Raises:
        ssl.SSLError, OSError: as for :class:`SecureStream`.
    """
    plain = socket.create_connection((address, port), HANDSHAKE_S)
    return SecureStream(plain, certificate, client=True)

"""Frames over mutually authenticated TLS: input, output and messages of a process on a host."""

from __future__ import annotations

import contextlib
import socket
import struct
from enum import IntEnum

from hvd_elastic.programs.tls import TlsSocket, read_exactly

CONNECT_S = 5.0
"""Time limit for a connection, which needs no processor at the other end [s]."""
HANDSHAKE_S = 30.0
"""Time limit for a handshake, and for the first frame after it [s]."""
PATIENCE_S = 60.0
"""Time after which a peer that takes nothing is given up [s]."""
_HEAD = struct.Struct("!BI")
_PIECE_BYTES = 1 << 16
"""Most bytes of one frame that is sent."""
_MAX_FRAME_BYTES = 1 << 22


class Kind(IntEnum):
    """Content of a frame. An empty one of the first three is the end of that stream."""

    STDIN = 0
    STDOUT = 1
    STDERR = 2
    EXIT = 3
    MESSAGE = 4


class SecureStream(TlsSocket):
    """Sends and receives frames; see :class:`TlsSocket`."""

    def __init__(self, plain: socket.socket, certificate: str, *, client: bool) -> None:
        super().__init__(plain, certificate, client=client, limit_s=HANDSHAKE_S)

    def send(self, kind: Kind, data: bytes = b"") -> None:
        """Send data in as many frames as it needs, at least one; blocks while there is no room.

        Raises:
            OSError: the peer is gone.
        """
        for at in range(0, len(data) or 1, _PIECE_BYTES):
            piece = data[at : at + _PIECE_BYTES]
            self.sendall(_HEAD.pack(kind, len(piece)) + piece)

    def receive(self) -> tuple[Kind, bytes]:
        """Return the next frame; called by one thread.

        Raises:
            OSError: the peer is gone, or sent no valid frame.
        """
        kind, size = _HEAD.unpack(read_exactly(self, _HEAD.size))
        if size > _MAX_FRAME_BYTES or kind not in Kind._value2member_map_:
            raise ConnectionError("the peer sent no valid frame")
        return Kind(kind), bytes(read_exactly(self, size))

    def cut(self) -> None:
        """End the connection; what another thread sends or receives fails."""
        with contextlib.suppress(OSError):
            self.shutdown()


def dial(address: str, port: int, certificate: str) -> SecureStream:
    """Return a connection to a process that listens, after both have shown the certificate.

    Raises:
        ssl.SSLError, OSError: as for :class:`TlsSocket`.
    """
    plain = socket.create_connection((address, port), CONNECT_S)
    return SecureStream(plain, certificate, client=True)

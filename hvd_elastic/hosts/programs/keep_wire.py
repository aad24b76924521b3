"""Frames between ``runclust``, its keeper and the agents on the hosts: a kind, a number, bytes.

The number is that of a command. Who sends output or input may have ``WINDOW_BYTES`` of it on the
way; the other side makes room again (``ROOM``) for what it has used, so nobody's memory grows and
a reader that stands still holds up nobody else.
"""

from __future__ import annotations

import struct

WINDOW_BYTES = 1 << 18
# An agent begins with it; what a shell's start-up files print comes before.
MARK = b"\x01hvd-elastic-agent\n"

# To an agent.
START, INPUT, CLOSE, FORGET, PING = 1, 2, 3, 4, 5
# From an agent.
OUT, ERR, EXIT, DRAINED, OVER, PONG = 12, 13, 14, 15, 16, 17
# Instead of a command's beginning: why there is none; EXIT follows.
REFUSED = 18
REASON_BYTES = 4096
# Both ways: so many bytes have been used.
ROOM = 21
# Between a call and the keeper.
OPEN, OPENED, FAILED, GONE, LIVE = 31, 32, 33, 34, 35

HEAD = struct.Struct(">BII")
_NUMBER = struct.Struct(">i")


def frame(kind: int, number: int = 0, payload: bytes = b"") -> bytes:
    """One frame as bytes."""
    return HEAD.pack(kind, number, len(payload)) + payload


def pack_number(value: int) -> bytes:
    """The payload of ROOM and EXIT."""
    return _NUMBER.pack(value)


def unpack_number(payload: bytes) -> int:
    """What :func:`pack_number` packed."""
    value: int = _NUMBER.unpack(payload)[0]
    return value


class Frames:
    """Finds frames in bytes that arrive in pieces.

    Args:
        largest: most bytes that a frame may bring; None: as it likes.
    """

    def __init__(self, largest: int | None = None) -> None:
        self._largest = largest
        self._data = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, int, bytes]]:
        """The frames that are whole now: kind, number, payload.

        Raises:
            ValueError: one is too large.
        """
        self._data += data
        found, at = [], 0
        while len(self._data) - at >= HEAD.size:
            kind, number, size = HEAD.unpack_from(self._data, at)
            if self._largest is not None and size > self._largest:
                raise ValueError(f"a frame of {size} bytes")
            end = at + HEAD.size + size
            if len(self._data) < end:
                break
            found.append((kind, number, bytes(self._data[at + HEAD.size : end])))
            at = end
        del self._data[:at]
        return found

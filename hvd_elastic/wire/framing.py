"""Messages between leader, agents and workers: one JSON object a line, plain data only.

Both ways the reader decodes JSON and nothing else: no message can name code. The leader and an
agent talk over the ssh channel that started the agent; a worker and its agent over a unix socket
in the abstract namespace, whose other end is checked to belong to the same user.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from typing import Any

__all__ = ["PROTOCOL", "Message", "decode", "encode", "peer_uid", "split_lines"]

PROTOCOL = 3
"""Raised with every change that an older peer would misread."""

Message = dict[str, Any]

_MOST_DIGITS = 300


def encode(message: Message) -> bytes:
    r"""One line, newline included.

    >>> encode({"kind": "ready"})
    b'{"kind":"ready"}\n'
    """
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The message of one line.

    Raises:
        ValueError: the line is not a JSON object.
    """
    message = json.loads(line, parse_int=_number)
    if not isinstance(message, dict):
        raise ValueError(f"a message is a JSON object, this is {type(message).__name__}")
    return message


def _number(digits: str) -> int | float:
    """An integer; one that no float can hold is infinite, as such a float is."""
    return int(digits) if len(digits) <= _MOST_DIGITS else float(digits)


def split_lines(buffer: bytearray, data: bytes) -> Iterator[bytes]:
    """Add ``data`` to ``buffer`` and yield the lines that are complete; the rest stays in it."""
    buffer += data
    while (end := buffer.find(b"\n")) >= 0:
        line = bytes(buffer[:end])
        del buffer[: end + 1]
        if line:
            yield line


def peer_uid(connection: socket.socket) -> int:
    """User id of the process at the other end of a unix socket, as the kernel knows it."""
    credentials = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
    )
    _pid, uid, _gid = struct.unpack("3i", credentials)
    return int(uid)

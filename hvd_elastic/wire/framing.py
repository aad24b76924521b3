"""Encode and decode messages as JSON lines over any byte stream.

One message is one line. It is decoded into a type of :mod:`hvd_elastic.wire.messages` and nothing
else, so a message can never name code to run. The byte stream may be the pipes of an ssh channel, a
unix socket, or a connection that an agent opens to its leader.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from typing import Any, Generic, TypeVar, get_args

import msgspec

from hvd_elastic.errors import HvdElasticError

MAX_LINE_BYTES = 64 << 20
"""Longest line that is accepted, far above the longest sent (index lists, rendezvous values)."""

_MAX_DIGITS = 300
"""Most digits of an integer that a float can hold."""
_SHOWN_CHARACTERS = 80
"""Characters of a bad message that an error quotes."""

Message = TypeVar("Message")


class ProtocolError(HvdElasticError):
    """A peer sent an invalid message; the text names the peer and the mistake."""


def encode(message: object) -> bytes:
    r"""Return a message as one line of JSON, line end included.

    Raises:
        TypeError: a value has no JSON form.

    >>> encode({"kind": "ready"})
    b'{"kind":"ready"}\n'
    """
    try:
        return msgspec.json.encode(message, enc_hook=_as_plain) + b"\n"
    except UnicodeEncodeError:
        # File names that are not valid UTF-8 are strings with lone surrogates, which only the
        # standard library can encode.
        plain = msgspec.to_builtins(message, enc_hook=_as_plain)
        return json.dumps(plain, separators=(",", ":")).encode() + b"\n"


def _as_plain(value: Any) -> Any:
    """Convert a subtype of a number or string, such as ``numpy.float64``, to the plain type."""
    for plain in (int, float, str):
        if isinstance(value, plain):
            return plain(value)
    raise TypeError(f"a message cannot hold an object of type {type(value).__name__}")


class MessageDecoder(Generic[Message]):
    """Decodes and checks the messages of one peer.

    Args:
        union: union of the message types that this peer may send.
        sender: name of the peer for error messages.
    """

    def __init__(self, union: Any, sender: str) -> None:
        self._sender = sender
        self._union = union
        self._decoder = msgspec.json.Decoder(union)

    def decode(self, line: bytes) -> Message:
        """Return the message of one line.

        Raises:
            ProtocolError: the line is not a valid message of this peer.
        """
        try:
            return self._decoder.decode(line)
        except (ValueError, RecursionError):
            pass
        # The standard library also decodes what msgspec refuses, such as lone surrogates.
        try:
            plain = json.loads(line, parse_int=_as_number)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(
                f"{self._sender} sent a line that is not JSON ({error}): {_shown(line)}"
            ) from None
        try:
            return msgspec.convert(plain, self._union)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(self._explain(plain, error)) from None

    def _explain(self, plain: Any, error: Exception) -> str:
        if not isinstance(plain, dict):
            return f"{self._sender} sent {type(plain).__name__} {_shown(plain)}, not an object"
        members = get_args(self._union) or (self._union,)
        types = {each.__struct_config__.tag: each for each in members}
        field = next(iter(types.values())).__struct_config__.tag_field
        tag = plain.get(field)
        if not isinstance(tag, str) or tag not in types:
            return (
                f"{self._sender} sent a message with {field} {_shown(tag)}; "
                f"valid are {', '.join(sorted(types))}"
            )
        fields = ", ".join(types[tag].__struct_fields__) or "none"
        return f"{self._sender} sent a wrong message {tag!r}: {error}; its fields are {fields}"


def _as_number(digits: str) -> int | float:
    """Return an integer, or infinity for one that no float can hold."""
    return int(digits) if len(digits) <= _MAX_DIGITS else float(digits)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


class LineSplitter:
    r"""Splits a stream of bytes into lines.

    Args:
        sender: name of the peer for error messages.
        limit: longest line that is accepted [bytes].

    >>> lines = LineSplitter("a test")
    >>> list(lines.feed(b"one\ntw")), list(lines.feed(b"o\n"))
    ([b'one'], [b'two'])
    """

    def __init__(self, sender: str, limit: int = MAX_LINE_BYTES) -> None:
        self._sender = sender
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the lines that ``data`` completes, without line ends; empty lines are skipped.

        Raises:
            ProtocolError: a line is longer than the limit.
        """
        searched = len(self._buffer)
        self._buffer += data
        begin = 0
        while (end := self._buffer.find(b"\n", searched)) >= 0:
            if end > begin:
                yield bytes(self._buffer[begin:end])
            begin = searched = end + 1
        del self._buffer[:begin]
        if len(self._buffer) > self._limit:
            raise ProtocolError(f"{self._sender} sent a line of more than {self._limit} bytes")


def compress(data: bytes) -> bytes:
    """Return bytes of a message in fewer bytes; fast rather than small."""
    return zlib.compress(data, 1)


def decompress(data: bytes, limit: int = MAX_LINE_BYTES) -> bytes:
    """Return what :func:`compress` was given.

    Raises:
        ProtocolError: it is damaged, or longer than ``limit`` [bytes].
    """
    unpacking = zlib.decompressobj()
    try:
        plain = unpacking.decompress(data, limit)
    except zlib.error as error:
        raise ProtocolError(f"a peer sent compressed bytes that are damaged: {error}") from None
    if not unpacking.eof:
        raise ProtocolError(f"a peer sent more than {limit} compressed bytes, or not all of them")
    return plain

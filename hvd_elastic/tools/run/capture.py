"""Capture the output of a command: keep its beginning, count and fingerprint all of it.

A command that prints a gigabyte, or bytes without line breaks, needs no more memory here than one
that prints a page.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable

# Longer lines are emitted in parts, to limit the memory.
LONGEST_LINE_BYTES = 64 * 1024


class Capture:
    """Keeps the first bytes that it receives; counts and fingerprints all of them.

    Args:
        limit: maximum number of bytes to keep.
        on_lines: called with lines as they arrive; see :class:`TextLines`.
    """

    def __init__(self, limit: int, on_lines: Callable[[str], None] | None) -> None:
        self._limit = limit
        self._lines = None if on_lines is None else TextLines(on_lines)
        self._kept = bytearray()
        self._hash = hashlib.blake2b(digest_size=16)
        self.size_bytes = 0

    def take_piece(self, data: bytes) -> None:
        self.size_bytes += len(data)
        self._kept += data[: max(0, self._limit - len(self._kept))]
        self._hash.update(data)
        if self._lines is not None:
            self._lines.feed(data)

    def finish(self) -> None:
        """Emit what came after the last line break."""
        if self._lines is not None:
            self._lines.finish()

    @property
    def kept(self) -> bytes:
        """Return what is kept, without a part of a character at its end if it is cut there."""
        cut = self.size_bytes > len(self._kept)
        return bytes(self._kept[: whole_characters(self._kept) if cut else None])

    @property
    def fingerprint(self) -> bytes:
        """Digest of all bytes, kept or not; equal for equal output."""
        return self._hash.digest()


class TextLines:
    """Splits output into lines; the last one may lack its line break.

    A line of more than 64 KiB is emitted in parts.

    Args:
        emit: called with the whole lines that arrived together, without the last line break; bytes
            that are no UTF-8 are surrogates.
    """

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._rest = b""
        self._lock = threading.Lock()

    def feed(self, data: bytes) -> None:
        with self._lock:
            lines, end, rest = (self._rest + data).rpartition(b"\n")
            texts = [lines] if end else []
            while len(rest) > LONGEST_LINE_BYTES:
                end_of_part = whole_characters(rest[:LONGEST_LINE_BYTES])
                texts.append(rest[:end_of_part])
                rest = rest[end_of_part:]
            self._rest = rest
        for text in texts:
            self._emit(text.decode("utf-8", errors="surrogateescape"))

    def finish(self) -> None:
        """Emit what came after the last line break."""
        with self._lock:
            rest, self._rest = self._rest, b""
        if rest:
            self._emit(rest.decode("utf-8", errors="surrogateescape"))


def whole_characters(data: bytes | bytearray) -> int:
    """Return the length of the data without a UTF-8 character that is cut at its end.

    >>> whole_characters("a字".encode()), whole_characters("a字".encode()[:-1])
    (4, 1)
    """
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 != 0x80:  # the first byte of a character says how many it has
            needed = 1 if byte < 0xC0 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) - back if needed > back else len(data)
    return len(data)

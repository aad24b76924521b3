"""What a command writes: the beginning of it kept, all of it counted and fingerprinted.

A command that prints a gigabyte, or bytes without a line end, costs no more memory than one that
prints a page.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable

LONGEST_LINE_BYTES = 64 * 1024


class Capture:
    """Keeps the first bytes that it is given, counts and fingerprints all.

    Args:
        limit: most bytes to keep.
        on_lines: is given lines as they come; see :class:`LineSplitter`.
    """

    def __init__(self, limit: int, on_lines: Callable[[str], None] | None) -> None:
        self._limit = limit
        self._lines = None if on_lines is None else LineSplitter(on_lines)
        self._kept = bytearray()
        self._hash = hashlib.blake2b(digest_size=16)
        self.size_bytes = 0

    def take(self, data: bytes) -> None:
        self.size_bytes += len(data)
        self._kept += data[: max(0, self._limit - len(self._kept))]
        self._hash.update(data)
        if self._lines is not None:
            self._lines.feed(data)

    def finish(self) -> None:
        """Gives out what came after the last line end."""
        if self._lines is not None:
            self._lines.finish()

    @property
    def kept(self) -> bytes:
        return bytes(self._kept)

    @property
    def fingerprint(self) -> bytes:
        """Equal for equal bytes, kept or not."""
        return self._hash.digest()


class LineSplitter:
    """Cuts pieces of output where lines end; the last one may lack its line end.

    A line of more than 64 KiB comes in parts.

    Args:
        emit: is given one or more whole lines, as many as came at once, without the last line end.
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
                texts.append(rest[:LONGEST_LINE_BYTES])
                rest = rest[LONGEST_LINE_BYTES:]
            self._rest = rest
        for text in texts:
            self._emit(text.decode("utf-8", errors="replace"))

    def finish(self) -> None:
        """Gives out what came after the last line end."""
        with self._lock:
            rest, self._rest = self._rest, b""
        if rest:
            self._emit(rest.decode("utf-8", errors="replace"))

"""Reads files that are packed by gzip or Zstandard."""

from __future__ import annotations

import gzip
import io
import os
import zlib
from pathlib import Path
from typing import Any

from hvd_elastic.errors import DataError

PACKED = (".gz", ".zst")
BROKEN = (EOFError, gzip.BadGzipFile, zlib.error)
"""What reading a damaged file raises."""
CHUNK_BYTES = 1 << 20
_READ_BYTES = 1 << 16


def opened(path: str) -> Any:
    """Open a file to read it, unpacked."""
    ending = os.path.splitext(path)[1].lower()  # noqa: PTH122
    if ending == ".gz":
        return gzip.open(path, "rb")
    if ending == ".zst":
        return io.BufferedReader(_Zstandard(path), CHUNK_BYTES)
    return Path(path).open("rb")


def unpacked_size(path: str) -> int:
    """Return the size of a packed file once it is unpacked.

    Raises:
        DataError: it is damaged.
        OSError: it cannot be read.
    """
    size = 0
    try:
        with opened(path) as stream:
            while count := len(stream.read(CHUNK_BYTES)):
                size += count
    except BROKEN as error:
        raise DataError(f"it is damaged ({error}); copy it again") from None
    return size


class _Zstandard(io.RawIOBase):
    """A file of Zstandard frames, unpacked; the library's own reader takes a cut one for whole."""

    def __init__(self, path: str) -> None:
        try:
            import zstandard
        except ModuleNotFoundError:
            raise OSError(0, "it needs a library: pip install zstandard", path) from None
        self._file = Path(path).open("rb")  # noqa: SIM115
        self._new = zstandard.ZstdDecompressor().decompressobj
        self._error = zstandard.ZstdError
        self._frame: Any = None
        self._rest = self._out = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._out:
            packed = self._rest or self._file.read(_READ_BYTES)
            if not packed:
                if self._frame is not None:
                    raise EOFError("it ends within a frame")
                return 0
            self._frame = self._frame or self._new()
            try:
                self._out = self._frame.decompress(packed)
            except self._error as error:
                raise EOFError(str(error)) from None
            self._rest = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        count = min(len(buffer), len(self._out))
        buffer[:count], self._out = self._out[:count], self._out[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()

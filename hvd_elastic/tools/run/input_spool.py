"""Give one input to many readers, each at its own speed, by keeping it in a file."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from hvd_elastic.errors import HvdElasticError

PIECE_BYTES = 64 * 1024


class FileInput:
    """The input of one reader: a regular file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pieces(self) -> Iterator[bytes]:
        """Yield all of the file.

        Raises:
            HvdElasticError: it cannot be read.
        """
        try:
            with self._path.open("rb") as file:
                while data := file.read(PIECE_BYTES):
                    yield data
        except OSError as error:
            raise HvdElasticError(f"{self._path} cannot be read: {error.strerror}") from error


class InputSpool(AbstractContextManager["InputSpool"]):
    """Reads an input once and gives all of it to every reader.

    It is kept on disk and not in memory, since a reader may begin when the input has long ended,
    and a slow reader must not block the others.

    Args:
        source: a binary file, which need not end.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the object
        self._size = 0
        self._ended = False
        self._error: OSError | None = None
        self._changed = threading.Condition()
        threading.Thread(target=self._fill, name="standard input", daemon=True).start()

    def pieces(self) -> Iterator[bytes]:
        """Yield all of the input, waiting for parts that have not arrived yet.

        Raises:
            HvdElasticError: the input cannot be read or written to disk.
        """
        at = 0
        while True:
            with self._changed:
                while self._size <= at and not self._ended:
                    self._changed.wait()
                if self._error is not None:
                    raise HvdElasticError(
                        f"the input cannot be kept in {tempfile.gettempdir()}: "
                        f"{self._error.strerror}. Set TMPDIR to a folder with room for it"
                    )
                if self._size <= at or self._file.closed:
                    return
                data = os.pread(self._file.fileno(), PIECE_BYTES, at)
            at += len(data)
            yield data

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End all readers, and ignore further input."""
        with self._changed:
            self._ended = True
            self._file.close()
            self._changed.notify_all()

    def _fill(self) -> None:
        read = getattr(self._source, "read1", self._source.read)
        try:
            while data := read(PIECE_BYTES):
                with self._changed:
                    if self._ended:
                        return
                    self._file.write(data)
                    self._file.flush()
                    self._size += len(data)
                    self._changed.notify_all()
        except OSError as error:
            self._error = error
        with self._changed:
            self._ended = True
            self._changed.notify_all()

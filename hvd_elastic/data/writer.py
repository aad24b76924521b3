"""Writes a shard, its table and its SHA-256."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from typing_extensions import Self

from hvd_elastic.data.example import Example
from hvd_elastic.data.files import open_part
from hvd_elastic.data.index import LAYOUTS, Shard, make_table, save_table
from hvd_elastic.errors import DataError


class ShardWriter:
    """Writes one shard, which appears under its name when it is whole and has been read back.

    As a context manager it removes what it wrote if the block raises.

    Args:
        path: of the shard.
        layout: "tar" or "tfrecord".
        fields: of every example, such as ``("jpg", "cls")``.
    """

    def __init__(self, path: Path, layout: str, fields: Sequence[str]) -> None:
        self._path, self._layout, self._fields = path, LAYOUTS[layout], tuple(fields)
        self._file = open_part(path)
        self._part = Path(self._file.name)
        self._hash = hashlib.sha256()
        self._bytes = 0
        self._examples: list[Example] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            try:
                self._file.close()  # may raise again where the disk is full
            finally:
                self._part.unlink(missing_ok=True)

    def add(self, key: str, values: Sequence[bytes]) -> None:
        """Append an example.

        Args:
            key: its name in the shard, without ``.``.
            values: of each field; that of ``cls`` is the number of the class, such as ``b"7"``.
        """
        record, place = self._layout.encode(key, self._fields, values)
        self._examples.append(place._replace(start=self._bytes))
        self._write(record)

    def finish(self) -> Shard:
        """Close the shard, read it back, and return its entry in the index.

        Raises:
            DataError: what was read back is not what was written.
        """
        self._write(self._layout.end)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        if self._examples:
            table = make_table(self._examples, self._fields)
            found = make_table(list(self._layout.scan(self._part)), self._fields)
            if found.tobytes() != table.tobytes():
                raise DataError(f"{self._path} reads back otherwise than it was written")
            save_table(self._path, table)
        self._part.replace(self._path)
        return Shard(self._path.name, len(self._examples), self._bytes, self._hash.hexdigest())

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._hash.update(data)
        self._bytes += len(data)

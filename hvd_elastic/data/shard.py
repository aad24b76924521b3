"""A shard that is open: reads the values of its examples."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvd_elastic.data.index import Index, Shard, restore
from hvd_elastic.data.tar import require_key
from hvd_elastic.data.tfrecord import CHECKSUM_BYTES, SEVERAL, decode_value
from hvd_elastic.errors import DataError


class OpenShard:
    """A shard that is open for reading; processes that were forked may share it.

    Args:
        file: descriptor of it, which :meth:`close` closes.
        shard: its entry in the index.
        remedy: what to do if it has changed, for messages.
    """

    def __init__(
        self, path: Path, file: int, shard: Shard, index: Index, table: np.ndarray, remedy: str
    ) -> None:
        self.path = path
        self._file, self._remedy = file, remedy
        self._fields = index.columns(shard)
        self._kinds = {name: kind for name, kind in index.kinds.items() if name != "cls"}
        self._columns = {name: table[name] for name in table.dtype.names or ()}
        self._checksums = table["checksum"] if index.layout == "tfrecord" else None
        self._labels_from = index.labels_from
        self._label = self._fields.index("cls") if "cls" in self._fields else None

    def key(self, row: int) -> str:
        """Return the key of an example; bytes of it that are no UTF-8 are surrogates."""
        key: bytes = self._columns["key"][row]
        return key.decode(errors="surrogateescape")

    def label(self, row: int) -> int | None:
        """Return the label of an example; None: it has none."""
        if self._label is None or self._columns["size"][row][self._label] == -1:
            return None
        return int(self._columns["label"][row]) + 1 - self._labels_from

    def places(self, fields: Sequence[str]) -> list[int]:
        """Return the columns of fields; -1: no example of the shard has it."""
        return [self._fields.index(name) if name in self._fields else -1 for name in fields]

    def read(self, row: int, places: Sequence[int]) -> list[Any]:
        """Return values of an example: bytes, what a TFRecord stores, or None if it has none.

        Args:
            row: number of the example in the shard.
            places: columns, as :meth:`places` gives them.

        Raises:
            DataError: another example is in its place.
        """
        columns = self._columns
        start, length = int(columns["start"][row]), int(columns["length"][row])
        offsets, sizes = columns["offset"][row].tolist(), columns["size"][row].tolist()
        try:
            record = os.pread(self._file, length, start)
            if len(record) < length:
                raise ValueError(f"the file ends after {start + len(record)} bytes")
            self._require_indexed(record, row, offsets, sizes)
        except (OSError, ValueError) as error:
            raise DataError(
                f"{self.path} has changed since it was indexed: example {self.key(row)!r} cannot "
                f"be read: {error}; {self._remedy}"
            ) from error
        return [
            None
            if place < 0 or sizes[place] == -1
            else self._value(place, record, offsets[place], sizes[place], start)
            for place in places
        ]

    def _require_indexed(
        self, record: bytes, row: int, offsets: Sequence[int], sizes: Sequence[int]
    ) -> None:
        """Raise ValueError if a record is not the one that was indexed, as far as it tells."""
        if self._checksums is not None:
            if record[-CHECKSUM_BYTES:] != self._checksums[row].tobytes():
                raise ValueError("another record is in its place")
            return
        first = min(offsets, default=0)
        if first < 0:  # it lacks a field
            first = min((each for each in offsets if each >= 0), default=0)
        if first:
            place, key = offsets.index(first), self._columns["key"][row]
            require_key(record, key, self._fields[place], first, sizes[place])

    def _value(self, place: int, record: bytes, offset: int, size: int, start: int) -> Any:
        if offset < 0:  # of a hard link in a tar file, to an example before this one
            return os.pread(self._file, size, start + offset)
        kind = self._kinds.get(self._fields[place])
        if kind is None:
            return record[offset : offset + size]
        if size < 0:
            return decode_value(kind, record[offset : offset + SEVERAL - size], several=True)
        return decode_value(kind, record[offset : offset + size])

    def close(self) -> None:
        os.close(self._file)


def read_all(path: Path, shard: Shard, index: Index, table: np.ndarray) -> None:
    """Read all examples of a shard as training does."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    opened = OpenShard(path, file, shard, index, table, restore(path.parent))
    try:
        places = opened.places(index.columns(shard))
        for row in range(shard.examples):
            opened.read(row, places)
    finally:
        opened.close()

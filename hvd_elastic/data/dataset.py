"""Reads examples from a folder of shards, by index."""

from __future__ import annotations

import bisect
import json
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from hvd_elastic.data import images
from hvd_elastic.data.index import LAYOUTS, load_index, load_table, require_size, restore
from hvd_elastic.errors import DataError
from hvd_elastic.model.sharding import Blocks

_OPEN_SHARDS = 128
"""Shards that a process keeps open. With their tables they are a quarter of the 1,024 files that a
process may usually have open."""
_WINDOW = 16


def _array(data: bytes) -> np.ndarray:
    return np.load(BytesIO(data), allow_pickle=False)


DECODERS: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff"), images.decode),
    "npy": _array,
    "txt": bytes.decode,
    "json": json.loads,
}
"""How the fields with these endings are decoded; others stay bytes."""


class ShardDataset:
    """A map-style data set over a folder of shards (tar in WebDataset's layout, or TFRecord).

    An example is a tuple of its fields, decoded, in the order of the index, and its label if the
    data set has labels; a single one comes without a tuple. It works with
    :class:`hvd_elastic.torch.DataLoader` and with PyTorch's own, with worker processes too.

    Args:
        folder: with an ``index.json``.
        transform: called with the first field, decoded, of every example.
        decode: decodes the first field (bytes → any) instead of ``DECODERS``, such as
            :class:`hvd_elastic.data.RandomCrop`; ``bytes`` leaves it as stored.
        fields: names of the fields to read; None: all but ``cls``, which is the label.
        shuffle_window: shards that an epoch's order mixes at a time, >= 1. It must stay the same
            for a run, as the seed.

    Attributes:
        classes: names by label; empty if there are none.
        blocks: sizes of the shards and the window, by which the loader shuffles.

    Raises:
        DataError: there is no index, or of another version; a shard is missing or has changed.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        transform: Callable[[Any], Any] | None = None,
        *,
        decode: Callable[[bytes], Any] | None = None,
        fields: Sequence[str] | None = None,
        shuffle_window: int = _WINDOW,
    ) -> None:
        if "://" in str(folder):
            raise DataError(
                f"{folder}: shards are read from folders only; copy them to every host, for "
                "example with copyclust, and name the folder there"
            )
        self.folder = Path(folder)
        self.transform = transform
        index = load_index(self.folder)
        for shard in index.shards:
            require_size(self.folder / shard.name, shard)
        if fields is None:
            fields = [name for name in index.fields if name != "cls"]
        if unknown := [name for name in fields if name not in index.fields]:
            raise DataError(
                f"{self.folder} has no field {', '.join(unknown)}; its fields are "
                f"{', '.join(index.fields)}"
            )
        if shuffle_window < 1:
            raise DataError(f"shuffle_window is {shuffle_window}, it must be 1 or more")
        self.classes = index.classes
        self._index = index
        self._layout = index.layout
        self._places = [index.fields.index(name) for name in fields]
        self._decoders = [DECODERS.get(name.rpartition(".")[2], bytes) for name in fields]
        if decode is not None:
            self._decoders[:1] = [decode]
        self._ends = list(accumulate(shard.examples for shard in index.shards))
        self.blocks = Blocks(tuple(shard.examples for shard in index.shards), shuffle_window)
        self._opened: OrderedDict[int, _OpenShard] = OrderedDict()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> Any:
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        number = bisect.bisect_right(self._ends, index)
        shard = self._shard(number)
        row = index - self._ends[number] + self._index.shards[number].examples
        values, label = shard.read(row, self._places)
        found = [self._decode(shard, row, *pair) for pair in enumerate(values)]
        if self.transform is not None and found:
            found[0] = self.transform(found[0])
        if self._index.labelled:
            found.append(label)
        return found[0] if len(found) == 1 else tuple(found)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return several examples in this order; they are read in the order of the shards."""
        places = sorted(range(len(indices)), key=indices.__getitem__)
        found: list[Any] = [None] * len(indices)
        for place in places:
            found[place] = self[indices[place]]
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": OrderedDict()}

    def _decode(self, shard: _OpenShard, row: int, number: int, value: bytes) -> Any:
        try:
            return self._decoders[number](value)
        except (OSError, ValueError, SyntaxError) as error:
            raise DataError(
                f"{shard.path}: example {shard.key(row)!r} cannot be decoded: {error}"
            ) from error

    def _shard(self, number: int) -> _OpenShard:
        found = self._opened.get(number)
        if found is None:
            if len(self._opened) >= _OPEN_SHARDS:
                self._opened.popitem(last=False)[1].close()
            shard = self._index.shards[number]
            path = self.folder / shard.name
            table = load_table(path, len(self._index.fields), shard.examples)
            found = self._opened[number] = _OpenShard(path, self._layout, self._index.fields, table)
        self._opened.move_to_end(number)
        return found


class _OpenShard:
    """A shard that is open for reading; processes that were forked may share it."""

    def __init__(self, path: Path, layout: str, fields: tuple[str, ...], table: np.ndarray) -> None:
        self.path = path
        self._layout, self._fields, self._table = LAYOUTS[layout], fields, table
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DataError(
                f"{path} cannot be read: {error.strerror}; {restore(path.parent)}"
            ) from error

    def key(self, row: int) -> str:
        return self._table["key"][row].decode()

    def read(self, row: int, fields: Sequence[int]) -> tuple[list[bytes], int]:
        """Return values of an example, and its label."""
        entry = self._table[row]
        start, length = int(entry["start"]), int(entry["length"])
        try:
            record = os.pread(self._file, length, start)
            if len(record) < length:
                raise ValueError(f"the file ends after {start + len(record)} bytes")
            self._layout.require_key(record, self.key(row), self._fields)
        except (OSError, ValueError) as error:
            raise DataError(
                f"{self.path} has changed since it was indexed: example {self.key(row)!r} cannot "
                f"be read: {error}; {restore(self.path.parent)}"
            ) from error
        offsets, sizes = entry["offset"].tolist(), entry["size"].tolist()
        values = [record[offsets[each] : offsets[each] + sizes[each]] for each in fields]
        return values, int(entry["label"])

    def close(self) -> None:
        os.close(self._file)

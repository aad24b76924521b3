"""Reads examples from a folder of shards, or from shards behind a URL, by index."""

from __future__ import annotations

import bisect
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from hvd_elastic.data.cache import ShardCache
from hvd_elastic.data.decoding import Decoder, decoders_of, order_key
from hvd_elastic.data.example import example_number
from hvd_elastic.data.index import (
    INDEX,
    LAYOUTS,
    Index,
    Shard,
    load_index,
    load_table,
    parse_index,
    require_size,
    restore,
)
from hvd_elastic.data.remote import RemoteFolder, is_url
from hvd_elastic.errors import DataError
from hvd_elastic.model.sharding import Blocks

_OPEN_SHARDS = 128
"""Shards that a process keeps open. With their tables they are a quarter of the 1,024 files that a
process may usually have open."""
_WINDOW = 16


class ShardDataset:
    """A map-style data set over a folder of shards (tar in WebDataset's layout, or TFRecord).

    An example is a tuple of its fields, decoded, in the order of the index, and its label if the
    data set has labels; a single one comes without a tuple. It works with
    :class:`hvd_elastic.torch.DataLoader` and with PyTorch's own, with worker processes too.

    Args:
        folder: with an ``index.json``; or the URL of such a folder, ``http(s)://…`` or one that
            fsspec supports.
        transform: called with the first field, decoded, of every example.
        decode: decodes the first field (bytes → any) in place of
            :func:`hvd_elastic.data.decoding.decoders_of`, such as
            :class:`hvd_elastic.data.RandomCrop`; ``bytes`` leaves it as stored. A dict has a
            decoder for each field that it names: ``{"mask.png": bytes}``.
        fields: names of the fields to read; None: all but ``cls``, which is the label.
        shuffle_window: shards that an epoch's order mixes at a time, >= 1. It must stay the same
            for a run, as the seed.
        cache: folder on this host's disk for shards behind a URL. Ranks, their loader processes and
            other runs of the host share it.
        cache_bytes: most bytes of all shards in it, enough for those of two windows; None: no
            limit.

    Attributes:
        classes: names by label; empty if there are none.
        blocks: sizes of the shards and the window, by which the loader shuffles.
        order_key: how examples are decoded, which stays the same within an epoch.

    Raises:
        DataError: there is no index, or of another version; a shard is missing or has changed.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        transform: Callable[[Any], Any] | None = None,
        *,
        decode: Decoder | Mapping[str, Decoder] | None = None,
        fields: Sequence[str] | None = None,
        shuffle_window: int = _WINDOW,
        cache: str | os.PathLike[str] | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        if shuffle_window < 1:
            raise DataError(f"shuffle_window is {shuffle_window}, it must be 1 or more")
        self.transform = transform
        self._files: _Folder | _Behind
        if is_url(folder):
            self._files = _Behind(str(folder), cache, cache_bytes, shuffle_window)
        elif cache is None and cache_bytes is None:
            self._files = _Folder(Path(folder))
        else:
            raise DataError(
                f"{folder} is a folder, from which shards are read directly; cache and cache_bytes "
                "are for a URL"
            )
        index = self._files.index
        if fields is None:
            fields = [name for name in index.fields if name != "cls"]
        if unknown := [name for name in fields if name not in index.fields]:
            raise DataError(
                f"{self._files} has no field {', '.join(unknown)}; its fields are "
                f"{', '.join(index.fields)}"
            )
        self.classes = index.classes
        self._index = index
        self._layout = index.layout
        self._places = [index.fields.index(name) for name in fields]
        self._decoders = decoders_of(fields, decode)
        self.order_key = order_key(fields, self._decoders)
        self._ends = list(accumulate(shard.examples for shard in index.shards))
        self.blocks = Blocks(tuple(shard.examples for shard in index.shards), shuffle_window)
        self._opened: OrderedDict[int, _OpenShard] = OrderedDict()

    def prefetch_blocks(self, blocks: Sequence[int]) -> None:
        """Fetch shards that will be read, in this order; the loader calls it."""
        self._files.prefetch(blocks)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> Any:
        asked, length = example_number(index), len(self)
        if not -length <= asked < length:
            raise IndexError(f"example {asked} of {length}: they are numbered 0 to {length - 1}")
        index = asked % length
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
        except (OSError, ValueError, SyntaxError, DataError) as error:
            raise DataError(
                f"{shard.path}: example {shard.key(row)!r} cannot be decoded: {error}"
            ) from error

    def _shard(self, number: int) -> _OpenShard:
        found = self._opened.get(number)
        if found is None:
            if len(self._opened) >= min(_OPEN_SHARDS, self._files.most_open):
                self._opened.popitem(last=False)[1].close()
            shard = self._index.shards[number]
            path, file = self._files.open(shard)
            try:
                table = load_table(path, len(self._index.fields), shard.examples)
            except DataError:
                os.close(file)
                raise
            fields, remedy = self._index.fields, self._files.remedy(path)
            found = _OpenShard(path, file, self._layout, fields, table, remedy)
            self._opened[number] = found
        self._opened.move_to_end(number)
        return found


class _Folder:
    """Shards in a folder.

    Attributes:
        index: of the shards.
        most_open: shards that a process should keep open.
    """

    most_open = _OPEN_SHARDS

    def __init__(self, folder: Path) -> None:
        self.index = load_index(folder)
        self._folder = folder
        for shard in self.index.shards:
            require_size(folder / shard.name, shard)

    def __str__(self) -> str:
        return str(self._folder)

    def open(self, shard: Shard) -> tuple[Path, int]:
        """Return the path of a shard, and a descriptor to read it."""
        path = self._folder / shard.name
        try:
            return path, os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DataError(
                f"{path} cannot be read: {error.strerror}; {self.remedy(path)}"
            ) from error

    def remedy(self, path: Path) -> str:
        """Return what to do about a shard that has changed."""
        return restore(path.parent)

    def prefetch(self, blocks: Sequence[int]) -> None:
        """Do nothing: the kernel reads ahead."""


class _Behind:
    """Shards behind a URL; see :class:`_Folder`."""

    def __init__(
        self,
        url: str,
        cache: str | os.PathLike[str] | None,
        cache_bytes: int | None,
        window: int,
    ) -> None:
        source = RemoteFolder(url)
        if cache is None:
            raise DataError(
                f"{source}: shards behind a URL need a folder on this host's disk to keep them, "
                'such as ShardDataset(url, cache="/tmp/shards", cache_bytes=100 << 30)'
            )
        self.index: Index = parse_index(source.read(INDEX), source)
        sizes = sorted((shard.bytes for shard in self.index.shards), reverse=True)
        needed = sum(sizes[: 2 * window])
        if cache_bytes is not None and cache_bytes < needed:
            raise DataError(
                f"cache_bytes is {cache_bytes}, and the shards of two windows of {window}, one "
                f"that is read and one to come, may have {needed} bytes; give at least that, or a "
                "smaller shuffle_window"
            )
        self.most_open = window
        self._source = source
        self._cache = ShardCache(source, Path(cache), len(self.index.fields), cache_bytes)

    def __str__(self) -> str:
        return str(self._source)

    def open(self, shard: Shard) -> tuple[Path, int]:
        return self._cache.path(shard), self._cache.open(shard)

    def remedy(self, path: Path) -> str:
        return f"remove {path}, and it is fetched again"

    def prefetch(self, blocks: Sequence[int]) -> None:
        self._cache.prefetch([self.index.shards[number] for number in blocks])


class _OpenShard:
    """A shard that is open for reading; processes that were forked may share it."""

    def __init__(
        self,
        path: Path,
        file: int,
        layout: str,
        fields: tuple[str, ...],
        table: np.ndarray,
        remedy: str,
    ) -> None:
        self.path = path
        self._file, self._remedy = file, remedy
        self._layout, self._fields = LAYOUTS[layout], fields
        self._columns = {name: table[name] for name in table.dtype.names or ()}

    def key(self, row: int) -> str:
        return self._columns["key"][row].decode()

    def read(self, row: int, fields: Sequence[int]) -> tuple[list[bytes], int]:
        """Return values of an example, and its label."""
        columns = self._columns
        start, length = int(columns["start"][row]), int(columns["length"][row])
        try:
            record = os.pread(self._file, length, start)
            if len(record) < length:
                raise ValueError(f"the file ends after {start + len(record)} bytes")
            self._layout.require_key(record, self.key(row), self._fields)
        except (OSError, ValueError) as error:
            raise DataError(
                f"{self.path} has changed since it was indexed: example {self.key(row)!r} cannot "
                f"be read: {error}; {self._remedy}"
            ) from error
        offsets, sizes = columns["offset"][row].tolist(), columns["size"][row].tolist()
        values = [record[offsets[each] : offsets[each] + sizes[each]] for each in fields]
        return values, int(columns["label"][row])

    def close(self) -> None:
        os.close(self._file)

"""Reads examples from a folder of shards, or from shards behind a URL, by index."""

from __future__ import annotations

import bisect
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

from hvd_elastic.data.cache import ShardCache
from hvd_elastic.data.decoding import Decoder, decoders_of, order_key
from hvd_elastic.data.example import example_number
from hvd_elastic.data.index import (
    INDEX,
    Index,
    Shard,
    load_index,
    load_table,
    parse_index,
    require_size,
    restore,
)
from hvd_elastic.data.remote import RemoteFolder, selection
from hvd_elastic.data.shard import OpenShard
from hvd_elastic.errors import DataError, SkippedExampleError
from hvd_elastic.model.sharding import Blocks
from hvd_elastic.urls import is_url

_OPEN_SHARDS = 128
"""Shards that a process keeps open. With their tables they are a quarter of the 1,024 files that a
process may usually have open."""
_WINDOW = 16


KEY = "__key__"
"""Field that is the key of an example, as WebDataset calls it."""


class ShardDataset:
    """A map-style dataset over a folder of shards (tar in WebDataset's layout, or TFRecord).

    An example is a tuple of its fields, decoded, in the order of the index, and its label if the
    dataset has labels; a single one comes without a tuple. A slice is a list of examples. It works
    with
    :class:`hvd_elastic.torch.DataLoader` and with PyTorch's own, with worker processes too.

    Args:
        folder: with an ``index.json``; or the URL of such a folder, ``http(s)://…`` or one that
            fsspec supports. A pattern with braces, ``/data/train-{000..127}.tar``, names some of
            its shards.
        transform: called with the first field, decoded, of every example.
        decode: decodes the first field (bytes → any) in place of
            :func:`hvd_elastic.data.decoding.decoders_of`, such as
            :class:`hvd_elastic.data.RandomCrop`; ``bytes`` leaves it as stored. A dict has a
            decoder for each field that it names: ``{"mask.png": bytes}``.
        fields: names of the fields to read; None: all but ``cls``, which is the label and comes
            last unless it is named here. ``__key__`` is the key of the example.
        optional: names of fields, also of ``cls``, that examples may lack: None is in their place.
        on_error: what to do with an example that cannot be decoded: ``"raise"`` the error, or
            ``"skip"``: the loaders leave it out of its batch. It counts as read, with a gradient
            of 0, and is named and counted in what is told of the run. Everything else that reads
            raises :class:`SkippedExampleError`.
        index: folder of the index, if it does not lie beside the shards.
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
        DataError: there is no index, or of another version; a shard is missing or has changed; some
            examples lack a field that is read and not named as optional.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        transform: Callable[[Any], Any] | None = None,
        *,
        decode: Decoder | Mapping[str, Decoder] | None = None,
        fields: Sequence[str] | None = None,
        optional: Sequence[str] = (),
        on_error: Literal["raise", "skip"] = "raise",
        index: str | os.PathLike[str] | None = None,
        shuffle_window: int = _WINDOW,
        cache: str | os.PathLike[str] | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        if shuffle_window < 1:
            raise DataError(f"shuffle_window is {shuffle_window}, it must be 1 or more")
        for name, value in (("fields", fields), ("optional", optional)):
            if isinstance(value, str):
                raise DataError(f"{name} is {value!r}, it must be a tuple of names: ({value!r},)")
        if on_error not in ("raise", "skip"):
            raise DataError(f'on_error is {on_error!r}, it must be "raise" or "skip"')
        self._skips = on_error == "skip"
        self.transform = transform
        self._files: _Folder | _Behind
        place, names = selection(folder)
        tables = None if index is None else Path(index)
        if is_url(place):
            self._files = _Behind(place, names, tables, cache, cache_bytes, shuffle_window)
        elif cache is None and cache_bytes is None:
            self._files = _Folder(Path(place), names, tables)
        else:
            raise DataError(
                f"{folder} is a folder, from which shards are read directly; cache and cache_bytes "
                "are for a URL"
            )
        found = self._files.index
        if fields is None:
            fields = [name for name in found.fields if name != "cls"]
        self._fields = tuple(fields)
        self._require_fields(found, optional)
        self.classes = found.classes
        self._index = found
        self._labelled = found.labelled and "cls" not in fields
        self._others = KEY in fields or "cls" in fields
        self._stored = [name for name in fields if name not in (KEY, "cls")]
        self._decoders = decoders_of(self._stored, decode, found.kinds)
        self.order_key = order_key(self._stored, self._decoders)
        self._ends = list(accumulate(shard.examples for shard in found.shards))
        self.blocks = Blocks(tuple(shard.examples for shard in found.shards), shuffle_window)
        self._opened: OrderedDict[int, tuple[OpenShard, list[int]]] = OrderedDict()

    def _require_fields(self, index: Index, optional: Sequence[str]) -> None:
        """Raise DataError if there is no such field, or examples lack one that is not optional."""
        known, named = {KEY, *index.fields}, (*self._fields, *optional)
        if unknown := [name for name in named if name not in known]:
            raise DataError(
                f"{self._files} has no field {', '.join(unknown)}; its fields are "
                f"{', '.join(index.fields)}"
            )
        lacking = index.lacking()
        for name in (*self._fields, *(["cls"] if index.labelled else [])):
            if name in lacking and name not in optional:
                number, first = lacking[name]
                total = sum(shard.examples for shard in index.shards)
                raise DataError(
                    f"{self._files}: {number} of {total} examples have no field {name}, the first "
                    f"in {first}; name the fields to read by fields=, or optional=({name!r},), "
                    "which gives None in its place"
                )

    def prefetch_blocks(self, blocks: Sequence[int]) -> None:
        """Fetch shards that will be read, in this order; the loader calls it."""
        self._files.prefetch(blocks)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return self.__getitems__(range(*index.indices(len(self))))
        shard, places, row = self._at(index)
        stored = shard.read(row, places)
        values = [
            None if value is None else self._decode(shard, row, number, value)
            for number, value in enumerate(stored)
        ]
        if self.transform is not None and values and values[0] is not None:
            values[0] = self.transform(values[0])
        if self._others:
            coming = iter(values)
            values = [self._other(name, shard, row, coming) for name in self._fields]
        if self._labelled:
            values.append(shard.label(row))
        return values[0] if len(values) == 1 else tuple(values)

    def key(self, index: int) -> str:
        """Return the key of an example, such as the name of its file without its ending."""
        shard, _, row = self._at(index)
        return shard.key(row)

    def _other(self, name: str, shard: OpenShard, row: int, values: Iterator[Any]) -> Any:
        if name == KEY:
            return shard.key(row)
        return shard.label(row) if name == "cls" else next(values)

    def _at(self, index: Any) -> tuple[OpenShard, list[int], int]:
        """Return the shard of an example, the columns to read, and the number of its row."""
        asked, length = example_number(index), len(self)
        if not -length <= asked < length:
            numbers = f"numbers are 0 to {length - 1}, from the end -1 to {-length}"
            raise IndexError(
                f"{self._files} has no example {asked}: {numbers if length else 'it is empty'}"
            )
        number = bisect.bisect_right(self._ends, asked % length)
        row = asked % length - self._ends[number] + self._index.shards[number].examples
        return *self._shard(number), row

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return several examples in this order; they are read in the order of the shards."""
        places = sorted(range(len(indices)), key=indices.__getitem__)
        found: list[Any] = [None] * len(indices)
        for place in places:
            found[place] = self[indices[place]]
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": OrderedDict()}

    def _decode(self, shard: OpenShard, row: int, number: int, value: bytes) -> Any:
        try:
            return self._decoders[number](value)
        except (OSError, ValueError, SyntaxError, DataError) as error:
            example = f"{shard.path}: example {shard.key(row)!r}"
            field = f"its {self._stored[number]}: " if len(self._stored) > 1 else ""
            if self._skips:
                raise SkippedExampleError(example, f"{field}{error}".rstrip(".")) from error
            raise DataError(f"{example} cannot be decoded: {field}{error}") from error

    def _shard(self, number: int) -> tuple[OpenShard, list[int]]:
        found = self._opened.get(number)
        if found is None:
            if len(self._opened) >= min(_OPEN_SHARDS, self._files.most_open):
                self._opened.popitem(last=False)[1][0].close()
            shard = self._index.shards[number]
            path, table, file = self._files.open(shard)
            try:
                rows = load_table(table, len(self._index.columns(shard)), shard.examples)
            except DataError:
                os.close(file)
                raise
            opened = OpenShard(path, file, shard, self._index, rows, self._files.remedy(path))
            found = self._opened[number] = opened, opened.places(self._stored)
        self._opened.move_to_end(number)
        return found


class _Folder:
    """Shards in a folder.

    Attributes:
        index: of the shards.
        most_open: shards that a process should keep open.
    """

    most_open = _OPEN_SHARDS

    def __init__(self, folder: Path, names: Sequence[str] | None, tables: Path | None) -> None:
        self._folder, self._tables = folder, tables
        self.index = _selected(load_index(tables or folder), names, folder)
        for shard in self.index.shards:
            require_size(folder / shard.name, shard, tables)

    def __str__(self) -> str:
        return str(self._folder)

    def open(self, shard: Shard) -> tuple[Path, Path, int]:
        """Return the path of a shard, that which its table lies beside, and its descriptor."""
        path = self._folder / shard.name
        require_size(path, shard, self._tables)
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return path, (self._tables or self._folder) / shard.name, file
        except OSError as error:
            raise DataError(
                f"{path} cannot be read: {error.strerror}; {self.remedy(path)}"
            ) from error

    def remedy(self, path: Path) -> str:
        """Return what to do about a shard that has changed."""
        return restore(path.parent, self._tables)

    def prefetch(self, blocks: Sequence[int]) -> None:
        """Do nothing: the kernel reads ahead."""


class _Behind:
    """Shards behind a URL; see :class:`_Folder`."""

    def __init__(
        self,
        url: str,
        names: Sequence[str] | None,
        tables: Path | None,
        cache: str | os.PathLike[str] | None,
        cache_bytes: int | None,
        window: int,
    ) -> None:
        source = RemoteFolder(url)
        if cache is None:
            raise DataError(
                f"{source}: shards behind a URL need a folder on this host's disk to keep them, "
                'such as ShardDataset(url, cache="/scratch/shards", cache_bytes=100 << 30)'
            )
        whole = load_index(tables) if tables else parse_index(source.read(INDEX), source)
        self.index = _selected(whole, names, source)
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
        self._cache = ShardCache(source, Path(cache), self.index, tables, cache_bytes)

    def __str__(self) -> str:
        return str(self._source)

    def open(self, shard: Shard) -> tuple[Path, Path, int]:
        path = self._cache.path(shard)
        return path, path, self._cache.open(shard)

    def remedy(self, path: Path) -> str:
        return f"remove {path}, and it is fetched again"

    def prefetch(self, blocks: Sequence[int]) -> None:
        self._cache.prefetch([self.index.shards[number] for number in blocks])


def _selected(index: Index, names: Sequence[str] | None, where: object) -> Index:
    return index if names is None else index.only(names, where)

"""The index of a folder of shards: which examples each shard holds, and where they are in it.

A folder holds shards (tar or TFRecord files), beside each a table ``SHARD.npy`` with a row for each
example, and ``index.json``, which names the shards with their sizes and SHA-256. The tables are
mapped into memory, so all processes of a host share one copy.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from hvd_elastic.data.example import Example, as_bytes
from hvd_elastic.data.files import file_size
from hvd_elastic.data.remote import WEB_PAGE
from hvd_elastic.data.tar import Tar
from hvd_elastic.data.tfrecord import TFRecord
from hvd_elastic.errors import DataError
from hvd_elastic.replaced_files import write_whole

INDEX, VERSION = "index.json", 2
"""Raised whenever shards of other programs are read otherwise than before."""
_FORMAT = "hvd_elastic shards"
_OURS = re.compile(rb'\s*(\{\s*"layout"|\Z)')  # how an index begins, or an empty one


class Layout(Protocol):
    """The layout of examples in a shard.

    Attributes:
        suffix: part of the names of its files.
        end: what a shard ends with, after its last example.
    """

    suffix: str
    end: bytes

    def encode(
        self, key: str, fields: Sequence[str], values: Sequence[bytes]
    ) -> tuple[bytes, Example]:
        """Return the record of an example, and where in it each value lies; it starts at 0."""

    def scan(
        self, path: Path, left_out: Counter[str] | None = None, *, label: bool = True
    ) -> Iterator[Example]:
        """Yield the examples of a whole shard; raises DataError if it is damaged.

        Args:
            path: of the shard.
            left_out: counts members that are part of no example, by name.
            label: whether a feature ``label`` of TFRecord is the number of a class.
        """


LAYOUTS: dict[str, Layout] = {"tar": Tar(), "tfrecord": TFRecord()}


class Shard(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One file of examples.

    Attributes:
        name: of the file, relative to the folder of the shards.
        bytes: size of the file.
        sha256: of the file, in hexadecimal.
        fields: columns of its table; empty: the fields of the index.
        lacking: number of its examples that lack a field of the table, by field.
        left_out: number of members that are part of no example, by name.
    """

    name: str
    examples: int
    bytes: int
    sha256: str
    fields: tuple[str, ...] = ()
    lacking: dict[str, int] = {}
    left_out: dict[str, int] = {}


class Index(msgspec.Struct, frozen=True):
    """Facts about a folder of shards that are known without opening them.

    Attributes:
        layout: a name of ``LAYOUTS``.
        fields: of the examples, in the order in which they store them, such as ``("jpg", "cls")``.
        shards: in the order of the dataset.
        classes: names by label; empty where examples have no class.
        made_from: settings of the preparation, for the reader's information.
        kinds: kinds of values that are no bytes, by field; see
            :data:`hvd_elastic.data.tfrecord.KINDS`.
        labels_from: number of the first class as TFRecord files store it, 0 or 1.
        labels_given: whether an option has set it, which holds for later calls too.
        source: folder or URL of the shards when they were indexed; empty: that of the index.
    """

    layout: str
    fields: tuple[str, ...]
    shards: tuple[Shard, ...]
    classes: tuple[str, ...] = ()
    made_from: dict[str, Any] = {}
    kinds: dict[str, str] = {}
    labels_from: int = 1
    labels_given: bool = False
    source: str = ""
    format: str = _FORMAT
    version: int = VERSION

    @property
    def labelled(self) -> bool:
        """Return whether examples have labels."""
        return "cls" in self.fields

    def columns(self, shard: Shard) -> tuple[str, ...]:
        """Return the fields of a shard's table."""
        return shard.fields or self.fields

    def lacking(self) -> dict[str, tuple[int, str]]:
        """Return how many examples lack a field, and the first shard with one, by field."""
        found: dict[str, tuple[int, str]] = {}
        for shard in self.shards:
            absent = dict.fromkeys(
                set(self.fields).difference(shard.fields) if shard.fields else (), shard.examples
            )
            for field, number in (shard.lacking | absent).items():
                if number:
                    before, first = found.get(field, (0, shard.name))
                    found[field] = (before + number, first)
        return found

    def only(self, names: Sequence[str], where: object) -> Index:
        """Return the index of some of the shards, in the order of their names.

        Raises:
            DataError: a shard is not in the index; ``where`` is for the message.
        """
        shards = {shard.name: shard for shard in self.shards}
        if missing := [name for name in names if name not in shards]:
            raise DataError(
                f"the index of {where} lacks {len(missing)} of {len(names)} shards, such as "
                f"{missing[0]}; it has {', '.join([*shards][:3])}, …"
            )
        return msgspec.structs.replace(self, shards=tuple(map(shards.__getitem__, names)))

    def save(self, folder: Path) -> None:
        """Write it to a folder; a reader sees the old index or this one."""
        data = msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"
        write_whole(folder / INDEX, data, synced=True)


def load_index(folder: Path, *, outdated: bool = False) -> Index:
    """Read the index of a folder; ``outdated``: see :func:`parse_index`.

    Raises:
        DataError: there is none, it is damaged, or of another version.
    """
    path = folder / INDEX
    try:
        file_size(path)
        text = path.read_bytes()
    except FileNotFoundError:
        if inside := sorted(path.parent.name for path in folder.glob(f"*/{INDEX}")):
            raise DataError(
                f"{folder} has no {INDEX}, but its folders {', '.join(inside)} have one; name one "
                "of these"
            ) from None
        what = f"has no {INDEX}" if folder.is_dir() else "is no folder"
        raise DataError(
            f"{folder} {what}; prepare data with the scripts of datasets_prep/, or index shards "
            "that you have: python datasets_prep/index_shards.py FOLDER"
        ) from None
    except NotADirectoryError:
        raise DataError(f"{folder} is a file; name its folder, or shards with braces") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    return parse_index(text, folder, outdated=outdated)


def parse_index(text: bytes, folder: object, *, outdated: bool = False) -> Index:
    """Return an index from the text of its file.

    Args:
        text: of the file.
        folder: where it lies, for messages.
        outdated: whether one of another version is taken.

    Raises:
        DataError: it is damaged, or of another version.
    """
    path = f"{folder}/{INDEX}"
    if text.lstrip()[:1] == b"<":
        raise DataError(f"{path} is a web page and not an index; {WEB_PAGE}")
    try:
        head = msgspec.json.decode(text)
        if not isinstance(head, dict) or head.get("format") != _FORMAT:
            raise DataError(
                f"{path} is not an index of hvd_elastic, but of another program; index the shards "
                f"in another folder: python datasets_prep/index_shards.py {folder} --index OTHER"
            )
        if head.get("version") != VERSION and not outdated:
            raise DataError(
                f"{path} has version {head.get('version')} of the index, and this release reads "
                f"version {VERSION}; {_again(folder)}"
            )
        index = msgspec.convert(head, Index)
        if index.layout not in LAYOUTS:
            raise DataError(f"{path}: layout {index.layout!r} is none of {', '.join(LAYOUTS)}")
        for shard in index.shards:
            parts = shard.name.split("/")
            if {"", ".", ".."} & {*parts} or "\0" in shard.name:
                raise DataError(
                    f"{path} names the shard {shard.name!r}, which would not lie in this folder"
                )
            if not re.fullmatch("[0-9a-f]{64}", shard.sha256):  # a part of paths in the cache
                raise DataError(
                    f"{path} gives {shard.name!r} the SHA-256 {shard.sha256!r}, which is none; "
                    f"{_again(folder)}"
                )
    except (msgspec.MsgspecError, RecursionError) as error:
        raise DataError(f"{path} is damaged ({error}); {_again(folder)}") from error
    return index


def is_other_index(path: Path) -> bool:
    """Return whether a file is no index of ours, whole or damaged: others use the name too."""
    try:
        file_size(path)
        text = path.read_bytes()
    except OSError:
        return False
    try:
        head = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return not _OURS.match(text)
    return not isinstance(head, dict) or head.get("format") != _FORMAT


def _again(folder: object) -> str:
    return f"make it again: python datasets_prep/index_shards.py {folder}"


def table_path(shard: Path) -> Path:
    """Return the path of a shard's table."""
    return shard.with_name(shard.name + ".npy")


def load_table(shard: Path, fields: int, examples: int) -> np.ndarray:
    """Map the table of a shard into memory.

    Args:
        shard: beside which it lies.
        fields: number of its columns.
        examples: number of its rows.

    Raises:
        DataError: it is missing, damaged, or does not fit the index.
    """
    path = table_path(shard)
    try:
        file_size(path)
        # As a plain array: each access to a memmap costs microseconds.
        table = np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)
        if table.dtype.names != _dtype(1, fields).names or table["size"].shape[1:] != (fields,):
            raise ValueError("it has other columns")
        if len(table) != examples:
            raise ValueError(f"it has {len(table)} rows instead of {examples}")
    except (OSError, ValueError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(
            f"{path}, the table of a shard, cannot be used ({reason}); {_again(shard.parent)}"
        ) from error
    return table


def fields_of(examples: Iterable[Example]) -> tuple[str, ...]:
    """Return the fields of examples, in the order in which they first come."""
    return tuple(dict.fromkeys(name for example in examples for name in example.fields))


def make_table(examples: Sequence[Example], fields: Sequence[str]) -> np.ndarray:
    """Return the table of a shard.

    Args:
        examples: one at least.
        fields: columns of the table.

    Returns:
        One row for each example: ``key`` (bytes, mostly UTF-8), ``start`` and ``length`` of its
        record in the shard [bytes], ``offset`` (from ``start``) and ``size`` of each field [bytes]
        (both -1: it lacks the field), ``label`` (-1: none), ``checksum`` that a TFRecord ends with
        (tar: 0).
    """
    keys, fields = [as_bytes(example.key) for example in examples], tuple(fields)
    table = np.zeros(len(examples), _dtype(max(map(len, keys)), len(fields)))
    table["key"] = keys
    for name in _NUMBERS:
        table[name] = [getattr(example, name) for example in examples]
    table["offset"] = [_row(example, example.offsets, fields) for example in examples]
    table["size"] = [_row(example, example.sizes, fields) for example in examples]
    return table


def _row(example: Example, values: Sequence[int], fields: Sequence[str]) -> Sequence[int]:
    if example.fields == fields:
        return values
    found = dict(zip(example.fields, values, strict=True))
    return [found.get(name, -1) for name in fields]


_NUMBERS = ("start", "length", "label", "checksum")


def _dtype(key_bytes: int, fields: int) -> np.dtype[Any]:
    return np.dtype(
        [
            ("key", f"S{key_bytes}"),
            ("start", "<i8"),
            ("length", "<i8"),
            ("offset", "<i8", (fields,)),
            ("size", "<i8", (fields,)),
            ("label", "<i8"),
            ("checksum", "<u4"),
        ]
    )


def save_table(shard: Path, table: np.ndarray) -> None:
    """Write the table of a shard beside it."""
    out = BytesIO()
    np.save(out, table, allow_pickle=False)
    table_path(shard).parent.mkdir(parents=True, exist_ok=True)
    write_whole(table_path(shard), out.getvalue(), synced=True)


def require_size(path: Path, shard: Shard, tables: Path | None = None) -> None:
    """Raise DataError if a shard is missing or has another size than when it was indexed.

    Args:
        path: of the shard.
        shard: its entry in the index.
        tables: folder of the index; None: that of the shard.
    """
    remedy = restore(path.parent, tables)
    try:
        size = file_size(path)
    except OSError as error:
        where = f"the index in {tables}" if tables else "the index"
        raise DataError(
            f"{path}, a shard of {where}, cannot be read: {error.strerror}; {remedy}"
        ) from error
    if size != shard.bytes:
        raise DataError(
            f"{path} has {size} bytes, and had {shard.bytes} when it was indexed; {remedy}"
        )


def restore(folder: Path, tables: Path | None = None) -> str:
    """Return what to do about a shard that has changed."""
    option = f" --index {tables}" if tables else ""
    return f"copy it again, or if the new one is meant: index_shards.py {folder}{option}"

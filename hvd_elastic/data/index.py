"""The index of a folder of shards: which examples each shard holds, and where they are in it.

A folder holds shards (tar or TFRecord files), beside each a table ``SHARD.npy`` with a row for each
example, and ``index.json``, which names the shards with their sizes and SHA-256. The tables are
mapped into memory, so all processes of a host share one copy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from hvd_elastic.data.example import Example
from hvd_elastic.data.files import file_size, sha256_of, write_whole
from hvd_elastic.data.tar import Tar
from hvd_elastic.data.tfrecord import TFRecord
from hvd_elastic.errors import DataError

INDEX, VERSION = "index.json", 1
_FORMAT = "hvd_elastic shards"


class Layout(Protocol):
    """How examples are stored in a shard.

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

    def require_key(self, record: bytes, key: str, fields: Sequence[str]) -> None:
        """Raise ValueError if a record is not that of the example with this key."""

    def scan(self, path: Path) -> Iterator[Example]:
        """Yield the examples of a whole shard; raises DataError if it is damaged."""


LAYOUTS: dict[str, Layout] = {"tar": Tar(), "tfrecord": TFRecord()}


class Shard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of examples.

    Attributes:
        name: of the file, in the folder of the index.
        examples: number of examples.
        bytes: size of the file.
        sha256: of the file, in hexadecimal.
    """

    name: str
    examples: int
    bytes: int
    sha256: str


class Index(msgspec.Struct, frozen=True):
    """What is known of a folder of shards without opening them.

    Attributes:
        layout: a name of ``LAYOUTS``.
        fields: of every example, in the order in which it stores them, such as ``("jpg", "cls")``.
        shards: in the order of the data set.
        classes: names by label; empty where examples have no class.
        made_from: settings of the preparation, for the reader's information.
    """

    layout: str
    fields: tuple[str, ...]
    shards: tuple[Shard, ...]
    classes: tuple[str, ...] = ()
    made_from: dict[str, Any] = {}
    format: str = _FORMAT
    version: int = VERSION

    @property
    def labelled(self) -> bool:
        """Whether every example has a label."""
        return "cls" in self.fields

    def save(self, folder: Path) -> None:
        """Write it to a folder; a reader sees the old index or this one."""
        write_whole(
            folder / INDEX, msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"
        )


def load_index(folder: Path) -> Index:
    """Read the index of a folder.

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
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    return parse_index(text, folder)


def parse_index(text: bytes, folder: object) -> Index:
    """Return an index from the text of its file; ``folder``, where it lies, is for messages.

    Raises:
        DataError: it is damaged, or of another version.
    """
    path = f"{folder}/{INDEX}"
    try:
        head = msgspec.json.decode(text)
        if not isinstance(head, dict) or head.get("format") != _FORMAT:
            raise DataError(f"{path} is not an index of hvd_elastic; {_again(folder)}")
        if head.get("version") != VERSION:
            raise DataError(
                f"{path} has version {head.get('version')} of the index, and this release reads "
                f"version {VERSION}; {_again(folder)}"
            )
        index = msgspec.convert(head, Index)
        if index.layout not in LAYOUTS:
            raise DataError(f"{path}: layout {index.layout!r} is none of {', '.join(LAYOUTS)}")
        for shard in index.shards:
            if (
                shard.name != Path(shard.name).name
                or shard.name in ("", "..")
                or "\0" in shard.name
            ):
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


def _again(folder: object) -> str:
    return f"make it again: python datasets_prep/index_shards.py {folder}"


def table_path(shard: Path) -> Path:
    """Return the path of a shard's table."""
    return shard.with_name(shard.name + ".npy")


def load_table(shard: Path, fields: int, examples: int) -> np.ndarray:
    """Map the table of a shard into memory.

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


def make_table(examples: Sequence[Example]) -> np.ndarray:
    """Return the table of a shard.

    Returns:
        One row for each example: ``key`` (ASCII or UTF-8), ``start`` and ``length`` of its record
        in the shard [bytes], ``offset`` (from ``start``) and ``size`` of each field [bytes],
        ``label`` (-1: none).
    """
    keys = [example.key.encode() for example in examples]
    table = np.zeros(len(examples), _dtype(max(map(len, keys), default=1), len(examples[0].sizes)))
    table["key"] = keys
    for name in ("start", "length", "label"):
        table[name] = [getattr(example, name) for example in examples]
    table["offset"] = [example.offsets for example in examples]
    table["size"] = [example.sizes for example in examples]
    return table


def _dtype(key_bytes: int, fields: int) -> np.dtype[Any]:
    return np.dtype(
        [
            ("key", f"S{key_bytes}"),
            ("start", "<i8"),
            ("length", "<i8"),
            ("offset", "<i8", (fields,)),
            ("size", "<i8", (fields,)),
            ("label", "<i8"),
        ]
    )


def save_table(shard: Path, examples: Sequence[Example]) -> None:
    """Write the table of a shard beside it."""
    out = BytesIO()
    np.save(out, make_table(examples), allow_pickle=False)
    write_whole(table_path(shard), out.getvalue())


def verify(folder: Path) -> Index:
    """Read every shard of a folder and compare it with its index, which is returned.

    Raises:
        DataError: names the first shard that has changed, and how.
    """
    index = load_index(folder)
    for shard in index.shards:
        path = folder / shard.name
        require_size(path, shard)
        if sha256_of(path) != shard.sha256:
            raise DataError(f"{path} has changed since it was indexed (SHA-256); {restore(folder)}")
        if not shard.examples:
            continue
        found = make_table(list(LAYOUTS[index.layout].scan(path)))
        if found.tobytes() != load_table(path, len(index.fields), shard.examples).tobytes():
            raise DataError(f"the table of {path} does not fit the shard; {_again(folder)}")
    return index


def require_size(path: Path, shard: Shard) -> None:
    """Raise DataError if a shard is missing or has another size than when it was indexed."""
    try:
        size = file_size(path)
    except OSError as error:
        raise DataError(
            f"{path}, a shard of the index, cannot be read: {error.strerror}; "
            f"{restore(path.parent)}"
        ) from error
    if size != shard.bytes:
        raise DataError(
            f"{path} has {size} bytes, and had {shard.bytes} when it was indexed; "
            f"{restore(path.parent)}"
        )


def restore(folder: Path) -> str:
    """Return what to do about a shard that has changed."""
    return f"copy it again, or if the new one is meant: index_shards.py {folder}"


def build_index(folder: Path, classes: Sequence[str] = ()) -> Index:
    """Index the shards that lie in a folder, in the order of their names.

    Args:
        folder: with tar files in WebDataset's layout, or with TFRecord files.
        classes: names by label.

    Raises:
        DataError: there are no shards, one is damaged, or examples have different fields.
        OSError: one cannot be read.
    """
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}")
    names = sorted(path for path in folder.iterdir() if path.name[0] != ".")
    tars = [path for path in names if path.suffix == Tar.suffix]
    records = [path for path in names if TFRecord.suffix in path.name and path.suffix != ".npy"]
    if bool(tars) == bool(records):
        raise DataError(
            f"{folder} holds {'both' if tars else 'neither'} tar {'and' if tars else 'nor'} "
            "TFRecord files (*.tar, *.tfrecord*); name a folder with shards of one kind"
        )
    layout = "tar" if tars else "tfrecord"
    fields: tuple[str, ...] = ()
    shards = []
    for path in tars or records:
        examples = list(LAYOUTS[layout].scan(path))
        for example in examples:
            fields = fields or example.fields
            if example.fields != fields:
                raise DataError(
                    f"{path}: example {example.key!r} has the fields {', '.join(example.fields)}, "
                    f"and others before it {', '.join(fields)}; all examples of a data set need "
                    "the same fields in the same order"
                )
            if classes and not 0 <= example.label < len(classes):
                raise DataError(
                    f"{path}: example {example.key!r} has label {example.label}, and "
                    f"{len(classes)} classes are named"
                )
        if examples:
            save_table(path, examples)
        shards.append(Shard(path.name, len(examples), file_size(path), sha256_of(path)))
    index = Index(layout, fields, tuple(shards), tuple(classes))
    index.save(folder)
    return index

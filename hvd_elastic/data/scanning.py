"""Indexes one shard that another program wrote."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from hvd_elastic.data.example import Example, readable
from hvd_elastic.data.files import disk_errors, file_size, sha256_of, write_pieces
from hvd_elastic.data.index import LAYOUTS, Index, Shard, fields_of, make_table, save_table
from hvd_elastic.data.remote import RemoteFolder, refuse_web_page
from hvd_elastic.data.shard import read_all
from hvd_elastic.data.tfrecord import LIST, place
from hvd_elastic.errors import DataError

_BEGIN_BYTES = 64
FETCHED = ".fetched-"
"""How folders of shards begin that are fetched to be indexed."""


class Task(NamedTuple):
    """A shard to index.

    Attributes:
        source: of the shards.
        name: of the shard there.
        layout: a name of ``LAYOUTS``.
        out: folder of the index.
        label: whether a feature ``label`` of TFRecord is the number of a class.
    """

    source: Path | RemoteFolder
    name: str
    layout: str
    out: Path
    label: bool = True


class Found(NamedTuple):
    """Facts about a shard.

    Attributes:
        shard: its entry in the index.
        kinds: of its values, by field.
        labels: the smallest and the largest, as the table has them, each with the key of an
            example; None: it has no labels.
    """

    shard: Shard
    kinds: dict[str, str]
    labels: tuple[tuple[int, str], tuple[int, str]] | None


def index_shard(task: Task) -> Found:
    """Write the table of a shard."""
    if isinstance(task.source, Path):
        return _index_file(task.source / task.name, task)
    with tempfile.TemporaryDirectory(dir=task.out, prefix=FETCHED) as folder:
        path = Path(folder) / task.name.rpartition("/")[2]
        with disk_errors(path), path.open("xb") as file:
            task.source.receive(task.name, partial(write_pieces, file))
        where = f"{task.source}/{task.name}"
        with path.open("rb") as file:
            refuse_web_page(file.read(_BEGIN_BYTES), where)
        try:
            return _index_file(path, task)
        except DataError as error:
            raise DataError(str(error).replace(str(path), where)) from None


def _index_file(path: Path, task: Task) -> Found:
    size, before = file_size(path), path.stat()
    left_out = Counter[str]()
    examples = list(LAYOUTS[task.layout].scan(path, left_out, label=task.label))
    shard = Shard(task.name, len(examples), size, sha256_of(path), left_out=dict(left_out))
    if not examples:
        return Found(shard, {}, None)
    fields = in_order(task.layout, fields_of(examples))
    if odd := [readable(name) for name in fields if readable(name) != name]:
        raise DataError(f"{path}: the field {odd[0]} has a name that is not UTF-8; give it another")
    kinds = _kinds(path, examples)
    table = make_table(examples, fields)
    absent = (table["size"] == -1).sum(0).tolist()
    lacking = {name: number for name, number in zip(fields, absent, strict=True) if number}
    shard = msgspec.structs.replace(shard, fields=fields, lacking=lacking)
    read_all(path, shard, Index(task.layout, fields, (shard,), kinds=stored_kinds(kinds)), table)
    after = path.stat()
    if (after.st_mtime_ns, after.st_size) != (before.st_mtime_ns, before.st_size):
        raise DataError(f"{path} was changed while it was indexed; call again when it is whole")
    save_table(task.out / task.name, table)
    return Found(shard, kinds, labels_of(table, fields))


def in_order(layout: str, fields: tuple[str, ...]) -> tuple[str, ...]:
    """Return fields in the order in which a layout stores them."""
    return tuple(sorted(fields, key=place)) if layout == "tfrecord" else fields


def _kinds(path: Path, examples: Sequence[Example]) -> dict[str, str]:
    """Return the kinds of the values of all examples, by field."""
    found: dict[str, str] = {}
    for fields, kinds in dict.fromkeys((each.fields, each.kinds) for each in examples):
        add_kinds(found, dict(zip(fields, kinds, strict=False)), path)
    return found


def add_kinds(found: dict[str, str], more: dict[str, str], where: object) -> None:
    """Add kinds of values to those found before; raises DataError if they do not go together."""
    for field, kind in more.items():
        before = found.setdefault(field, kind)
        if before != kind:
            if field == "cls":
                raise DataError(
                    f"{where}: labels are in image/class/label in some examples, and in label or "
                    "cls in others; a data set needs one name for them"
                )
            if before.removesuffix(LIST) != kind.removesuffix(LIST):
                raise DataError(
                    f"{where}: {field} holds {kind.removesuffix(LIST)} values here, and "
                    f"{before.removesuffix(LIST)} values before; a field needs values of one kind"
                )
            found[field] = kind.removesuffix(LIST) + LIST


def stored_kinds(kinds: dict[str, str]) -> dict[str, str]:
    """Return the kinds that an index names."""
    return {name: kind for name, kind in kinds.items() if kind != "bytes"}


def labels_of(
    table: np.ndarray, fields: Sequence[str]
) -> tuple[tuple[int, str], tuple[int, str]] | None:
    """Return the labels of a shard as :class:`Found` has them."""
    if "cls" not in fields:
        return None
    rows = table[table["size"][:, fields.index("cls")] != -1]
    ends = (rows[rows["label"].argmin()], rows[rows["label"].argmax()])
    low, high = ((int(row["label"]), bytes.decode(row["key"], errors="replace")) for row in ends)
    return low, high

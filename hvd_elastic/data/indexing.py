"""Indexes a folder of shards that other programs wrote, and verifies indexed ones."""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from hvd_elastic.data.example import Example
from hvd_elastic.data.files import compression, file_size, sha256_of
from hvd_elastic.data.index import (
    INDEX,
    LAYOUTS,
    Index,
    Shard,
    fields_of,
    is_other_index,
    load_index,
    load_table,
    make_table,
    require_size,
    restore,
    save_table,
    table_path,
)
from hvd_elastic.data.processes import in_processes
from hvd_elastic.data.remote import RemoteFolder, refuse_web_page, selection
from hvd_elastic.data.shard import OpenShard
from hvd_elastic.data.tar import Tar
from hvd_elastic.data.tfrecord import FROM_0, LIST, place
from hvd_elastic.errors import DataError
from hvd_elastic.urls import is_url

_RECORDS = re.compile(r"\.tfrec|-\d{5,}-of-\d{5,}$")
"""Names of TFRecord files: ``x.tfrecord``, ``x.tfrecord-00000-of-00128``, and
``x-00000-of-00128``, as TensorFlow's script for ImageNet calls them."""
_BEGIN_BYTES = 64
_COMPRESSED = re.compile(r"\.(tgz|tar\.(gz|zst|xz|bz2))$")


class _Task(NamedTuple):
    """A shard to index.

    Attributes:
        source: of the shards.
        name: of the shard there.
        layout: a name of ``LAYOUTS``.
        out: folder of the index.
    """

    source: Path | RemoteFolder
    name: str
    layout: str
    out: Path


class _Found(NamedTuple):
    """What is known of a shard.

    Attributes:
        shard: its entry in the index.
        kinds: of its values, by field.
        labels: the smallest and the largest, as the table has them, each with the key of an
            example; None: it has no labels.
    """

    shard: Shard
    kinds: dict[str, str]
    labels: tuple[tuple[int, str], tuple[int, str]] | None


def build_index(
    folder: Path | str,
    classes: Sequence[str] = (),
    *,
    out: Path | None = None,
    subfolders: bool = False,
    labels_from: int | None = None,
    processes: int = 1,
) -> Index:
    """Index shards, in the order of their names. What has not changed is not read again.

    Args:
        folder: with tar files in WebDataset's layout, or with TFRecord files; or a pattern with
            braces, such as ``/data/train-{000..127}.tar``, which may be a URL.
        classes: names by label.
        out: folder for the index; None: beside the shards.
        subfolders: whether to look for shards in folders inside too.
        labels_from: number of the first class in ``image/class/label`` of TFRecord, 0 or 1; None: 1
            unless there is a label 0.
        processes: number of processes that read; a script that names more than one needs
            `if __name__ == "__main__":`.

    Raises:
        DataError: there are no shards, one is damaged, or labels are out of range.
        OSError: one cannot be read.
    """
    place, names = selection(folder)
    if is_url(place):
        if names is None or out is None:
            raise DataError(
                f"{place}: a server does not list its files, nor keep an index; name the shards "
                "and a folder for the index: index_shards.py 'https://…/train-{000..127}.tar' "
                "--index FOLDER"
            )
        source: Path | RemoteFolder = RemoteFolder(place)
    else:
        source = Path(place)
        if not source.is_dir():
            raise DataError(f"there is no folder {source}")
        names = _names(source, subfolders=subfolders) if names is None else names
    layout = _layout(source, names)
    out = source if out is None and isinstance(source, Path) else Path(out or "")
    out.mkdir(parents=True, exist_ok=True)
    before = _earlier(out, layout)
    tasks = [_Task(source, name, layout, out) for name in names]
    found = [_unchanged(task, before) for task in tasks]
    changed = [task for task, known in zip(tasks, found, strict=True) if known is None]
    indexed = {each.shard.name: each for each in in_processes(_index_shard, changed, processes)}
    whole = [known or indexed[task.name] for task, known in zip(tasks, found, strict=True)]
    if labels_from is None and before is not None and any(found):
        # Shards that are not read again do not tell it by the names of their features.
        labels_from = 0 if before.labels_from == 0 else None
    index = _merged(source, layout, whole, classes, labels_from)
    index.save(out)
    return index


def verify(folder: Path, index_folder: Path | None = None) -> Index:
    """Read every shard of a folder as training does, and compare it with its index.

    Args:
        folder: of the shards.
        index_folder: of the index; None: beside the shards.

    Returns:
        The index.

    Raises:
        DataError: names the first shard that has changed, and how.
    """
    tables = folder if index_folder is None else index_folder
    index = load_index(tables)
    for shard in index.shards:
        path = folder / shard.name
        require_size(path, shard, index_folder)
        if sha256_of(path) != shard.sha256:
            remedy = restore(folder, index_folder)
            raise DataError(f"{path} has changed since it was indexed (SHA-256); {remedy}")
        if not shard.examples:
            continue
        fields = index.columns(shard)
        table = load_table(tables / shard.name, len(fields), shard.examples)
        found = make_table(list(LAYOUTS[index.layout].scan(path)), fields)
        if found.tobytes() != table.tobytes():
            raise DataError(
                f"the table of {path} does not fit the shard; make the index again: "
                f"python datasets_prep/index_shards.py {folder}"
            )
        _read_all(path, shard, index, table)
    return index


def _names(folder: Path, *, subfolders: bool) -> list[str]:
    """Return the names of the shards in a folder."""
    found = sorted(folder.rglob("*") if subfolders else folder.iterdir())
    paths = [path.relative_to(folder) for path in found]
    names = [str(path) for path in paths if not any(part[0] == "." for part in path.parts)]
    if packed := [name for name in names if _COMPRESSED.search(name)]:
        raise DataError(f"{folder / packed[0]} {compression(folder / packed[0])}")
    tars = [name for name in names if name.endswith(Tar.suffix)]
    records = [name for name in names if name not in tars and _is_record(name)]
    if tars and records:
        raise DataError(
            f"{folder} holds both tar and TFRecord files ({tars[0]}, {records[0]}); name a folder "
            "with shards of one kind"
        )
    if not tars and not records:
        inside = sorted({path.parent.name for path in folder.glob("*/*") if _is_shard(path.name)})
        hint = (
            f"; its folders {', '.join(inside[:5])} do: name one, or --subfolders for one dataset "
            "of all"
            if inside
            else "; name a folder with shards"
        )
        raise DataError(
            f"{folder} holds neither tar nor TFRecord files (*.tar, *.tfrecord*, "
            f"*-00000-of-00128){hint}"
        )
    return tars or records


def _is_record(name: str) -> bool:
    own = name.endswith(".npy")
    return not own and _RECORDS.search(name.rpartition("/")[2]) is not None


def _is_shard(name: str) -> bool:
    return name.endswith(Tar.suffix) or _is_record(name)


def _layout(source: Path | RemoteFolder, names: Sequence[str]) -> str:
    kinds = {"tar" if name.endswith(Tar.suffix) else "tfrecord" for name in names}
    if len(kinds) != 1:
        raise DataError(f"{source}: name shards of one kind, tar or TFRecord")
    return kinds.pop()


def _earlier(out: Path, layout: str) -> Index | None:
    """Return the index of an earlier call; None: there is none that can be used.

    Raises:
        DataError: another program's index lies there.
    """
    if is_other_index(out / INDEX):
        raise DataError(
            f"{out / INDEX} is not an index of hvd_elastic, and is not overwritten; give --index "
            "another folder"
        )
    try:
        found = load_index(out)
    except DataError:
        return None
    return found if found.layout == layout else None


def _unchanged(task: _Task, before: Index | None) -> _Found | None:
    """Return what an earlier call has found of a shard; None: the shard has changed since."""
    if before is None or not isinstance(task.source, Path):
        return None
    path, table = task.source / task.name, table_path(task.out / task.name)
    shard = next((each for each in before.shards if each.name == task.name), None)
    try:
        now, written = path.stat(), table.stat()
    except OSError:
        return None
    if shard is None or shard.bytes != now.st_size or not shard.examples:
        return None
    if max(now.st_ctime_ns, now.st_mtime_ns) >= written.st_mtime_ns:
        return None
    fields = before.columns(shard)
    try:
        rows = load_table(task.out / task.name, len(fields), shard.examples)
    except DataError:
        return None
    shard = msgspec.structs.replace(shard, fields=fields)
    kinds = {name: before.kinds[name] for name in fields if name in before.kinds}
    return _Found(shard, kinds, _labels(rows, fields))


def _index_shard(task: _Task) -> _Found:
    """Write the table of a shard."""
    if isinstance(task.source, Path):
        return _index_file(task.source / task.name, task)
    with tempfile.TemporaryDirectory(dir=task.out, prefix=".fetched-") as folder:
        path = Path(folder) / task.name.rpartition("/")[2]

        def write(pieces: Iterator[bytes]) -> None:
            with path.open("wb") as file:
                file.writelines(pieces)

        task.source.receive(task.name, write)
        where = f"{task.source}/{task.name}"
        with path.open("rb") as file:
            refuse_web_page(file.read(_BEGIN_BYTES), where)
        try:
            return _index_file(path, task)
        except DataError as error:
            raise DataError(str(error).replace(str(path), where)) from None


def _index_file(path: Path, task: _Task) -> _Found:
    size, before = file_size(path), path.stat()
    left_out = Counter[str]()
    examples = list(LAYOUTS[task.layout].scan(path, left_out))
    shard = Shard(task.name, len(examples), size, sha256_of(path), left_out=dict(left_out))
    if not examples:
        return _Found(shard, {}, None)
    fields = _in_order(task.layout, fields_of(examples))
    kinds = _kinds(path, examples)
    table = save_table(task.out / task.name, examples, fields)
    absent = (table["size"] == -1).sum(0).tolist()
    lacking = {name: number for name, number in zip(fields, absent, strict=True) if number}
    shard = msgspec.structs.replace(shard, fields=fields, lacking=lacking)
    _read_all(path, shard, Index(task.layout, fields, (shard,), kinds=_stored(kinds)), table)
    after = path.stat()
    if (after.st_mtime_ns, after.st_size) != (before.st_mtime_ns, before.st_size):
        raise DataError(f"{path} was changed while it was indexed; call again when it is whole")
    return _Found(shard, kinds, _labels(table, fields))


def _in_order(layout: str, fields: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted(fields, key=place)) if layout == "tfrecord" else fields


def _kinds(path: Path, examples: Sequence[Example]) -> dict[str, str]:
    """Return the kinds of the values of all examples, by field."""
    found: dict[str, str] = {}
    for fields, kinds in dict.fromkeys((each.fields, each.kinds) for each in examples):
        _add_kinds(found, dict(zip(fields, kinds, strict=False)), path)
    return found


def _add_kinds(found: dict[str, str], more: dict[str, str], where: object) -> None:
    for field, kind in more.items():
        before = found.setdefault(field, kind)
        if before != kind:
            if before.removesuffix(LIST) != kind.removesuffix(LIST):
                raise DataError(
                    f"{where}: {field} holds {kind.removesuffix(LIST)} values here, and "
                    f"{before.removesuffix(LIST)} values before; a field needs values of one kind"
                )
            found[field] = kind.removesuffix(LIST) + LIST


def _stored(kinds: dict[str, str]) -> dict[str, str]:
    """Return the kinds that an index names."""
    return {name: kind for name, kind in kinds.items() if kind != "bytes" and name != "cls"}


def _labels(
    table: np.ndarray, fields: Sequence[str]
) -> tuple[tuple[int, str], tuple[int, str]] | None:
    if "cls" not in fields:
        return None
    rows = table[table["size"][:, fields.index("cls")] != -1]
    ends = (rows[rows["label"].argmin()], rows[rows["label"].argmax()])
    low, high = ((int(row["label"]), bytes.decode(row["key"], errors="replace")) for row in ends)
    return low, high


def _read_all(path: Path, shard: Shard, index: Index, table: np.ndarray) -> None:
    """Read all examples of a shard as training does."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    opened = OpenShard(path, file, shard, index, table, restore(path.parent))
    try:
        places = opened.places(index.columns(shard))
        for row in range(shard.examples):
            opened.read(row, places)
    finally:
        opened.close()


def _merged(
    source: Path | RemoteFolder,
    layout: str,
    found: Sequence[_Found],
    classes: Sequence[str],
    labels_from: int | None,
) -> Index:
    """Return the index of all shards."""
    shards = [each.shard for each in found]
    if not any(shard.examples for shard in shards) and any(shard.left_out for shard in shards):
        names = ", ".join(sorted({name for shard in shards for name in shard.left_out})[:3])
        raise DataError(
            f"{source} holds no example: none of the members ({names}, …) is named KEY.FIELD, such "
            "as 0001.jpg"
        )
    kinds: dict[str, str] = {}
    for each in found:
        _add_kinds(kinds, each.kinds, f"{source}/{each.shard.name}")
    fields = dict.fromkeys(name for shard in shards for name in shard.fields)
    ordered = _in_order(layout, tuple(fields))
    from_0 = layout == "tfrecord" and (
        kinds.get("cls") == FROM_0 or any(each.labels and each.labels[0][0] < 0 for each in found)
    )
    first = labels_from if labels_from is not None and layout == "tfrecord" else 1 - from_0
    for each in found if classes else ():
        for label, key in each.labels or ((-1, ""),) * bool(each.shard.examples):
            if not 0 <= label + 1 - first < len(classes):
                raise DataError(
                    f"{source}/{each.shard.name}: example {key!r} has label {label + 1 - first}, "
                    f"and {len(classes)} classes are named"
                )
    return Index(
        layout,
        ordered,
        tuple(
            msgspec.structs.replace(shard, fields=()) if shard.fields in ((), ordered) else shard
            for shard in shards
        ),
        tuple(classes),
        kinds=_stored(kinds),
        labels_from=first,
    )

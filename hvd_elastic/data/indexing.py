"""Indexes a folder of shards that other programs wrote, and verifies indexed ones."""

from __future__ import annotations

import logging
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from hvd_elastic.checkpoint.whole_files import remove_leftovers
from hvd_elastic.data.example import readable
from hvd_elastic.data.files import LINKS, compression, files_below, sha256_of, sole_writer
from hvd_elastic.data.index import (
    INDEX,
    LAYOUTS,
    VERSION,
    Index,
    Shard,
    is_other_index,
    load_index,
    load_table,
    make_table,
    require_size,
    restore,
    table_path,
)
from hvd_elastic.data.processes import in_processes
from hvd_elastic.data.remote import RemoteFolder, selection
from hvd_elastic.data.scanning import (
    FETCHED,
    Found,
    Task,
    add_kinds,
    in_order,
    index_shard,
    labels_of,
    stored_kinds,
)
from hvd_elastic.data.shard import read_all
from hvd_elastic.data.tar import Tar
from hvd_elastic.data.tfrecord import FROM_0, LABEL
from hvd_elastic.errors import DataError
from hvd_elastic.replaced_files import write_whole
from hvd_elastic.urls import is_url

log = logging.getLogger(__name__)

_JOURNAL = ".indexed.jsonl"
"""In the folder of the index: what a call that was interrupted has found."""
_RECORDS = re.compile(r"\.tfrec|-\d{5,}-of-\d{5,}$")
"""Names of TFRecord files: ``x.tfrecord``, ``x.tfrecord-00000-of-00128``, and
``x-00000-of-00128``, as TensorFlow's script for ImageNet calls them."""
_COMPRESSED = re.compile(r"\.(tgz|tar\.(gz|zst|xz|bz2))$")


def build_index(
    folder: Path | str,
    classes: Sequence[str] = (),
    *,
    out: Path | None = None,
    subfolders: bool = False,
    labels_from: int | None = None,
    processes: int = 1,
    again: bool = False,
) -> Index:
    """Index shards, in the order of their names. What has not changed is not read again.

    A call that was interrupted or killed leaves what it has found to the next one.

    Args:
        folder: with tar files in WebDataset's layout, or with TFRecord files; or a pattern with
            braces, such as ``/data/train-{000..127}.tar``, which may be a URL.
        classes: names by label; empty: those of the index that is there.
        out: folder for the index; None: beside the shards.
        subfolders: whether to look for shards in folders inside too.
        labels_from: number of the first class in ``image/class/label`` of TFRecord, 0 or 1; None: 1
            unless there is a label 0.
        processes: number of processes that read; a script that names more than one needs
            `if __name__ == "__main__":`.
        again: whether all shards are read, also those that have not changed.

    Raises:
        DataError: there are no shards, one is damaged, labels are out of range, or another call is
            writing to the folder.
        OSError: one cannot be read.
    """
    place, names = selection(folder)
    if is_url(place):
        source: Path | RemoteFolder = RemoteFolder(place)
        if names is None or out is None:
            raise DataError(
                f"{source}: a server does not list its files, nor keep an index; name the shards "
                "and a folder for the index: index_shards.py 'https://…/train-{000..127}.tar' "
                "--index FOLDER"
            )
    else:
        source = Path(place)
        if not source.is_dir():
            if source.exists():
                raise DataError(f"{source} is a file; name its folder, or shards with braces")
            raise DataError(f"there is no folder {source}")
        names = _names(source, subfolders=subfolders) if names is None else names
    if odd := [readable(name) for name in names if readable(name) != name]:
        raise DataError(f"{source} holds a shard whose name is not UTF-8, {odd[0]}; rename it")
    layout = _layout(source, names)
    if layout == "tar" and labels_from is not None:
        raise DataError(
            f"{source}: the labels of tar shards are read as they are; --labels-from "
            "(labels_from=) is for TFRecord"
        )
    out = source if out is None and isinstance(source, Path) else Path(out or "")
    out.mkdir(parents=True, exist_ok=True)
    with sole_writer(out):
        for path in out.glob(f"{FETCHED}*"):  # of a call that was killed
            shutil.rmtree(path, ignore_errors=True)
        for folder in {out, *((out / name).parent for name in names)}:
            if folder.is_dir():
                remove_leftovers(folder)
        before = _earlier(out, layout, source, again=again)
        tasks = [Task(source, name, layout, out) for name in names]
        found = _find_all(tasks, before, processes)
        index = _merged(source, layout, found, classes, labels_from, before)
        index.save(out)
        (out / _JOURNAL).unlink(missing_ok=True)
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
        scanned = LAYOUTS[index.layout].scan(path, label=LABEL not in fields)
        if make_table(list(scanned), fields).tobytes() != table.tobytes():
            raise DataError(
                f"the table of {path} does not fit the shard; make the index again: "
                f"python datasets_prep/index_shards.py {folder}"
            )
        read_all(path, shard, index, table)
    return index


def _names(folder: Path, *, subfolders: bool) -> list[str]:
    """Return the names of the shards in a folder."""
    left_out = Counter[str]()
    if subfolders:
        names = [name for name, _ in files_below(folder, lambda _: "", left_out)]
    else:
        names = sorted(path.name for path in folder.iterdir() if path.name[0] != ".")
    if left_out[LINKS]:
        log.warning(
            "%s: %d %s are left out; links to the shards themselves are followed",
            folder,
            left_out[LINKS],
            LINKS,
        )
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


class _Entry(msgspec.Struct, frozen=True):
    """Facts about a shard that an earlier call has found.

    Attributes:
        shard: its entry in the index, with its fields.
        kinds: of its values, by field.
        noted_ns: when the table was there; one that was written later is of another state.
    """

    shard: Shard
    kinds: dict[str, str]
    noted_ns: int


class _Head(msgspec.Struct, frozen=True):
    """First line of a journal: which calls can use it.

    Attributes:
        layout, source, version: as in the index.
        again: whether that call reads all shards, so that an index beside says nothing.
    """

    layout: str
    source: str
    again: bool
    version: int = VERSION


class _Earlier(NamedTuple):
    """Files and facts that earlier calls have left.

    Attributes:
        head: for the journal of this call.
        written: the index; None: there is none that can be used.
        noted: entries of a call that was interrupted, by name.
        entries: these and those of the index.
    """

    head: _Head
    written: Index | None
    noted: dict[str, _Entry]
    entries: dict[str, _Entry]


def _earlier(out: Path, layout: str, source: Path | RemoteFolder, *, again: bool) -> _Earlier:
    """Return what earlier calls have left.

    Raises:
        DataError: another program's index lies there.
    """
    if is_other_index(out / INDEX):
        raise DataError(
            f"{out / INDEX} is not an index of hvd_elastic, and is not overwritten; give --index "
            "another folder"
        )
    place = "" if source == out else str(source)
    if place and isinstance(source, Path):
        place = readable(str(source.absolute()))
    head = _Head(layout, place, again)
    noted: dict[str, _Entry] = {}
    if not again:
        head, noted = _read_journal(out / _JOURNAL, head)
    try:
        index = load_index(out, outdated=True)
    except DataError:
        index = None
    if index is None or (index.layout, index.source) != (layout, place):
        return _Earlier(head, None, noted, noted)
    if index.version != VERSION:
        log.warning("%s was made by another release; all shards are read again", out / INDEX)
    entries: dict[str, _Entry] = {}
    if isinstance(source, Path) and index.version == VERSION and not head.again:
        noted_ns = (out / INDEX).stat().st_mtime_ns
        for shard in index.shards:
            fields = index.columns(shard)
            kinds = {name: index.kinds[name] for name in fields if name in index.kinds}
            whole = msgspec.structs.replace(shard, fields=fields)
            entries[shard.name] = _Entry(whole, kinds, noted_ns)
    return _Earlier(head, index, noted, entries | noted)


def _read_journal(path: Path, head: _Head) -> tuple[_Head, dict[str, _Entry]]:
    """Return the head and the entries of an interrupted call of the same kind as this one."""
    noted: dict[str, _Entry] = {}
    try:
        first, *lines = path.read_bytes().split(b"\n")
        found = msgspec.json.decode(first, type=_Head)
        if msgspec.structs.replace(found, again=head.again) != head:
            return head, {}
        head = found
        for line in lines:
            entry = msgspec.json.decode(line, type=_Entry)
            noted[entry.shard.name] = entry
    except (OSError, msgspec.MsgspecError):  # none, or killed while it wrote the last line
        pass
    return head, noted


def _find_all(tasks: Sequence[Task], before: _Earlier, processes: int) -> list[Found]:
    """Index the shards that have changed; note each, so that an interrupted call can continue."""
    found = {task.name: _unchanged(task, before.entries.get(task.name)) for task in tasks}
    written = before.written
    if written and any(
        LABEL in written.columns(shard) and found.get(shard.name) is None
        for shard in written.shards
    ):  # That shard may be why the others have lists of numbers in place of labels.
        found = {
            name: each and (None if LABEL in each.shard.fields else each)
            for name, each in found.items()
        }
    out, encode = tasks[0].out, msgspec.json.encode
    lines = [encode(each) + b"\n" for each in (before.head, *before.noted.values())]
    write_whole(out / _JOURNAL, b"".join(lines), synced=True)
    with (out / _JOURNAL).open("ab", buffering=0) as journal:

        def index_all(changed: Sequence[Task]) -> None:
            for each in in_processes(index_shard, changed, processes):
                found[each.shard.name] = each
                if each.shard.examples:
                    noted_ns = table_path(out / each.shard.name).stat().st_mtime_ns
                    journal.write(encode(_Entry(each.shard, each.kinds, noted_ns)) + b"\n")

        index_all([task for task in tasks if found[task.name] is None])
        known = [each for each in found.values() if each is not None]
        if any(LABEL in each.shard.fields for each in known):
            # It is one number in some examples and several in others: a list in all of them.
            labelled = {each.shard.name for each in known if each.kinds.get("cls") == FROM_0}
            index_all([task._replace(label=False) for task in tasks if task.name in labelled])
    return [each for each in found.values() if each is not None]


def _unchanged(task: Task, entry: _Entry | None) -> Found | None:
    """Return what an earlier call has found of a shard; None: it is to be read.

    Whether one behind a URL has changed is found when it is fetched for training (SHA-256).
    """
    if entry is None or not entry.shard.examples:
        return None
    shard = entry.shard
    try:
        written_ns = table_path(task.out / task.name).stat().st_mtime_ns
        if isinstance(task.source, Path):
            now = (task.source / task.name).stat()
            if shard.bytes != now.st_size or max(now.st_ctime_ns, now.st_mtime_ns) >= written_ns:
                return None
        rows = load_table(task.out / task.name, len(shard.fields), shard.examples)
    except (OSError, DataError):
        return None
    if written_ns > entry.noted_ns:
        return None
    return Found(shard, entry.kinds, labels_of(rows, shard.fields))


def _merged(
    source: Path | RemoteFolder,
    layout: str,
    found: Sequence[Found],
    classes: Sequence[str],
    labels_from: int | None,
    before: _Earlier,
) -> Index:
    """Return the index of all shards."""
    shards, earlier = [each.shard for each in found], before.written
    left_out = sorted({name for shard in shards for name in shard.left_out})
    if left_out and not any(shard.examples for shard in shards):
        raise DataError(
            f"{source} holds no example: none of the members ({', '.join(left_out[:3])}, …) is "
            "named KEY.FIELD, such as 0001.jpg"
        )
    kinds: dict[str, str] = {}
    for each in found:
        add_kinds(kinds, each.kinds, f"{source}/{each.shard.name}")
    fields = dict.fromkeys(name for shard in shards for name in shard.fields)
    ordered = in_order(layout, tuple(fields))
    first, given = _first_class(layout, found, kinds, labels_from, before)
    named = "are named"
    if earlier is not None and not classes:
        classes = earlier.classes
        named = f"are in the {INDEX} that is there; give --classes, or remove it"
    if classes:
        _require_classes(source, found, first, len(classes), named)
    made_from: dict[str, Any] = {}
    if earlier is not None and _digests(earlier.shards) == _digests(shards):
        made_from = earlier.made_from
    return Index(
        layout,
        ordered,
        tuple(
            msgspec.structs.replace(shard, fields=()) if shard.fields in ((), ordered) else shard
            for shard in shards
        ),
        tuple(classes),
        made_from,
        stored_kinds(kinds),
        first,
        given,
        before.head.source,
    )


def _first_class(
    layout: str,
    found: Sequence[Found],
    kinds: Mapping[str, str],
    labels_from: int | None,
    before: _Earlier,
) -> tuple[int, bool]:
    """Return the number of the first class, and whether an option has set it, now or before."""
    earlier = before.written
    if labels_from is None and earlier is not None and earlier.labels_given:
        labels_from = earlier.labels_from
    if layout != "tfrecord" or labels_from is not None:
        return 1 if labels_from is None else labels_from, labels_from is not None
    # An earlier index may know of a label 0 that is in no shard any more.
    was_0 = earlier is not None and bool(before.entries) and earlier.labels_from == 0
    is_0 = kinds.get("cls") == FROM_0 or any(
        each.labels and each.labels[0][0] < 0 for each in found
    )
    return 0 if was_0 or is_0 else 1, False


def _require_classes(
    source: Path | RemoteFolder, found: Sequence[Found], first: int, classes: int, named: str
) -> None:
    """Raise DataError if an example has a label without a name; ``named``: where names are from."""
    for each in found:
        for label, key in each.labels or ((-1, ""),) * bool(each.shard.examples):
            if not 0 <= label + 1 - first < classes:
                raise DataError(
                    f"{source}/{each.shard.name}: example {key!r} has label {label + 1 - first}, "
                    f"and {classes} classes {named}"
                )


def _digests(shards: Sequence[Shard]) -> list[tuple[str, str]]:
    return [(shard.name, shard.sha256) for shard in shards]

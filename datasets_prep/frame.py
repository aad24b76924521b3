"""The frame of the scripts that write shards: what is shared out, skipped, and indexed.

A script lists where its raw examples lie (:class:`Source`) and gives a function that turns the
bytes of one into the values of its examples; :func:`prepare` does the rest.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from datasets_prep.common import is_of_storage, progress_bar
from datasets_prep.on_hosts import BEGIN, OnHost, OtherDataError, prepare_on_hosts
from datasets_prep.resuming import (
    COUNTS,
    JOURNAL,
    SIZES,
    SKIPPED,
    Done,
    base_name,
    done_before,
    note,
    remove_made,
    skipped_before,
    whole_of,
    written_names,
)
from hvd_elastic.data.example import as_bytes, readable
from hvd_elastic.data.files import file_size, sha256_of, sole_writer
from hvd_elastic.data.index import (
    INDEX,
    LAYOUTS,
    Index,
    Shard,
    fields_of,
    load_index,
    make_table,
    save_table,
    table_path,
)
from hvd_elastic.data.processes import in_processes
from hvd_elastic.data.writer import ShardWriter
from hvd_elastic.errors import DataError
from hvd_elastic.model.sharding import epoch_order
from hvd_elastic.replaced_files import write_whole

_STEM = 48  # most characters of a source's name in a key
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_VERSION = 2  # raised when the same sources and settings give other shards
_PLACE_DIGITS = 8  # of a source's place in the order, with which a key begins


class Converted(NamedTuple):
    """What a source gives, where not all of it could be read.

    Attributes:
        examples: the values of each.
        skipped: a line for each part that is left out or damaged.
        counts: what is added up over all sources, such as ``{"tokens": 5}``.
    """

    examples: Sequence[tuple[bytes, ...]]
    skipped: Sequence[str] = ()
    counts: Mapping[str, int] = {}


Convert = Callable[[Any], Sequence[tuple[bytes, ...]]] | Callable[[Any], Converted]


class Source(NamedTuple):
    """Where a raw example lies.

    Attributes:
        path: of a file.
        name: for messages and keys.
        label: number of its class; -1: none.
        offset, size: its bytes in the file; size -1: the whole file.
        file_bytes: size of the whole file when it was listed; -1: the archive's size tells.
    """

    path: str
    name: str
    label: int = -1
    offset: int = 0
    size: int = -1
    file_bytes: int = -1

    @property
    def identity(self) -> str:
        """Name and place, which are the same on all hosts."""
        return f"{self.name}\0{self.label}\0{self.size}\n"

    def read(self) -> bytes:
        """Return its bytes; raises OSError or DataError if they cannot be read."""
        file_size(Path(self.path))
        with Path(self.path).open("rb") as file:
            file.seek(self.offset)
            data = file.read(self.size)
        if len(data) < self.size:
            raise DataError(f"{self.path} ends before it: cut off, or changed meanwhile")
        return data

    def damage(self) -> list[str]:
        """Return nothing: what it gives an example of is whole."""
        return []


class AnySource(Protocol):
    """What is asked of a source; see :class:`Source`."""

    @property
    def name(self) -> str: ...
    @property
    def label(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def file_bytes(self) -> int: ...
    @property
    def identity(self) -> str: ...
    def read(self) -> Any:
        """Return what the function of the script converts."""

    def damage(self) -> list[str]:
        """Return a line for each part that cannot be read, of a source that gives examples."""


@dataclass(frozen=True)
class Settings:
    """How shards are written.

    Attributes:
        layout: "tar" or "tfrecord".
        fields: of an example without its class.
        sources_per_shard: raw examples of a shard; 0: as many as have ``shard_bytes``.
        convert: turns what a source's ``read`` gives into examples, each the values of ``fields``;
            it is sent to processes. It raises DataError for a source that is damaged.
        made_from: what the data depend on, for comparison when a call goes on.
        strict: a damaged source ends the call.
        shuffle: whether the sources are mixed, in an order that is always the same.
        sample: use this many of the sources; None: all.
        processes: number of processes.
        hostfile: names hosts that share the work; None: this machine does it.
        on_host: what this call does as one of them; None: it was made by a user.
        again: whether a folder that was made before is made anew.
        shard_bytes: of the sources of a shard.
    """

    layout: str
    fields: tuple[str, ...]
    sources_per_shard: int
    convert: Convert
    made_from: dict[str, Any] = field(default_factory=dict)
    strict: bool = False
    shuffle: bool = True
    sample: int | None = None
    processes: int = 1
    hostfile: Path | None = None
    on_host: OnHost | None = None
    again: bool = False
    shard_bytes: int = 0


class _Task(NamedTuple):
    path: Path
    number: int
    first: int
    sources: Sequence[AnySource]


def prepare(
    folder: Path, sources: Sequence[AnySource], classes: Sequence[str], settings: Settings
) -> dict[str, Any]:
    """Write what is missing of a folder of shards, and its index when all is there.

    Returns:
        For ``--json``: ``folder``, ``examples``, ``shards``, ``bytes``, ``there`` (shards of an
        earlier call), ``skipped`` (a line for each damaged source) and what ``convert`` counts.

    Raises:
        DataError: there is nothing to prepare, the folder holds something else, or with ``strict``
            a source is damaged.
        OSError: it cannot be written to.
    """
    if not sources:
        raise DataError(f"there is nothing to prepare for {folder}")
    newest: float = getattr(sources, "newest", 0.0)
    classes = [readable(name) for name in classes]
    if twice := [name for name, count in Counter(classes).items() if count > 1]:
        raise DataError(f"two classes have the name {twice[0]!r}; each needs a name of its own")
    count = len(sources)
    order = epoch_order(0, 0, count, shuffle=settings.shuffle)(np.arange(count))
    sources = _Ordered(sources, order[: settings.sample])
    labelled = sources[0].label >= 0
    fields = (*settings.fields, "cls") if labelled else settings.fields
    made_from = {
        **settings.made_from,
        "version": _VERSION,
        "layout": settings.layout,
        "sources": len(sources),
        **digests(sources),
    }
    if settings.sources_per_shard:
        made_from["sources_per_shard"] = settings.sources_per_shard
    else:
        made_from["shard_bytes"] = settings.shard_bytes
    bounds = _bounds(sources, settings)
    paths = _paths(folder, len(bounds) - 1, settings)
    on_host = settings.on_host
    if settings.hostfile is not None and on_host is None:
        if settings.again:
            remove = ("runclust", str(settings.hostfile), "rm", "-r", str(folder.absolute()))
            raise DataError(
                "--again does not go with --hostfile; remove the folder on the hosts: "
                f"{shlex.join(remove)}"
            )
        names = [path.name for path in paths]
        return prepare_on_hosts(settings.hostfile, folder, names, digest_of(made_from))
    if on_host is not None and on_host.folder != str(folder.absolute()):
        return {}  # the other splits of the data set
    if on_host is not None and on_host.digest != digest_of(made_from):
        raise OtherDataError(
            f"{folder} would be another one on this host than where the call was made: the source "
            "has other files, or files of other sizes, or the tokenizer or the release is another "
            "one; all hosts need the same"
        )
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder} is a file; name a folder")
    folder.mkdir(parents=True, exist_ok=True)
    with sole_writer(folder, waits=on_host is not None):
        if settings.again:
            remove_made(folder, made_from)
        gets_shards = on_host is not None and on_host.names != BEGIN
        done = done_before(folder, made_from, shards_too=gets_shards)
        if done is None:
            index = load_index(folder)
            if newest > (folder / INDEX).stat().st_mtime:
                print(
                    f"{folder}: files of the source were written after it was made; if they have "
                    "changed, make it anew with --again",
                    file=sys.stderr,
                )
            counts, skipped = index.made_from.get(COUNTS, {}), skipped_before(folder)
            _require_none(folder, settings, skipped)
            return _found(folder, index, len(index.shards), skipped, counts)
        with (folder / JOURNAL).open("a", encoding="utf-8") as journal:
            if journal.tell() == 0:
                note(journal, made_from)
            if on_host is not None and on_host.names == BEGIN:
                return {}
            write = partial(_write_shard, settings, fields)
            if on_host is not None and on_host.names:
                tasks_of = partial(_tasks, paths, sources, bounds)
                _write_listed(on_host, paths, tasks_of, write, settings.processes)
                return {}
            done = whole_of(folder, done, settings.processes)
            there = len(done)
            work = write if on_host is None else partial(_read_shard, settings)
            missing = [number for number in range(len(paths)) if number not in done]
            left = sum(bounds[number + 1] - bounds[number] for number in missing)
            tasks = _tasks(paths, sources, bounds, missing)
            with progress_bar(f"{base_name(folder)}: preparing", max(1, left)) as advance:
                for number, result in in_processes(work, tasks, settings.processes):
                    note(journal, {"number": number, **result._asdict()})
                    done[number] = result
                    advance(result.sources)
        shards = [msgspec.convert(done[number].shard, Shard) for number in range(len(paths))]
        skipped = [_one_line(line) for number in range(len(paths)) for line in done[number].skipped]
        _require_none(folder, settings, skipped)
        counts = Counter[str]()
        for each in done.values():
            counts.update(each.counts)
        if not any(shard.examples for shard in shards):
            why = f"; the first: {skipped[0]}" if skipped else ": the data are too short for one"
            raise DataError(f"none of {len(sources)} sources gave an example{why}")
        if skipped:
            text = as_bytes("".join(f"{line}\n" for line in skipped))
            write_whole(folder / SKIPPED, text, synced=True)
        if counts:
            made_from[COUNTS] = dict(counts)
        index = Index(settings.layout, fields, tuple(shards), tuple(classes), made_from)
        index.save(folder)
        kept = {name for path in paths for name in (path.name, table_path(path).name)}
        for name in (JOURNAL, *({*written_names(folder)} - kept)):  # the latter of calls before
            (folder / name).unlink()
    return _found(folder, index, there, skipped, counts)


def _require_none(folder: Path, settings: Settings, skipped: Sequence[str]) -> None:
    """Raise DataError with ``strict`` if an earlier call has skipped something."""
    if settings.strict and skipped:
        raise DataError(
            f"{skipped[0]}; an earlier call without --strict has skipped it: repair it, and make "
            f"{folder} anew with --again"
        )


def _write_listed(
    on_host: OnHost,
    paths: Sequence[Path],
    tasks: Callable[[Iterable[int]], Iterator[_Task]],
    write: Callable[[_Task], object],
    processes: int,
) -> None:
    """Write the shards that this host was given, and move them to where the copy expects them."""
    listed = {*Path(on_host.names).read_text(encoding="utf-8").split("\n")}
    wanted = [number for number, path in enumerate(paths) if path.name in listed]
    lacking = (task for task in tasks(wanted) if not task.path.exists())
    for _ in in_processes(write, lacking, processes):
        pass
    # Not one by one, so that a call that is killed leaves all it has done for the next.
    for number in wanted:
        paths[number].replace(Path(on_host.out) / paths[number].name)


def digest_of(made_from: dict[str, Any]) -> str:
    """Return the SHA-256 of all that data depend on."""
    return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()


def digests(sources: Sequence[AnySource]) -> dict[str, str]:
    """Return the SHA-256 of the names of sources, and of their files' sizes."""
    names, sizes = hashlib.sha256(), hashlib.sha256()
    for source in sources:
        names.update(as_bytes(source.identity))
        sizes.update(b"%d\n" % source.file_bytes)
    return {"sources_sha256": names.hexdigest(), SIZES: sizes.hexdigest()}


def _found(
    folder: Path, index: Index, there: int, skipped: list[str], counts: Mapping[str, int]
) -> dict[str, Any]:
    return {
        **counts,
        "folder": str(folder),
        "examples": sum(shard.examples for shard in index.shards),
        "shards": len(index.shards),
        "bytes": sum(shard.bytes for shard in index.shards),
        "there": there,
        "skipped": skipped,
    }


class _Ordered(Sequence[AnySource]):
    """Sources in another order, each made when it is asked for."""

    def __init__(self, sources: Sequence[AnySource], order: np.ndarray) -> None:
        self._sources, self._order = sources, order

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: Any) -> Any:
        found = self._order[index].tolist()
        if isinstance(index, slice):
            return [self._sources[place] for place in found]
        return self._sources[found]


def _bounds(sources: Sequence[AnySource], settings: Settings) -> list[int]:
    """Return the place of the first source of each shard, and after the last one."""
    count = len(sources)
    if settings.sources_per_shard:
        return [*range(0, count, settings.sources_per_shard), count]
    bounds, size = [0], 0
    for place, source in enumerate(sources):
        if size and size + source.size > settings.shard_bytes:
            bounds.append(place)
            size = 0
        size += source.size
    return [*bounds, count]


def _paths(folder: Path, count: int, settings: Settings) -> list[Path]:
    """Return the path of each shard."""
    base = base_name(folder)
    if settings.layout == "tfrecord":
        return [folder / f"{base}.tfrecord-{n:05d}-of-{count:05d}" for n in range(count)]
    return [folder / f"{base}-{n:06d}.tar" for n in range(count)]


def _tasks(
    paths: Sequence[Path],
    sources: Sequence[AnySource],
    bounds: Sequence[int],
    numbers: Iterable[int],
) -> Iterator[_Task]:
    for number in numbers:
        first = bounds[number]
        yield _Task(paths[number], number, first, sources[first : bounds[number + 1]])


def _read_shard(settings: Settings, task: _Task) -> tuple[int, Done]:
    """Make the table of a shard that a host has written, and its entry in the index."""
    if not task.path.exists():
        raise DataError(f"{task.path} did not arrive; the same call goes on")
    examples = list(LAYOUTS[settings.layout].scan(task.path))
    if examples:
        save_table(task.path, make_table(examples, fields_of(examples)))
    found = {int(example.key[:_PLACE_DIGITS]) for example in examples}
    skipped: list[str] = []
    for place, source in enumerate(task.sources, task.first):
        try:
            if place in found:
                skipped += source.damage()
                continue
            lacking, damaged, _ = _converted(settings, source)
        except (DataError, OSError) as error:
            skipped.append(_reason(source, error))
            continue
        if lacking:  # the host that wrote it could not read the source for a while
            raise DataError(
                f"{task.path} lacks {source.name}, which is not damaged; remove that shard on "
                "all hosts and call again"
            )
        skipped += damaged
    size = task.path.stat().st_size
    shard = Shard(task.path.name, len(examples), size, sha256_of(task.path))
    return task.number, Done(_as_dict(shard), len(task.sources), skipped)


def _converted(settings: Settings, source: AnySource) -> Converted:
    found = settings.convert(source.read())
    return found if isinstance(found, Converted) else Converted(found)


def _one_line(text: str) -> str:
    r"""Return a text with its line ends and other control characters escaped.

    >>> print(_one_line("a\nb.jpg: it is empty"))
    a\nb.jpg: it is empty
    """
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def _reason(source: AnySource, error: Exception) -> str:
    """Return the line for a damaged source; raises DataError if not the source is at fault."""
    why = getattr(error, "strerror", None) or error
    if is_of_storage(error, was_there=max(source.file_bytes, source.size) >= 0):
        remedy = "remove the file and call with --again (what is written so far is made anew)"
        if isinstance(source, Source) and source.size >= 0:  # within an archive
            remedy = f"copy {source.path} again"
        raise DataError(
            f"{getattr(error, 'filename', None) or source.name}: {why}; that is no damage of the "
            "file, so it is not skipped: the same call, without --again, goes on where this one "
            f"stopped; if it fails again, {remedy}"
        ) from error
    return f"{source.name}: {why}"


def _write_shard(settings: Settings, fields: Sequence[str], task: _Task) -> tuple[int, Done]:
    skipped: list[str] = []
    counts = Counter[str]()
    with ShardWriter(task.path, settings.layout, fields) as writer:
        for place, source in enumerate(task.sources, task.first):
            try:
                examples, damaged, counted = _converted(settings, source)
            except (DataError, OSError) as error:
                if settings.strict:
                    raise DataError(_reason(source, error)) from None
                skipped.append(_reason(source, error))
                continue
            if damaged and settings.strict:
                raise DataError(damaged[0])
            skipped += damaged
            counts.update(counted)
            label = () if source.label < 0 else (str(source.label).encode(),)
            stem = re.sub(r"[^A-Za-z0-9_-]", "_", Path(source.name).stem)[-_STEM:]
            for number, values in enumerate(examples):
                part = f"_{number:06d}" if len(examples) > 1 else ""
                writer.add(f"{place:0{_PLACE_DIGITS}d}_{stem}{part}", (*values, *label))
        shard = writer.finish()
    return task.number, Done(_as_dict(shard), len(task.sources), skipped, dict(counts))


def _as_dict(shard: Shard) -> dict[str, Any]:
    return {name: getattr(shard, name) for name in shard.__struct_fields__}

"""The frame of the scripts that write shards: options, processes, resuming, errors.

A script lists where its raw examples lie (:class:`Source`) and gives a function that turns the
bytes of one into the values of its examples; :func:`prepare` does the rest.
"""

from __future__ import annotations

import argparse
import glob
import hashlib
import io
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from datasets_prep.common import progress_bar, whole_number
from datasets_prep.on_hosts import ON_HOST, OnHost, prepare_on_hosts
from hvd_elastic.data.example import as_bytes, readable
from hvd_elastic.data.files import file_size, sha256_of, sole_writer, write_whole
from hvd_elastic.data.index import (
    INDEX,
    LAYOUTS,
    VERSION,
    Index,
    Shard,
    fields_of,
    load_index,
    make_table,
    require_size,
    save_table,
    table_path,
)
from hvd_elastic.data.processes import in_processes
from hvd_elastic.data.writer import ShardWriter
from hvd_elastic.errors import DataError, HvdElasticError
from hvd_elastic.hosts.programs.cores import usable_cores
from hvd_elastic.model.sharding import permutation

JOURNAL, SKIPPED = ".prepared.jsonl", "skipped.txt"
_STEM = 48  # most characters of a source's name in a key
_PLACE_DIGITS = 8  # of a source's place in the order, with which a key begins
_SHOWN = 5
_SIZES, _COUNTS = "sizes_sha256", "counts"  # in what data were made from


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


class _Done(NamedTuple):
    shard: dict[str, Any]
    sources: int
    skipped: list[str]
    counts: Mapping[str, int] = {}


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
    order = permutation(0, 0, count) if settings.shuffle else np.arange(count)
    sources = _Ordered(sources, order[: settings.sample])
    labelled = sources[0].label >= 0
    fields = (*settings.fields, "cls") if labelled else settings.fields
    made_from = {
        **settings.made_from,
        "version": VERSION,
        "layout": settings.layout,
        "sources": len(sources),
        **_digests(sources),
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
            raise DataError(
                "--again does not go with --hostfile; remove the folder on the hosts: "
                f"runclust -k {settings.hostfile} rm -r {folder}"
            )
        names = [path.name for path in paths]
        return prepare_on_hosts(settings.hostfile, folder, names, made_from["sources_sha256"])
    if on_host is not None and on_host.folder != str(folder.absolute()):
        return {}  # the other splits of the data set
    if on_host is not None and on_host.digest != made_from["sources_sha256"]:
        raise DataError(
            f"the source of {folder} has other files on this host than where the call was made; "
            "all hosts need the same source"
        )
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder} is a file; name a folder")
    folder.mkdir(parents=True, exist_ok=True)
    with sole_writer(folder, waits=on_host is not None):
        if settings.again:
            _remove_made(folder)
        done = _done_before(folder, made_from, shards_too=on_host is not None)
        if done is None:
            index = load_index(folder)
            if newest > (folder / INDEX).stat().st_mtime:
                print(
                    f"{folder}: files of the source were written after it was made; if they have "
                    "changed, make it anew with --again",
                    file=sys.stderr,
                )
            counts = index.made_from.get(_COUNTS, {})
            return _found(folder, index, len(index.shards), _skipped_before(folder), counts)
        there = len(done)
        with (folder / JOURNAL).open("a", encoding="utf-8") as journal:
            if journal.tell() == 0:
                _note(journal, made_from)
            write = partial(_write_shard, settings, fields)
            if on_host is not None and on_host.names:
                listed = {*Path(on_host.names).read_text(encoding="utf-8").split("\n")}
                wanted = [n for n, path in enumerate(paths) if path.name in listed]
                tasks = _tasks(paths, sources, bounds, wanted)
                lacking = (task for task in tasks if not task.path.exists())
                for _ in in_processes(write, lacking, settings.processes):
                    pass
                # Not one by one, so that a call that is killed leaves all it has done for the next.
                for number in wanted:
                    paths[number].replace(Path(on_host.out) / paths[number].name)
                return {}
            work = write if on_host is None else partial(_read_shard, settings)
            missing = [number for number in range(len(paths)) if number not in done]
            left = sum(bounds[number + 1] - bounds[number] for number in missing)
            tasks = _tasks(paths, sources, bounds, missing)
            with progress_bar(f"{folder.name}: preparing", max(1, left)) as advance:
                for number, result in in_processes(work, tasks, settings.processes):
                    _note(journal, {"number": number, **result._asdict()})
                    done[number] = result
                    advance(result.sources)
        shards = [Shard(**done[number].shard) for number in range(len(paths))]
        skipped = [line for number in range(len(paths)) for line in done[number].skipped]
        counts = Counter[str]()
        for each in done.values():
            counts.update(each.counts)
        if not any(shard.examples for shard in shards):
            why = f"; the first: {skipped[0]}" if skipped else ": the data are too short for one"
            raise DataError(f"none of {len(sources)} sources gave an example{why}")
        if skipped:
            write_whole(folder / SKIPPED, as_bytes("".join(f"{line}\n" for line in skipped)))
        if counts:
            made_from[_COUNTS] = dict(counts)
        index = Index(settings.layout, fields, tuple(shards), tuple(classes), made_from)
        index.save(folder)
        for path in (folder / JOURNAL, *folder.glob(".*.part")):  # the latter of calls before
            path.unlink()
    return _found(folder, index, there, skipped, counts)


def _digests(sources: Sequence[AnySource]) -> dict[str, str]:
    """Return the SHA-256 of the names of sources, and of their files' sizes."""
    names, sizes = hashlib.sha256(), hashlib.sha256()
    for source in sources:
        names.update(as_bytes(source.identity))
        sizes.update(b"%d\n" % source.file_bytes)
    return {"sources_sha256": names.hexdigest(), _SIZES: sizes.hexdigest()}


def _remove_made(folder: Path) -> None:
    """Remove what an earlier call has written to a folder, and nothing else.

    Raises:
        DataError: the folder was not made by such a call.
    """
    names = [SKIPPED, JOURNAL]
    if (folder / INDEX).exists():
        index = load_index(folder)
        if "sources_sha256" not in index.made_from:
            raise DataError(
                f"{folder} holds shards that were indexed, not made; remove it yourself"
            )
        names += [shard.name for shard in index.shards]
    elif (folder / JOURNAL).exists():
        names += [path.name for path in folder.glob(f"{glob.escape(folder.name)}[-.]*")]
    for name in (*names, INDEX):  # the index last, for a call that is killed here
        table_path(folder / name).unlink(missing_ok=True)
        (folder / name).unlink(missing_ok=True)


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


def _skipped_before(folder: Path) -> list[str]:
    try:
        return (folder / SKIPPED).read_text("utf-8", "surrogateescape").split("\n")[:-1]
    except FileNotFoundError:
        return []


def _done_before(
    folder: Path, made_from: dict[str, Any], *, shards_too: bool = False
) -> dict[int, _Done] | None:
    """Return the shards of an earlier call by number; None: it has written all.

    Args:
        folder: of the shards.
        made_from: settings of this call.
        shards_too: whether shards of other hosts may lie there.

    Raises:
        DataError: the folder holds something else.
    """
    if (folder / INDEX).exists():
        index = load_index(folder)
        _require_same(folder, index.made_from, made_from)
        for shard in index.shards:
            require_size(folder / shard.name, shard)
        return None
    try:
        lines = (folder / JOURNAL).read_bytes().split(b"\n")
    except FileNotFoundError:
        other = [path.name for path in folder.iterdir() if path.name[0] != "."]
        if other and not shards_too:
            raise DataError(
                f"{folder} holds other files ({other[0]}); name a new or empty folder"
            ) from None
        return {}
    if len(lines) < 2:  # killed while it wrote the first line
        (folder / JOURNAL).unlink()
        return {}
    # Killed while it wrote the last line; the next one must not be appended to that.
    os.truncate(folder / JOURNAL, sum(len(line) + 1 for line in lines[:-1]))
    try:
        was, *entries = map(json.loads, lines[:-1])
        _require_same(folder, was, made_from)
        done = {entry.pop("number"): _Done(**entry) for entry in entries}
        return {number: each for number, each in done.items() if _is_there(folder, each)}
    except (ValueError, TypeError, KeyError, AttributeError):
        raise DataError(f"{folder / JOURNAL} is damaged; remove {folder} and begin anew") from None


def _is_there(folder: Path, done: _Done) -> bool:
    try:
        return (folder / done.shard["name"]).stat().st_size == done.shard["bytes"]
    except FileNotFoundError:  # somebody has removed it
        return False


def _require_same(folder: Path, was: dict[str, Any], now: dict[str, Any]) -> None:
    names = {*was, *now} - {_COUNTS}
    if _SIZES not in was:  # an earlier release made it
        names.discard(_SIZES)
    other = sorted(name for name in names if was.get(name) != now.get(name))
    if other:
        settings = [name for name in other if name not in ("sources_sha256", _SIZES)]
        difference = "files that have changed since"
        if settings:
            name = settings[0]
            difference = f"{name.replace('_', ' ')} {was.get(name)} instead of {now.get(name)}"
        raise DataError(
            f"{folder} was made from {difference}; name another folder, make this one anew with "
            "--again, or use its settings"
        )


def _note(journal: Any, entry: dict[str, Any]) -> None:
    journal.write(json.dumps(entry) + "\n")
    journal.flush()
    os.fsync(journal.fileno())


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
    name = f"{folder.name}-%06d.tar"
    if settings.layout == "tfrecord":
        name = f"{folder.name}.tfrecord-%05d-of-{count:05d}"
    return [folder / (name % number) for number in range(count)]


def _tasks(
    paths: Sequence[Path],
    sources: Sequence[AnySource],
    bounds: Sequence[int],
    numbers: Iterable[int],
) -> Iterator[_Task]:
    for number in numbers:
        first = bounds[number]
        yield _Task(paths[number], number, first, sources[first : bounds[number + 1]])


def _read_shard(settings: Settings, task: _Task) -> tuple[int, _Done]:
    """Make the table of a shard that a host has written, and its entry in the index."""
    if not task.path.exists():
        raise DataError(f"{task.path} did not arrive; the same call goes on")
    examples = list(LAYOUTS[settings.layout].scan(task.path))
    if examples:
        save_table(task.path, make_table(examples, fields_of(examples)))
    found = {int(example.key[:_PLACE_DIGITS]) for example in examples}
    skipped = []
    for place, source in enumerate(task.sources, task.first):
        if place not in found:
            try:
                lacking = len(_converted(settings, source).examples)
            except (DataError, OSError) as error:
                skipped.append(_reason(source, error))
                continue
            if lacking:  # the host that wrote it could not read the source for a while
                raise DataError(
                    f"{task.path} lacks {source.name}, which is not damaged; remove that shard on "
                    "all hosts and call again"
                )
    size = task.path.stat().st_size
    shard = Shard(task.path.name, len(examples), size, sha256_of(task.path))
    return task.number, _Done(_as_dict(shard), len(task.sources), skipped)


def _converted(settings: Settings, source: AnySource) -> Converted:
    found = settings.convert(source.read())
    return found if isinstance(found, Converted) else Converted(found)


def _reason(source: AnySource, error: Exception) -> str:
    return f"{source.name}: {getattr(error, 'strerror', None) or error}"


def _write_shard(settings: Settings, fields: Sequence[str], task: _Task) -> tuple[int, _Done]:
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
    return task.number, _Done(_as_dict(shard), len(task.sources), skipped, dict(counts))


def _as_dict(shard: Shard) -> dict[str, Any]:
    return {name: getattr(shard, name) for name in shard.__struct_fields__}


# ---- command line


def options(description: str, *, per_shard: int | None = 1000) -> argparse.ArgumentParser:
    """Return a parser with the options that all scripts have; ``per_shard``: None: not that one."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,  # the hosts get the options as they are written, less --hostfile
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit status: 0 all well, 1 something is wrong and was named, 2 wrong usage, 130\n"
        "interrupted. The same call goes on where an interrupted or killed one stopped.",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument(
        "--format", choices=("tar", "tfrecord"), default="tar", help="of the shards (tar)"
    )
    if per_shard is not None:
        parser.add_argument(
            "--per-shard",
            type=whole_number(1),
            default=per_shard,
            help=f"files of the source in a shard ({per_shard})",
        )
    parser.add_argument("--sample", type=whole_number(1), help="use this many of them, for a trial")
    parser.add_argument("--strict", action="store_true", help="stop at a damaged one")
    parser.add_argument(
        "--again", action="store_true", help="make --out anew, such as from a source that changed"
    )
    parser.add_argument(
        "--processes",
        type=whole_number(1),
        default=usable_cores(),
        help="one for each core that may be used",
    )
    parser.add_argument(
        "--hostfile",
        type=Path,
        help="share the work among these hosts, which see script and source at the same paths; "
        "afterwards all have all shards",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument(ON_HOST, nargs="+", default=(), help=argparse.SUPPRESS)
    return parser


def picture_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of scripts that encode pictures."""
    parser.add_argument(
        "--resize", type=whole_number(0), default=0, help="shorter side, if longer (0: as it is)"
    )
    parser.add_argument("--quality", type=whole_number(1, 100), default=92, help="of JPEG (92)")


def settings_of(
    given: argparse.Namespace, fields: tuple[str, ...], convert: Convert, **more: Any
) -> Settings:
    """Return the settings that the common options ask for."""
    made_from = asdict(convert) if hasattr(convert, "__dataclass_fields__") else {}  # type: ignore[call-overload]
    return Settings(
        given.format,
        fields,
        getattr(given, "per_shard", 0),
        convert,
        made_from,
        strict=given.strict,
        again=given.again,
        sample=given.sample,
        processes=given.processes,
        hostfile=given.hostfile,
        on_host=OnHost(*given.on_host) if given.on_host else None,
        **more,
    )


def main(
    parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], list[dict[str, Any]]]
) -> int:
    """Parse the command line, run, and print what was done or what is wrong; exit status."""
    given = parser.parse_args()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names of files need not be UTF-8
            stream.reconfigure(errors="backslashreplace")
    try:
        found = [each for each in run(given) if each]
    except HvdElasticError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {error.filename or given.out}: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same call goes on where this one stopped", file=sys.stderr)
        return 130
    if given.json:
        print(json.dumps(found))
        return 0
    for each in found:
        for line in each["skipped"][:_SHOWN]:
            print(f"skipped {line}")
        if len(each["skipped"]) > _SHOWN:
            print(f"and {len(each['skipped']) - _SHOWN} more, in {each['folder']}/{SKIPPED}")
        if "tokens" in each:
            print(f"{each['tokens']:,} tokens used, {each['tokens_lost']:,} lost at ends of pieces")
        print(
            f"{each['folder']}: {each['examples']} examples in {each['shards']} shards, "
            f"{each['bytes'] / 1e6:,.1f} MB; {len(each['skipped'])} skipped"
        )
    return 0

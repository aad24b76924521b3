"""What an earlier call has left in a folder of shards, for the one that goes on."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from datasets_prep.common import progress_bar
from datasets_prep.on_hosts import OtherDataError
from hvd_elastic.data.files import sha256_of
from hvd_elastic.data.index import INDEX, Shard, load_index, require_size, table_path
from hvd_elastic.data.processes import in_processes
from hvd_elastic.errors import DataError
from hvd_elastic.replaced_files import write_whole

JOURNAL, SKIPPED = ".prepared.jsonl", "skipped.txt"
SIZES, COUNTS = "sizes_sha256", "counts"  # in what data were made from


class Done(NamedTuple):
    """A shard that is written.

    Attributes:
        shard: its entry in the index.
        sources: number of its sources.
        skipped: a line for each source that is damaged.
        counts: what its sources add up to.
    """

    shard: dict[str, Any]
    sources: int
    skipped: list[str]
    counts: Mapping[str, int] = {}


def base_name(folder: Path) -> str:
    """Return the name with which shards of a folder begin: its own, also of ``.`` and ``..``."""
    return Path(os.path.abspath(folder)).name  # noqa: PTH100  a link keeps its name


def written_names(folder: Path) -> list[str]:
    """Return the names of the shards in a folder, whole or begun, and of their tables."""
    shard = rf"{re.escape(base_name(folder))}(-\d{{6,}}\.tar|\.tfrecord-\d{{5,}}-of-\d{{5,}})"
    ours = re.compile(rf"{shard}(\.npy)?|\.{shard}\.part")
    return [path.name for path in folder.iterdir() if ours.fullmatch(path.name)]


def remove_made(folder: Path, made_from: dict[str, Any]) -> None:
    """Remove what an earlier call has written to a folder, and nothing else.

    A call with the new settings, ``made_from``, goes on from the journal if this one is killed.

    Raises:
        DataError: the folder was not made by such a call.
    """
    if (folder / INDEX).exists():
        index = load_index(folder, outdated=True)
        if "sources_sha256" not in index.made_from:
            raise DataError(
                f"{folder} holds shards that were indexed, not made; remove it yourself"
            )
        names = [shard.name for shard in index.shards]
    elif (folder / JOURNAL).exists():
        names = written_names(folder)
    else:
        return
    journal = json.dumps(made_from) + "\n"
    try:
        write_whole(folder / JOURNAL, journal, synced=True)
    except OSError as error:
        there = [path for path in map(folder.joinpath, names) if path.exists()]
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not there:
            raise
        max(there, key=lambda path: path.stat().st_size).unlink()  # the disk is full of them
        write_whole(folder / JOURNAL, journal, synced=True)
    for name in (INDEX, SKIPPED, *names, JOURNAL):
        table_path(folder / name).unlink(missing_ok=True)
        (folder / name).unlink(missing_ok=True)


def skipped_before(folder: Path) -> list[str]:
    """Return the lines of the sources that an earlier call has skipped."""
    try:
        return (folder / SKIPPED).read_text("utf-8", "surrogateescape").split("\n")[:-1]
    except FileNotFoundError:
        return []


def done_before(
    folder: Path, made_from: dict[str, Any], *, shards_too: bool = False
) -> dict[int, Done] | None:
    """Return the shards of an earlier call by number; None: it has written all.

    Args:
        folder: of the shards.
        made_from: what the data of this call depend on.
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
            raise OtherDataError(
                f"{folder} holds other files ({other[0]}); name a new or empty folder"
            ) from None
        return {}
    # Killed while it wrote the first line, or before it wrote a shard.
    if len(lines) < 2 or (len(lines) == 2 and not written_names(folder)):
        (folder / JOURNAL).unlink()
        return {}
    # Killed while it wrote the last line; the next one must not be appended to that.
    os.truncate(folder / JOURNAL, sum(len(line) + 1 for line in lines[:-1]))
    try:
        was, *entries = map(json.loads, lines[:-1])
        _require_same(folder, was, made_from)
        done = {entry.pop("number"): Done(**entry) for entry in entries}
        for each in done.values():
            Shard(**each.shard)
        return done
    except (ValueError, TypeError, KeyError, AttributeError):
        raise DataError(f"{folder / JOURNAL} is damaged; remove {folder} and begin anew") from None


def whole_of(folder: Path, done: dict[int, Done], processes: int) -> dict[int, Done]:
    """Return those of the shards whose content is what was written (SHA-256)."""
    shards = [(number, Shard(**each.shard)) for number, each in done.items()]
    whole = {}
    with progress_bar(
        f"{base_name(folder)}: comparing what is there", max(1, len(shards))
    ) as advance:
        for number in in_processes(partial(_whole, folder), shards, processes):
            advance(1)
            if number is not None:
                whole[number] = done[number]
    return whole


def _whole(folder: Path, numbered: tuple[int, Shard]) -> int | None:
    """Return the number of a shard; None: it is not what was written, or somebody removed it."""
    number, shard = numbered
    path = folder / shard.name
    try:
        require_size(path, shard)
        is_same = sha256_of(path) == shard.sha256
    except (OSError, DataError):
        return None
    return number if is_same and (table_path(path).exists() or not shard.examples) else None


def _require_same(folder: Path, was: dict[str, Any], now: dict[str, Any]) -> None:
    names = {*was, *now} - {COUNTS}
    if SIZES not in was:  # an earlier release made it
        names.discard(SIZES)
    other = sorted(name for name in names if was.get(name) != now.get(name))
    if other:
        settings = [name for name in other if name not in ("sources_sha256", SIZES)]
        difference = "files that have changed since"
        if settings:
            name = settings[0]
            difference = f"{name.replace('_', ' ')} {was.get(name)} instead of {now.get(name)}"
        raise OtherDataError(
            f"{folder} was made from {difference}; name another folder, make this one anew with "
            "--again, or use its settings"
        )


def note(journal: Any, entry: dict[str, Any]) -> None:
    """Append an entry to the journal, so that it is there after a kill or a power cut."""
    journal.write(json.dumps(entry) + "\n")
    journal.flush()
    os.fsync(journal.fileno())

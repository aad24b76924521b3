"""Writes, finds, verifies and drops shards: the parts of a checkpoint that one rank each writes.

Each shard, such as ``step-000000000100-0-of-2-0123456789ab.shard``, holds the part of the state
that one rank wrote. Its name contains the first digits of its SHA-256, so writing a step again
never changes an existing file. Every file is written under a temporary name, synced and renamed.

In the *spool*, the folder of a run on the disk of a rank's host, each shard has a description
beside it, with the same name ending in ``.json``. From these, the shards of one checkpoint on
several hosts can be put together.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from hvd_elastic.checkpoint.whole_files import (
    Write,
    check_arrived,
    explained,
    failures_logged,
    mismatch,
    remove_leftovers,
    write_hashed,
    write_json,
)
from hvd_elastic.json_text import parse_json
from hvd_elastic.programs.file_hash import hash_of

FORMAT = 4
"""Format of checkpoints."""
# Names of shards, and of their descriptions in a spool.
SHARD = re.compile(r"step-(\d{12,})-(\d+)-of-(\d+)-[0-9a-f]{12}\.shard")
_DESCRIPTION = re.compile(r"step-(\d{12,})-(\d+)-of-(\d+)-[0-9a-f]{12}\.json")
Count = Annotated[int, msgspec.Meta(ge=0)]
Key = tuple[int, int, str, str, int]


@dataclass(frozen=True)
class ShardInfo:
    """One shard of a checkpoint: the part that one rank writes.

    The tensors that all ranks share form one stream of bytes; a shard holds the part from ``begin``
    to ``end`` of it. In shard 0, ``header`` bytes come before that: the description of the
    checkpoint (:mod:`hvd_elastic.checkpoint.header`), and the data that only rank 0 writes.

    Attributes:
        step, epoch, examples: point in training that it holds.
        generation: number of the generation that wrote it.
        life: id of the leader term, which distinguishes the generations of a resumed run from
            earlier ones with the same number.
        host, rank, world: host and rank that wrote it, and number of ranks.
        layout: digest of the names, shapes and types of the stream's tensors.
        header: number of bytes before the part of the stream.
        begin, end, total: its range in the stream, and the length of the stream [bytes].
        bytes, sha256: size and SHA-256 of the file.
        created: when it was written [Unix seconds].
        seconds: how long writing took [s]; 0 for a shard that was found.
        run: name of the run that wrote it; empty: unknown, or there was no run.
        not_finite: name of a weight in it that holds NaN or infinity; empty: none, or unknown.
    """

    path: Path
    step: Count
    epoch: Count
    examples: Count
    generation: Count
    life: str
    index: Count
    count: Count
    host: str
    rank: Count
    layout: str
    header: Count
    begin: Count
    end: Count
    total: Count
    bytes: Count = 0
    sha256: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")] = ""
    created: float = 0.0
    seconds: float = 0.0
    run: str = ""
    world: Count = 0
    not_finite: str = ""

    @property
    def file(self) -> str:
        """Return the name of its file."""
        return f"step-{self.step:012d}-{self.index}-of-{self.count}-{self.sha256[:12]}.shard"

    @property
    def key(self) -> Key:
        """Return what identifies its checkpoint: equal for all shards of one and no others."""
        return (self.step, self.generation, self.life, self.layout, self.count)

    def manifest(self) -> dict[str, Any]:
        """Return its description as plain data, for manifests and messages."""
        fields = asdict(self)
        del fields["path"], fields["seconds"]
        return {"format": FORMAT, "file": self.file, **fields}


def write_shard(folder: Path | str, shard: ShardInfo, write: Write) -> ShardInfo:
    """Write the data of one shard; return the shard with path, size, SHA-256 and times.

    Args:
        folder: folder of the file; created if missing.
        write: function that writes the data to the file it is given.

    Raises:
        CheckpointError: the folder cannot be written, or is full; no file is left behind.
    """
    folder, started, written = Path(folder), time.monotonic(), shard

    def place(size: int, sha256: str) -> Path:
        nonlocal written
        now, seconds = time.time(), time.monotonic() - started
        named = replace(shard, bytes=size, sha256=sha256, created=now, seconds=seconds)
        written = replace(named, path=folder / named.file)
        return written.path

    with write_errors_explained(folder, f"the checkpoint of step {shard.step}"):
        write_hashed(folder, write, place)
    return written


def receive_shard(folder: Path | str, shard: ShardInfo, write: Write) -> ShardInfo:
    """Write a shard that comes from another host or URL, and verify its size and SHA-256.

    Raises:
        DamagedFileError: it was truncated or changed at its source or on the way.
        CheckpointError: it cannot be read, or the folder cannot be written.
    """
    folder, started = Path(folder), time.monotonic()
    step = f"the checkpoint of step {shard.step}"

    def place(size: int, sha256: str) -> Path:
        what = f"shard {shard.index} of {shard.count} of {step}, from host {shard.host}"
        check_arrived(what, (shard.bytes, shard.sha256), (size, sha256))
        return folder / shard.file

    with write_errors_explained(folder, step):
        write_hashed(folder, write, place)
    return replace(shard, path=folder / shard.file, seconds=time.monotonic() - started)


def describe_shard(shard: ShardInfo, keep: int) -> None:
    """Write the description of a shard in a spool, for :func:`find_shards`; prune older shards.

    Args:
        shard: shard whose file is in the spool.
        keep: number of steps whose shards are kept.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    require_keep(keep)
    folder = shard.path.parent
    with write_errors_explained(folder, f"the checkpoint of step {shard.step}"):
        write_json(shard.path.with_suffix(".json"), shard.manifest())
    known = [each for each in find_shards(folder) if each.step <= shard.step]
    steps = sorted({each.step for each in known})
    if len(steps) > keep:
        finite = [each.step for each in known if not each.not_finite]
        drop_shards(folder, min(steps[-keep - 1], max(finite, default=shard.step) - 1))
    with failures_logged(folder):
        remove_leftovers(folder)


def find_shards(folder: Path | str) -> list[ShardInfo]:
    """Return the shards of a spool whose files have the right size, newest step first.

    Contents are verified later, when a shard is fetched. A missing folder has no shards.
    """
    folder = Path(folder)
    found = []
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if _DESCRIPTION.fullmatch(path.name):
                with contextlib.suppress(OSError, ValueError):
                    shard = parse_shard(parse_json(path.read_text(encoding="utf-8")), folder)
                    if shard.path.stat().st_size == shard.bytes:
                        found.append(shard)
    return sorted(found, key=lambda shard: (-shard.step, shard.index, shard.file))


def drop_shards(folder: Path | str, up_to_step: int | None) -> None:
    """Remove the shards of a spool up to and including a step; None: all of them."""
    folder = Path(folder)
    with failures_logged(folder):
        for path in list(folder.iterdir()) if folder.is_dir() else []:
            match = _DESCRIPTION.fullmatch(path.name) or SHARD.fullmatch(path.name)
            if match and (up_to_step is None or int(match[1]) <= up_to_step):
                with failures_logged(path):
                    path.unlink(missing_ok=True)


def complete_sets(shards: Iterable[ShardInfo]) -> list[tuple[ShardInfo, ...]]:
    """Return the complete checkpoints among these shards, newest first.

    Of several copies of a shard, such as those on other hosts, the first is used.

    >>> complete_sets([])
    []
    """
    known: dict[Key, dict[int, ShardInfo]] = {}
    for shard in shards:
        known.setdefault(shard.key, {}).setdefault(shard.index, shard)
    complete = []
    for parts in known.values():
        ordered = tuple(parts[index] for index in sorted(parts))
        if why_incomplete(ordered) is None:
            complete.append(ordered)
    return sorted(complete, key=lambda parts: (-parts[0].step, -parts[0].created))


def why_incomplete(shards: Sequence[ShardInfo]) -> str | None:
    """Return why these shards, by index, are not one complete checkpoint; None if they are."""
    if not shards:
        return "it has no shards"
    count, total = shards[0].count, shards[0].total
    indices = [shard.index for shard in shards]
    there = {*indices}
    # Not by a list of all, since a description from elsewhere may give any count.
    missing = next(index for index in itertools.count() if index not in there)
    if missing < count:
        return f"shard {missing} of {count} is missing"
    if indices != [*range(len(shards))] or len(shards) != count:
        return "its shards are not in order"
    at = 0
    for shard in shards:
        if shard.key != shards[0].key or shard.total != total:
            return f"shard {shard.index} belongs to another checkpoint"
        if shard.begin != at or shard.end < at:
            return f"shard {shard.index} begins at byte {shard.begin} instead of {at}"
        at = shard.end
    return None if at == total else f"its shards end at byte {at} of {total}"


def parse_shard(described: Any, folder: Path) -> ShardInfo:
    """Return the shard that :meth:`ShardInfo.manifest` described, as a file in ``folder``.

    The description may come from another host, so no path is taken from it.

    Raises:
        ValueError: the description is invalid; the message names the field.
    """
    check_format(described)
    shard = msgspec.convert(
        {**described, "path": folder, "seconds": 0.0}, ShardInfo, dec_hook=lambda _, path: path
    )
    for name, value in shard.manifest().items():
        if described.get(name) != value:
            raise ValueError(f"{name} is {described.get(name)!r}, it must be {value!r}")
    if shard.header + shard.end - shard.begin != shard.bytes:
        raise ValueError(f"bytes is {shard.bytes}, header and range say something else")
    return replace(shard, path=folder / shard.file)


def check_format(described: Any) -> None:
    """Raise ValueError if a description is none, or of a format that cannot be read."""
    if not isinstance(described, Mapping):
        raise ValueError(f"it holds {type(described).__name__} instead of an object")
    if described.get("format") != FORMAT:
        raise ValueError(
            f"format is {described.get('format')!r}, this version reads {FORMAT}; resume with the "
            "version that wrote it"
        )


def wrong_size(shard: ShardInfo) -> str | None:
    """Return how the size of the file differs from that described; None if it does not."""
    return mismatch((shard.bytes, shard.sha256), (shard.path.stat().st_size, shard.sha256))


def wrong_content(shard: ShardInfo) -> str | None:
    """Return how the content of the file differs from that described; None if it does not."""
    with shard.path.open("rb") as data:
        found = shard.bytes, hash_of(data.fileno()).hexdigest()
        return mismatch((shard.bytes, shard.sha256), found)


def write_errors_explained(folder: Path, what: str) -> contextlib.AbstractContextManager[None]:
    """Return a context that explains why ``what`` cannot be written to ``folder``."""
    return explained(
        folder,
        what,
        "The checkpoints that were there are untouched",
        ", keep fewer checkpoints, or choose another folder",
    )


def require_keep(keep: int) -> None:
    """Raise ValueError unless at least one checkpoint is to be kept."""
    if keep < 1:
        raise ValueError(f"keep is {keep}, it must be 1 or more")

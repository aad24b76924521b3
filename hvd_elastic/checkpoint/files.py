"""Writes, finds, verifies and prunes checkpoint files; a checkpoint is always complete or absent.

A checkpoint of N shards is N + 1 files in one folder. Each shard, such as
``step-000000000100-0-of-2-0123456789ab.shard``, holds the part of the state that one rank wrote.
Its name contains the first digits of its SHA-256, so writing a step again never changes an existing
file. The manifest, ``step-000000000100.json``, lists all shards with their sizes and SHA-256. It is
written last: shards without a matching manifest are not a checkpoint. Every file is written under a
temporary name, synced and renamed, so a complete checkpoint stays complete even if a writer is
killed.

In the *spool*, the folder of a run on the disk of a rank's host, each shard has a description
beside it, with the same name ending in ``.json``. From these, the shards of one checkpoint on
several hosts can be put together.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hvd_elastic.checkpoint.whole_files import (
    CHUNK_BYTES,
    HashingWriter,
    explained,
    failures_logged,
    is_abandoned,
    remove_leftovers,
    sync_folder,
    temporary_in,
    write_json,
)
from hvd_elastic.errors import CheckpointError

log = logging.getLogger(__name__)

FORMAT = 3
"""Format that is written. Format 2, with a header pickled by PyTorch and without ``world``, can
still be read."""
PICKLED_FORMAT = 2  # the last format with a pickled header
# Names of manifests, shards, and shards' descriptions in a spool.
MANIFEST = re.compile(r"step-(\d{12,})\.json")
SHARD = re.compile(r"step-(\d{12,})-(\d+)-of-(\d+)-[0-9a-f]{12}\.shard")
_DESCRIPTION = re.compile(r"step-(\d{12,})-(\d+)-of-(\d+)-[0-9a-f]{12}\.json")
_FIELDS: tuple[tuple[tuple[str, ...], Any, str], ...] = (
    (
        (
            *("step", "epoch", "examples", "generation", "index", "count", "rank"),
            *("header", "begin", "end", "total", "bytes", "world"),
        ),
        int,
        "a whole number >= 0",
    ),
    (("life", "host", "layout", "sha256", "run"), str, "a text"),
    (("created",), (int, float), "Unix seconds"),
)
"""Fields of a shard's description, their type, and the type as text for error messages."""

OnSkip = Callable[[Path, str], None]
Key = tuple[int, int, str, str]


class DamagedShardError(CheckpointError):
    """A received shard differs from the one that was written."""


@dataclass(frozen=True)
class ShardInfo:
    """One shard of a checkpoint: the part that one rank writes.

    The tensors that all ranks share form one stream of bytes; a shard holds the part from ``begin``
    to ``end`` of it. In shard 0, ``header`` bytes come before that: the description of the
    checkpoint (:mod:`hvd_elastic.checkpoint.header`), and the data that only rank 0 writes.

    Attributes:
        path: path of the file.
        step, epoch, examples: point in training that it holds.
        generation: number of the generation that wrote it.
        life: id of the leader term, which distinguishes the generations of a resumed run from
            earlier ones with the same number.
        index, count: index of the shard, and number of shards.
        host, rank, world: host and rank that wrote it, and number of ranks; world 0: unknown.
        layout: digest of the names, shapes and types of the stream's tensors.
        header: number of bytes before the part of the stream.
        begin, end, total: its range in the stream, and the length of the stream [bytes].
        bytes, sha256: size and SHA-256 of the file.
        created: when it was written [Unix seconds].
        seconds: how long writing took [s]; 0 for a shard that was found.
        run: name of the run that wrote it; empty: unknown, or there was no run.
        format: :data:`FORMAT`, or an earlier one that can be read.
    """

    path: Path
    step: int
    epoch: int
    examples: int
    generation: int
    life: str
    index: int
    count: int
    host: str
    rank: int
    layout: str
    header: int
    begin: int
    end: int
    total: int
    bytes: int = 0
    sha256: str = ""
    created: float = 0.0
    seconds: float = 0.0
    run: str = ""
    world: int = 0
    format: int = FORMAT

    @property
    def file(self) -> str:
        """Return the name of its file."""
        return f"step-{self.step:012d}-{self.index}-of-{self.count}-{self.sha256[:12]}.shard"

    @property
    def key(self) -> Key:
        """Return what identifies its checkpoint: equal for all shards of one and no others."""
        return (self.step, self.generation, self.life, self.layout)

    def manifest(self) -> dict[str, Any]:
        """Return its description as plain data, for manifests and messages."""
        fields = asdict(self)
        del fields["path"], fields["seconds"], fields["format"]
        return {"format": self.format, "file": self.file, **fields}


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint as described by its manifest.

    Attributes:
        path: path of the manifest.
        shards: shards by index; their files are in the same folder.
        seconds: how long writing took [s]; 0 for a checkpoint that was found.
    """

    path: Path
    shards: tuple[ShardInfo, ...]
    seconds: float = 0.0

    @property
    def run(self) -> str:
        """Return the name of the run that wrote it; empty if unknown."""
        return self.shards[0].run

    @property
    def format(self) -> int:
        """Return the format of its shards."""
        return self.shards[0].format

    @property
    def step(self) -> int:
        """Return the number of optimizer steps in it."""
        return self.shards[0].step

    @property
    def epoch(self) -> int:
        """Return the epoch of its state."""
        return self.shards[0].epoch

    @property
    def examples(self) -> int:
        """Return the number of examples consumed until its state."""
        return self.shards[0].examples

    @property
    def bytes(self) -> int:
        """Return the size of all shards together."""
        return sum(shard.bytes for shard in self.shards)

    @property
    def files(self) -> list[Path]:
        """Return the paths of all its files in the order to write them: shards, then manifest."""
        return [*(shard.path for shard in self.shards), self.path]

    def manifest(self) -> dict[str, Any]:
        """Return the content of the manifest."""
        first = self.shards[0]
        return {
            "format": self.format,
            "run": first.run,
            "step": first.step,
            "epoch": first.epoch,
            "examples": first.examples,
            "generation": first.generation,
            "world": first.world,
            "bytes": self.bytes,
            "created": max(shard.created for shard in self.shards),
            "shards": [shard.manifest() for shard in self.shards],
        }


# -- shards


def write_shard(
    folder: Path | str,
    shard: ShardInfo,
    write: Callable[[HashingWriter], None],
) -> ShardInfo:
    """Write the data of one shard; return the shard with path, size, SHA-256 and times.

    Args:
        folder: folder of the file; created if missing.
        shard: shard to write.
        write: function that writes the data to the file it is given.

    Raises:
        CheckpointError: the folder cannot be written, or is full; no file is left behind.
    """
    folder = Path(folder)
    started = time.monotonic()
    with _explained(folder, f"the checkpoint of step {shard.step}"):
        folder.mkdir(parents=True, exist_ok=True)
        with temporary_in(folder) as temporary:
            with temporary.open("xb") as raw:
                writer = HashingWriter(raw)
                write(writer)
                sha256 = writer.finish()
            shard = replace(
                shard,
                bytes=writer.bytes,
                sha256=sha256,
                created=time.time(),
                seconds=time.monotonic() - started,
            )
            shard = replace(shard, path=folder / shard.file)
            temporary.replace(shard.path)
    return shard


def receive_shard(
    folder: Path | str, shard: ShardInfo, copy: Callable[[HashingWriter], None]
) -> ShardInfo:
    """Write a shard that comes from another host or URL, and verify its size and SHA-256.

    Raises:
        DamagedShardError: it was truncated or changed at its source or on the way.
        CheckpointError: it cannot be read, or the folder cannot be written.
    """
    arrived = write_shard(folder, replace(shard, path=Path(folder)), copy)
    wrong = _mismatch(shard, arrived.bytes, arrived.sha256)
    if wrong is not None:
        arrived.path.unlink(missing_ok=True)
        raise DamagedShardError(
            f"shard {shard.index} of {shard.count} of the checkpoint of step {shard.step}, from "
            f"host {shard.host}: {wrong}; it was cut or changed on the way"
        )
    return replace(arrived, created=shard.created)


def describe_shard(shard: ShardInfo, keep: int) -> None:
    """Write the description of a shard in a spool, for :func:`find_shards`; prune older shards.

    Args:
        shard: shard whose file is in the spool.
        keep: number of steps whose shards are kept.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    _require_keep(keep)
    folder = shard.path.parent
    with _explained(folder, f"the checkpoint of step {shard.step}"):
        write_json(shard.path.with_suffix(".json"), shard.manifest())
    steps = sorted({known.step for known in find_shards(folder) if known.step <= shard.step})
    if len(steps) > keep:
        drop_shards(folder, steps[-keep - 1])
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
                    shard = parse_shard(json.loads(path.read_text(encoding="utf-8")), folder)
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
    count, total, form = shards[0].count, shards[0].total, shards[0].format
    missing = sorted({*range(count)} - {shard.index for shard in shards})
    if missing:
        return f"shard {missing[0]} of {count} is missing"
    if [shard.index for shard in shards] != [*range(count)]:
        return "its shards are not in order"
    at = 0
    for shard in shards:
        whole = shard.count, shard.total, shard.format
        if shard.key != shards[0].key or whole != (count, total, form):
            return f"shard {shard.index} belongs to another checkpoint"
        if shard.begin != at or shard.end < at:
            return f"shard {shard.index} begins at byte {shard.begin} instead of {at}"
        at = shard.end
    return None if at == total else f"its shards end at byte {at} of {total}"


# -- checkpoints


def complete_checkpoint(
    folder: Path | str, shards: Sequence[ShardInfo], keep: int, seconds: float = 0.0
) -> CheckpointInfo:
    """Write the manifest for shards in ``folder``, and prune older checkpoints.

    Args:
        folder: folder of the checkpoints.
        shards: all verified shards of the checkpoint, by index, with their files in ``folder``.
        keep: number of checkpoints to keep, this one included, >= 1.
        seconds: how long writing took [s], for the returned description.

    Raises:
        CheckpointError: the shards are not complete, the folder cannot be written, or it holds
            checkpoints of another run; existing checkpoints are untouched.
    """
    _require_keep(keep)
    folder = Path(folder)
    wrong = why_incomplete(shards)
    if wrong is not None:
        raise CheckpointError(f"the checkpoint was not completed in {folder}: {wrong}")
    info = CheckpointInfo(
        folder / f"step-{shards[0].step:012d}.json",
        tuple(replace(shard, path=folder / shard.file) for shard in shards),
        seconds,
    )
    try:
        with _explained(folder, f"the checkpoint of step {info.step}"):
            check_owner(find_checkpoints(folder), str(folder), info.run)
            # The shards' directory entries must be on the disk before the manifest names them.
            sync_folder(folder)
            write_json(info.path, info.manifest())
    except CheckpointError:
        named = {shard.file for known in find_checkpoints(folder) for shard in known.shards}
        for shard in info.shards:
            if shard.file not in named:
                with failures_logged(shard.path):
                    shard.path.unlink(missing_ok=True)
        raise
    prune(folder, keep, info)
    return info


def find_checkpoints(folder: Path | str) -> list[CheckpointInfo]:
    """Return the complete checkpoints of a folder, greatest step first, without verification.

    A missing folder has none.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    return [info for _, info, _ in _candidates(Path(folder)) if info is not None]


def newest_valid(
    folder: Path | str, on_skip: OnSkip | None = None, run_id: str = ""
) -> CheckpointInfo | None:
    """Return the newest checkpoint whose content is verified; None if there is none.

    Args:
        folder: folder of the checkpoints.
        on_skip: called with (path, why) for each newer one that is incomplete, damaged or of
            another run, newest first; by default a warning is logged.
        run_id: run whose checkpoints are searched; empty: any run.

    Raises:
        CheckpointError: the folder cannot be read; or none is valid, and one that cannot be read
            now might be.
    """
    tell = _warn_of_skip if on_skip is None else on_skip
    unreadable = ""
    for path, info, why in _candidates(Path(folder)):
        if info is None:
            tell(path, why)
            continue
        if not is_own(info, run_id):
            tell(path, f"it is of run {info.run}")
            continue
        try:
            wrong = why_invalid(info)
        except OSError as error:
            wrong = info.path, f"it cannot be read: {error}"
            unreadable = unreadable or f"checkpoint {info.path} cannot be read: {error}"
        if wrong is None:
            return info
        tell(*wrong)
    if unreadable:
        raise CheckpointError(unreadable)
    return None


def why_invalid(info: CheckpointInfo) -> tuple[Path, str] | None:
    """Return the first invalid file of a checkpoint and why it is invalid; None if all are valid.

    Raises:
        OSError: a file exists but cannot be read.
    """
    # All sizes are checked first, since hashing is slow.
    for check in (_wrong_size, _wrong_content):
        for shard in info.shards:
            try:
                wrong = check(shard)
            except FileNotFoundError:
                wrong = "it is gone"
            if wrong is not None:
                return shard.path, wrong
    return None


def is_own(info: CheckpointInfo, run_id: str) -> bool:
    """Return whether a checkpoint belongs to a run, or may belong because one has no name."""
    return not run_id or info.run in ("", run_id)


def check_owner(found: Iterable[CheckpointInfo], place: str, run_id: str | None) -> None:
    """Check that a place holds no checkpoints of another run.

    Args:
        found: checkpoints that are there.
        place: the folder or URL, for messages.
        run_id: run that is to use the place; None: a new run, which cannot have any there.

    Raises:
        CheckpointError: there is a checkpoint of another run; the message names it.
    """
    for info in found:
        if run_id is None:
            whose = f"run {info.run}" if info.run else "another run"
            go_on = f", or go on with: hvd-elastic run --resume {info.run}" if info.run else ""
            raise CheckpointError(
                f"{place} holds a checkpoint of {whose}, {info.path.name}, and a new run needs a "
                f"folder or URL without any. Give it a --checkpoint-dir of its own{go_on}"
            )
        if not is_own(info, run_id):
            raise CheckpointError(
                f"{place} holds a checkpoint of run {info.run}, {info.path.name}, and run {run_id} "
                f"neither goes on from another run's nor writes beside it. Move the files of "
                f"{info.run} elsewhere, or go on with: hvd-elastic run --resume {info.run}"
            )


def prune(folder: Path | str, keep: int, latest: CheckpointInfo) -> None:
    """Remove old checkpoints and abandoned files; failures to remove are only logged.

    Kept are the newest ``keep`` checkpoints up to the step of ``latest``. Checkpoints of later
    steps are kept too but not counted: training went back to an earlier step, perhaps because they
    are damaged, and they must not displace checkpoints that are known to be valid.
    """
    _require_keep(keep)
    folder = Path(folder)
    with failures_logged(folder):
        present = find_checkpoints(folder)
        kept = [info for info in present if info.step <= latest.step][:keep]
        oldest = min((info.step for info in kept), default=latest.step)
        named = {
            shard.path.name for info in present if info.step >= oldest for shard in info.shards
        }
        for path in list(folder.iterdir()):
            found = MANIFEST.fullmatch(path.name)
            # Manifests are removed first, so that a manifest never names missing shards.
            if found and int(found[1]) < oldest:
                with failures_logged(path):
                    path.unlink(missing_ok=True)
        for path in list(folder.iterdir()):
            with failures_logged(path):
                found = SHARD.fullmatch(path.name)
                if found and path.name not in named and not path.is_dir():
                    if int(found[1]) < oldest or _is_replaced(path, kept) or is_abandoned(path):
                        path.unlink(missing_ok=True)
        remove_leftovers(folder)


def check_folder(folder: Path | str) -> None:
    """Check that checkpoints can be written to ``folder``, before training starts.

    Raises:
        CheckpointError: the folder cannot be created or written.
    """
    folder = Path(folder)
    with _explained(folder, "checkpoints"):
        folder.mkdir(parents=True, exist_ok=True)
        with temporary_in(folder) as probe:
            probe.write_bytes(b"hvd_elastic")


# -- writing


def _is_replaced(path: Path, complete: list[CheckpointInfo]) -> bool:
    """Return whether a shard was replaced by a newer checkpoint of the same step."""
    return any(
        path.name.startswith(f"step-{info.step:012d}-")
        and path.stat().st_mtime_ns < info.path.stat().st_mtime_ns
        for info in complete
    )


def _explained(folder: Path, what: str) -> contextlib.AbstractContextManager[None]:
    return explained(
        folder,
        what,
        "The checkpoints that were there are untouched",
        ", keep fewer checkpoints, or choose another folder",
    )


def _require_keep(keep: int) -> None:
    if keep < 1:
        raise ValueError(f"keep is {keep}, it must be 1 or more")


# -- reading


def _candidates(folder: Path) -> list[tuple[Path, CheckpointInfo | None, str]]:
    """Return (path, checkpoint, "") or (path, None, why it is not one) of each, newest first."""
    try:
        names = {path.name for path in folder.iterdir()}
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"checkpoints cannot be looked for in {folder}: {error.strerror or error}; give the "
            "folder that holds them"
        ) from error
    found: list[tuple[int, Path, CheckpointInfo | None, str]] = []
    for name in names:
        if match := MANIFEST.fullmatch(name):
            path, step = folder / name, int(match[1])
            try:
                info = parse_manifest(json.loads(path.read_text(encoding="utf-8")), folder)
                if info.step != step:
                    raise ValueError(f"it says step {info.step}")
                missing = [s.path.name for s in info.shards if s.path.name not in names]
                if missing:
                    raise ValueError(f"its shard {missing[0]} is missing")
            except FileNotFoundError:  # pruned since the folder was listed
                continue
            except (OSError, ValueError) as error:
                found.append((step, path, None, f"its manifest is of no use: {error}"))
            else:
                found.append((step, path, info, ""))
    said = {step for step, *_ in found}
    for name in sorted(names):
        match = SHARD.fullmatch(name)
        if match and int(match[1]) not in said:
            said.add(int(match[1]))
            why = "it has no manifest, so its checkpoint was not completed"
            found.append((int(match[1]), folder / name, None, why))
    found.sort(key=lambda entry: (-entry[0], entry[1].name))
    return [entry[1:] for entry in found]


def parse_manifest(manifest: Any, folder: Path) -> CheckpointInfo:
    """Return the checkpoint that a manifest describes, with its shards in ``folder``.

    Raises:
        ValueError: the manifest is invalid; the message names the field.
    """
    _check_format(manifest)
    described = manifest.get("shards")
    if not isinstance(described, list):
        raise ValueError(f"shards is {described!r}, it must be a list")
    shards = tuple(parse_shard(entry, folder) for entry in described)
    wrong = why_incomplete(shards)
    if wrong is not None:
        raise ValueError(wrong)
    return CheckpointInfo(folder / f"step-{shards[0].step:012d}.json", shards)


def parse_shard(described: Any, folder: Path) -> ShardInfo:
    """Return the shard that :meth:`ShardInfo.manifest` described, as a file in ``folder``.

    The description may come from another host, so no path is taken from it.

    Raises:
        ValueError: the description is invalid; the message names the field.
    """
    _check_format(described)
    fields: dict[str, Any] = {"world": 0, "run": "", **described}  # format 2 has neither
    for names, kind, what in _FIELDS:
        for name in names:
            value: Any = fields.get(name)
            fits = isinstance(value, kind) and not isinstance(value, bool)
            if not fits or (kind is int and value < 0):
                raise ValueError(f"{name} is {value!r}, it must be {what}")
    if not re.fullmatch(r"[0-9a-f]{64}", fields["sha256"]):
        raise ValueError(f"sha256 is {fields['sha256']!r}, it must be 64 hexadecimal digits")
    known = ("format", *(name for names, *_ in _FIELDS for name in names))
    shard = ShardInfo(folder, **{name: fields[name] for name in known})
    if described.get("file") != shard.file:
        raise ValueError(f"file is {described.get('file')!r}, it must be {shard.file!r}")
    if shard.header + shard.end - shard.begin != shard.bytes:
        raise ValueError(f"bytes is {shard.bytes}, header and range say something else")
    return replace(shard, path=folder / shard.file)


def _check_format(described: Any) -> None:
    if not isinstance(described, Mapping):
        raise ValueError(f"it holds {type(described).__name__} instead of an object")
    if described.get("format") not in (PICKLED_FORMAT, FORMAT):
        raise ValueError(
            f"format is {described.get('format')!r}, this version reads {PICKLED_FORMAT} and "
            f"{FORMAT}; resume with the version that wrote it"
        )


def _wrong_size(shard: ShardInfo) -> str | None:
    return _mismatch(shard, shard.path.stat().st_size, shard.sha256)


def _wrong_content(shard: ShardInfo) -> str | None:
    digest = hashlib.sha256()
    with shard.path.open("rb") as data:
        while chunk := data.read(CHUNK_BYTES):
            digest.update(chunk)
    return _mismatch(shard, shard.bytes, digest.hexdigest())


def _mismatch(shard: ShardInfo, size: int, sha256: str) -> str | None:
    if size < shard.bytes:
        return f"it is truncated: {size} of {shard.bytes} bytes"
    if size > shard.bytes:
        return f"it is too long: {size} bytes instead of {shard.bytes}"
    if sha256 != shard.sha256:
        return f"it is corrupted: SHA-256 is {sha256[:12]}…, not {shard.sha256[:12]}…"
    return None


def _warn_of_skip(path: Path, why: str) -> None:
    log.warning("checkpoint %s is skipped: %s", path, why)

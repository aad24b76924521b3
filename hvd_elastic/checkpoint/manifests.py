"""Completes, finds, verifies and prunes checkpoints; a checkpoint is always complete or absent.

A checkpoint of N shards is N + 1 files in one folder: the shards
(:mod:`hvd_elastic.checkpoint.shards`) and the manifest, ``step-000000000100.json``, which lists all
shards with their sizes and SHA-256. It is written last: shards without a matching manifest are not
a checkpoint. So a complete checkpoint stays complete even if a writer is killed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hvd_elastic.checkpoint.shards import (
    FORMAT,
    SHARD,
    ShardInfo,
    check_format,
    parse_shard,
    require_keep,
    why_incomplete,
    write_errors_explained,
    wrong_content,
    wrong_size,
)
from hvd_elastic.checkpoint.whole_files import (
    failures_logged,
    is_abandoned,
    remove_leftovers,
    sync_folder,
    write_json,
)
from hvd_elastic.errors import CheckpointError
from hvd_elastic.json_text import parse_json
from hvd_elastic.replaced_files import temporary_in

log = logging.getLogger(__name__)

MANIFEST = re.compile(r"step-(\d{12,})\.json")

OnSkip = Callable[[Path, str], None]


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint as described by its manifest.

    Attributes:
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
    def not_finite(self) -> str:
        """Return the name of a weight that holds NaN or infinity; empty: none is known."""
        return next((shard.not_finite for shard in self.shards if shard.not_finite), "")

    @property
    def files(self) -> list[Path]:
        """Return the paths of all its files in the order to write them: shards, then manifest."""
        return [*(shard.path for shard in self.shards), self.path]

    def manifest(self) -> dict[str, Any]:
        """Return the content of the manifest."""
        first = self.shards[0]
        return {
            "format": FORMAT,
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


def complete_checkpoint(
    folder: Path | str, shards: Sequence[ShardInfo], keep: int, seconds: float = 0.0
) -> CheckpointInfo:
    """Write the manifest for shards in ``folder``, and prune older checkpoints.

    Args:
        shards: all verified shards of the checkpoint, by index, with their files in ``folder``.
        keep: number of checkpoints to keep, this one included, >= 1.
        seconds: how long writing took [s], for the returned description.

    Raises:
        CheckpointError: the shards are not complete, the folder cannot be written, or it holds
            checkpoints of another run; existing checkpoints are untouched.
    """
    require_keep(keep)
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
        with write_errors_explained(folder, f"the checkpoint of step {info.step}"):
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

    One with weights that are not finite is returned only if no other is valid.

    Args:
        on_skip: called with (path, why) for each newer one that is incomplete, damaged, of
            another run or not finite, newest first; by default a warning is logged.
        run_id: run whose checkpoints are searched; empty: any run.

    Raises:
        CheckpointError: the folder cannot be read; or none is valid, and one that cannot be read
            now might be.
    """
    tell = _warn_of_skip if on_skip is None else on_skip
    unreadable = ""
    not_finite: list[CheckpointInfo] = []

    def finite_first() -> Iterator[CheckpointInfo]:
        for path, info, why in _candidates(Path(folder)):
            if info is None:
                tell(path, why)
            elif not is_own(info, run_id):
                tell(path, f"it is of run {info.run}")
            elif info.not_finite:
                tell(path, why_passed_over(info))
                not_finite.append(info)
            else:
                yield info
        yield from not_finite

    for info in finite_first():
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
    for check in (wrong_size, wrong_content):
        for shard in info.shards:
            try:
                wrong = check(shard)
            except FileNotFoundError:
                wrong = "it is gone"
            if wrong is not None:
                return shard.path, wrong
    return None


def why_passed_over(info: CheckpointInfo) -> str:
    """Return why a checkpoint with weights that are not finite is not the first choice."""
    return f"its weights are not finite: {info.not_finite} holds NaN or infinity"


def warning_of_not_finite(info: CheckpointInfo) -> str:
    """Return the warning about a new checkpoint with weights that are not finite."""
    return (
        f"weights are not finite: {info.not_finite} holds NaN or infinity in the checkpoint of "
        f"step {info.step}. The last finite checkpoints are kept beside it, and a resumed run "
        "continues from them"
    )


def is_own(info: CheckpointInfo, run_id: str) -> bool:
    """Return whether a checkpoint belongs to a run, or may belong because one has no name."""
    return not run_id or info.run in ("", run_id)


def check_owner(found: Iterable[CheckpointInfo], place: str, run_id: str | None) -> None:
    """Check that a place holds no checkpoints of another run.

    Args:
        run_id: run that is to use the place; None: a new run, which cannot have any there.

    Raises:
        CheckpointError: there is a checkpoint of another run; the message names it.
    """
    for info in found:
        if run_id is None:
            whose = f"run {info.run}" if info.run else "another run"
            go_on = f", or continue with: hvd-elastic run --resume {info.run}" if info.run else ""
            raise CheckpointError(
                f"{place} holds a checkpoint of {whose}, {info.path.name}, and a new run needs a "
                f"folder or URL without any. Give it a --checkpoint-dir of its own{go_on}"
            )
        if not is_own(info, run_id):
            raise CheckpointError(
                f"{place} holds a checkpoint of run {info.run}, {info.path.name}, and run {run_id} "
                "neither resumes another run's checkpoints nor writes beside it. Move the files "
                f"of {info.run} elsewhere, or continue with: hvd-elastic run --resume {info.run}"
            )


def prune(folder: Path | str, keep: int, latest: CheckpointInfo) -> None:
    """Remove old checkpoints and abandoned files; failures to remove are only logged.

    See :func:`is_outdated`.
    """
    require_keep(keep)
    folder = Path(folder)
    with failures_logged(folder):
        present = find_checkpoints(folder)
        outdated = is_outdated(present, keep, latest)
        kept = [info for info in present if not outdated(info.step)]
        named = {shard.path.name for info in kept for shard in info.shards}
        for path in list(folder.iterdir()):
            found = MANIFEST.fullmatch(path.name)
            # Manifests are removed first, so that a manifest never names missing shards.
            if found and outdated(int(found[1])):
                with failures_logged(path):
                    path.unlink(missing_ok=True)
        for path in list(folder.iterdir()):
            with failures_logged(path):
                found = SHARD.fullmatch(path.name)
                if found and path.name not in named and not path.is_dir():
                    step = int(found[1])
                    if outdated(step) or _is_replaced(path, kept) or is_abandoned(path):
                        path.unlink(missing_ok=True)
        remove_leftovers(folder)


def is_outdated(
    present: Iterable[CheckpointInfo], keep: int, latest: CheckpointInfo
) -> Callable[[int], bool]:
    """Return a function that returns whether the files of a step are no longer needed.

    Kept are the newest ``keep`` checkpoints up to the step of ``latest`` whose weights are finite,
    and ``latest`` itself: one with NaN must not displace those that training can go back to.
    Checkpoints of later steps are kept too but not counted: training went back to an earlier step,
    perhaps because they are damaged, and they must not displace checkpoints known to be valid.

    Args:
        latest: the checkpoint that was written last.
    """
    earlier = [info for info in present if info.step <= latest.step]
    finite = sorted((info.step for info in earlier if not info.not_finite), reverse=True)
    oldest = min([latest.step, *finite[:keep]])
    replaced = {info.step for info in earlier if info.not_finite} - {latest.step}
    return lambda step: step < oldest or step in replaced


def check_folder(folder: Path | str) -> None:
    """Check that checkpoints can be written to ``folder``, before training starts.

    Raises:
        CheckpointError: the folder cannot be created or written.
    """
    folder = Path(folder)
    with write_errors_explained(folder, "checkpoints"):
        folder.mkdir(parents=True, exist_ok=True)
        with temporary_in(folder) as probe:
            probe.write_bytes(b"hvd_elastic")


def _is_replaced(path: Path, complete: list[CheckpointInfo]) -> bool:
    """Return whether a shard was replaced by a newer checkpoint of the same step."""
    return any(
        path.name.startswith(f"step-{info.step:012d}-")
        and path.stat().st_mtime_ns < info.path.stat().st_mtime_ns
        for info in complete
    )


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
                info = parse_manifest(parse_json(path.read_text(encoding="utf-8")), folder)
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
    check_format(manifest)
    described = manifest.get("shards")
    if not isinstance(described, list):
        raise ValueError(f"shards is {described!r}, it must be a list")
    shards = tuple(parse_shard(entry, folder) for entry in described)
    wrong = why_incomplete(shards)
    if wrong is not None:
        raise ValueError(wrong)
    return CheckpointInfo(folder / f"step-{shards[0].step:012d}.json", shards)


def _warn_of_skip(path: Path, why: str) -> None:
    log.warning("checkpoint %s is skipped: %s", path, why)

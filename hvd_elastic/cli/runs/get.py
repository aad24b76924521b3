"""The command that lists and copies the files that the script of a run has saved."""

# ruff: noqa: D301  (the backspace tells the command line to keep the lines of the examples)
from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from hvd_elastic.checkpoint.saved import differing, find_stored
from hvd_elastic.cli.jobs.naming import open_run
from hvd_elastic.cli.options import AsJson, RequiredRun, argument
from hvd_elastic.cli.output import print_json
from hvd_elastic.errors import RunError, UsageError
from hvd_elastic.formatting import bytes_words, date_words
from hvd_elastic.programs.file_hash import hash_of
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.replaced_files import replacing

_PIECE_BYTES = 1 << 20
"""Size of the pieces in which a file is read and copied."""


def get(
    run: RequiredRun,
    name: Annotated[
        str | None, argument("A file to copy; all are listed if left out.", "NAME")
    ] = None,
    dest: Annotated[
        str | None,
        argument(
            "File or folder to copy it to; '-' = stdout. Here under its name if left out.", "DEST"
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the files that the script of a run saved with hvd.save, or copy one of them.

    \b
    Examples:
      hvd-elastic get digits-3                      list what was saved
      hvd-elastic get digits-3 best.pt              copy to ./best.pt
      hvd-elastic get digits-3 best.pt models/digits.pt
      hvd-elastic get digits-3 best.pt - | sha256sum
    """
    folder = open_run(run)
    if name is None:
        _list(folder, as_json)
        return
    if dest == "-" and as_json:
        raise UsageError("--json prints on stdout, and so does DEST '-': leave one of them out")
    source = folder.saved / name
    names = _names(folder)
    if name not in names:
        there = f"it has: {', '.join(names)}" if names else "it has saved none"
        raise RunError(f"run {folder.run_id} has no saved file {name!r}; {there}")
    if dest == "-":
        _print(source, folder.run_id)
        return
    target = Path(name if dest is None else dest)
    if target.is_dir():
        target /= name
    elif dest is not None and dest.endswith("/"):
        raise UsageError(f"{dest} is no folder; make it first: mkdir -p {dest}")
    elif target.exists() and not target.is_file():
        raise UsageError(f"{target} is neither a file nor a folder; '-' writes to stdout")
    try:
        _copy(source, target, folder.run_id)
    except OSError as error:
        raise RunError(
            f"{target} cannot be written: {error.strerror or error}. Name a place with room that "
            "this user can write; what was there is untouched"
        ) from error
    size = target.stat().st_size
    if as_json:
        print(
            json.dumps({"run_id": folder.run_id, "name": name, "path": str(target), "bytes": size})
        )
    else:
        print(f"{target}: {bytes_words(size)}")


def _names(folder: RunFolder) -> list[str]:
    """Return the names of the saved files; hidden ones are descriptions and unfinished."""
    if not folder.saved.is_dir():
        return []
    return sorted(path.name for path in folder.saved.glob("[!.]*") if path.is_file())


def _list(folder: RunFolder, as_json: bool) -> None:
    described = find_stored(folder.saved)
    rows: list[dict[str, Any]] = []
    for name in _names(folder):
        status = (folder.saved / name).stat()
        known = described.get(name)
        rows.append(
            {
                "name": name,
                "bytes": status.st_size,
                "step": None if known is None else known.step,
                "epoch": None if known is None else known.epoch,
                "host": None if known is None else known.host,
                "sha256": None if known is None else known.sha256,
                "time": status.st_mtime,
                "path": str(folder.saved / name),
            }
        )
    if as_json:
        print_json(rows)
        return
    if not rows:
        print(f"run {folder.run_id} has saved no files", file=sys.stderr)
        return
    width = max(4, *(len(row["name"]) for row in rows))
    print(f"{'NAME':<{width}} {'SIZE':>9} {'STEP':>9}  SAVED")
    for row in rows:
        at = date_words(row["time"])
        step = "" if row["step"] is None else row["step"]
        print(f"{row['name']:<{width}} {bytes_words(row['bytes']):>9} {step:>9}  {at}")


def _copy(source: Path, target: Path, run_id: str) -> None:
    """Copy a file, whole and as it was saved or not at all."""
    with replacing(target) as temporary:
        with _opened(source, run_id) as file, temporary.open("xb") as copy:
            shutil.copyfileobj(file, copy, _PIECE_BYTES)
            copy.flush()
            os.fsync(copy.fileno())


def _print(source: Path, run_id: str) -> None:
    """Write a file to stdout, or nothing if it is not as it was saved."""
    with _opened(source, run_id) as file:
        shutil.copyfileobj(file, sys.stdout.buffer, _PIECE_BYTES)
    sys.stdout.flush()


def _opened(source: Path, run_id: str) -> BinaryIO:
    """Open a file.

    Raises:
        RunError: it is not the one that the script has saved.
    """
    while True:
        file = source.open("rb")
        sha256 = hash_of(file.fileno()).hexdigest()
        recorded = differing(source.parent, source.name, sha256)
        if not recorded:
            return file
        replaced = not os.path.samestat(os.fstat(file.fileno()), source.stat())
        file.close()
        if not replaced:
            raise RunError(
                f"{source} has SHA-256 {sha256}, and the script saved {recorded}: it was changed "
                f"or damaged since. Nothing was copied. hvd-elastic run --resume {run_id} fetches "
                "it again if its host still has it; to use it as it is, copy it from there by "
                "yourself"
            )

"""Writes and finds the files that a script saves by name, such as its best model.

A worker writes a file into the *spool* of its host, under a name with the first digits of its
SHA-256, and its description beside it. The leader puts it into the folder ``saved`` of the run
under the name that the script gave, with its description in a hidden file. Without a leader rank 0
writes into such a folder itself. Every file is written under a temporary name, synced and renamed,
so a file of that name is always whole, and is the earlier one until then. The description of a new
file is there before the file itself, and replaces that of the earlier one after it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path

import msgspec

from hvd_elastic.checkpoint.whole_files import (
    Write,
    check_arrived,
    explained,
    remove_leftovers,
    sync_folder,
    write_hashed,
    write_json,
)
from hvd_elastic.errors import ScriptError
from hvd_elastic.wire.messages import SAVED_NAME, SavedFile

Describe = Callable[[int, str], SavedFile]
"""Returns the description of a file from its size [bytes] and SHA-256."""

SAVED_FOLDER = "saved"
"""Folder of saved files, in a spool and without a leader."""
_NAMES_SHOWN = 80  # characters of a bad name in an error


def check_name(name: object) -> str:
    """Return the name of a file to save.

    Raises:
        ScriptError: it is not a valid name.

    >>> check_name("best.pt")
    'best.pt'
    """
    if isinstance(name, str) and re.search(SAVED_NAME, name):
        return name
    raise ScriptError(
        f"hvd.save: {repr(name)[:_NAMES_SHOWN]} is not a valid name of a file. A name has 1 to 100 "
        "of the characters A-Z a-z 0-9 . _ - and starts with a letter or a digit, for example "
        "'best.pt'; it has no folder, since the run has one"
    )


# -- spool


def spool_file(folder: Path, write: Write, describe: Describe) -> SavedFile:
    """Write a file into a spool, with its description beside it.

    Args:
        folder: the spool; created if missing.
        write: writes the content to the file it is given.
        describe: called once it is written.

    Raises:
        CheckpointError: the folder cannot be written, or is full; nothing is left behind.
    """

    def place(saved: SavedFile) -> Path:
        # If the writer is killed now, no large file without a description is left.
        _describe(folder / f"{saved.spooled}.json", saved)
        return folder / saved.spooled

    return _write_whole(folder, write, describe, place)


def find_spooled(folder: Path) -> list[SavedFile]:
    """Return the files of a spool that are whole; a missing folder has none."""
    found = []
    with contextlib.suppress(OSError):
        for path in folder.glob("[!.]*.save.json"):
            saved = _read_description(path)
            if saved is not None and _has_size(folder / saved.spooled, saved.bytes):
                found.append(saved)
    return found


def drop_spooled(folder: Path, saved: SavedFile) -> None:
    """Remove a file from a spool."""
    with contextlib.suppress(OSError):
        # The description first: a file without one is never sent.
        (folder / f"{saved.spooled}.json").unlink(missing_ok=True)
        (folder / saved.spooled).unlink(missing_ok=True)


# -- folder of a run


def store_file(folder: Path, write: Write, describe: Describe) -> SavedFile:
    """Put a file into the folder of saved files, in place of an earlier one of that name.

    Args:
        folder: the folder; created if missing.
        write: writes the content to the file it is given.
        describe: called once it is written, and before it takes the place of the earlier one.

    Raises:
        CheckpointError: the folder cannot be written, or is full; the earlier file stays.
    """

    def place(saved: SavedFile) -> Path:
        _describe(_next_description(folder, saved.name), saved)
        return folder / saved.name

    saved = _write_whole(folder, write, describe, place)
    with _explained(folder):
        _next_description(folder, saved.name).replace(_description(folder, saved.name))
        sync_folder(folder)
    return saved


def receive_file(folder: Path, saved: SavedFile, write: Write) -> SavedFile:
    """Store a file that comes from a host, if its size and SHA-256 are right.

    Raises:
        DamagedFileError: it was truncated or changed on the way.
        CheckpointError: see :func:`store_file`.
    """

    def compare(size: int, sha256: str) -> SavedFile:
        what = f"{saved.name}, from host {saved.host}"
        check_arrived(what, (saved.bytes, saved.sha256), (size, sha256))
        return saved

    return store_file(folder, write, compare)


def differing(folder: Path, name: str, sha256: str) -> str:
    """Return the SHA-256 of a stored file's description if it is another one, or "".

    Args:
        name: the file; one without a description cannot be compared.
        sha256: SHA-256 of its content.
    """
    recorded = [saved.sha256 for saved in _described(folder, name)]
    return "" if not recorded or sha256 in recorded else recorded[-1]


def find_stored(folder: Path) -> dict[str, SavedFile]:
    """Return the descriptions of the saved files by name; a missing folder has none."""
    found = {}
    with contextlib.suppress(OSError):
        for path in sorted(folder.glob("[!.]*")):
            for saved in _described(folder, path.name):
                if _has_size(path, saved.bytes):
                    found[path.name] = saved
    return found


def _described(folder: Path, name: str) -> list[SavedFile]:
    """Return the descriptions of a stored file: two while it is replaced, that of now last."""
    # In the order in which they are renamed, so that none is missed.
    paths = (_next_description(folder, name), _description(folder, name))
    return [saved for path in paths if (saved := _read_description(path)) is not None]


def _description(folder: Path, name: str) -> Path:
    return folder / f".{name}.json"


def _next_description(folder: Path, name: str) -> Path:
    return folder / f"..{name}.json"


# -- both


def _write_whole(
    folder: Path, write: Write, describe: Describe, place: Callable[[SavedFile], Path]
) -> SavedFile:
    saved: SavedFile | None = None

    def describe_first(size: int, sha256: str) -> Path:
        nonlocal saved
        saved = describe(size, sha256)
        return place(saved)

    with _explained(folder):
        if folder.is_dir():
            remove_leftovers(folder)
        write_hashed(folder, write, describe_first)
        sync_folder(folder)
    assert saved is not None
    return saved


def _describe(path: Path, saved: SavedFile) -> None:
    write_json(path, msgspec.to_builtins(saved))


def _read_description(path: Path) -> SavedFile | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=SavedFile)
    except (OSError, ValueError, RecursionError):
        return None


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def _explained(folder: Path) -> contextlib.AbstractContextManager[None]:
    return explained(
        folder,
        "the file",
        "A new file is written beside the earlier one of its name, which is untouched",
    )

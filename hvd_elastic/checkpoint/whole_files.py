"""Writes files that are whole or not there, whatever happens to the writer or the disk."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from hvd_elastic.errors import CheckpointError
from hvd_elastic.replaced_files import TEMPORARY, temporary_in, write_whole

log = logging.getLogger(__name__)

CHUNK_BYTES = 4 << 20  # per write and hash update; large enough to make calls cheap
_ABANDONED_S = 3600.0
"""Age after which unfinished files of a writer on another host are removed [s]; it cannot be seen
whether that writer is alive. A write that takes longer fails with an error."""


class HashingWriter:
    """Writes to a file, and counts and hashes the bytes."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._hash = hashlib.sha256()
        self.bytes = 0

    def write(self, data: Any) -> int:
        """Write all of ``data``; return its size [bytes]."""
        view = memoryview(data).cast("B")
        for begin in range(0, len(view), CHUNK_BYTES):
            chunk = view[begin : begin + CHUNK_BYTES]
            self._raw.write(chunk)
            self._hash.update(chunk)
            self.bytes += len(chunk)
        return len(view)

    def flush(self) -> None:
        """Pass what was written to the system."""
        self._raw.flush()

    def finish(self) -> str:
        """Sync the file to the disk; return the SHA-256 as hexadecimal digits."""
        self._raw.flush()
        os.fsync(self._raw.fileno())
        return self._hash.hexdigest()


Write = Callable[[HashingWriter], object]
Hashed = tuple[int, str]
"""Size [bytes] and SHA-256 of a file."""


class DamagedFileError(CheckpointError):
    """A file that arrived differs from the one that was written."""


def write_hashed(folder: Path, write: Write, place: Callable[[int, str], Path]) -> None:
    """Write a file whose name depends on its content; nothing is left behind if that fails.

    Args:
        folder: its folder; created if missing.
        write: writes the content to the file it is given.
        place: returns its path from its size [bytes] and SHA-256; called once it is written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with temporary_in(folder) as temporary:
        with temporary.open("xb") as raw:
            writer = HashingWriter(raw)
            write(writer)
            sha256 = writer.finish()
        temporary.replace(place(writer.bytes, sha256))


def mismatch(described: Hashed, found: Hashed) -> str | None:
    """Return how a file differs from its description; None if it does not."""
    (size, sha256), (found_size, found_sha256) = described, found
    if found_size < size:
        return f"it is truncated: {found_size} of {size} bytes"
    if found_size > size:
        return f"it is too long: {found_size} bytes instead of {size}"
    if found_sha256 != sha256:
        return f"it is corrupted: SHA-256 is {found_sha256[:12]}…, not {sha256[:12]}…"
    return None


def check_arrived(what: str, described: Hashed, arrived: Hashed) -> None:
    """Raise DamagedFileError unless a file that comes from elsewhere is as it was described."""
    wrong = mismatch(described, arrived)
    if wrong is not None:
        raise DamagedFileError(f"{what}: {wrong}; it was cut or changed on the way")


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file that survives a crash of the machine."""
    write_whole(path, json.dumps(value) + "\n", synced=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Sync the entries of a folder to the disk, where its file system can."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a folder.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of writers that have ended."""
    for path in list(folder.iterdir()):
        with failures_logged(path):
            if TEMPORARY.fullmatch(path.name) and is_abandoned(path):
                path.unlink(missing_ok=True)


def is_abandoned(path: Path) -> bool:
    """Return whether the writer of an unfinished file has ended, or probably has."""
    found = TEMPORARY.fullmatch(path.name)
    if found and found["host"] == socket.gethostname():
        pid = int(found["pid"])
        if pid == os.getpid():
            return False
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
    try:
        return time.time() - path.stat().st_mtime > _ABANDONED_S
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def explained(folder: Path, what: str, kept: str, when_full: str = "") -> Iterator[None]:
    """Turn an OSError into a CheckpointError that says what the user can do.

    Args:
        kept: what is untouched, as a sentence.
        when_full: what helps on a full disk besides free space, after "free some space there".
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CheckpointError(
                f"{what} cannot be written: {folder} is full ({reason}); free some space there"
                f"{when_full}. {kept}"
            ) from error
        at = f" at {error.filename}" if error.filename not in (None, str(folder)) else ""
        raise CheckpointError(
            f"{what} cannot be written to {folder}: {reason}{at}; it must be a folder that this "
            f"user can make and write. {kept}"
        ) from error


@contextlib.contextmanager
def failures_logged(path: Path) -> Iterator[None]:
    """Log that a path could not be removed, and continue."""
    try:
        yield
    except (OSError, CheckpointError) as error:
        log.warning("%s is no longer needed and could not be removed: %s", path, error)

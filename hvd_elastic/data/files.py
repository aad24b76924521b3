"""Reads and writes whole files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from hvd_elastic.errors import DataError
from hvd_elastic.programs.file_hash import hash_of

_OTHERS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def file_size(path: Path) -> int:
    """Return the size of a file [bytes].

    Raises:
        OSError: it is not there, or no file: who opens a named pipe may wait forever.
    """
    found = path.stat()
    kind = stat.S_IFMT(found.st_mode)
    if kind != stat.S_IFREG:
        raise OSError(errno.EINVAL, f"it is {_OTHERS.get(kind, 'something else')}, no file", path)
    return found.st_size


HIDDEN = "hidden, or of a cache"
LINKS = "links to folders"
_CACHES = ("__pycache__", "__MACOSX", "@eaDir", "$RECYCLE.BIN", "lost+found", "Thumbs.db")


def is_shown(name: str) -> bool:
    """Return whether a file or folder is neither hidden nor of a cache, by its name."""
    return name[0] != "." and name not in _CACHES


def leads_to_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a link to a folder; one that leads to itself is not."""
    try:
        return entry.is_symlink() and entry.is_dir()
    except OSError:
        return False


def files_below(
    folder: Path, why_left_out: Callable[[os.DirEntry[str]], str], left_out: Counter[str]
) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield the files in a folder at any depth, by their paths in it, in the order of names.

    Hidden ones and caches are left out, and links to folders: they may lead back.

    Args:
        folder: where to look.
        why_left_out: returns the kind of an entry that is left out with all that is in it; "": it
            is not.
        left_out: counts them by kind.

    Raises:
        OSError: a folder cannot be read.
    """
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            why = HIDDEN if not is_shown(entry.name) else why_left_out(entry)
            if not why and leads_to_folder(entry):
                why = LINKS
            if why:
                left_out[why] += 1
            else:
                found.append(entry)
    for entry in sorted(found, key=lambda entry: entry.name):
        if entry.is_dir(follow_symlinks=False):
            inside = files_below(folder / entry.name, why_left_out, left_out)
            yield from ((f"{entry.name}/{name}", each) for name, each in inside)
        else:
            yield entry.name, entry


_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}
_ZLIB = (b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")


def compression(path: Path) -> str:
    """Return that a shard is compressed, and what to do; "": nothing says that it is."""
    with path.open("rb") as file:
        begin = file.read(5)
    for magic, name in (*_MAGIC.items(), *((each, "zlib") for each in _ZLIB)):
        if begin.startswith(magic):
            tool = {"gzip": "gunzip", "zlib": "pigz -dz"}.get(name, f"{name} -d")
            return f"is compressed ({name}), which allows no random access; unpack it: {tool}"
    return ""


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return str(hash_of(file.fileno()).hexdigest())


def open_part(path: Path) -> BinaryIO:
    """Create the file that gets the name ``path`` when it is whole.

    It is always a new one: what another user has put there stays theirs to change.
    """
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    return part.open("xb")


def write_pieces(file: BinaryIO, pieces: Iterator[bytes]) -> None:
    """Write what a :class:`RemoteFolder` gives to a file, from its beginning.

    Raises:
        DataError: it cannot be written. So errors of the disk end the attempts; those of the
            connection, which the pieces raise, do not.
    """
    with disk_errors(file.name):
        file.seek(0)
        file.truncate()
    for piece in pieces:
        with disk_errors(file.name):
            file.write(piece)
            file.flush()


@contextlib.contextmanager
def disk_errors(path: Path | str) -> Iterator[None]:
    """Turn errors of the disk, also those of closing a file, into a DataError that names it."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}") from error


@contextlib.contextmanager
def sole_writer(out: Path, *, waits: bool = False) -> Iterator[None]:
    """Let one call at a time write to the folder; ``waits``: the next one waits for its turn."""
    descriptor = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            raise DataError(f"another call is writing to {out}; wait for its end") from None
        yield
    finally:
        os.close(descriptor)

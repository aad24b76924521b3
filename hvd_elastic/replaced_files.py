"""Files that are replaced in one step: a reader finds the old content or the new, never a part."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

TEMPORARY = re.compile(r"\.tmp-(?P<host>.+)-(?P<pid>\d+)-[0-9a-f]{8}")
"""Names of :func:`temporary_in`, by which files of writers that were killed are found."""


def file_stamp(path: Path) -> tuple[int, int, int]:
    """Return the time, size and inode of a file, which differ once it has been saved again.

    Raises:
        OSError: it cannot be read, or cannot be read again because it is not a regular file.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):  # reading a pipe would block until somebody writes to it
        raise OSError(errno.EINVAL, "not a regular file")
    return found.st_mtime_ns, found.st_size, found.st_ino


@contextlib.contextmanager
def temporary_in(folder: Path) -> Iterator[Path]:
    """Yield a temporary path in ``folder`` that names this process; remove the file afterwards."""
    path = folder / f".tmp-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path for a file that takes the place of ``path``, if nothing is raised."""
    with temporary_in(path.parent) as temporary:
        yield temporary
        temporary.replace(path)


def write_whole(
    path: Path, content: str | bytes, *, mode: int = 0o666, synced: bool = False
) -> None:
    """Write a file in one step.

    Args:
        path: the file.
        content: what it is to hold; text is written as UTF-8.
        mode: its mode, less the umask.
        synced: whether it is to survive a crash of the machine.

    Raises:
        OSError: it cannot be written; what was there is untouched.
    """
    data = content.encode() if isinstance(content, str) else content
    with replacing(path) as temporary:
        number = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(number, "wb") as file:
            file.write(data)
            if synced:
                file.flush()
                os.fsync(number)

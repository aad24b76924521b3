"""Files whose readers find the old content or the new, never a part, whoever writes them."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import secrets
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

TEMPORARY = re.compile(r"\.tmp-(?P<host>.+)-(?P<pid>\d+)-[0-9a-f]{8}")
"""Names of :func:`temporary_in`, by which files of writers that were killed are found."""


_SETTLED_S = 1.0
"""How long a file that is not renamed into its place must be unchanged before it counts [s]."""


class SavedFile:
    """Says when a file that its users save is to be read again.

    A file that is renamed into its place is whole. With ``>`` and many editors it is empty, or
    gone, or has a part of its lines for a while, so otherwise it counts once it stays as it is.

    Args:
        path: the file, which counts as read now.

    Attributes:
        error: why it could not be looked at last; None: it could be, and is a regular file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.error: OSError | None = None
        self._read = self._seen = self._look()
        self._seen_at = -math.inf

    @property
    def settles(self) -> bool:
        """Return whether it was saved, and may not be whole yet."""
        return self._seen != self._read

    def saved(self, now: float) -> bool:
        """Return whether it was saved since it was marked as read, with the same text or another.

        Args:
            now: present time [monotonic s].
        """
        seen, read = self._look(), self._read
        if seen != self._seen:
            self._seen, self._seen_at = seen, now
        if seen is not None and read is not None:
            (_, size, inode), (*_, before) = seen, read
            if inode != before and size:  # some editors rename the old file, and make an empty one
                return True
        return self.settles and now >= self._seen_at + _SETTLED_S

    def mark_read(self) -> bool:
        """Note that it was read as at the last look; return whether it is still like that."""
        if self._look() != self._seen:
            return False
        self._read = self._seen
        return True

    def _look(self) -> tuple[int, int, int] | None:
        """Return its time of change, size and inode, which differ once it has been saved again."""
        self.error = None
        try:
            found = self._path.stat()
        except OSError as error:
            self.error = error
            return None
        if not stat.S_ISREG(found.st_mode):  # reading a pipe blocks until somebody writes to it
            self.error = OSError(errno.EINVAL, "not a regular file")
            return None
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

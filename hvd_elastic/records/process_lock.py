"""A file that one process at a time has locked; the kernel frees it when that process ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path

_TRIES = 20  # those that look whether it is locked hold the lock for a moment
_WAIT_S = 0.05  # between two attempts; together with their number, 1 s


def take_lock(path: Path) -> FileIO | None:
    """Lock a file, which is made if there is none.

    Returns:
        The open file, whose closing frees the lock; None: another process holds it.

    Raises:
        OSError: the file cannot be made or opened.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    for left in reversed(range(_TRIES)):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if left:
                time.sleep(_WAIT_S)
        except BaseException:
            os.close(fd)
            raise
        else:
            return open(fd, "r+b", buffering=0)  # noqa: PTH123
    os.close(fd)
    return None


def is_locked(path: Path) -> bool:
    """Return whether a process has locked a file now; one that is not there is not locked.

    Raises:
        OSError: the file cannot be opened.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)  # frees this shared lock too
    return False


@contextlib.contextmanager
def lock_held(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock at ``path``; call ``waiting`` once if another process holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield

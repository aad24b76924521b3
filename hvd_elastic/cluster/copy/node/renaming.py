"""Files that have arrived get their names once they are on the disk.

A name that is there before its bytes would, after a power cut, be that of an empty file. Asking the
disk for each file would cost more than the file; here the whole file system is asked, behind the
stream, whenever so much has come.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable

# What is left for the end of a copy is waited for.
SYNC_BYTES = 16 << 20
PAUSE_S = 0.5


def sync_disk(descriptor: int) -> None:
    """Waits until all that was written to a file system is on its disk.

    Args:
        descriptor: of anything on it.

    Raises:
        OSError: it cannot be.
    """
    syncfs = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
    if syncfs is None:
        os.sync()
    elif syncfs(descriptor) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class Names:
    """The names that are still to be given.

    Args:
        folder: a descriptor of a folder on the file system.
        give: gives a file its name; called with its index and where it is until then.
    """

    def __init__(self, folder: int, give: Callable[[int, bytes], None]) -> None:
        self._folder = folder
        self._give = give
        self._waiting: dict[int, bytes] = {}
        self._unsynced = 0
        self._error: OSError | None = None
        self._ended = False
        self._changed = threading.Condition()
        self._giving = threading.Lock()
        threading.Thread(target=self._follow, name="names", daemon=True).start()

    def __contains__(self, index: int) -> bool:
        """Whether that file's name is still to be given."""
        return index in self._waiting

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, index: int, part: bytes) -> None:
        """A file has all arrived."""
        with self._changed:
            self._waiting[index] = part

    def count(self, size: int) -> None:
        """So many bytes have been written.

        Raises:
            OSError: the disk could not take what was written before.
        """
        with self._changed:
            if self._error is not None:
                raise self._error
            self._unsynced += size
            if self._unsynced >= SYNC_BYTES:
                self._changed.notify_all()

    def settle(self) -> None:
        """Gives the names of all that has arrived.

        The kernel tells of a failed write once, and holds what was lost for written afterwards:
        after an error no name is given any more.

        Raises:
            OSError: the disk cannot take it, or a name cannot be given; now or before.
        """
        with self._giving:
            with self._changed:
                if self._error is not None:
                    raise self._error
                arrived = dict(self._waiting)
                self._unsynced = 0
            try:
                sync_disk(self._folder)
                for index, part in arrived.items():
                    self._give(index, part)
                    with self._changed:
                        del self._waiting[index]
            except OSError as error:
                with self._changed:
                    self._error = error
                raise

    def end(self) -> None:
        """No more will arrive; what has no name then gets none."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        with self._giving:
            pass

    def _follow(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or self._unsynced >= SYNC_BYTES)
                if self._ended:
                    return
            try:
                self.settle()
            except OSError:
                return  # who writes on is told
            with self._changed:
                self._changed.wait_for(lambda: self._ended, PAUSE_S)

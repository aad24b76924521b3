"""Give files that have arrived their final names once their contents are on the disk.

If a name were on the disk before the contents, a power cut would leave an empty file. Syncing each
file would take longer than sending it, so the whole file system is synced in the background,
whenever ``SYNC_BYTES`` have been written.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable

# Bytes written between two syncs. What is left at the end of a copy delays its end.
SYNC_BYTES = 16 << 20
# Minimum pause between two syncs.
PAUSE_S = 0.5


def sync_disk(descriptor: int) -> None:
    """Wait until everything written to a file system is on its disk.

    Args:
        descriptor: descriptor of any file or folder on the file system.

    Raises:
        OSError: the sync failed.
    """
    syncfs = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
    if syncfs is None:
        os.sync()
    elif syncfs(descriptor) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class Names:
    """Files that have arrived completely but do not have their final names yet.

    Args:
        folder: descriptor of a folder on the file system.
        give: gives a file its name; called with its index and its temporary name.
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
        """Return whether that file does not have its name yet."""
        return index in self._waiting

    def __len__(self) -> int:
        return len(self._waiting)

    def add_file(self, index: int, part: bytes) -> None:
        """Add a file that has arrived completely, under its temporary name."""
        with self._changed:
            self._waiting[index] = part

    def count(self, size: int) -> None:
        """Record that ``size`` bytes have been written.

        Raises:
            OSError: an earlier write failed on the disk.
        """
        with self._changed:
            if self._error is not None:
                raise self._error
            self._unsynced += size
            if self._unsynced >= SYNC_BYTES:
                self._changed.notify_all()

    def settle(self) -> None:
        """Sync the disk, then give all files that have arrived their names.

        The kernel reports a failed write only once, and treats the lost data as written afterwards.
        So after an error no file gets a name any more.

        Raises:
            OSError: the sync or a rename failed, now or in an earlier call.
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

    def stop_renaming(self) -> None:
        """Stop the background thread; files that do not have a name yet get none."""
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
                return  # the next call of `count` or `settle` raises it
            with self._changed:
                self._changed.wait_for(lambda: self._ended, PAUSE_S)

"""A watcher of all command lines, for tests that nothing secret stands on one."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from typing_extensions import Self

__all__ = ["CommandLines"]


class CommandLines:
    """Looks at every command line of this machine and its virtual hosts, again and again."""

    def __init__(self, *secret: str) -> None:
        self._secret = [word.encode() for word in secret]
        self._over = threading.Event()
        self.rounds = 0
        self.found: set[bytes] = set()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        # Not sleeping: the shorter a process lives, the more looks it takes to see it.
        while not self._over.wait(0.002):
            for entry in os.scandir("/proc"):
                if entry.name.isdecimal():
                    with contextlib.suppress(OSError):
                        line = Path(entry.path, "cmdline").read_bytes()
                        if any(word in line for word in self._secret):
                            self.found.add(line)
            self.rounds += 1

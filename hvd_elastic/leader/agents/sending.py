"""Sends to all agents: what does not have to wait in one thread, the rest in one of each agent."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any

from hvd_elastic.errors import HvdElasticError

_AT_ONCE_BYTES = 4096
"""Longest line that is written at once where there is room: a pipe has room for so much or none."""

PassOn = Callable[[bytes | None], None]
"""Takes a line for an agent, or None for the end; does not block."""


class Sender:
    """Sends messages to all agents in one thread, which starts with the first.

    With a thread for each, a message to all would wake hundreds that wait for each other.
    """

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[tuple[PassOn, bytes | None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, pass_on: PassOn, line: bytes | None) -> None:
        """Have ``pass_on`` called with a line, or None for the end, without waiting for it."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="to agents", daemon=True)
            self._thread.start()
        self._lines.put((pass_on, line))

    def _run(self) -> None:
        while True:
            pass_on, line = self._lines.get()
            pass_on(line)


class Outgoing:
    """The input of an agent: takes lines in order, those that have to wait with a thread."""

    def __init__(self) -> None:
        self._stdin: Any = None
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._counting = threading.Lock()
        self.waiting = 0
        """Number of lines that are left to the thread and not written yet."""

    def open(self, stdin: Any, first: bytes, host: str) -> None:
        """Begin to write to the process, after lines that came before with ``first``."""
        self._stdin = stdin
        self.put(first)
        threading.Thread(target=self._run, name=f"to agent of {host}", daemon=True).start()

    def pass_on(self, line: bytes | None) -> None:
        """Write a line if that cannot block, else leave it to the thread; called by one thread."""
        is_short = line is not None and len(line) <= _AT_ONCE_BYTES
        if line and is_short and self._stdin and not self.waiting and self._stdin.is_ready():
            self._write(line)
        else:
            self.put(line)

    def put(self, line: bytes | None) -> None:
        """Leave a line to the thread; None: it ends."""
        with self._counting:
            self.waiting += 1
        self._lines.put(line)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            self._write(line)
            with self._counting:
                self.waiting -= 1

    def _write(self, line: bytes) -> None:
        # If it fails, the thread that reads fails as well, and the connection reports it.
        with contextlib.suppress(OSError, HvdElasticError):
            self._stdin.write(line)

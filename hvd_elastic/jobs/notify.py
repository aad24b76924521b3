"""Tells of events by a command of the operator, which gets each as JSON on its input."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

TOLD_KINDS = frozenset(
    {
        *("job_finished", "job_requeued", "time_limit_near"),
        *("host_lost", "host_back", "host_drained", "host_undrained"),
    }
)
"""Kinds of events that are told."""
_LIMIT_S = 30.0
"""How long the command may take for one event [s]."""
_MOST_WAITING = 1000
"""Events that wait to be told; others are dropped."""
_LAST_S = 10.0
"""How long the last events are told when the daemon ends [s]."""


class Notifier:
    """Runs a command for each event, one at a time; what it prints is dropped.

    It never blocks: a command that hangs is killed, and events that come too fast are dropped.

    Args:
        command: shell text; empty: nothing is told.
        warn: called with what went wrong.
    """

    def __init__(self, command: str, warn: Callable[[str], None]) -> None:
        self._command = command
        self._warn = warn
        self._waiting: deque[bytes] = deque()
        self._running: tuple[subprocess.Popen[bytes], float] | None = None

    def tell(self, event: Mapping[str, Any]) -> None:
        """Tell an event soon, if it is one of :data:`TOLD_KINDS`."""
        if not self._command or event["kind"] not in TOLD_KINDS:
            return
        if len(self._waiting) >= _MOST_WAITING:
            self._warn(f"--notify: {_MOST_WAITING} events wait to be told, so others are dropped")
            return
        self._waiting.append(json.dumps(event, default=str).encode() + b"\n")

    def work(self) -> None:
        """Start the command for the next event, if it has ended for the last one."""
        if self._running is not None:
            process, began = self._running
            status = process.poll()
            if status is None and time.monotonic() - began <= _LIMIT_S:
                return
            self._running = None
            if status is None:
                self._warn(f"--notify: the command did not end within {_LIMIT_S:g} s: killed")
                _kill(process)
            elif status:
                self._warn(f"--notify: the command ended with exit status {status}")
        if self._waiting:
            event = self._waiting.popleft()
            try:
                self._running = self._start(event), time.monotonic()
            except OSError as error:
                self._warn(f"--notify: the command cannot be started: {error.strerror}")

    def close(self) -> None:
        """Tell what waits, for some seconds at most."""
        deadline = time.monotonic() + _LAST_S
        while (self._waiting or self._running) and time.monotonic() < deadline:
            self.work()
            time.sleep(0.02)
        if self._running is not None:
            _kill(self._running[0])

    def _start(self, event: bytes) -> subprocess.Popen[bytes]:
        with tempfile.TemporaryFile() as told:  # unlike a pipe it holds all that nobody reads
            told.write(event)
            told.seek(0)
            return subprocess.Popen(
                ["/bin/sh", "-c", self._command],
                stdin=told,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a command with all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()

"""Keeps the place of each worker of a run, and writes the workers' logs."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any

from hvd_elastic.control import events as ev
from hvd_elastic.control.endings import crash_stack, explain_script_error, how_it_ended
from hvd_elastic.formatting import worker_name
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.run_events import ScriptFailed, WorkerCrashed

_TAIL_LINES = 30  # enough for a Python traceback, and fits a terminal
_END_BYTES = 64 << 10  # holds the stacks of a hundred threads
_CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
"""Signals at which Python's faulthandler writes the stacks of all threads."""


class Workers:
    """Holds the workers that have not been seen to end, and their logs.

    Attributes:
        failure_told: whether an error of the script was already reported; the other workers
            usually fail in the same way, and are not reported again.
        error: last line that the worker printed whose error was reported from its log.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self.places: dict[str, tuple[str, int]] = {}
        self.failure_told = False
        self.error = ""
        self._crash_told = ""
        self._code: dict[str, str] = {}
        self._other_code: set[str] = set()
        self._logs: dict[str, Any] = {}
        self._partial: dict[str, str] = {}

    def name(self, worker: str) -> str:
        """Return the name of a worker as users see it: host and slot."""
        return worker_name(*self.places[worker])

    def forget_host(self, host: str) -> None:
        """Forget the workers on a host, which is lost or has left."""
        for worker in [name for name, (place, _) in self.places.items() if place == host]:
            del self.places[worker]

    def other_code(self, code: Mapping[str, str]) -> list[str]:
        """Return which files of a worker's script are not those of the workers before it.

        Each content is returned once.

        Args:
            code: digests of its files by name.
        """
        found = []
        for name, digest in code.items():
            if self._code.setdefault(name, digest) != digest and digest not in self._other_code:
                self._other_code.add(digest)
                found.append(name)
        return found

    def log(self, worker: str, text: str) -> list[str]:
        """Append text to a worker's log; return the lines that are complete now.

        Of a line that a progress bar rewrites, perhaps for days, the last state is kept.
        """
        self.write(worker, text)
        *lines, rest = (self._partial.get(worker, "") + text).split("\n")
        self._partial[worker] = rest[rest.rstrip("\r").rfind("\r") + 1 :]
        return lines

    def write(self, worker: str, text: str) -> None:
        """Append text to a worker's log; if the disk is full, the text is lost."""
        file = self._logs.get(worker)
        try:
            if file is None:
                path = self._folder.log_path(*self.places[worker])
                # Unbuffered, so that close() does not fail on text that a full disk rejected.
                file = self._logs[worker] = path.open("ab", buffering=0)
            file.write(text.encode("utf-8", "replace"))
        except OSError:
            pass  # the event log is on the same disk and warns about it

    def ended(
        self, exited: ev.WorkerExited
    ) -> ScriptFailed | WorkerCrashed | ev.ScriptFailed | None:
        """Remove a worker; return an event with the cause from its log, unless already reported.

        The library reports no traceback for an error before ``init()`` or a ``sys.exit()``, so the
        last lines of the log are taken instead.
        """
        self._partial.pop(exited.worker, None)
        file = self._logs.pop(exited.worker, None)
        if file is not None:
            file.close()
        host, slot = self.places.pop(exited.worker)
        status, how = how_it_ended(exited)
        if status and not self.failure_told:
            self.failure_told = True
            lines = self._end_of_log(host, slot).rstrip().splitlines()[-_TAIL_LINES:]
            tail = "\n".join(lines) or f"exit status {status}, nothing printed"
            self.error = lines[-1].strip() if lines else ""
            explained = explain_script_error(tail)
            if explained is not None:
                return ev.ScriptFailed(exited.worker, explained)
            return ScriptFailed(host, slot, tail)
        if exited.signal in _CRASHES and (stack := crash_stack(self._end_of_log(host, slot))):
            if stack != self._crash_told:  # the slot's next worker may crash in the same place
                self._crash_told = stack
                stack += f"\n(log: {self._folder.log_path(host, slot)})"
                return WorkerCrashed(host, slot, how, stack)
        return None

    def _end_of_log(self, host: str, slot: int) -> str:
        try:
            with self._folder.log_path(host, slot).open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _END_BYTES))
                return log.read().decode(errors="replace")
        except OSError:
            return ""

    def close(self) -> None:
        for file in self._logs.values():
            file.close()

"""Knows where the workers of a run are, and keeps what they print."""

from __future__ import annotations

import os
import signal
from typing import Any

from hvd_elastic.control import events as ev
from hvd_elastic.control.endings import crash_stack, explain_script_error, how_it_ended
from hvd_elastic.formatting import worker_name
from hvd_elastic.records.run_folder import RunFolder

__all__ = ["Workers"]

_TAIL_LINES = 30
_END_BYTES = 64 << 10  # holds the stacks of a hundred threads
_CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
"""Signals at which Python's faulthandler writes a stack."""

Emitted = tuple[str, dict[str, Any]]


class Workers:
    """The workers whose end was not seen, and their logs.

    Args:
        folder: of the run.

    Attributes:
        places: (host, slot) by name.
        failure_told: the error of the script was told; other workers fail alike.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self.places: dict[str, tuple[str, int]] = {}
        self.failure_told = False
        self._crash_told = ""
        self._logs: dict[str, Any] = {}
        self._partial: dict[str, str] = {}

    def name(self, worker: str) -> str:
        """Return what users call a worker."""
        return worker_name(*self.places[worker])

    def of_host(self, host: str) -> list[str]:
        """Return the workers of a host."""
        return [worker for worker, (place, _) in self.places.items() if place == host]

    def log(self, worker: str, text: str) -> list[str]:
        """Add to a worker's log; return the lines that are complete now."""
        self.write(worker, text)
        *lines, self._partial[worker] = (self._partial.get(worker, "") + text).split("\n")
        return lines

    def write(self, worker: str, text: str) -> None:
        """Add to a worker's log; what a full disk does not take is lost."""
        file = self._logs.get(worker)
        try:
            if file is None:
                path = self._folder.log_path(*self.places[worker])
                # Unbuffered: what a full disk did not take must not come back at close().
                file = self._logs[worker] = path.open("ab", buffering=0)
            file.write(text.encode("utf-8", "replace"))
        except OSError:
            pass  # the event log says so

    def ended(self, exited: ev.WorkerExited) -> Emitted | ev.ScriptFailed | None:
        """Forget a worker; return what its log tells of its end, if that was not told before.

        An error before ``init()``, or ``sys.exit()``, comes without a traceback from the library.
        """
        self._partial.pop(exited.worker, None)
        file = self._logs.pop(exited.worker, None)
        if file is not None:
            file.close()
        host, slot = self.places.pop(exited.worker)
        status, how = how_it_ended(exited)
        place = {"host": host, "local_rank": slot}
        if status and not self.failure_told:
            self.failure_told = True
            lines = self._end_of_log(host, slot).rstrip().splitlines()[-_TAIL_LINES:]
            tail = "\n".join(lines) or f"exit status {status}, nothing printed"
            explained = explain_script_error(tail)
            if explained is not None:
                return ev.ScriptFailed(exited.worker, explained)
            return "script_failed", {**place, "traceback": tail}
        if exited.signal in _CRASHES and (stack := crash_stack(self._end_of_log(host, slot))):
            if stack != self._crash_told:  # the next worker of the slot may die in the same place
                self._crash_told = stack
                stack += f"\n(log: {self._folder.log_path(host, slot)})"
                return "worker_crashed", {**place, "cause": how, "traceback": stack}
        return None

    def _end_of_log(self, host: str, slot: int) -> str:
        try:
            with self._folder.log_path(host, slot).open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _END_BYTES))
                return log.read().decode(errors="replace")
        except OSError:
            return ""

    def close(self) -> None:
        """Close the logs."""
        for file in self._logs.values():
            file.close()

"""Runs the user's command that tells whether the host will be preempted, and reads its answer."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from datetime import datetime, timezone

NOTICE_S = 30.0
"""Time until the host goes after a notice without one [s]: the shortest of the large clouds."""
AFTER_SIGTERM = "HVD_ELASTIC_AFTER_SIGTERM_S"
"""Variable that an engine sets where it knows how long after SIGTERM it kills the agent [s]."""

_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)\s*s?\s*")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:?\d\d)?")


def after_sigterm_s() -> float:
    """Return how long this host has after SIGTERM to the agent [s]."""
    return float(os.environ.get(AFTER_SIGTERM) or NOTICE_S)


def seconds_left(output: str, now: float) -> float:
    """Return how long a host has, from the output of the command [s].

    Args:
        output: a number of seconds, or text with an ISO 8601 time (UTC if it has no zone).
        now: current time [unix seconds].

    Returns:
        0 or more; :data:`NOTICE_S` if the output has neither.

    >>> seconds_left("90", 0.0), seconds_left("TRUE", 0.0)
    (90.0, 30.0)
    >>> seconds_left('{"action": "stop", "time": "1970-01-01T00:02:00Z"}', 20.0)
    100.0
    """
    number = _NUMBER.fullmatch(output)
    if number is not None:
        return float(number[1])
    found = _TIME.search(output)
    if found is None:
        return NOTICE_S
    try:
        when = datetime.fromisoformat(found[0].replace("Z", "+00:00"))
    except ValueError:
        return NOTICE_S
    if when.tzinfo is None:
        when = when.replace(tzinfo=timezone.utc)
    return max(0.0, when.timestamp() - now)


# Interval of the command, as recommended for the metadata services of clouds.
_POLL_S = 5.0
# The command is killed after this time.
_LIMIT_S = 10.0
_MAX_BYTES = 1 << 16
# Exit statuses of a shell that cannot execute or find a command.
_NOT_STARTED = (126, 127)


class CommandWatch:
    """Runs the user's command every few seconds; exit status 0 means that the host will go away.

    Args:
        command: command for ``sh -c``.
        on_notice: called with the seconds left when a notice arrives.
        on_trouble: called once with the reason if the command does not work.
    """

    def __init__(
        self, command: str, on_notice: Callable[[float], None], on_trouble: Callable[[str], None]
    ) -> None:
        self._command = command
        self._on_notice = on_notice
        self._on_trouble = on_trouble
        self._running: subprocess.Popen[bytes] | None = None
        self._ended: asyncio.Future[int] | None = None

    async def watch(self) -> None:
        """Run the command in a loop, until cancelled."""
        noticed = complained = False
        while True:
            code, output = await self._ask()
            if code == 0 and not noticed:
                self._on_notice(seconds_left(output, time.time()))
            noticed = code == 0
            trouble = self._trouble(code)
            if trouble and not complained:
                complained = True
                self._on_trouble(trouble)
            await asyncio.sleep(_POLL_S)

    def reaped(self, pid: int, code: int) -> bool:
        """Handle the end of a child process; return whether it was the command."""
        if self._running is None or self._running.pid != pid:
            return False
        self._running.returncode = code
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(code)
        return True

    def _trouble(self, code: float) -> str:
        if code in _NOT_STARTED:
            return f"the preemption command cannot be run: {self._command}"
        if math.isinf(code):
            return f"the preemption command takes more than {_LIMIT_S:g} s: {self._command}"
        return ""

    async def _ask(self) -> tuple[float, str]:
        """Run the command; return its exit status (infinite if it timed out) and its output."""
        self._ended = asyncio.get_running_loop().create_future()
        # In its own session, so that its child processes can be ended with it.
        try:
            process = self._running = subprocess.Popen(
                ["/bin/sh", "-c", self._command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:  # no memory, or no process or descriptor left; perhaps the next time
            return _NOT_STARTED[0], ""
        assert process.stdout is not None
        with process.stdout as pipe:
            os.set_blocking(pipe.fileno(), False)
            try:
                code: float = await asyncio.wait_for(self._ended, _LIMIT_S)
            except asyncio.TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                return math.inf, ""
            with contextlib.suppress(BlockingIOError):
                return code, os.read(pipe.fileno(), _MAX_BYTES).decode(errors="replace")
            return code, ""

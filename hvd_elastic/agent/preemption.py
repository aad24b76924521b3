"""Notices that a host will be taken away, as the host itself learns of them.

Two kinds reach the agent: SIGTERM, and a command of the user's that asks whoever knows, such as the
metadata service of a cloud. That service answers each machine for itself alone, and the leader may
be no machine of the cloud at all, so the command is run on every host by its agent.
"""

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
"""Time that a host has after a notice that names none [s]: the shortest of the large clouds."""

_POLL_S = 5.0
_LIMIT_S = 10.0
_MAX_BYTES = 1 << 16
_NOT_STARTED = (126, 127)
_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)\s*s?\s*")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:?\d\d)?")


def seconds_left(output: str, now: float) -> float:
    """How long a host has, from what the command printed [s].

    Args:
        output: seconds, or a text with a time as of ISO 8601 in it (UTC where it names no zone).
        now: unix seconds.

    Returns:
        0 or more; :data:`NOTICE_S` where it says nothing of the kind.

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


class PreemptionWatch:
    """Runs the user's command every few seconds; exit status 0 says that the host will go.

    Args:
        command: for ``sh -c``.
        on_notice: told the seconds left, when a notice comes.
        on_trouble: told, once, why the command is of no use.
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
        """Poll for ever."""
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
        """A child of this process ended; whether it was the command."""
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
        """Exit status and output; infinite where the command did not end."""
        self._ended = asyncio.get_running_loop().create_future()
        # In a session of its own, so that what it starts can be ended with it.
        process = self._running = subprocess.Popen(
            ["/bin/sh", "-c", self._command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
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

"""Watches the hardware of the host by a process of its own, and judges what that tells."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvd_elastic.control.hardware import judge_hardware
from hvd_elastic.json_text import parse_json
from hvd_elastic.run_events import Fault

_FIRST_S = 10.0
"""Time until the process is started, so that it takes nothing from a start [s]."""
_NEW_S = 3600.0
"""How long what has come counts as new [s]."""
_KEPT_EVERY_S = 300.0
"""Least time between answers that are kept to compare with [s]."""
_PROGRAM = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r}); "
    "from hvd_elastic.programs.hardware import watch_hardware; watch_hardware()"
)


class HardwareWatch:
    """Tells the faults of the hardware of this host.

    Args:
        tell: called with the faults when they are known, when they have changed, and when a number
            has doubled.
        warn: called with the reason when they cannot be watched any more.
    """

    def __init__(self, tell: Callable[[list[Fault]], None], warn: Callable[[str], None]) -> None:
        self._tell, self._warn = tell, warn
        self._told: list[tuple[str, bool, int]] | None = None
        self._before: deque[tuple[dict[str, Any], float]] = deque()
        self._watches = True
        """Whether there is anything to watch."""

    async def watch(self) -> None:
        """Watch until cancelled, or until there is nothing to watch."""
        await asyncio.sleep(_FIRST_S)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM],
            stdin=subprocess.PIPE,  # it ends when that is closed, also by the end of this process
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        process.returncode = 0  # the agent reaps it
        assert process.stdin is not None
        assert process.stdout is not None
        lines = asyncio.StreamReader(limit=1 << 24)
        loop = asyncio.get_running_loop()
        with process.stdin:
            protocol = asyncio.StreamReaderProtocol(lines)
            pipe, _ = await loop.connect_read_pipe(lambda: protocol, process.stdout)
            try:
                async for line in lines:
                    self.add(parse_json(line), time.monotonic())
                if self._watches:
                    self._warn("its hardware is not watched any more: that process has ended")
            except ValueError as error:
                self._warn(f"its hardware is not watched any more: {error}")
            finally:
                pipe.close()

    def add(self, found: dict[str, Any], now: float) -> None:
        """Judge the next answer of the process, which came at a time [s]."""
        self._watches = any(each not in (None, []) for each in found.values())
        if not self._before or now - self._before[-1][1] >= _KEPT_EVERY_S:
            self._before.append((found, now))
        while len(self._before) > 1 and now - self._before[1][1] >= _NEW_S:
            self._before.popleft()
        faults = judge_hardware(found, self._before[0][0])
        told = [(each.what, each.is_broken, each.number.bit_length()) for each in faults]
        if told != self._told:
            self._told = told
            self._tell(faults)

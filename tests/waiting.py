"""Waits in tests for what other processes and threads do, and a clock that does not wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.paths import LIMIT_S


def until(
    condition: Callable[[], Any],
    what: str = "what a test waits for",
    limit_s: float = LIMIT_S,
    *,
    process: Any = None,
    said: Callable[[], object] = str,
) -> Any:
    """Wait until a condition returns something true, and return that.

    Args:
        condition: called every few hundredths of a second.
        what: describes it in the error.
        limit_s: longest wait [s].
        process: in which it must come true; the test fails once it has ended before.
        said: returns more for the error, such as the output of the process.
    """
    deadline = time.monotonic() + limit_s
    while True:
        ended = None if process is None else process.poll()  # its last act may be what comes true
        if found := condition():
            return found
        assert ended is None, f"ended with {ended} before: {what}\n{said()}"
        assert time.monotonic() < deadline, f"did not come true: {what}\n{said()}"
        time.sleep(0.02)


@dataclass
class Clock:
    """Stands still until a test moves it."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now

"""A run that was submitted to whoever owns the machines, as the tests follow it."""

from __future__ import annotations

import subprocess
import time
from collections import defaultdict
from typing import Any

from tests.dist.running import RunningJob
from tests.paths import LIMIT_S

POLL_S = 0.5


class SubmittedRun(RunningJob):
    """A run whose ranks do not know which leader they have."""

    def check_equal_parameters(self) -> None:
        """All ranks hold the same; nothing tells them which leader they have."""
        held: dict[tuple[Any, ...], set[str]] = defaultdict(set)
        for record in self.digests():
            held[record["generation"], record["kind"], record["step"]].add(record["digest"])
        assert held
        assert all(len(digests) == 1 for digests in held.values()), self.story()


class SubmittedProcess:
    """What leads such a run, as a process: its status, and its end.

    Args:
        name: what its owner calls it.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def poll(self) -> int | None:
        raise NotImplementedError

    def wait(self, timeout_s: float | None = None) -> int:
        limit_s = LIMIT_S if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.name, limit_s)
            time.sleep(POLL_S)
        return status

"""One call of a command that is timed."""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence

from hvd_elastic.errors import RunError

__all__ = ["timed_call"]

LIMIT_S = 300.0
"""For one call."""


def timed_call(command: Sequence[str], environment: Mapping[str, str]) -> tuple[float, str]:
    """Runs it without input; its seconds, and what it said on stderr.

    Raises:
        RunError: it failed; with the end of what it said.
        subprocess.TimeoutExpired: it did not end within ``LIMIT_S``.
    """
    begun = time.monotonic()
    done = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=LIMIT_S,
    )
    if done.returncode != 0:
        raise RunError(f"'{shlex.join(command)[:80]}…' failed: {done.stderr[-500:]}")
    return time.monotonic() - begun, done.stderr

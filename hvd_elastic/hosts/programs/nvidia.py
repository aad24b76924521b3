"""Asks nvidia-smi; standard library only, as it is sent to hosts."""

from __future__ import annotations

import shutil
import subprocess
from typing import NamedTuple

LIMIT_S = 8.0


class Answer(NamedTuple):
    """What nvidia-smi said.

    Attributes:
        lines: not empty ones.
        status: its exit status; None where it could not be started or did not end.
        error: why it failed, or "".
    """

    lines: list[str]
    status: int | None
    error: str


def ask_nvidia_smi(query: str) -> Answer | None:
    """Return the answer to a query such as ``--query-gpu=name``; None: there is no nvidia-smi."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, query, "--format=csv,noheader,nounits"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Answer([], None, str(error))
    lines = [line.strip() for line in done.stdout.decode("utf-8", "replace").splitlines()]
    why = f"exit status {done.returncode}" if done.returncode else ""
    return Answer([line for line in lines if line], done.returncode, why)

"""Run nvidia-smi; standard library only, since this module is sent to hosts."""

from __future__ import annotations

import shutil
import subprocess
from typing import NamedTuple

LIMIT_S = 8.0  # nvidia-smi can hang if a GPU or the driver is broken


class Answer(NamedTuple):
    """Answer of nvidia-smi.

    Attributes:
        lines: lines of its output that are not empty.
        status: exit status; None if it could not be started or did not end.
        error: why it failed, or "".
    """

    lines: list[str]
    status: int | None
    error: str


def ask_nvidia_smi(query: str, *form: str) -> Answer | None:
    """Return the answer of nvidia-smi; None if it is missing.

    Args:
        query: what is asked, such as ``--query-gpu=name``.
        form: options for the form of the answer, by default plain values with commas between.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, query, *(form or ("--format=csv,noheader,nounits",))],
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

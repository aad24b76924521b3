"""A file system that is soon full."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mounted(folder: Path, size: str, *, lazy: bool = False) -> Iterator[Path]:
    """Mount one at ``folder``; skips the test where that cannot be done.

    Args:
        folder: made if it is not there.
        size: as for ``mount -o size=``.
        lazy: at the end a process may still have a file of it open.
    """
    if os.geteuid() != 0:
        pytest.skip(f"needs root: mounts a file system of {size} to fill it")
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "hvd_elastic-test", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"a file system of {size} cannot be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", *(["-l"] if lazy else []), str(folder)], check=True)

"""Programs run by processes that are forked from one that has imported PyTorch and Horovod.

A rank's start takes seconds otherwise, nearly all of it for these imports.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

__all__ = ["start_program"]

PRELOADED = ["torch", "horovod.torch", "hvd_elastic.torch.collectives", "tests.unit.forked"]


def start_program(
    program: str, argument: str, environment: Mapping[str, str], folder: Path
) -> ForkServerProcess:
    """Start a program with one argument; it writes to files ``out`` and ``err`` in a folder."""
    process = _context().Process(target=_run, args=(program, argument, dict(environment), folder))
    # Only the process that all others are forked from reads it, when it imports PyTorch.
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        process.start()
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
    return process


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _run(program: str, argument: str, environment: Mapping[str, str], folder: Path) -> None:
    for name, number in (("out", 1), ("err", 2)):
        with (folder / name).open("wb") as file:
            os.dup2(file.fileno(), number)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c", argument]
    try:
        exec(compile(program, "<rank>", "exec"), {"__name__": "__main__"})
    finally:
        sys.stdout.flush()

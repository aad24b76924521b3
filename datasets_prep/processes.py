"""What the scripts of this folder share: processes, a progress bar, one writer at a time."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, as_completed, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, TypeVar

from hvd_elastic.errors import DataError

Work = TypeVar("Work")
_PIECES_EACH = 3
"""Pieces that each process has or waits for: enough that none is idle between two."""


def in_processes(
    work: Callable[[Any], Work], pieces: Iterable[Any], processes: int
) -> Iterator[Work]:
    """What the work gives for each piece, as they get done; in this process where one is enough.

    Pieces are taken when they are needed, so that not all of them are in memory.

    Raises:
        DataError: a process was killed.
    """
    pieces = iter(pieces)
    first = list(islice(pieces, 2))
    if processes <= 1 or len(first) < 2:
        yield from map(work, chain(first, pieces))
        return
    # Not forked, since the bar has a thread.
    pool = ProcessPoolExecutor(
        processes, mp_context=get_context("spawn"), initializer=_end_with_parent
    )
    try:
        jobs: set[Future[Work]] = set()
        for piece in chain(first, pieces):
            jobs.add(pool.submit(work, piece))
            if len(jobs) >= _PIECES_EACH * processes:
                done, jobs = wait(jobs, return_when=FIRST_COMPLETED)
                yield from (job.result() for job in done)
        for job in as_completed(jobs):
            yield job.result()
    except BrokenProcessPool:
        raise DataError(
            "a process was killed (is there enough memory?); the same call goes on where this "
            "one stopped, with --processes 1 if need be"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """Leave Ctrl-C to the parent, and do not outlive it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def wait() -> None:
        parent = parent_process()
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


@contextlib.contextmanager
def progress_bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on a terminal, elsewhere a line for each tenth, with rate and time left.

    Yields the function that moves it on by a count.
    """
    began, done = time.monotonic(), 0
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        columns = (
            *(label, BarColumn(), MofNCompleteColumn()),
            *(TextColumn("{task.fields[rate]}"), TimeRemainingColumn()),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            bar = progress.add_task(label, total=total, rate="")

            def move(count: int) -> None:
                nonlocal done
                done += count
                rate = done / max(1e-9, time.monotonic() - began)
                progress.update(bar, advance=count, rate=f"{rate:,.0f}/s")

            yield move
        return

    def advance(count: int) -> None:
        nonlocal done
        before, done = done, done + count
        if 10 * before // total < 10 * done // total:
            rate = done / max(1e-9, time.monotonic() - began)
            left = f", {(total - done) / rate:,.0f} s left" if done < total else ""
            print(f"{label}: {done} of {total} ({rate:,.0f}/s{left})", file=sys.stderr, flush=True)

    yield advance


@contextlib.contextmanager
def sole_writer(out: Path, *, waits: bool = False) -> Iterator[None]:
    """Let one call at a time write to the folder; ``waits``: the next one waits for its turn."""
    descriptor = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            raise DataError(f"another call is writing to {out}; wait for its end") from None
        yield
    finally:
        os.close(descriptor)


def whole_number(low: int, high: int | None = None) -> Callable[[str], int]:
    """Return argparse's type of an option that is a whole number within limits."""

    def number(text: str) -> int:
        value = int(text)
        if value < low or (high is not None and value > high):
            limits = f"{low} to {high}" if high is not None else f"{low} or more"
            raise argparse.ArgumentTypeError(f"{value}: it must be {limits}")
        return value

    number.__name__ = "whole number"  # argparse: invalid whole number value
    return number

"""Runs work in processes, and ends them when this process is interrupted or gone."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, as_completed, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from multiprocessing import get_context, parent_process
from multiprocessing.resource_tracker import ensure_running
from typing import Any, TypeVar

from hvd_elastic.errors import DataError

Work = TypeVar("Work")
_PIECES_EACH = 3
"""Pieces that each process has or waits for: enough that none is idle between two."""


def in_processes(
    work: Callable[[Any], Work], pieces: Iterable[Any], processes: int
) -> Iterator[Work]:
    """Yield the result of each piece of work as it gets done; one process needs no other.

    Pieces are taken when they are needed, so that not all of them are in memory.

    Raises:
        DataError: a process was killed.
    """
    pieces = iter(pieces)
    first = list(islice(pieces, 2))
    if processes <= 1 or len(first) < 2:
        yield from map(work, chain(first, pieces))
        return
    # Not forked, since the caller may have threads.
    pool = ProcessPoolExecutor(
        processes, mp_context=get_context("spawn"), initializer=_end_with_parent
    )
    try:
        jobs: set[Future[Work]] = set()
        for piece in chain(first, pieces):
            jobs.add(_submit(pool, work, piece))
            if len(jobs) >= _PIECES_EACH * processes:
                done, jobs = wait(jobs, return_when=FIRST_COMPLETED)
                yield from (job.result() for job in done)
        for job in as_completed(jobs):
            yield job.result()
    except KeyboardInterrupt:
        _stop_writing(pool)
        for process in (pool._processes or {}).values():  # what they are at is given up
            process.terminate()
        raise
    except BrokenProcessPool:
        _stop_writing(pool)
        raise DataError(
            "a process was killed (is there enough memory?); call again, with --processes 1 if "
            "need be"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _stop_writing(pool: ProcessPoolExecutor) -> None:
    """Close this process's end of the pipe from which the processes read their pieces.

    Python before 3.11.5 otherwise waits for its thread that writes to it (cpython gh-94777). A
    later one closes it in a thread of its own, which must not meet this.
    """
    if sys.version_info >= (3, 11, 5):
        return
    queue: Any = pool._call_queue  # type: ignore[attr-defined]
    if queue is not None:
        with contextlib.suppress(OSError):  # Python closes it too
            queue._reader.close()


def _submit(pool: ProcessPoolExecutor, work: Callable[[Any], Work], piece: Any) -> Future[Work]:
    """Give a piece to the pool. A process that it starts is born without ears for Ctrl-C.

    Otherwise one that is still being loaded would print a traceback of its own.
    """
    ensure_running()  # as it starts, it unblocks the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(work, piece)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_parent() -> None:
    """Leave Ctrl-C to the parent, and do not outlive it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def wait() -> None:
        parent = parent_process()
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()

"""Functions by which a script asks about its ranks, and reports, with every frontend."""

from __future__ import annotations

from typing import Any

from hvd_elastic.worker import context, launch


def rank() -> int:
    """Return this process's rank in the current generation, 0 to ``size() - 1``."""
    worker = context.current().worker
    worker.check_has_ranks("rank()")
    return worker.rank


def size() -> int:
    """Return the number of processes that train together now."""
    worker = context.current().worker
    worker.check_has_ranks("size()")
    return worker.size


def local_rank() -> int:
    """Return the slot of this process on its host; constant while the process lives."""
    context.current()
    return launch.local_rank()


def report(**metrics: Any) -> None:
    """Add numbers to the run's metrics, for example ``report(test_accuracy=0.98)``."""
    context.current().report(metrics)

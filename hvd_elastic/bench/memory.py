"""Checks in a worker that a step fits into memory, and names the batch that would."""

from __future__ import annotations

import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

from hvd_elastic.errors import ScriptError

Step = Callable[[int], object]
"""Makes the model, and runs its passes over so many examples."""


def refuse_too_large(
    model: str,
    batch_size: int,
    run: Step,
    is_too_large: Callable[[Exception], bool],
    ranks: int | None,
) -> None:
    """Try a step, and if it does not fit, steps of half as many examples, until one does.

    Args:
        model: name of the model, for the message.
        batch_size: number of examples.
        run: runs a step.
        is_too_large: whether an error means that memory was short.
        ranks: number of ranks that share the memory of this host; None: memory of a GPU.

    Raises:
        ScriptError: the step does not fit; names the largest of these batches that does.
    """
    size = batch_size
    with _share_of_memory(ranks):
        while size and not _fits(run, size, is_too_large):
            size //= 2
    if size == batch_size:
        return
    where = "the GPU" if ranks is None else f"host {socket.gethostname()}"
    shared = f", which {ranks} ranks share" if ranks and ranks > 1 else ""
    fits = f"--batch-size {size} does" if size else "neither does a single example"
    raise ScriptError(
        f"{model} with {batch_size} examples does not fit into the memory of {where}{shared}; "
        f"{fits}"
    )


def _fits(run: Step, size: int, is_too_large: Callable[[Exception], bool]) -> bool:
    try:
        run(size)
    except Exception as error:  # frameworks raise many kinds
        if not isinstance(error, MemoryError) and not is_too_large(error):
            raise
        return False
    return True


@contextmanager
def _share_of_memory(ranks: int | None) -> Iterator[None]:
    """Have allocations fail that go beyond a rank's share of the memory that is free now.

    Without it the kernel grants them, and kills a process when they are used.
    """
    if ranks is None:
        yield
        return
    before, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = psutil.Process().memory_info().data + psutil.virtual_memory().available // ranks
    if before != resource.RLIM_INFINITY:
        limit = min(limit, before)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, most))

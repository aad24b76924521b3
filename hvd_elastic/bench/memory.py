"""Checks in a worker that a step fits into memory, and names the largest batch that would."""

from __future__ import annotations

import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from hvd_elastic.errors import ScriptError
from hvd_elastic.programs.usable import usable_memory

Step = Callable[[int], object]
"""Makes the model, and runs its passes over so many examples."""
_MEASURABLE_BYTES = 400 << 20
"""Growth of the memory of a process from one batch to the next, from which on it tells the memory
of an example. The heaps of TensorFlow's threads grow by 64 MiB at a time."""
_SURE = 0.75
"""Part of the memory that a batch may take by what a few examples tell. The optimizer takes some of
the rest, and larger batches take up to a quarter more for each example (ResNet-50)."""


def refuse_too_large(
    model: str,
    batch_size: int,
    run: Step,
    is_too_large: Callable[[Exception], bool],
    ranks: int | None,
) -> None:
    """Refuse a batch that does not fit into memory.

    A GPU runs a step of the batch, and if it does not fit, steps of half as many examples, until
    one does. On processors that would take minutes. There it runs steps of a few examples, and
    the growth of the memory from one to the next tells what an example takes.

    Args:
        model: name of the model, for the message.
        is_too_large: whether an error means that memory was short.
        ranks: number of ranks that share the memory of this host; None: memory of a GPU.

    Raises:
        ScriptError: the step does not fit; names the largest batch that does.
    """

    def fits(size: int) -> bool:
        try:
            run(size)
        except Exception as error:  # frameworks raise many kinds
            if not isinstance(error, MemoryError) and not is_too_large(error):
                raise
            return False
        return True

    if ranks is None:
        most = next((size for size in _halves(batch_size) if fits(size)), 0)
    else:
        with _share_of_memory(ranks) as limit:
            most = _most_by_growth(batch_size, fits, limit)
    if most >= batch_size:
        return
    where = "the GPU" if ranks is None else f"host {socket.gethostname()}"
    shared = f", which {ranks} ranks share" if ranks and ranks > 1 else ""
    words = f"--batch-size {most} does" if most else "neither does a single example"
    raise ScriptError(
        f"{model} with {batch_size} examples does not fit into the memory of {where}{shared}; "
        f"{words}"
    )


def _halves(batch_size: int) -> list[int]:
    """Return the batch size, half of it, and so on.

    >>> _halves(12)
    [12, 6, 3, 1]
    """
    return [batch_size >> power for power in range(batch_size.bit_length())]


def _most_by_growth(batch_size: int, fits: Callable[[int], bool], limit: int) -> int:
    """Return how many examples fit into memory, at most ``batch_size``.

    Args:
        fits: runs a step of so many, and returns whether memory sufficed.
        limit: most memory that this process may hold [bytes].
    """
    most, before = 0, 0
    for size in reversed(_halves(batch_size)):
        _forget_peak()
        try:
            fitted = fits(size)
        except Exception:
            if size == batch_size:
                raise
            continue  # the model may not take so few, as one with batch norm does not take one
        if not fitted:
            return most
        peak = _peak()
        if most and (growth := peak - before) >= _MEASURABLE_BYTES:
            each = growth / (size - most)
            sure, at_most = (size + max(0, int((n * limit - peak) / each)) for n in (_SURE, 1.0))
            if batch_size <= sure or (batch_size <= at_most and fits(batch_size)):
                return batch_size
            return sure
        most, before = size, peak
    return most


def _forget_peak() -> None:
    """Have :func:`_peak` start again, at what is held now."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:  # a peak of before then hides the growth, until there is more
        return


def _peak() -> int:
    """Return the most memory that this process has held [bytes]."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@contextmanager
def _share_of_memory(ranks: int) -> Iterator[int]:
    """Have allocations fail that go beyond a rank's share of the memory that is free now.

    Without it the kernel grants them, and kills a process when they are used. Yields the most
    memory that this process may hold [bytes].
    """
    now, share = psutil.Process().memory_info(), usable_memory().available // ranks
    before, most = resource.getrlimit(resource.RLIMIT_DATA)
    if before != resource.RLIM_INFINITY:
        share = min(share, max(0, before - now.data))
    resource.setrlimit(resource.RLIMIT_DATA, (now.data + share, most))
    try:
        yield now.rss + share
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, most))

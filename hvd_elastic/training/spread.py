"""Who lacks which tensors of a state when a world begins, and who sends them.

What optimizers change is the same on all ranks that stand at the same step with a whole state:
nothing changes it but a step, which all made with the same gradients. Of the rest (frozen weights,
running averages) the ranks compare digests: a fine-tuned model's frozen gigabytes are sent to
nobody, not even to a newcomer that has loaded the same file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from typing import Any

import numpy as np

from hvd_elastic.communicator.interface import Communicator

__all__ = ["spread"]

_COMPARED_BYTES = 1 << 20
"""Smaller tensors are sent sooner than compared."""
_MOST_THREADS = 8

Content = Sequence[Callable[[], np.ndarray]]
"""Gives the bytes of a tensor, piece by piece."""


def spread(
    tensors: Sequence[Any],
    known: Sequence[bool],
    has: bool,
    communicator: Communicator,
    root_rank: int,
    content: Callable[[Any], Content],
) -> None:
    """Give the root's tensors to the ranks that lack them.

    Args:
        tensors: in the same order on all ranks, overwritten in place.
        known: which of them are the same on every rank that has the state.
        has: whether this rank has it.
        communicator: the communicator.
        root_rank: whose tensors.
        content: gives the bytes of a tensor; called in several threads.
    """
    compared = [
        index
        for index, tensor in enumerate(tensors)
        if not known[index] and tensor.nbytes >= _COMPARED_BYTES
    ]
    row = [int(not has)]
    for digest in _digests([content(tensors[index]) for index in compared]):
        row += digest
    rows = communicator.gather(np.array([row]), "hvd_elastic.lacking")
    lack_all = rows[:, 0].astype(bool).tolist()
    # What is too small to compare goes to everybody.
    lack_small = [rank != root_rank for rank in range(communicator.size)]
    lacking = [lack_all if same else lack_small for same in known]
    for column, index in enumerate(compared):
        theirs = rows[:, 1 + 2 * column : 3 + 2 * column]
        lacking[index] = (theirs != theirs[root_rank]).any(axis=1).tolist()
    groups: dict[tuple[bool, ...], list[Any]] = {}
    for tensor, ranks in zip(tensors, lacking, strict=True):
        groups.setdefault(tuple(ranks), []).append(tensor)
    for lacks, some in groups.items():
        if sum(lacks) * 2 > len(lacks):
            # Few have it: a tree spreads it faster than each of them could alone.
            communicator.broadcast(some, root_rank)
        elif any(lacks):
            communicator.hand_over(some, lacks)


def _digests(contents: Sequence[Content]) -> list[list[int]]:
    """Return 128 bits of the SHA-256 of each tensor, as two integers."""
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
        hashed = pool.map(_hash, chain.from_iterable(contents))
        whole = [hashlib.sha256(b"".join(islice(hashed, len(some)))).digest() for some in contents]
    return [
        [int.from_bytes(digest[at : at + 8], "little", signed=True) for at in (0, 8)]
        for digest in whole
    ]


def _hash(piece: Callable[[], np.ndarray]) -> bytes:
    return hashlib.sha256(piece().data).digest()

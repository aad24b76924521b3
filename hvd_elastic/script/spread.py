"""Gives the root's tensors to the ranks that lack them when a world begins.

Tensors that only optimizers change are the same on all ranks that hold a whole state of the same
step, since all took their steps with the same gradients. For the other tensors (frozen weights,
running averages) the ranks compare digests: the frozen gigabytes of a fine-tuned model are not
sent at all, not even to a newcomer that has loaded the same file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from typing import Any

import numpy as np

from hvd_elastic.communicator.interface import Communicator, RingRank
from hvd_elastic.programs.usable import usable_cores

_COMPARED_BYTES = 1 << 20
"""Least size of a tensor that is compared: sending a smaller one is faster."""
_MOST_THREADS = 8  # the ranks of a host share its cores

Content = Sequence[Callable[[], np.ndarray]]
"""Functions that return the bytes of a tensor, piece by piece."""


def spread(
    tensors: Sequence[Any],
    known: Sequence[bool],
    has: bool,
    communicator: Communicator,
    root_rank: RingRank,
    content: Callable[[Any], Content],
    agreed: int = 0,
) -> int:
    """Give the root's tensors to the ranks that lack them.

    Args:
        tensors: tensors in the same order on all ranks, overwritten in place.
        known: for each tensor, whether it is the same on every rank that holds the state.
        has: whether this rank holds the state.
        communicator: communicator of all ranks.
        root_rank: number in its ring of the one whose tensors all get.
        content: returns the bytes of a tensor in pieces, which are read in several threads.
        agreed: bits of this rank.

    Returns:
        The bits that all ranks have set.
    """
    compared = [
        index
        for index, tensor in enumerate(tensors)
        if not known[index] and tensor.nbytes >= _COMPARED_BYTES
    ]
    row = [int(not has) + 2 * agreed]
    for digest in _digests([content(tensors[index]) for index in compared]):
        row += digest
    rows = communicator.gather(np.array([row]), "hvd_elastic.lacking")
    lack_all = (rows[:, 0] % 2).astype(bool).tolist()
    # Tensors too small to compare are sent to all ranks but the root.
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
            # If only a minority has it, a broadcast tree is faster than point-to-point sending.
            communicator.broadcast(some, root_rank)
        elif any(lacks):
            communicator.hand_over(some, lacks)
    return int(np.bitwise_and.reduce(rows[:, 0] // 2))


def _digests(contents: Sequence[Content]) -> list[list[int]]:
    """Return 128 bits of the SHA-256 of each tensor, as two integers."""
    with ThreadPoolExecutor(min(_MOST_THREADS, usable_cores())) as pool:
        hashed = pool.map(_hash, chain.from_iterable(contents))
        whole = [hashlib.sha256(b"".join(islice(hashed, len(some)))).digest() for some in contents]
    return [
        [int.from_bytes(digest[at : at + 8], "little", signed=True) for at in (0, 8)]
        for digest in whole
    ]


def _hash(piece: Callable[[], np.ndarray]) -> bytes:
    return hashlib.sha256(piece().data).digest()

"""Who lacks which tensors of a state when a world begins, and who sends them.

What optimizers change is the same on all ranks that stand at the same step with a whole state:
nothing changes it but a step, which all made with the same gradients. Of the rest (frozen weights,
running averages) the ranks compare digests: a fine-tuned model's frozen gigabytes are sent to
nobody, not even to a newcomer that has loaded the same file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import numpy as np
import torch

from hvd_elastic.communicator.interface import Communicator

__all__ = ["spread"]

# Less is sent sooner than compared.
_COMPARED_BYTES = 1 << 20
_PIECE_BYTES = 16 << 20
_MOST_THREADS = 8


def spread(
    tensors: Sequence[torch.Tensor],
    known: Sequence[bool],
    has: bool,
    communicator: Communicator,
    root_rank: int,
) -> None:
    """Give the root's tensors to the ranks that lack them.

    Args:
        tensors: in the same order on all ranks, overwritten in place.
        known: which of them are the same on every rank that has the state.
        has: whether this rank has it.
        communicator: the communicator.
        root_rank: whose tensors.
    """
    compared = [
        index
        for index, tensor in enumerate(tensors)
        if not known[index] and tensor.nbytes >= _COMPARED_BYTES
    ]
    row = [int(not has)]
    for digest in _digests([tensors[index] for index in compared]):
        row += digest
    rows = communicator.gather(np.array([row]), "hvd_elastic.lacking")
    lack_all = rows[:, 0].astype(bool).tolist()
    # What is too small to compare goes to everybody.
    lack_small = [rank != root_rank for rank in range(communicator.size)]
    lacking = [lack_all if same else lack_small for same in known]
    for column, index in enumerate(compared):
        theirs = rows[:, 1 + 2 * column : 3 + 2 * column]
        lacking[index] = (theirs != theirs[root_rank]).any(axis=1).tolist()
    groups: dict[tuple[bool, ...], list[torch.Tensor]] = {}
    for tensor, ranks in zip(tensors, lacking, strict=True):
        groups.setdefault(tuple(ranks), []).append(tensor)
    for lacks, some in groups.items():
        if sum(lacks) * 2 > len(lacks):
            # Few have it: a tree spreads it faster than each of them could alone.
            communicator.broadcast(some, root_rank)
        elif any(lacks):
            communicator.hand_over(some, lacks)


def _digests(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """128 bits of the SHA-256 of the content of each, as two integers."""
    if not tensors:
        return []
    pieces = [_pieces(tensor.detach()) for tensor in tensors]
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
        hashed = pool.map(_hash, chain.from_iterable(pieces))
        whole = [hashlib.sha256(b"".join(next(hashed) for _ in some)).digest() for some in pieces]
    return [
        [int.from_bytes(digest[at : at + 8], "little", signed=True) for at in (0, 8)]
        for digest in whole
    ]


def _pieces(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Views of it, where it lies in one piece."""
    if not tensor.is_contiguous():
        return [tensor]
    return tensor.reshape(-1).view(torch.uint8).split(_PIECE_BYTES)


def _hash(piece: torch.Tensor) -> bytes:
    """Of its bytes; a copy from another device, or in order, lives no longer than this."""
    content = piece.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(content.data).digest()

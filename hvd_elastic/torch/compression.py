"""Gradients that are sent in 16 bits and summed in float32."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum

import torch

_PIECE = 4 << 20
"""Most elements sent at a time: Horovod allocates memory for what is received, and memory of more
than 32 MB is mapped again each time, which takes longer than the sum."""


class Compression(Enum):
    """Type in which gradients of float32 and float64 are sent; named as in Horovod."""

    none = None
    """As they are."""
    fp16 = torch.float16
    """In float16: 11 significant bits, but infinite above 65504."""
    bf16 = torch.bfloat16
    """In bfloat16: 8 significant bits, and the range of float32."""

    def sent_as(self, kind: torch.dtype) -> torch.dtype | None:
        """Return the type that gradients of type ``kind`` are sent in; None: their own."""
        return self.value if kind in (torch.float32, torch.float64) else None


class Packed:
    """Copy of a flat tensor in 16 bits, which the ranks sum part by part.

    Each rank receives its part from all ranks, sums it in float32 and sends the sum to all. So as
    many elements are sent as in a ring all-reduce, and all ranks hold the same result. It goes in
    pieces, of which some are summed while others are sent.

    Args:
        kind: type of 16 bits.
        flat: tensor of the size and on the device of those that are copied.
    """

    def __init__(self, kind: torch.dtype, flat: torch.Tensor, ranks: int) -> None:
        self._kind = kind
        self._ranks = ranks
        self._pieces = [
            torch.zeros(ranks, -(-len(piece) // ranks), dtype=kind, device=flat.device)
            for piece in flat.split(_PIECE)
        ]

    def fits(self, ranks: int) -> bool:
        """Return whether it is for so many ranks."""
        return self._ranks == ranks

    def rows(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """Copy a flat tensor; yield pieces of a row for each rank, in a type that Horovod sends."""
        for copy, piece in zip(self._pieces, flat.split(_PIECE), strict=True):
            copy.view(-1)[: len(piece)].copy_(piece)
            yield copy.view(torch.float16)

    def sum(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the sum of the rows that this rank has received of a piece."""
        first, *others = rows.view(self._kind)
        total = first.float()
        for row in others:  # rows.sum(0) takes eight times as long for two ranks
            total += row
        return total.to(self._kind).view(torch.float16)

    def unpack(self, sums: Iterable[torch.Tensor], flat: torch.Tensor) -> None:
        """Copy the sums of all ranks, joined for each piece, to the flat tensor."""
        for found, piece in zip(sums, flat.split(_PIECE), strict=True):
            piece.copy_(found.view(self._kind)[: len(piece)])

"""Interface of what processes read for a rank: a loader's dataset, as batches by index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

Buffers = list[Any]
"""Bytes-like objects."""


class Skipped(NamedTuple):
    """An example that was skipped.

    Attributes:
        reason: why it cannot be decoded.
    """

    dataset_index: int
    example: str
    reason: str


class Source(Protocol):
    """A source of batches: a loader with its dataset, transform and collate function.

    Attributes:
        fields: checksums of the dataset; see :class:`DataDigest`.
    """

    examples: int
    fields: Mapping[str, int] = {}

    def start(self, number: int, count: int) -> None:
        """Prepare a process that was forked to read, the ``number``-th of ``count``."""

    def make(self, epoch: int, indices: Sequence[int]) -> Any:
        """Return the batch of these dataset indices; :class:`Shortened` if it lacks examples."""

    def make_here(self, epoch: int, indices: Sequence[int]) -> Any:
        """Return the same batch, and leave the script's own random numbers as they are."""

    def pack(self, batch: Any) -> Buffers:
        """Return a batch as buffers, of which the first describes the others."""

    def unpack(self, buffers: Buffers) -> Any:
        """Return the batch that :meth:`pack` was given; tensors share memory with the buffers."""

"""Which bytes of a training state each rank writes, and what stands before them.

What all ranks hold alike (parameters, optimizer state) is one stream of bytes, tensor after tensor,
of which every rank writes a part; everything else is written by rank 0, before the stream.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hvd_elastic import __version__
from hvd_elastic.checkpoint.files import ShardInfo
from hvd_elastic.checkpoint.header import OPAQUE, Header, TensorInfo

__all__ = ["SHARD_BYTES", "Content", "Position", "byte_range", "new_shard"]

SHARD_BYTES = 16 << 20
"""Smallest shard, where there are several: copying so much takes some milliseconds, and more
files would cost more than they save."""

_ALIGNMENT = 64


def shard_count(total: int, size: int) -> int:
    """How many of ``size`` ranks write a shard of a stream of ``total`` bytes.

    >>> [shard_count(total << 20, 4) for total in (0, 31, 32, 1000)]
    [1, 1, 2, 4]
    """
    return max(1, min(size, total // SHARD_BYTES))


def shard_index(rank: int, size: int, count: int) -> int | None:
    """Which shard a rank writes; None for none. They are spread over the ranks, so over hosts.

    >>> [shard_index(rank, 4, 2) for rank in range(4)]
    [0, None, 1, None]
    """
    index = -(-rank * count // size)
    return index if index < count and index * size // count == rank else None


def byte_range(index: int, count: int, total: int) -> tuple[int, int]:
    """First byte of a shard's part of the stream, and the one after its last.

    >>> [byte_range(index, 3, 1000) for index in range(3)]
    [(0, 320), (320, 640), (640, 1000)]
    """

    def cut(number: int) -> int:
        at = total * number // count
        return total if number == count else at // _ALIGNMENT * _ALIGNMENT

    return cut(index), cut(index + 1)


class Position(Protocol):
    """Where training stands."""

    step: int
    epoch: int
    examples: int

    def as_state(self) -> dict[str, int]:
        """Return everything as plain numbers."""


class Content(ABC):
    """A state at one step: the tensors that all ranks hold alike, and a copy of everything else.

    A frontend's subclass supplies what touches its tensors.

    Attributes:
        frontend: name of the framework.
        values: what is not a tensor, as :func:`~hvd_elastic.checkpoint.header.encode_values`
            encodes it; tensors stand there by name.
        stream: the tensors that all ranks hold alike, in their order in the stream.
        own: tensors that only rank 0 writes.
        pinned: whether copies go faster into memory that :meth:`make_buffer` makes for them.
    """

    frontend: str
    pinned: bool = False

    def __init__(self) -> None:
        self.values: Any = None
        self.stream: list[TensorInfo] = []
        self.own: list[TensorInfo] = []

    @property
    def names(self) -> list[str]:
        """Names of the stream's tensors."""
        return [tensor.name for tensor in self.stream]

    @property
    def total(self) -> int:
        """Length of the stream [bytes]."""
        return sum(tensor.bytes for tensor in self.stream)

    @property
    def layout(self) -> str:
        """Digest of what the stream is made of; ranks with the same can write one checkpoint."""
        described = [(tensor.name, tensor.shape, tensor.dtype) for tensor in self.stream]
        return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]

    def parts(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """(number of a tensor, first byte, byte after the last) of what is in a range."""
        at = 0
        for number, tensor in enumerate(self.stream):
            first, last = max(begin - at, 0), min(end - at, tensor.bytes)
            if first < last:
                yield number, first, last
            at += tensor.bytes

    def head(self, progress: Mapping[str, int], world: int) -> list[Any]:
        """Return what shard 0 begins with, in pieces: the header and all data but the stream."""
        opaque = self.encode_opaque()
        blobs = [TensorInfo(OPAQUE, "uint8", (len(opaque),), len(opaque))] if opaque else []
        header = Header(
            tensors=(*self.own, *blobs, *self.stream),
            progress=progress,
            world=world,
            frontend=self.frontend,
            library=__version__,
            values=self.values,
        )
        return [header.encode(), *self.own_data(), opaque]

    def make_buffer(self, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return memory for a copy, written to once: the system provides it only then.

        Raises:
            MemoryError: there is too little.
        """
        return np.full(size, 0, np.uint8)

    @abstractmethod
    def own_data(self) -> Iterable[Any]:
        """Return the bytes of each tensor of :attr:`own`, copied when the content was made."""

    @abstractmethod
    def encode_opaque(self) -> bytes:
        """Return the values that only this frontend can represent; nothing for none."""

    @abstractmethod
    def begin_copy(
        self, begin: int, end: int, target: np.ndarray[Any, Any], lasting: set[int]
    ) -> Callable[[], str | None]:
        """Copy a part of the stream into ``target``, now where a tensor may change at any time.

        Args:
            begin, end: the part.
            target: bytes of the same length.
            lasting: tensors that do not change before the rest is copied.

        Returns:
            What copies the rest, in another thread, and returns the name of a tensor that was
            changed nevertheless.
        """


def new_shard(
    content: Content,
    progress: Position,
    rank: int,
    size: int,
    generation: int = 0,
    life: str = "",
    world: int | None = None,
) -> ShardInfo | None:
    """What one of ``size`` ranks that write ``content`` has to write; None for nothing.

    ``world``: the ranks that train, if others than those write.
    """
    total = content.total
    count = shard_count(total, size)
    index = shard_index(rank, size, count)
    if index is None:
        return None
    begin, end = byte_range(index, count, total)
    return ShardInfo(
        path=Path(),
        step=progress.step,
        epoch=progress.epoch,
        examples=progress.examples,
        generation=generation,
        life=life,
        index=index,
        count=count,
        host=os.environ.get("HVD_ELASTIC_HOST") or socket.gethostname(),
        rank=rank,
        layout=content.layout,
        header=0,
        begin=begin,
        end=end,
        total=total,
        run=os.environ.get("HVD_ELASTIC_RUN_ID", ""),
        world=size if world is None else world,
    )

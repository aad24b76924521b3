"""Divides a training state among the ranks that write it as shards of a checkpoint.

The state that all ranks share (parameters, optimizer state) is one stream of bytes, tensor after
tensor, of which each rank writes a part. Rank 0 writes everything else, before the stream.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hvd_elastic import __version__
from hvd_elastic.checkpoint.header import (
    OPAQUE,
    RESERVED,
    Header,
    TensorInfo,
    encode_values,
    unused_name,
)
from hvd_elastic.checkpoint.shards import ShardInfo

_CHUNK_BYTES = 1 << 19  # stays in a processor's cache between the passes over it
_PATTERNS = {
    "float16": ("<u2", 0x7C00),
    "bfloat16": ("<u2", 0x7F80),
    "float32": ("<u4", 0x7F800000),
    "float64": ("<u8", 0x7FF0 << 48),
    "complex64": ("<u4", 0x7F800000),
    "complex128": ("<u8", 0x7FF0 << 48),
    "float8_e4m3fn": ("u1", 0x7F),  # the only NaN; it has no infinity
    "float8_e5m2": ("u1", 0x7C),
}
"""For each type, the integer of a number's size, and the bits that are all set in NaN and infinity:
those of the exponent."""


def has_not_finite(dtype: str, data: np.ndarray[Any, Any], first: int = 0) -> bool:
    """Return whether a number in the bytes of a tensor is NaN or infinity.

    Args:
        dtype: name of the tensor's type; a type without NaN has none.
        data: a contiguous part of the tensor's bytes. Numbers that are cut are left out.
        first: where in the tensor the part begins [bytes].

    >>> has_not_finite("float32", np.array([1.0, np.nan], np.float32).view(np.uint8))
    True
    """
    if dtype not in _PATTERNS:
        return False
    kind, mask = _PATTERNS[dtype]
    size = np.dtype(kind).itemsize
    data = data[-first % size :]
    numbers = data[: len(data) // size * size].view(kind)
    step = _CHUNK_BYTES // size
    chunks = (numbers[at : at + step] for at in range(0, len(numbers), step))
    return any(int((chunk & chunk.dtype.type(mask)).max()) == mask for chunk in chunks)


SHARD_BYTES = 16 << 20
"""Smallest size of a shard when there are several: copying this many bytes takes some milliseconds,
so more and smaller files would cost more time than they save."""

_ALIGNMENT = 64  # bytes; shards begin at multiples of a cache line


def shard_count(total: int, size: int) -> int:
    """Return how many of ``size`` ranks write a shard of a stream of ``total`` bytes.

    >>> [shard_count(total << 20, 4) for total in (0, 31, 32, 1000)]
    [1, 1, 2, 4]
    """
    return max(1, min(size, total // SHARD_BYTES))


def shard_index(rank: int, size: int, count: int) -> int | None:
    """Return which shard a rank writes, None for none; shards are spread evenly over the ranks.

    >>> [shard_index(rank, 4, 2) for rank in range(4)]
    [0, None, 1, None]
    """
    index = -(-rank * count // size)
    return index if index < count and index * size // count == rank else None


def byte_range(index: int, count: int, total: int) -> tuple[int, int]:
    """Return the first byte of a shard's part of the stream, and the byte after its last.

    >>> [byte_range(index, 3, 1000) for index in range(3)]
    [(0, 320), (320, 640), (640, 1000)]
    """

    def cut(number: int) -> int:
        at = total * number // count
        return total if number == count else at // _ALIGNMENT * _ALIGNMENT

    return cut(index), cut(index + 1)


class Position(Protocol):
    """A point in training, as far as checkpoints need it."""

    step: int
    epoch: int
    examples: int

    def as_state(self) -> dict[str, int]:
        """Return all fields as plain numbers."""


class Content(ABC):
    """The training state at one step: tensors shared by all ranks, and a copy of everything else.

    A subclass for each framework implements the access to its tensors.

    Args:
        nested: nested dicts, lists, tuples, tensors and plain values.
        shared: keys (such as addresses) of the tensors that are the same on every rank.
        copy_own: copy the other tensors; for the rank that writes them.

    Raises:
        ScriptError: a value cannot be put into a checkpoint; names its place and its type.

    Attributes:
        values: values that are not tensors, encoded by
            :func:`~hvd_elastic.checkpoint.header.encode_values`; they refer to tensors by name.
        stream: tensors that are the same on all ranks, in the order of the stream.
        own: tensors that only rank 0 writes.
        tensors: live tensors of the stream, in its order.
        weights: returns whether a tensor, by its name, is a weight that has to be finite.
        pinned: whether :meth:`make_buffer` returns pinned memory, for faster copies from a GPU.
    """

    frontend: str
    pinned: bool = False

    def __init__(
        self, nested: Any = None, shared: Container[int] = (), *, copy_own: bool = True
    ) -> None:
        self.stream: list[TensorInfo] = []
        self.own: list[TensorInfo] = []
        self.tensors: list[Any] = []
        self.weights: Callable[[str], bool] = lambda _: False
        self._shared = shared
        self._copy_own = copy_own
        self._own_data: list[Any] = []
        self._opaque: list[Any] = []
        self._taken = set(RESERVED)
        self._names: dict[object, str] = {}
        self.values: Any = encode_values(nested, self._encode_leaf)

    def _encode_leaf(self, value: Any, path: tuple[Any, ...]) -> Any:
        """Return the encoding of a value of the framework; NotImplemented for others."""
        return NotImplemented

    def name_tensor(
        self, key: object, path: tuple[Any, ...], tensor: Any, dtype: str, *, shared: bool
    ) -> str:
        """Name a tensor, and add it to the stream, or to :attr:`own` with a copy of its data.

        Args:
            key: equal for the same tensor, which is stored once; None: it may be stored again.
            path: keys to it in the state.
            shared: whether it is the same on all ranks.

        Returns:
            Its name.
        """
        if key in self._names:
            return self._names[key]
        # The first key is the kind of value.
        name = unused_name(".".join(map(str, path[1:])), self._taken)
        self._taken.add(name)
        if key is not None:
            self._names[key] = name
        info = TensorInfo(name, dtype, tuple(tensor.shape), tensor.nbytes)
        (self.stream if shared else self.own).append(info)
        if shared:
            self.tensors.append(tensor)
        elif self._copy_own:
            self._own_data.append(self._copied(tensor))
        return name

    @property
    def names(self) -> list[str]:
        """Return the names of the stream's tensors."""
        return [tensor.name for tensor in self.stream]

    @property
    def total(self) -> int:
        """Return the length of the stream [bytes]."""
        return sum(tensor.bytes for tensor in self.stream)

    @property
    def layout(self) -> str:
        """Return a digest of the stream's tensors; ranks need the same one to write together."""
        described = [(tensor.name, tensor.shape, tensor.dtype) for tensor in self.stream]
        return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]

    def parts(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield (index, first byte, byte after the last) of each tensor's part in a range."""
        at = 0
        for number, tensor in enumerate(self.stream):
            first, last = max(begin - at, 0), min(end - at, tensor.bytes)
            if first < last:
                yield number, first, last
            at += tensor.bytes

    def not_finite(self, begin: int, end: int, data: np.ndarray[Any, Any], *, own: bool) -> str:
        """Return the name of a weight with NaN or infinity in a copy of a part; "" for none.

        Args:
            begin, end: range of the stream [bytes].
            data: copy of that range.
            own: whether to look at the copy of :attr:`own` as well.
        """
        at = 0
        for number, first, last in self.parts(begin, end):
            tensor = self.stream[number]
            part = data[at : at + last - first]
            at += last - first
            if self.weights(tensor.name) and has_not_finite(tensor.dtype, part, first):
                return tensor.name
        for tensor, copied in zip(self.own, self._own_data, strict=True) if own else ():
            if self.weights(tensor.name) and has_not_finite(tensor.dtype, copied):
                return tensor.name
        return ""

    def head(self, progress: Mapping[str, Any], world: int) -> list[Any]:
        """Return the beginning of shard 0 in pieces: the header and all data before the stream."""
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
        return [header.encode(), *self._own_data, opaque]

    def make_buffer(self, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return memory for a copy.

        It is filled once, because the system provides pages of memory only at the first write.

        Raises:
            MemoryError: there is too little memory.
        """
        return np.full(size, 0, np.uint8)

    def _copied(self, tensor: Any) -> Any:
        """Return the bytes of a tensor as they are now, in host memory."""
        raise NotImplementedError

    def encode_opaque(self) -> bytes:
        """Return the encoded values that only this framework can represent; empty for none."""
        return b""

    @abstractmethod
    def begin_copy(
        self, begin: int, end: int, target: np.ndarray[Any, Any], lasting: set[int]
    ) -> Callable[[], str | None]:
        """Copy the tensors of a part of the stream that may change; return a function for the rest.

        Args:
            begin, end: range of the stream [bytes].
            target: buffer of the same length.
            lasting: indices of tensors that do not change until the rest is copied.

        Returns:
            A function that copies the rest, to be called in another thread. It returns the name of
            a tensor that changed nevertheless, None if all is well.
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
    """Return the shard that a rank has to write; None if it writes none.

    Args:
        rank, size: rank among the ranks that write, and their number.
        generation, life: generation, and leader term that numbers it.
        world: number of ranks that train, if it differs from ``size``.
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

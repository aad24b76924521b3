"""Training state to and from checkpoint shards, while training goes on.

What a checkpoint is as files stands in :mod:`hvd_elastic.checkpoint.files`; here PyTorch puts a
nest of plain data and tensors into one. What all ranks hold alike (parameters, optimizer state) is
one stream of bytes, of which every rank writes its part; everything else is in the header of
shard 0, as rank 0 has it.

Training waits for no disk and hardly for the copy. Parameters and optimizer state change in
``optimizer.step()`` alone, so they are copied by a thread beside the next forward and backward
pass, and only that step waits, for what is not copied by then. The copy goes into a buffer that is
kept: memory that is written to for the first time costs many times the copy.

Files are read with ``weights_only=True``, so that a file from somewhere else cannot run code, and
:func:`take_stock` refuses in time what could not be read back so.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import pickle
import socket
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hvd_elastic.checkpoint.files import HashingWriter, ShardInfo, parse_manifest, write_shard
from hvd_elastic.errors import CheckpointError, HvdElasticError, ScriptError
from hvd_elastic.torch.progress import Progress

__all__ = [
    "SHARD_BYTES",
    "Content",
    "ShardWriter",
    "byte_range",
    "load_checkpoint",
    "new_shard",
    "shard_count",
    "shard_index",
    "take_stock",
]

log = logging.getLogger(__name__)

SHARD_BYTES = 16 << 20
"""No shard of several is smaller: a copy of so much takes some milliseconds, and files, fetches
and renames would cost more than they save."""

_PLACE = "__hvd_elastic_tensor__"
_ALIGNMENT = 64
_READ_BYTES = 4 << 20


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


# -- what there is to write

_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    bytearray,
    torch.Size,
    torch.dtype,
    torch.device,
)


@dataclass
class Content:
    """A state at one step: the shared stream as live tensors, and everything else as a copy.

    Attributes:
        rest: the nest, with a place holder for each tensor of the stream; own tensors as copies.
        names, tensors: of the stream, in its order.
        total: length of the stream [bytes].
    """

    rest: Any = None
    names: list[str] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    total: int = 0

    @property
    def layout(self) -> str:
        """Digest of what the stream is made of; ranks with the same can write one checkpoint."""
        return hashlib.sha256(json.dumps(self._described()).encode()).hexdigest()[:16]

    def _described(self) -> list[tuple[str, list[int], str]]:
        return [
            (name, list(tensor.shape), str(tensor.dtype))
            for name, tensor in zip(self.names, self.tensors, strict=True)
        ]

    def parts(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """(number of a tensor, first byte, byte after the last) of what is in a range."""
        at = 0
        for number, tensor in enumerate(self.tensors):
            size = tensor.numel() * tensor.element_size()
            first, last = max(begin - at, 0), min(end - at, size)
            if first < last:
                yield number, first, last
            at += size

    def header(self, progress: Progress) -> bytes:
        """The beginning of shard 0: everything but the stream, and how to cut the stream."""
        stream = [(list(tensor.shape), tensor.dtype) for tensor in self.tensors]
        buffer = io.BytesIO()
        torch.save({"rest": self.rest, "stream": stream, "progress": progress.as_state()}, buffer)
        return buffer.getvalue()


def take_stock(nested: Any, shared: set[int], *, copy_own: bool = True) -> Content:
    """Sort a nest of dicts, lists, tuples, tensors and plain values into a :class:`Content`.

    Tensors that are one and the same in ``nested`` (tied weights) are taken once. NumPy scalars
    become Python's, subclasses of dict and tuple (but ``OrderedDict`` and ``Counter``) become
    plain, since a file could not be read with them.

    Args:
        nested: the state.
        shared: ``data_ptr()`` of the tensors that every rank holds alike.
        copy_own: copy the others, on this rank, which writes them.

    Raises:
        ScriptError: a value cannot be put into a checkpoint; names where it is, and its type.
    """
    stock = _Stock(shared, copy_own)
    stock.content.rest = stock.sort(nested, ())
    return stock.content


class _Stock:
    def __init__(self, shared: set[int], copy_own: bool) -> None:
        self.content = Content()
        self._shared = shared
        self._copy_own = copy_own
        self._seen: dict[Any, Any] = {}

    def sort(self, value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value.detach(), path)
        if type(value) in _PLAIN:
            return bytearray(value) if isinstance(value, bytearray) else value
        if isinstance(value, dict):
            items = (
                (self._key(key, path), self.sort(item, (*path, key))) for key, item in value.items()
            )
            if isinstance(value, OrderedDict):
                ordered = OrderedDict(items)
                # Modules keep the versions of their state there; load_state_dict looks at it.
                if hasattr(value, "_metadata"):
                    metadata = self.sort(value._metadata, (*path, "_metadata"))
                    ordered._metadata = metadata  # type: ignore[attr-defined]
                return ordered
            return Counter(dict(items)) if isinstance(value, Counter) else dict(items)
        if isinstance(value, (list, tuple, set)):
            parts = [self.sort(item, (*path, number)) for number, item in enumerate(value)]
            if isinstance(value, list):
                return parts
            return tuple(parts) if isinstance(value, tuple) else set(parts)
        if isinstance(value, np.generic) and type(value.item()) in _PLAIN:
            return value.item()
        raise ScriptError(
            f"{_where(path)} is a {type(value).__module__}.{type(value).__qualname__} and "
            "cannot be put into a checkpoint; use numbers, strings, tensors (torch.from_numpy), or "
            "lists, tuples, sets and dicts of them"
        )

    def _key(self, key: Any, path: tuple[Any, ...]) -> Any:
        try:
            return self.sort(key, ())
        except ScriptError as error:
            raise ScriptError(f"in a key of {_where(path)}: {error}") from error

    def _tensor(self, tensor: torch.Tensor, path: tuple[Any, ...]) -> Any:
        if tensor.layout is not torch.strided or tensor.is_quantized or not tensor.data_ptr():
            return tensor.to("cpu", copy=True)
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if place not in self._seen:
            if tensor.data_ptr() in self._shared:
                self._seen[place] = {_PLACE: len(self.content.tensors)}
                self.content.names.append(".".join(str(key) for key in path[1:]))
                self.content.tensors.append(tensor)
                self.content.total += tensor.numel() * tensor.element_size()
            else:
                self._seen[place] = tensor.to("cpu", copy=True) if self._copy_own else None
        return self._seen[place]


def _where(path: tuple[Any, ...]) -> str:
    return "".join(f"[{key!r}]" for key in path) or "the value"


# -- writing


@dataclass
class _Job:
    """One shard on its way."""

    content: Content
    progress: Progress
    shard: ShardInfo
    buffer: torch.Tensor
    copied: threading.Event = field(default_factory=threading.Event)
    blocked_s: float = 0.0


class ShardWriter:
    """Copies and writes the shards of one rank, one at a time, in a thread of its own.

    Args:
        folder: where to.
        finish: makes a written shard findable, in that thread.
        on_done: told of each shard that is finished, and for how long training stood still for
            it [s], in that thread.
        on_error: told why one was not written, in that thread.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        finish: Callable[[ShardInfo], object],
        on_done: Callable[[ShardInfo, float], None],
        on_error: Callable[[HvdElasticError], None],
    ) -> None:
        self._folder = Path(folder)
        self._finish = finish
        self._on_done = on_done
        self._on_error = on_error
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._thread: threading.Thread | None = None
        self._job: _Job | None = None

    @property
    def busy(self) -> bool:
        """Whether a shard is being written, or room for one being made."""
        return self._thread is not None and self._thread.is_alive()

    def prepare(self, size: int, *, pinned: bool = False) -> None:
        """Make room for a shard of ``size`` bytes, beside training; see :attr:`busy`."""
        if not self.busy and not self._fits(size, pinned):

            def make_room() -> None:
                try:
                    self._buffer = _room(size, pinned)
                except RuntimeError as error:  # PyTorch's word for no memory
                    self._on_error(_no_room(size, error))

            self._start(make_room)

    def begin(
        self,
        content: Content,
        progress: Progress,
        shard: ShardInfo,
        lasting: set[int],
        began: float,
    ) -> None:
        """Write the shard with this state; returns before it is copied.

        Args:
            content: the state now.
            progress: where it stands.
            shard: which part of it.
            lasting: ``data_ptr()`` of tensors that do not change before :meth:`settle`; all
                others are copied before this returns.
            began: since when training stands still for this [s, monotonic].
        """
        self.flush()
        size = shard.end - shard.begin
        pinned = any(tensor.is_cuda for tensor in content.tensors)
        if not self._fits(size, pinned):
            try:
                self._buffer = _room(size, pinned)
            except RuntimeError as error:
                self._on_error(_no_room(size, error))
                return
        job = self._job = _Job(content, replace(progress), shard, self._buffer[:size])
        later: list[_Piece] = []
        at = 0
        for number, first, last in content.parts(shard.begin, shard.end):
            piece = _Piece(content, number, first, last, job.buffer[at : at + last - first])
            at += last - first
            # What has to be put in order first is copied by that, so better now than later.
            if content.tensors[number].data_ptr() in lasting and piece.in_order:
                later.append(piece)
            else:
                piece.copy()
        streams = _streams({piece.source.device for piece in later if piece.source.is_cuda})
        self._start(lambda: self._work(job, later, streams))
        job.blocked_s = time.monotonic() - began

    def settle(self) -> None:
        """Wait until what is being written is copied: from now on everything may change."""
        job = self._job
        if job is not None and not job.copied.is_set():
            began = time.monotonic()
            job.copied.wait()
            job.blocked_s += time.monotonic() - began

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is being written; False after ``timeout_s``."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return not self.busy

    def _fits(self, size: int, pinned: bool) -> bool:
        return self._buffer.numel() >= size and self._buffer.is_pinned() == pinned

    def _start(self, work: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=work, name="hvd_elastic checkpoint", daemon=True)
        self._thread.start()

    def _work(self, job: _Job, later: list[_Piece], streams: dict[torch.device, Any]) -> None:
        shard = job.shard
        try:
            try:
                for piece in later:
                    if piece.source.is_cuda:
                        with torch.cuda.stream(streams[piece.source.device]):
                            piece.copy(non_blocking=True)
                    else:
                        piece.copy()
                for stream in streams.values():
                    stream.synchronize()
                changed = next((piece.name for piece in later if piece.changed), None)
            finally:
                job.copied.set()
            if changed is not None:
                raise CheckpointError(
                    f"the checkpoint of step {shard.step} was not written: {changed} was changed "
                    "between two steps, while it was copied. Change parameters in or after "
                    "optimizer.step(), not before it"
                )
            header = job.content.header(job.progress) if shard.index == 0 else b""
            shard = replace(shard, header=len(header))

            def write(file: HashingWriter) -> None:
                file.write(header)
                file.write(job.buffer.numpy())

            written = write_shard(self._folder, shard, write)
            self._finish(written)
        except HvdElasticError as error:
            self._tell(self._on_error, error)
        except Exception as error:  # training goes on without this checkpoint
            log.debug("writing a checkpoint failed", exc_info=True)
            wrapped = CheckpointError(
                f"the checkpoint of step {shard.step} was not written to {self._folder}: "
                f"{type(error).__name__}: {error}"
            )
            self._tell(self._on_error, wrapped)
        else:
            self._tell(self._on_done, written, job.blocked_s)
        finally:
            self._job = None

    @staticmethod
    def _tell(callback: Callable[..., None], *result: Any) -> None:
        try:
            callback(*result)
        except Exception:
            log.exception("the callback for a checkpoint failed")


class _Piece:
    """Some bytes of one tensor, and where they go."""

    def __init__(
        self, content: Content, number: int, first: int, last: int, target: torch.Tensor
    ) -> None:
        self.name = content.names[number]
        self._tensor = content.tensors[number]
        self._version = self._tensor._version
        self.in_order = self._tensor.is_contiguous()
        self.source = self._tensor.reshape(-1).view(torch.uint8)[first:last]
        self._target = target

    def copy(self, *, non_blocking: bool = False) -> None:
        self._target.copy_(self.source, non_blocking=non_blocking)

    @property
    def changed(self) -> bool:
        return self._tensor._version != self._version


def _room(size: int, pinned: bool) -> torch.Tensor:
    room = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    return room.zero_()  # the system gives memory when it is first written to


def _no_room(size: int, error: RuntimeError) -> CheckpointError:
    said = str(error).partition("\n")[0]
    return CheckpointError(
        f"no checkpoint was written: there is no memory for a copy of {size} bytes ({said}). "
        "More ranks, or hosts with more memory, make it smaller"
    )


def _streams(devices: set[torch.device]) -> dict[torch.device, Any]:
    """A stream for each GPU, that begins after what the GPU has been given so far."""
    streams = {}
    for device in devices:
        streams[device] = torch.cuda.Stream(device)
        streams[device].wait_stream(torch.cuda.current_stream(device))
    return streams


def new_shard(
    content: Content, progress: Progress, rank: int, size: int, generation: int = 0, life: str = ""
) -> ShardInfo | None:
    """What this rank has to write of ``content``; None for nothing."""
    count = shard_count(content.total, size)
    index = shard_index(rank, size, count)
    if index is None:
        return None
    begin, end = byte_range(index, count, content.total)
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
        total=content.total,
        tensors=tuple(
            (content.names[number], first, last)
            for number, first, last in content.parts(begin, end)
        ),
        run=os.environ.get("HVD_ELASTIC_RUN_ID", ""),
    )


# -- reading


def load_checkpoint(path: Path | str) -> dict[str, Any]:
    """What a checkpoint holds, with all tensors on the CPU, however many ranks wrote it.

    Args:
        path: its manifest; the shards lie beside it.

    Returns:
        ``objects`` (name → ``state_dict``), ``plain`` (name → value) and ``progress``.

    Raises:
        CheckpointError: there is no such file, or it is not what this program wrote there.
    """
    path = Path(path)
    try:
        info = parse_manifest(json.loads(path.read_text(encoding="utf-8")), path.parent)
        with contextlib.closing(_Reader(info.shards)) as reader:
            return _read_state(reader, info.shards[0].header)
    except (RuntimeError, ValueError, EOFError, KeyError, TypeError, pickle.UnpicklingError) as why:
        said = str(why).strip().partition("\n")[0]
        raise CheckpointError(
            f"checkpoint {path} cannot be loaded, it is damaged or not one of ours: {said}; use an "
            "older checkpoint of the same folder"
        ) from why
    except OSError as error:
        named = error.filename or path
        raise CheckpointError(
            f"checkpoint {path} cannot be read: {named}: {error.strerror or error}"
        ) from error


def _read_state(reader: _Reader, header: int) -> dict[str, Any]:
    found = torch.load(io.BytesIO(reader.take(header)), map_location="cpu", weights_only=True)
    tensors = []
    for shape, dtype in found["stream"]:
        tensor = torch.empty(shape, dtype=dtype)
        reader.fill(tensor.reshape(-1).view(torch.uint8))
        tensors.append(tensor)
    reader.end()
    return {**_fill(found["rest"], tensors), "progress": found["progress"]}


class _Reader:
    """The bytes of all shards one after the other, each verified when it has been read."""

    def __init__(self, shards: tuple[ShardInfo, ...]) -> None:
        self._shards = iter(shards)
        self._file: Any = None
        self._left = 0
        self._next()

    def take(self, size: int) -> bytes:
        data = bytearray(size)
        self._read(memoryview(data))
        return bytes(data)

    def fill(self, tensor: torch.Tensor) -> None:
        self._read(tensor.numpy().data)

    def end(self) -> None:
        while self._file is not None:
            self._check()
            self._next()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _read(self, view: memoryview) -> None:
        while len(view):
            while not self._left:
                self._check()
                self._next()
                if self._file is None:
                    raise EOFError("its shards are shorter than what is in them")
            size = self._file.readinto(view[: min(len(view), self._left, _READ_BYTES)])
            if not size:
                raise EOFError(f"{self._shard.path.name} is truncated")
            self._hash.update(view[:size])
            self._left -= size
            view = view[size:]

    def _next(self) -> None:
        self.close()
        shard = next(self._shards, None)
        self._file = None
        if shard is not None:
            self._shard = shard
            self._file = shard.path.open("rb", buffering=0)
            self._left = shard.bytes
            self._hash = hashlib.sha256()

    def _check(self) -> None:
        if self._left or self._hash.hexdigest() != self._shard.sha256:
            raise ValueError(f"{self._shard.path.name} is corrupted: its SHA-256 is another")


def _fill(value: Any, tensors: list[torch.Tensor]) -> Any:
    """``value`` with the tensors in their places."""
    if isinstance(value, dict):
        if set(value) == {_PLACE}:
            return tensors[value[_PLACE]]
        for key, item in value.items():
            value[key] = _fill(item, tensors)
        return value
    if isinstance(value, (list, tuple)):
        parts = [_fill(item, tensors) for item in value]
        return parts if isinstance(value, list) else type(value)(parts)
    return value

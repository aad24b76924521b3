"""Converts the state of a PyTorch training to the content of checkpoints and back.

:mod:`hvd_elastic.checkpoint` divides, writes and reads checkpoints. This module finds the tensors
in nested plain data, copies them, and puts them back. Nothing read from a file can run code: values
that only PyTorch can represent are read with ``weights_only=True``.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hvd_elastic.checkpoint.header import TensorInfo
from hvd_elastic.checkpoint.reader import open_checkpoint
from hvd_elastic.checkpoint.stream import Content

_PIECE_BYTES = 16 << 20  # bounds the memory for a copy of a GPU tensor's bytes on the host


# -- writing


class TorchContent(Content):
    """Nested dicts, lists, tuples, tensors and plain values; tensors are shared by ``data_ptr()``.

    A tensor that occurs several times (tied weights) is stored once.
    """

    frontend = "torch"

    def _encode_leaf(self, value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, torch.Tensor):
            tensor = value.detach()
            if tensor.layout is torch.strided and not tensor.is_quantized:
                return {"$tensor": self._add_tensor(tensor, path)}
            value = tensor.to("cpu", copy=True)
        elif not isinstance(value, (torch.Size, torch.dtype, torch.device)):
            return NotImplemented
        self._opaque.append(value)
        return {"$opaque": len(self._opaque) - 1}

    def _add_tensor(self, tensor: torch.Tensor, path: tuple[Any, ...]) -> str:
        address = tensor.data_ptr()
        place = (tensor.device, address, tensor.dtype, tensor.shape, tensor.stride())
        key, dtype = place if address else None, dtype_name(tensor.dtype)
        shared = address in self._shared
        self.pinned |= shared and tensor.is_cuda
        return self.name_tensor(key, path, tensor, dtype, shared=shared)

    def _copied(self, tensor: torch.Tensor) -> np.ndarray[Any, Any]:
        copy = tensor.to("cpu", copy=True)
        return _bytes_of(copy).numpy()

    def encode_opaque(self) -> bytes:
        """Return the values that only PyTorch can represent, serialised; empty for none."""
        if not self._opaque:
            return b""
        buffer = io.BytesIO()
        torch.save(self._opaque, buffer)
        return buffer.getvalue()

    def make_buffer(self, size: int) -> np.ndarray[Any, Any]:
        """Return pinned memory, which a GPU can write directly, if tensors need it."""
        if not self.pinned:
            return super().make_buffer(size)
        try:
            # zero_() has the system provide the memory now: it does so at the first write.
            return torch.empty(size, dtype=torch.uint8, pin_memory=True).zero_().numpy()
        except RuntimeError as error:
            raise MemoryError(str(error).partition("\n")[0]) from error

    def begin_copy(
        self, begin: int, end: int, target: np.ndarray[Any, Any], lasting: set[int]
    ) -> Callable[[], str | None]:
        """See the base class; ``lasting`` holds ``data_ptr()`` values."""
        memory = torch.from_numpy(target)
        later: list[_Piece] = []
        at = 0
        for number, first, last in self.parts(begin, end):
            tensor, name = self.tensors[number], self.stream[number].name
            piece = _Piece(name, tensor, first, last, memory[at : at + last - first])
            at += last - first
            # Making a tensor contiguous copies it anyway, so it is not worth deferring.
            if tensor.data_ptr() in lasting and tensor.is_contiguous():
                later.append(piece)
            else:
                piece.copy()
        streams = _streams({piece.source.device for piece in later if piece.source.is_cuda})

        def copy_rest() -> str | None:
            for piece in later:
                if piece.source.is_cuda:
                    with torch.cuda.stream(streams[piece.source.device]):
                        piece.copy(non_blocking=True)
                else:
                    piece.copy()
            for stream in streams.values():
                stream.synchronize()
            return next((piece.name for piece in later if piece.changed), None)

        return copy_rest


class _Piece:
    """A range of bytes of one tensor, and the memory that it is copied to."""

    def __init__(
        self, name: str, tensor: torch.Tensor, first: int, last: int, target: torch.Tensor
    ) -> None:
        self.name = name
        self._tensor = tensor
        self._version = tensor._version
        self.source = _bytes_of(tensor)[first:last]
        self._target = target

    def copy(self, *, non_blocking: bool = False) -> None:
        self._target.copy_(self.source, non_blocking=non_blocking)

    @property
    def changed(self) -> bool:
        return self._tensor._version != self._version


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)


def content_of(tensor: torch.Tensor) -> list[Callable[[], np.ndarray[Any, Any]]]:
    """Return functions that return the bytes of a tensor, piece by piece.

    Each call copies a piece to the host if needed, so only pieces in use take memory.
    """
    tensor = tensor.detach()
    pieces = _bytes_of(tensor).split(_PIECE_BYTES) if tensor.is_contiguous() else (tensor,)
    return [partial(_bytes_on_host, piece) for piece in pieces]


def _bytes_on_host(piece: torch.Tensor) -> np.ndarray[Any, Any]:
    return _bytes_of(piece.cpu().contiguous()).numpy()


def _streams(devices: set[torch.device]) -> dict[torch.device, Any]:
    """Return a CUDA stream for each GPU, ordered behind the work queued there so far."""
    streams = {}
    for device in devices:
        streams[device] = torch.cuda.Stream(device)
        streams[device].wait_stream(torch.cuda.current_stream(device))
    return streams


# -- reading


def load_checkpoint(path: Path | str, name: str | None = None) -> dict[str, Any]:
    """Return the content of a checkpoint on the CPU; see :meth:`CheckpointReader.load`."""
    with open_checkpoint(path) as reader:
        return reader.load("torch", _new_tensor, decode_opaque=_unpickle, name=name)


def load_object(path: Path | str, name: str) -> dict[str, Any]:
    """Return the ``state_dict`` of one object of a checkpoint."""
    return load_checkpoint(path, name)


def _new_tensor(info: TensorInfo) -> tuple[torch.Tensor, Any]:
    tensor = torch.empty(info.shape, dtype=dtype_named(info.dtype))
    return tensor, _bytes_of(tensor).numpy()


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of one of PyTorch's types, such as ``float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """Return PyTorch's type of a name such as ``float32``."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"this version of PyTorch has no type {name!r}")
    return dtype


def _unpickle(data: bytes | bytearray) -> Any:
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(str(error)) from error

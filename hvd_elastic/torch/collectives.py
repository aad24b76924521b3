"""Horovod's collectives on PyTorch tensors, which the Horovod communicator is built on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from hvd_elastic.communicator.interface import Collectives
from hvd_elastic.communicator.ring import load_horovod

_Received: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
_GATHERED_AS = {torch.bool: torch.uint8, torch.bfloat16: torch.float16}
"""Types that Horovod does not gather, with those of as many bits that it does."""


def to_reduce(value: torch.Tensor, *, average: bool) -> tuple[torch.Tensor, _Received]:
    """Return a copy of a tensor that Horovod can reduce, and what turns the result back.

    Types of less than 32 bits are added up in float32. As in PyTorch, truth values and whole
    numbers add up to an int64; their mean is a float64.
    """
    if value.is_complex():
        parts = torch.view_as_real(value.resolve_conj())
        return parts.clone(memory_format=torch.contiguous_format), torch.view_as_complex
    if value.is_floating_point():
        result = value.dtype
        kind = result if result.itemsize >= 4 else torch.float32
    else:
        kind = result = torch.float64 if average else torch.int64
    copy = value.to(kind, copy=True, memory_format=torch.contiguous_format)
    return copy, lambda reduced: reduced.to(result)


def to_gather(value: torch.Tensor) -> tuple[torch.Tensor, _Received]:
    """Return a tensor that Horovod can gather, and what turns the result back; a number is a row.

    It may share the memory.
    """
    value = value.reshape(value.shape or (1,)).resolve_conj().contiguous()
    if value.is_complex():
        return torch.view_as_real(value), torch.view_as_complex
    sent = value.view(_GATHERED_AS.get(value.dtype, value.dtype))
    return sent, lambda gathered: gathered.view(value.dtype)


class TorchCollectives(Collectives):
    """Horovod's collectives on PyTorch tensors, which change them in place."""

    framework = "PyTorch"

    def __init__(self) -> None:
        self.horovod = horovod = load_horovod("torch")
        self._begins = {
            "allreduce": horovod.allreduce_async_,
            "broadcast": horovod.broadcast_async_,
            "allgather": horovod.allgather_async,
            "alltoall": horovod.alltoall_async,
        }

    def warm(self) -> None:
        """Have NCCL detect the machine's topology and load its kernels."""
        if torch.cuda.is_available() and self.horovod.nccl_built():
            alone = torch.zeros(1, device="cuda")
            torch.cuda.nccl.all_reduce([alone], [torch.empty_like(alone)])

    def from_numpy(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array)

    def to_numpy(self, tensor: torch.Tensor) -> np.ndarray:
        return tensor.numpy()

    @contextlib.contextmanager
    def as_bytes(
        self, tensors: Sequence[torch.Tensor], *, receives: bool
    ) -> Iterator[list[list[torch.Tensor]]]:
        """Yield the tensors as bytes, grouped by device; Horovod does not support every type."""
        with torch.no_grad():
            in_order = [tensor.detach().contiguous() for tensor in tensors]
            devices: dict[torch.device, list[torch.Tensor]] = {}
            for tensor in in_order:
                if tensor.numel():
                    flat = tensor.reshape(-1).view(torch.uint8)
                    devices.setdefault(tensor.device, []).append(flat)
            yield list(devices.values())
            for tensor, ordered in zip(tensors, in_order, strict=True):
                if receives and tensor.data_ptr() != ordered.data_ptr():
                    tensor.copy_(ordered)

    def join(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(pieces))

    def begin(self, kind: str, tensor: torch.Tensor, name: str, *more: Any, **options: Any) -> int:
        handle: int = self._begins[kind](tensor, *more, name=name, **options)
        return handle

    def synchronize(self, handle: int) -> Any:
        result = self.horovod.synchronize(handle)
        # Horovod's all-to-all returns the received tensor together with the received sizes.
        return result[0] if isinstance(result, tuple) else result

    def barrier(self) -> None:
        self.horovod.barrier()

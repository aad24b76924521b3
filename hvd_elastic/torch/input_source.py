"""What a loader reads, in any process: examples by index, transformed, collated, and as buffers."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvd_elastic.training.input.indexed import IndexedSource
from hvd_elastic.training.input.link import Buffers

_PLAIN = frozenset(
    (
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    )
)
"""Types of tensors that are sent as their bytes."""


class _Pickler(pickle.Pickler):
    """Pickles tensors of the CPU as their bytes, which stay out of the stream."""

    def reducer_override(self, value: Any) -> Any:
        """Return how a tensor is pickled."""
        if (
            type(value) is torch.Tensor
            and value.device.type == "cpu"
            and value.layout is torch.strided
            and value.dtype in _PLAIN
        ):
            flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
            content: Any = flat.numpy()
            return _tensor, (pickle.PickleBuffer(content), value.dtype, tuple(value.shape))
        return NotImplemented


class LoaderSource(IndexedSource):
    """Reads a data set for a loader.

    Args:
        dataset: the script's data set.
        examples: number of its examples.
        collate: the script's collate function.
        seed: seed of the data order.
        started: called in a process that was forked to read, with its number.
        pins: whether batches are put into pinned memory.
    """

    pickler = _Pickler

    def __init__(
        self,
        dataset: Any,
        examples: int,
        collate: Callable[[list[Any]], Any],
        seed: int,
        started: Callable[[int], None],
        *,
        pins: bool,
    ) -> None:
        super().__init__(dataset, examples, collate, seed)
        self._started = started
        self._pins = pins

    def start(self, number: int) -> None:
        torch.set_num_threads(1)  # as in PyTorch's loader: each core has a process of its own
        self._started(number)

    def seed_for(self, epoch: int, index: int) -> int:
        """Seed the random numbers of Python, NumPy and PyTorch for an example."""
        seed = super().seed_for(epoch, index)
        torch.default_generator.manual_seed(seed)
        return seed

    def make_here(self, epoch: int, indices: Sequence[int]) -> Any:
        with torch.random.fork_rng(devices=[]):
            return self._pinned(super().make_here(epoch, indices))

    def unpack(self, buffers: Buffers) -> Any:
        return self._pinned(super().unpack(buffers))

    def _pinned(self, batch: Any) -> Any:
        if not (self._pins and torch.cuda.is_available()):
            return batch
        from torch.utils.data._utils.pin_memory import pin_memory

        return pin_memory(batch)


def _tensor(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not memoryview(buffer).nbytes:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype).reshape(shape)

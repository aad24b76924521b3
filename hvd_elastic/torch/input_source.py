"""Source of a loader, in any process: examples by index, transformed, collated, as buffers."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data._utils import worker

from hvd_elastic.input.indexed import IndexedSource
from hvd_elastic.worker.input_source import Buffers

_PLAIN = frozenset(
    (
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    )
)
"""Types of tensors that are sent as their bytes."""


class TensorPickler(pickle.Pickler):
    """Pickles tensors of the CPU as their bytes, which stay out of the stream.

    Strides survive where the elements fill their memory, as in ``torch.channels_last``.
    """

    def reducer_override(self, value: Any) -> Any:
        """Return how a tensor is pickled."""
        if (
            type(value) is torch.Tensor
            and value.device.type == "cpu"
            and value.layout is torch.strided
            and value.dtype in _PLAIN
        ):
            order = sorted(range(value.dim()), key=value.stride, reverse=True)
            stored = value.detach().permute(order)
            if not stored.is_contiguous():
                order, stored = [*range(value.dim())], value.detach().contiguous()
            content: Any = stored.reshape(-1).view(torch.uint8).numpy()
            told = (value.dtype, tuple(stored.shape), order)
            return _tensor, (pickle.PickleBuffer(content), *told)
        return NotImplemented


class LoaderSource(IndexedSource):
    """Reads a dataset for a loader.

    Args:
        dataset: the script's dataset.
        collate: the script's collate function.
        seed: seed of the data order.
        started: called in a process that was forked to read, with its number.
        pins: whether batches are put into pinned memory.
    """

    pickler = TensorPickler

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

    def start(self, number: int, count: int) -> None:
        torch.set_num_threads(1)  # as in PyTorch's loader: each core has a process of its own
        # For get_worker_info(), by which a worker_init_fn finds the dataset.
        worker._worker_info = worker.WorkerInfo(
            id=number, num_workers=count, seed=torch.initial_seed(), dataset=self._dataset
        )
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


def _tensor(
    buffer: Any, dtype: torch.dtype, shape: tuple[int, ...], order: list[int]
) -> torch.Tensor:
    """Return a tensor whose dimensions lie in memory in this order, with this shape in memory."""
    if not memoryview(buffer).nbytes:
        stored = torch.empty(shape, dtype=dtype)
    else:
        stored = torch.frombuffer(buffer, dtype=dtype).reshape(shape)
    return stored.permute([order.index(place) for place in range(len(order))])

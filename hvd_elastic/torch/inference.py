"""A model of PyTorch on all ranks, not in training: for ``hvd.evaluate`` and ``hvd.predict``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader as PlainLoader
from torch.utils.data import IterableDataset

from hvd_elastic.input.forked import WorkerStart
from hvd_elastic.input.loader_arguments import examples_of
from hvd_elastic.torch.copies import TensorCopies
from hvd_elastic.torch.data import DataLoader
from hvd_elastic.torch.saving import load_model
from hvd_elastic.torch.state import State
from hvd_elastic.worker.inference import Inference


class TorchInference(Inference):
    """See the base class; the model is on one device."""

    state = State
    load_model = staticmethod(load_model)

    def __init__(
        self,
        model: torch.nn.Module,
        dataset: Any,
        called: str,
        num_workers: int,
        collate_fn: Callable[[list[Any]], Any] | None,
    ) -> None:
        instead = f"{called} a map-style dataset"
        self.model, self.dataset = model, dataset
        self.examples = examples_of(dataset, isinstance(dataset, IterableDataset), instead)
        self._num_workers, self._collate = num_workers, collate_fn
        parameters = model.parameters()
        self._device = next((each.device for each in parameters), torch.device("cpu"))

    def batches(self, indices: Sequence[range]) -> PlainLoader[Any]:
        return PlainLoader(
            self.dataset,
            batch_sampler=[*map(list, indices)],
            num_workers=self._num_workers,
            collate_fn=self._collate,
            worker_init_fn=WorkerStart(None),
        )

    def shared(self, dataset: Any, batch_size: int) -> DataLoader[Any]:
        workers, collate = self._num_workers, self._collate
        return DataLoader(dataset, batch_size, num_workers=workers, collate_fn=collate)

    def given(self, batch: Any) -> Any:
        return on_device(batch, self._device)

    def outputs(self, inputs: Any) -> Any:
        return self.model(inputs)

    def values(self, metric: Callable[[Any, Any], Any], outputs: Any, targets: Any) -> Any:
        found = metric(outputs, targets)
        if not isinstance(found, torch.Tensor):
            return found
        return found.detach().double().cpu().numpy()

    def array(self, output: torch.Tensor) -> np.ndarray:
        output = output.detach().cpu()
        return (output.float() if output.dtype is torch.bfloat16 else output).numpy()

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        with in_evaluation_mode(self.model), torch.no_grad():
            yield

    def untrained(self) -> tuple[list[Any], Callable[[], None]]:
        buffers, kept = [*self.model.buffers()], TensorCopies()
        kept.take(buffers)
        return [buffer.detach() for buffer in buffers], kept.restore


@contextlib.contextmanager
def in_evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and each of its modules back into its own mode after."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def on_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on a device, in the same structure."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: on_device(each, device) for key, each in batch.items()}
    if isinstance(batch, (tuple, list)):
        moved = [on_device(each, device) for each in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch

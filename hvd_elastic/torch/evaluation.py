"""Evaluation of a model of PyTorch on all ranks: ``hvd.evaluate``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from hvd_elastic.torch.copies import TensorCopies
from hvd_elastic.training.evaluation import evaluate_on_ranks, pair_of
from hvd_elastic.training.input.forked import WorkerStart
from hvd_elastic.training.planning.choice import examples_of


def evaluate(
    model: torch.nn.Module,
    dataset: Any,
    metrics: Mapping[str, Callable[[Any, Any], torch.Tensor]],
    *,
    batch_size: int = 64,
    forward: Callable[[Any], tuple[Any, Any]] | None = None,
    num_workers: int = 0,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> dict[str, float]:
    """Return the mean of each metric over a data set, computed by all ranks together.

    Each example is read once, by one rank, and all ranks return the same numbers. These do not
    depend on the number of ranks: the batches are the same, and their sums are added exactly. All
    ranks must call it, in the function under ``hvd.run`` between two steps, or after training. The
    model is in evaluation mode meanwhile, with the buffers of rank 0 (the running statistics of
    batch norm), as a checkpoint has them. Nothing of it is changed.

    Args:
        model: model, on one device.
        dataset: map-style data set, the same on all ranks; for other batches than (inputs, targets)
            give ``forward``.
        metrics: functions by name. Each is called with the outputs and targets of a batch and
            returns one number for each example: a tensor of shape (examples,).
        batch_size: examples in a forward pass of a rank, >= 1. The batches are divided over the
            ranks, so with fewer of them than ranks some have none.
        forward: returns (outputs, targets) of a batch on the model's device, in place of
            ``model(inputs), targets``.
        num_workers, collate_fn: as in PyTorch's loader.

    Raises:
        ScriptError: an argument is not valid, a metric does not return one number for each example,
            or the data set has other lengths on other ranks.

    >>> def correct(outputs, targets):      # doctest: +SKIP
    ...     return outputs.argmax(1) == targets
    >>> hvd.evaluate(model, test_set, {"accuracy": correct})      # doctest: +SKIP
    {'accuracy': 0.9762}
    """
    examples = examples_of(
        dataset, isinstance(dataset, IterableDataset), "hvd.evaluate a map-style dataset"
    )
    device = device_of(model)

    def predict(batch: Any) -> tuple[Any, Any]:
        inputs, targets = pair_of(batch)
        return model(inputs), targets

    def compute(batches: Sequence[range]) -> Iterator[Mapping[str, Any]]:
        loader = DataLoader(
            dataset,
            batch_sampler=[list(batch) for batch in batches],
            num_workers=num_workers,
            collate_fn=collate_fn,
            worker_init_fn=WorkerStart(None),
        )
        for batch in loader:
            with torch.no_grad():  # not around a yield, which an error of another rank may end at
                outputs, targets = (forward or predict)(on_device(batch, device))
                values = {name: _numbers(of(outputs, targets)) for name, of in metrics.items()}
            yield values

    buffers = list(model.buffers())
    kept = TensorCopies()
    kept.take(buffers)
    try:
        with in_evaluation_mode(model):
            differing = [buffer.detach() for buffer in buffers]
            return evaluate_on_ranks(examples, batch_size, metrics, compute, differing)
    finally:
        kept.restore()


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


def device_of(model: torch.nn.Module) -> torch.device:
    """Return the device of a model's parameters; the CPU if it has none."""
    return next((each.device for each in model.parameters()), torch.device("cpu"))


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


def _numbers(values: Any) -> Any:
    return values.detach().double().cpu().numpy() if isinstance(values, torch.Tensor) else values

"""Batch prediction with a model of PyTorch on all ranks: ``hvd.predict``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from hvd_elastic.torch.data import DataLoader
from hvd_elastic.torch.evaluation import device_of, in_evaluation_mode, on_device
from hvd_elastic.torch.saving import load_model
from hvd_elastic.torch.state import State
from hvd_elastic.training import prediction
from hvd_elastic.training.planning.choice import examples_of


def predict(
    model: torch.nn.Module,
    data: Any,
    *,
    forward: Callable[[Any], torch.Tensor | Mapping[str, torch.Tensor]] | None = None,
    batch_size: int = 256,
    num_workers: int = 0,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> None:
    """Compute the outputs of a model for all examples of a data set, on all hosts together.

    It is the whole work of a script that ``hvd-elastic predict`` starts: it loads the weights, and
    saves the outputs of every batch as a file. Hosts may join, leave and die meanwhile; each
    example counts once.

    Args:
        model: model on this rank's device (``hvd.device()``).
        data: map-style data set, or a function that makes one of the folder given with ``--data``.
        forward: returns the outputs of a batch on the model's device: one tensor, or a dict of
            tensors by name, each with a row for each example. By default the model is given the
            batch, or its first part where the data set gives several (inputs and label).
        batch_size: examples of a batch over all ranks together, and of a file of outputs, >= 1.
        num_workers, collate_fn: as in PyTorch's loader.

    Raises:
        ScriptError: the data cannot be read by index, or outputs do not have one row for each
            example.
        CheckpointError: no host has the weights, or they are of another model.
    """
    asked = prediction.asked_prediction()
    dataset = prediction.data_of(data, asked)
    examples = examples_of(
        dataset, isinstance(dataset, IterableDataset), "hvd.predict a map-style dataset"
    )
    missing = prediction.Missing(dataset, examples, asked.done)
    loader: DataLoader[Any] = DataLoader(
        missing, batch_size, num_workers=num_workers, collate_fn=collate_fn
    )
    device = device_of(model)

    def compute(batch: Any) -> Any:
        given = on_device(batch, device)
        return model(prediction.inputs_of(given)) if forward is None else forward(given)

    with in_evaluation_mode(model), torch.no_grad():
        prediction.predict_missing(
            State(model=model), asked, missing, loader, batch_size, load_model, compute, _array
        )


def _array(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()

"""The workload of the elasticity benchmark: model, data set and padding that all launchers share.

Each launcher has a script of its own beside this file, since each needs its own API calls;
everything that determines the step time is here.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from benchmarks.adaptive.workloads import digits_network
from benchmarks.peers.options import commits, mark, parse_arguments

__all__ = ["batches", "commits", "load_data", "loss_of", "make_model", "make_optimizer", "mark"]
__all__ += ["parse_arguments"]


class Model(nn.Module):
    """The network of ``scripts/examples/digits.py``, or a linear one, with frozen ballast.

    The ballast is an embedding table of which each step reads one row: it adds to the state that a
    newcomer needs, and neither to the step time nor to the gradients. Each process creates a
    different one, so that no newcomer has it before it is sent.
    """

    def __init__(self, kind: str, frozen_mb: float) -> None:
        super().__init__()
        tiny = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        self.network = tiny if kind == "tiny" else digits_network(16, 64)
        rows = max(1, round(frozen_mb * 1e6 / 4 / 1000))
        own = torch.Generator().manual_seed(time.time_ns())
        weight = torch.rand(rows, 1000, generator=own)
        self.ballast = nn.Embedding.from_pretrained(weight, freeze=True) if frozen_mb else None

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the scores of the ten digits."""
        scores: torch.Tensor = self.network(images)
        if self.ballast is not None:
            scores = scores + self.ballast(torch.zeros(1, dtype=torch.int64))[:, :10]
        return scores


def make_model(args: argparse.Namespace) -> nn.Module:
    """Return the model, with the same trained weights on every rank."""
    torch.manual_seed(0)
    return Model(args.model, args.frozen_mb)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD; without momentum if the model has ballast."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    momentum = 0.0 if getattr(model, "ballast", None) is not None else 0.9
    return torch.optim.SGD(trained, lr=0.05, momentum=momentum)


def load_data(args: argparse.Namespace) -> TensorDataset:
    """Return the training examples."""
    with np.load(args.data / "train.npz") as arrays:
        return TensorDataset(*(torch.from_numpy(arrays[key]) for key in ("images", "labels")))


def batches(
    dataset: TensorDataset, args: argparse.Namespace, world_size: Callable[[], int]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield random shares of the global batch without end, for scripts without our loader.

    Args:
        dataset: result of :func:`load_data`.
        args: parsed options.
        world_size: returns the number of ranks; called before each step.
    """
    images, labels = dataset.tensors
    random = np.random.default_rng(os.getpid())
    while True:
        share = max(1, args.batch_size // max(1, world_size()))
        chosen = random.integers(len(labels), size=share)
        picked = torch.from_numpy(chosen)
        yield images[picked], labels[picked]


def loss_of(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of the model's scores."""
    return F.cross_entropy(model(images), labels)

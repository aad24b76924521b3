"""The workload of the elasticity benchmark: model, data set and padding that all launchers share.

Each launcher has a script of its own beside this file, since each needs its own API calls;
everything that determines the step time is here.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from benchmarks.adaptive.workloads import digits_network

COMMIT_BLOCK = 40


def parse_arguments() -> argparse.Namespace:
    """Parse the options of every script, and sleep for ``--slow-start``, as slow imports would."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True, help="folder of digits.py")
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
    parser.add_argument("--step-time", type=float, default=0.015, help="sleep in each step [s]")
    parser.add_argument("--slow-start", type=float, default=0.0, help="sleep before training [s]")
    parser.add_argument("--newcomers-only", type=Path, help="sleep only when this file exists")
    parser.add_argument("--model", choices=("digits", "tiny"), default="digits")
    parser.add_argument("--frozen-mb", type=float, default=0.0, help="frozen parameters [MB]")
    parser.add_argument("--commit-blocks", action="store_true", help="commit in every other block")
    parser.add_argument("--min-np", type=int, default=1)
    parser.add_argument("--snapshot", type=Path, help="file for launchers that restart")
    args = parser.parse_args()
    if args.newcomers_only is None or args.newcomers_only.exists():
        time.sleep(args.slow_start)
    return args


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


def commits(args: argparse.Namespace, step: int) -> bool:
    """Return whether this step ends with a commit; blocks with and without commits alternate.

    Writes a note to the marks where a block begins, so that its steps can be recognised.
    """
    if not args.commit_blocks:
        return True
    committing = step // COMMIT_BLOCK % 2 == 1
    if step % COMMIT_BLOCK == 0:
        mark("note", text="commit" if committing else "no commit")
    return committing


def mark(kind: str, **fields: Any) -> None:
    """Append a line to the marks of this process, if it has any."""
    path = os.environ.get("HVD_ELASTIC_BENCH_MARKS")
    if path:
        line = json.dumps({"mark": kind, "mono": time.monotonic(), **fields})
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(line + "\n")

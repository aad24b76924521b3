"""A trial on handwritten digits with an emulated device: the script of ours, and parts of Ray's.

Every epoch appends its accuracy to ``--reports``, a file that all hosts see.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

BATCH, EPOCHS = 32, 27
EXAMPLE_S = 0.004
"""Time of an example on the emulated device [s]."""


def read_data(folder: Path) -> tuple[TensorDataset, tuple[torch.Tensor, ...]]:
    """Return the training data, and images and labels to validate with."""
    with np.load(folder / "train.npz") as arrays:
        images, labels = (torch.from_numpy(arrays[key]) for key in ("images", "labels"))
    return TensorDataset(images[::2], labels[::2]), (images[1::2], labels[1::2])


def make_model(width: int) -> nn.Module:
    """Return the model."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, width, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(2 * width * 16, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def take_step(model: nn.Module, optimizer: Any, images: Any, labels: Any) -> None:
    """Take a step on a rank's part of a batch."""
    optimizer.zero_grad()
    time.sleep(EXAMPLE_S * len(images))
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()


def accuracy_of(model: nn.Module, valid: tuple[torch.Tensor, ...]) -> float:
    """Return the part of the validation images that are recognized."""
    with torch.no_grad():
        return float((model(valid[0]).argmax(1) == valid[1]).float().mean())


def note(reports: Path, **told: Any) -> None:
    """Append a report; a short line is written at once."""
    with reports.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"t": time.time(), **told}) + "\n")


def main() -> None:
    """Train under ``hvd-elastic``."""
    import hvd_elastic.torch as hvd

    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--reports", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    train_data, valid = read_data(args.data)
    model = make_model(args.width)
    inner = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(inner, model)
    loader: Any = hvd.DataLoader(train_data, BATCH, shuffle=True)

    @hvd.run
    def train(_: Any) -> None:
        for epoch in hvd.epochs(args.epochs):
            for images, labels in loader:
                take_step(model, optimizer, images, labels)
            accuracy = accuracy_of(model, valid)
            hvd.report(accuracy=accuracy)
            if hvd.rank() == 0:
                note(args.reports, lr=args.lr, width=args.width, epoch=epoch, accuracy=accuracy)

    train(hvd.State(model=model, optimizer=optimizer))


if __name__ == "__main__":
    main()

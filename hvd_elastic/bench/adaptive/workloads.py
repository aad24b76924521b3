"""What is trained: networks, data and settings that our jobs and those of peers share.

Peers import this in environments of their own, so it needs nothing of ours.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

__all__ = ["digits", "digits_network", "square_step", "take_turns", "warm_up", "wide_network"]

INITIAL, LARGEST, RATE, TARGET = 32, 512, 0.05, 0.98
"""Of the digits: global batch sizes, learning rate for the initial one, test accuracy wanted."""
PASSES = 60
"""Over the data, after which the target counts as missed."""
WIDTH, BATCH, STEPS, WARM = 1000, 64, 20, 260
"""Of the overhead: the network's width, the global batch, steps of a block, steps before all."""


def digits() -> tuple[TensorDataset, tuple[torch.Tensor, torch.Tensor]]:
    """Training examples, and images and labels of every fifth one for testing."""
    images, labels = load_digits(return_X_y=True)
    inputs = torch.from_numpy(images / 16.0).float().reshape(-1, 1, 8, 8)
    targets = torch.from_numpy(labels).long()
    test = torch.arange(len(targets)) % 5 == 0
    return TensorDataset(inputs[~test], targets[~test]), (inputs[test], targets[test])


def digits_network(channels: int = 32, hidden: int = 256) -> nn.Module:
    """That of ``scripts/examples/digits.py``, but wider, so that steps have more to compute."""
    twice = 2 * channels
    return nn.Sequential(
        *(nn.Conv2d(1, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()),
        *(nn.Conv2d(channels, twice, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(twice * 4 * 4, hidden), nn.ReLU(), nn.Linear(hidden, 10)),
    )


def wide_network() -> nn.Module:
    """Two million parameters in two layers of a thousand."""
    torch.manual_seed(0)
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(first, nn.ReLU(), second)


def square_step(model: nn.Module, optimizer: Any, batch: torch.Tensor) -> None:
    """One step towards outputs of zero; the optimizer may be any that has the methods of one."""
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()


def take_turns(
    rounds: int, bare: Callable[[], None], adaptive: Callable[[], None]
) -> dict[str, list[float]]:
    """Blocks of ``STEPS`` steps of each, in turn; the time of a step in each block [s]."""
    times: dict[str, list[float]] = {"bare": [], "adaptive": []}
    for _ in range(rounds):
        for name, block in (("bare", bare), ("adaptive", adaptive)):
            began = time.perf_counter()
            block()
            times[name].append((time.perf_counter() - began) / STEPS)
    return times


def warm_up() -> None:
    """A few steps of the digits network on this process alone, charged to nobody."""
    model = digits_network()
    sgd = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    images, labels = digits()[1]
    for batch in range(20):
        some = slice(batch, batch + INITIAL)
        sgd.zero_grad()
        F.cross_entropy(model(images[some]), labels[some]).backward()
        sgd.step()

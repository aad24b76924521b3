"""What is trained: networks, data and settings that our jobs and those of peers share.

Peers import this in environments of their own, so it needs nothing of ours.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

INITIAL, LARGEST = 32, 512
"""Of the digits: global batch sizes."""
COPIES, DISTORTED_RATE, DISTORTED_TARGET = 10, 0.05, 0.975
"""Of distorted digits: made of each, first learning rate for the initial batch, accuracy wanted."""
DISTORTED_STEPS, LOOK, LOOKS = 1800, 50, 4
"""The same: progress of a training in steps of the initial batch, that between looks at the
accuracy, and of how many looks the mean must reach the target."""
WIDTH, BATCH, STEPS, WARM = 1000, 64, 20, 420
"""Of the overhead: the network's width, the global batch, steps of a block, steps before all."""


def digits() -> tuple[TensorDataset, tuple[torch.Tensor, torch.Tensor]]:
    """Training examples, and images and labels of every fifth one for testing."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    inputs = torch.from_numpy(images / 16.0).float().reshape(-1, 1, 8, 8)
    targets = torch.from_numpy(labels).long()
    test = torch.arange(len(targets)) % 5 == 0
    return TensorDataset(inputs[~test], targets[~test]), (inputs[test], targets[test])


def distorted_digits() -> tuple[TensorDataset, tuple[torch.Tensor, torch.Tensor]]:
    """As :func:`digits`, of each digit ten, turned, resized and moved by chance."""
    learned, test = digits()
    images, labels = learned.tensors
    return TensorDataset(*_distorted(images, labels, seed=1)), _distorted(*test, seed=2)


def rate_left(progress: float) -> float:
    """Share of the first learning rate that distorted digits have after so many initial steps."""
    return max(0.0, 1 - progress / DISTORTED_STEPS)


def _distorted(
    images: torch.Tensor, labels: torch.Tensor, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    count, generator = COPIES * len(images), torch.Generator().manual_seed(seed)

    def within(most: float) -> torch.Tensor:
        return most * (2 * torch.rand(count, generator=generator) - 1)

    angle, size = within(math.radians(20)), 1 + within(0.2)
    cos, sin = torch.cos(angle) / size, torch.sin(angle) / size
    across, down = within(0.25), within(0.25)  # a pixel of eight, in halves of the image
    rows = [torch.stack([cos, -sin, across], 1), torch.stack([sin, cos, down], 1)]
    many = images.repeat(COPIES, 1, 1, 1)
    grid = F.affine_grid(torch.stack(rows, 1), list(many.shape), align_corners=False)
    return F.grid_sample(many, grid, align_corners=False), labels.repeat(COPIES)


def digits_network(channels: int = 32, hidden: int = 256) -> nn.Module:
    """That of ``scripts/examples/digits.py``, but wider, so that steps have more to compute."""
    twice = 2 * channels
    return nn.Sequential(
        *(nn.Conv2d(1, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()),
        *(nn.Conv2d(channels, twice, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(twice * 4 * 4, hidden), nn.ReLU(), nn.Linear(hidden, 10)),
    )


def share_right(network: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of the images, how many the network tells; it is one that trains, before and after."""
    network.eval()
    with torch.no_grad():
        right = (network(images).argmax(1) == labels).float().mean()
    network.train()
    return right


class Race:
    """A training's way to an accuracy; the time of looking at that is charged to nobody.

    It goes on until its schedule ends. Looks are taken at the same progress in all trainings, and
    the target is reached where the mean of several running is: single ones go up and down.

    Args:
        judge: the accuracy now, the same on all ranks.
    """

    def __init__(self, judge: Callable[[], float]) -> None:
        self._judge = judge
        self._seconds, self._due = 0.0, LOOK
        self.curve: list[tuple[float, int, float, int, float]] = []
        """Of each look: seconds and examples so far, accuracy, batch, progress."""

    def start(self) -> None:
        """The training begins, or goes on, now."""
        self._began = time.perf_counter()

    def over(self, examples: int, batch: int, progress: float) -> bool:
        """A step was taken; whether the training ends with it.

        Args:
            examples: of all steps so far.
            batch: the global one now.
            progress: steps of the initial batch that all steps so far were worth.
        """
        if progress < self._due:
            return False
        self._seconds += time.perf_counter() - self._began
        seconds, accuracy = round(self._seconds, 4), round(self._judge(), 4)
        self.curve.append((seconds, examples, accuracy, batch, round(progress, 1)))
        self._due += LOOK * math.ceil((progress - self._due + 1e-6) / LOOK)
        self.start()
        return progress >= DISTORTED_STEPS

    def result(self) -> dict[str, Any]:
        """Fields of a row: ``seconds`` are None where the target was missed."""
        looks = range(LOOKS, len(self.curve) + 1)
        means = [statistics.fmean(look[2] for look in self.curve[n - LOOKS : n]) for n in looks]
        reached = [n for n, mean in zip(looks, means, strict=True) if mean >= DISTORTED_TARGET]
        whole_s, examples, accuracy, batch, _ = self.curve[-1]
        seconds = self.curve[reached[0] - 1][0] if reached else None
        known = {"seconds": seconds, "whole_s": whole_s, "examples": examples}
        return {**known, "accuracy": accuracy, "last_batch": batch, "curve": self.curve}


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
    rounds: int, bare: Callable[[], None], adaptive: Callable[[], None], steps: int = STEPS
) -> dict[str, list[float]]:
    """Blocks of so many steps of each, in turn; the time of a step in each block [s]."""
    times: dict[str, list[float]] = {"bare": [], "adaptive": []}
    for _ in range(rounds):
        for name, block in (("bare", bare), ("adaptive", adaptive)):
            began = time.perf_counter()
            block()
            times[name].append((time.perf_counter() - began) / steps)
    return times


def warm_up() -> None:
    """A few steps of the digits network on this process alone, charged to nobody."""
    model = digits_network()
    sgd = torch.optim.SGD(model.parameters(), lr=DISTORTED_RATE, momentum=0.9)
    images, labels = digits()[1]
    for batch in range(20):
        some = slice(batch, batch + INITIAL)
        sgd.zero_grad()
        F.cross_entropy(model(images[some]), labels[some]).backward()
        sgd.step()

"""Networks, data and settings that our jobs and those of peers share.

Peers import this module in environments of their own, so it does not import hvd_elastic.
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
"""Initial and largest global batch size for the digits."""
COPIES, DISTORTED_RATE, DISTORTED_TARGET = 10, 0.05, 0.975
"""Distorted digits: copies of each digit, first learning rate at the initial batch, and target
accuracy."""
DISTORTED_STEPS, LOOK, LOOKS = 1800, 50, 4
"""Distorted digits: progress of a training in steps at the initial batch, progress between two
evaluations, and number of evaluations whose mean must reach the target."""


def digits() -> tuple[TensorDataset, tuple[torch.Tensor, torch.Tensor]]:
    """Return the training examples, and images and labels of every fifth digit for testing."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    inputs = torch.from_numpy(images / 16.0).float().reshape(-1, 1, 8, 8)
    targets = torch.from_numpy(labels).long()
    test = torch.arange(len(targets)) % 5 == 0
    return TensorDataset(inputs[~test], targets[~test]), (inputs[test], targets[test])


def distorted_digits() -> tuple[TensorDataset, tuple[torch.Tensor, torch.Tensor]]:
    """Return the same as :func:`digits`, with ten randomly distorted copies of each digit."""
    learned, test = digits()
    images, labels = learned.tensors
    return TensorDataset(*_distorted(images, labels, seed=1)), _distorted(*test, seed=2)


def rate_left(progress: float) -> float:
    """Return the fraction of the first learning rate after ``progress`` initial-batch steps."""
    return max(0.0, 1 - progress / DISTORTED_STEPS)


def _distorted(
    images: torch.Tensor, labels: torch.Tensor, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    count, generator = COPIES * len(images), torch.Generator().manual_seed(seed)

    def within(most: float) -> torch.Tensor:
        return most * (2 * torch.rand(count, generator=generator) - 1)

    angle, size = within(math.radians(20)), 1 + within(0.2)
    cos, sin = torch.cos(angle) / size, torch.sin(angle) / size
    across, down = within(0.25), within(0.25)  # one of eight pixels, in units of half the image
    rows = [torch.stack([cos, -sin, across], 1), torch.stack([sin, cos, down], 1)]
    many = images.repeat(COPIES, 1, 1, 1)
    grid = F.affine_grid(torch.stack(rows, 1), list(many.shape), align_corners=False)
    return F.grid_sample(many, grid, align_corners=False), labels.repeat(COPIES)


def digits_network(channels: int = 32, hidden: int = 256) -> nn.Module:
    """Return the network of ``scripts/examples/digits.py``, by default wider: steps are longer."""
    twice = 2 * channels
    return nn.Sequential(
        *(nn.Conv2d(1, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()),
        *(nn.Conv2d(channels, twice, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(twice * 4 * 4, hidden), nn.ReLU(), nn.Linear(hidden, 10)),
    )


def share_right(network: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the network's accuracy; it is in training mode before and after."""
    network.eval()
    with torch.no_grad():
        right = (network(images).argmax(1) == labels).float().mean()
    network.train()
    return right


class Race:
    """Measures a training's time to a target accuracy, without the time of the evaluations.

    The training continues until its schedule ends. The accuracy is evaluated at the same progress
    in all trainings. The target counts as reached when the mean of several consecutive evaluations
    reaches it, since single ones fluctuate.

    Args:
        judge: returns the present accuracy, the same on all ranks.
    """

    def __init__(self, judge: Callable[[], float]) -> None:
        self._judge = judge
        self._seconds, self._due = 0.0, LOOK
        self.curve: list[tuple[float, int, float, int, float]] = []
        """Evaluations: seconds and examples so far, accuracy, batch, progress."""

    def start(self) -> None:
        """Start the clock, or continue it after an evaluation."""
        self._began = time.perf_counter()

    def over(self, examples: int, batch: int, progress: float) -> bool:
        """Evaluate the accuracy if due; return whether the training ends with this step.

        Args:
            examples: examples of all steps so far.
            batch: present global batch size.
            progress: scale-invariant progress of all steps so far, in initial-batch steps.
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
        """Return the fields of a row; ``seconds`` is None if the target was missed."""
        looks = range(LOOKS, len(self.curve) + 1)
        means = [statistics.fmean(look[2] for look in self.curve[n - LOOKS : n]) for n in looks]
        reached = [n for n, mean in zip(looks, means, strict=True) if mean >= DISTORTED_TARGET]
        whole_s, examples, accuracy, batch, _ = self.curve[-1]
        seconds = self.curve[reached[0] - 1][0] if reached else None
        known = {"seconds": seconds, "whole_s": whole_s, "examples": examples}
        return {**known, "accuracy": accuracy, "last_batch": batch, "curve": self.curve}


def warm_up() -> None:
    """Take a few steps with the digits network in this process, before anything is timed."""
    model = digits_network()
    sgd = torch.optim.SGD(model.parameters(), lr=DISTORTED_RATE, momentum=0.9)
    images, labels = digits()[1]
    for batch in range(20):
        some = slice(batch, batch + INITIAL)
        sgd.zero_grad()
        F.cross_entropy(model(images[some]), labels[some]).backward()
        sgd.step()

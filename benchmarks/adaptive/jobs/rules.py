"""A job that solves a convex problem with increasing batch sizes.

The problem is linear regression. Its least loss and its curvature are known, and so is the exact
loss after every step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

import hvd_elastic.torch as hvd
from benchmarks.adaptive.jobs.training import begin, loader_with_plan, train_until
from hvd_elastic.model.goodput import BatchPlan
from hvd_elastic.worker import context

EXAMPLES, WIDTH, INITIAL, RATE = 32000, 50, 16, 0.001
SCALES = (1, 2, 4, 8, 16, 32)
PROGRESS = (500, 1000, 2000, 4000)
"""Steps at the initial batch size after which losses are compared."""


class Regression:
    """Linear regression with noise in its targets.

    Attributes:
        examples: data set of inputs and targets.
        least: loss at the solution.
    """

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(EXAMPLES, WIDTH, generator=generator)
        truth = torch.randn(WIDTH, 1, generator=generator)
        targets = inputs @ truth + torch.randn(EXAMPLES, 1, generator=generator)
        self.examples = TensorDataset(inputs, targets)
        self._curvature = inputs.T @ inputs / EXAMPLES
        self._solution = torch.linalg.solve(self._curvature, inputs.T @ targets / EXAMPLES)
        self.least = float((inputs @ self._solution - targets).square().mean())

    def loss(self, weight: torch.Tensor) -> float:
        """Return the mean squared error over all examples, by the constant second derivative."""
        off = weight.detach().reshape(-1, 1) - self._solution
        return self.least + float(off.T @ self._curvature @ off)


def solve(problem: Regression, rule: str, scale: int, seed: int) -> tuple[list[float], int]:
    """Return the losses at ``PROGRESS``, and the number of steps needed for the last."""
    begin(seed)
    model = torch.nn.Linear(WIDTH, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    sgd = torch.optim.SGD(model.parameters(), lr=RATE)
    optimizer = hvd.DistributedOptimizer(sgd, model, lr_rule=rule)
    loader = loader_with_plan(problem.examples, BatchPlan(INITIAL * scale), INITIAL, seed)
    curve = [(0.0, problem.loss(model.weight))]

    def over(_step: int) -> bool:
        curve.append((loader.planner.progress, problem.loss(model.weight)))
        return curve[-1][0] >= PROGRESS[-1]

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(model(inputs), targets)

    train_until(over, loader, model, optimizer, loss)
    progress, losses = np.array(curve).T
    found = np.exp(np.interp(PROGRESS, progress, np.log(losses)))
    return found.tolist(), context.current().worker.progress.step


def rows(rule: str, seeds: str) -> list[dict[str, Any]]:
    """Return the losses at the same progress for each batch size."""
    found = []
    for seed in range(int(seeds)):
        problem = Regression(seed)
        for scale in SCALES:
            losses, steps = solve(problem, rule, scale, seed)
            row = {"seed": seed, "scale": scale, "losses": losses, "steps": steps}
            found.append({**row, "least_loss": problem.least})
    return found

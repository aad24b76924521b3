"""One rank of a job that solves a convex problem with larger and larger batches.

``python -m hvd_elastic.bench.adaptive.rule_job OUT RULE SEEDS`` under a launcher; rank 0 writes
what the loss was at the same progress, for each batch size. The problem is linear regression: its
least loss and its curvature are known, so the loss is known after every step.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

import hvd_elastic.torch as hvd
from hvd_elastic.bench.adaptive.given import begin, loader_with_plan, write_rank_0
from hvd_elastic.model.goodput import BatchPlan
from hvd_elastic.torch import context

EXAMPLES, WIDTH, INITIAL, RATE = 32000, 50, 16, 0.001
SCALES = (1, 2, 4, 8, 16, 32)
PROGRESS = (500, 1000, 2000, 4000)
"""Steps at the initial batch size after which losses are compared."""


class Regression:
    """Linear regression with noise in its targets.

    Attributes:
        examples: inputs and targets.
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
        """Mean squared error over all examples, from the second derivative, which is constant."""
        off = weight.detach().reshape(-1, 1) - self._solution
        return self.least + float(off.T @ self._curvature @ off)


def solve(problem: Regression, rule: str, scale: int, seed: int) -> tuple[list[float], int]:
    """Losses at ``PROGRESS``, and the steps that were needed for the last."""
    begin()
    model = torch.nn.Linear(WIDTH, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    sgd = torch.optim.SGD(model.parameters(), lr=RATE)
    optimizer = hvd.DistributedOptimizer(sgd, model, lr_rule=rule)
    loader = loader_with_plan(problem.examples, BatchPlan(INITIAL * scale), INITIAL, seed)
    curve = [(0.0, problem.loss(model.weight))]

    @hvd.run
    def train(_state: hvd.State) -> None:
        for _ in hvd.epochs(10**6):
            for inputs, targets in loader:
                curve.append((loader.adaptation.progress, problem.loss(model.weight)))
                if curve[-1][0] >= PROGRESS[-1]:
                    return
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()

    train(hvd.State(model=model, optimizer=optimizer))
    progress, losses = np.array(curve).T
    found = np.exp(np.interp(PROGRESS, progress, np.log(losses)))
    return found.tolist(), context.current().progress.step


def main() -> None:
    """Run the job that the command line describes."""
    out, rule, seeds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    rows: list[Mapping[str, Any]] = []
    for seed in range(seeds):
        problem = Regression(seed)
        for scale in SCALES:
            losses, steps = solve(problem, rule, scale, seed)
            row = {"seed": seed, "scale": scale, "losses": losses, "steps": steps}
            rows.append({**row, "least_loss": problem.least})
    write_rank_0(out, rows)


if __name__ == "__main__":
    main()

"""One rank of a job whose gradient noise scale is known: compares the estimate with it.

``python -m hvd_elastic.bench.adaptive.noise_job OUT PROBLEM OPTIMIZER ACCUMULATION TRAINING SEED``
on one rank or under a launcher; rank 0 writes the ratios of estimate and exact value to OUT.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import hvd_elastic.torch as hvd
from hvd_elastic.torch import context

EXAMPLES, WIDTH, CLASSES, BATCH = 6400, 100, 10, 32
FROZEN_STEPS = 200
CHECKPOINTS = range(100, 401, 20)
RATES = {"sgd": 0.0005, "adam": 0.0005}


def data(problem: str, seed: int) -> TensorDataset:
    """Made-up examples: inputs, and targets that a linear model explains in part."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(EXAMPLES, WIDTH, generator=generator)
    scores = inputs @ torch.randn(WIDTH, CLASSES, generator=generator) / WIDTH**0.5
    noise = torch.randn(EXAMPLES, CLASSES, generator=generator)
    if problem == "softmax":
        return TensorDataset(inputs, (3 * scores + noise).argmax(1))
    return TensorDataset(inputs, scores[:, :1] * 3 + noise[:, :1])


def exact(model: torch.nn.Linear, examples: TensorDataset, divisor: Any) -> float:
    """From the gradient of every example: residual times input."""
    inputs, targets = examples.tensors
    with torch.no_grad():
        if targets.dim() == 1:
            residual = model(inputs).softmax(1) - F.one_hot(targets, CLASSES)
        else:
            residual = 2 * (model(inputs) - targets)
        own = residual[:, :, None] * inputs[:, None, :] / divisor
        variance = own.var(0, unbiased=True).sum()
        return float(variance / own.mean(0).square().sum())


def main() -> None:
    """Run the job that the command line describes."""
    out, problem, kind, accumulation, training, seed = sys.argv[1:]
    hvd.init()
    torch.manual_seed(int(seed))
    examples = data(problem, int(seed))
    model = torch.nn.Linear(WIDTH, CLASSES if problem == "softmax" else 1, bias=False)
    rate = RATES[kind] if training == "training" else 0.0
    make: Any = torch.optim.SGD if kind == "sgd" else torch.optim.Adam
    optimizer = hvd.DistributedOptimizer(make(model.parameters(), lr=rate), model, lr_rule="none")
    # The batch has one size only, and a pass no room for more: the plan is given.
    ranks = int(os.environ.get("HOROVOD_SIZE", "1"))
    most = BATCH // ranks // (int(accumulation) + 1)
    loader: Any = hvd.DataLoader(
        examples,
        BATCH,
        shuffle=True,
        seed=int(seed),
        max_batch_size=BATCH,
        atomic_batch_size_bounds=(1, most),
    )
    adaptation = loader.adaptation
    ratios: list[float] = []
    loss_of = F.cross_entropy if problem == "softmax" else F.mse_loss
    wanted = CHECKPOINTS if training == "training" else (FROZEN_STEPS,)

    @hvd.run
    def train(_state: hvd.State) -> None:
        done = 0
        for _ in hvd.epochs(10):
            for inputs, targets in loader:
                progress = context.current().progress
                if progress.step in wanted and progress.step != done:
                    done = progress.step
                    divisor: Any = 1.0
                    if kind == "adam":
                        moments = optimizer.state[model.weight]
                        corrected = moments["exp_avg_sq"] / (1 - 0.999 ** moments["step"])
                        divisor = corrected.sqrt() + 1e-8
                    known = exact(model, examples, divisor)
                    ratios.append(adaptation.metrics()["noise_scale"] / known)
                if progress.step > max(wanted):
                    return
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                optimizer.step()

    train(hvd.State(model=model, optimizer=optimizer))
    if hvd.rank() == 0:
        Path(out).write_text(json.dumps(ratios), encoding="utf-8")


if __name__ == "__main__":
    main()

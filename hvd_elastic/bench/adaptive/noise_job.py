"""One rank of a job whose gradient noise scale is known: compares the estimate with it.

``python -m hvd_elastic.bench.adaptive.noise_job OUT SEEDS`` on one rank or under a launcher; rank 0
writes the ratios of estimate and exact value to OUT, for each kind of training.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import hvd_elastic.torch as hvd
from hvd_elastic.bench.adaptive.given import begin, loader_with_plan, write_rank_0
from hvd_elastic.model.goodput import BatchPlan
from hvd_elastic.torch import context

EXAMPLES, WIDTH, CLASSES, BATCH = 6400, 100, 10, 32
FROZEN_STEPS = 200
CHECKPOINTS = range(100, 401, 20)
RATE = 0.0005


@dataclass(frozen=True)
class Kind:
    """What is trained, and how."""

    problem: str
    optimizer: str
    accumulation_steps: int
    weights: str


KINDS = [
    Kind(*kind)
    for kind in itertools.product(
        ("linear", "softmax"), ("sgd", "adam"), (0, 3), ("frozen", "training")
    )
]


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


def ratios(kind: Kind, seed: int) -> list[float]:
    """Estimated over exact noise scale, at the checkpoints of one training."""
    begin()
    torch.manual_seed(seed)
    examples = data(kind.problem, seed)
    model = torch.nn.Linear(WIDTH, CLASSES if kind.problem == "softmax" else 1, bias=False)
    rate = RATE if kind.weights == "training" else 0.0
    make: Any = torch.optim.SGD if kind.optimizer == "sgd" else torch.optim.Adam
    optimizer = hvd.DistributedOptimizer(make(model.parameters(), lr=rate), model, lr_rule="none")
    loader: Any
    if context.current().engine.size == 1 and kind.accumulation_steps == 0:
        # One rank alone sees the noise where it may make two passes of a step now and then.
        loader = hvd.DataLoader(examples, BATCH, shuffle=True, seed=seed, max_batch_size=BATCH)
    else:
        loader = loader_with_plan(examples, BatchPlan(BATCH, kind.accumulation_steps), seed=seed)
    adaptation = loader.adaptation
    found: list[float] = []
    loss_of = F.cross_entropy if kind.problem == "softmax" else F.mse_loss
    wanted = CHECKPOINTS if kind.weights == "training" else (FROZEN_STEPS,)

    @hvd.run
    def train(_state: hvd.State) -> None:
        done = 0
        for _ in hvd.epochs(10):
            for inputs, targets in loader:
                step = context.current().progress.step
                if step in wanted and step != done:
                    done = step
                    divisor: Any = 1.0
                    if kind.optimizer == "adam":
                        moments = optimizer.state[model.weight]
                        corrected = moments["exp_avg_sq"] / (1 - 0.999 ** moments["step"])
                        divisor = corrected.sqrt() + 1e-8
                    known = exact(model, examples, divisor)
                    found.append(adaptation.metrics()["noise_scale"] / known)
                if step > max(wanted):
                    return
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                optimizer.step()

    train(hvd.State(model=model, optimizer=optimizer))
    return found


def main() -> None:
    """Run the job that the command line describes."""
    out, seeds = Path(sys.argv[1]), int(sys.argv[2])
    rows: list[Mapping[str, Any]] = []
    for kind in KINDS:
        found = [ratio for seed in range(seeds) for ratio in ratios(kind, seed)]
        rows.append({**asdict(kind), "ratios": found})
    write_rank_0(out, rows)


if __name__ == "__main__":
    main()

"""A job whose gradient noise scale is known, to compare the estimate with it."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import hvd_elastic.torch as hvd
from benchmarks.adaptive.jobs.training import adam_divisor, begin, measuring_loader, train_until
from hvd_elastic.model.goodput import BatchPlan

EXAMPLES, WIDTH, CLASSES, BATCH = 6400, 100, 10, 32
FROZEN_STEPS = 200
CHECKPOINTS = range(100, 401, 20)
RATE = 0.0005


@dataclass(frozen=True)
class Kind:
    """A trained configuration."""

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
    """Return random inputs, and targets that a linear model explains in part."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(EXAMPLES, WIDTH, generator=generator)
    scores = inputs @ torch.randn(WIDTH, CLASSES, generator=generator) / WIDTH**0.5
    noise = torch.randn(EXAMPLES, CLASSES, generator=generator)
    if problem == "softmax":
        return TensorDataset(inputs, (3 * scores + noise).argmax(1))
    return TensorDataset(inputs, scores[:, :1] * 3 + noise[:, :1])


def exact(model: torch.nn.Linear, examples: TensorDataset, divisor: Any) -> float:
    """Return the exact noise scale, from the gradient (residual times input) of every example."""
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
    """Return the ratio of estimated and exact noise scale at the checkpoints of one training."""
    begin(seed)
    examples = data(kind.problem, seed)
    model = torch.nn.Linear(WIDTH, CLASSES if kind.problem == "softmax" else 1, bias=False)
    rate = RATE if kind.weights == "training" else 0.0
    make: Any = torch.optim.SGD if kind.optimizer == "sgd" else torch.optim.Adam
    optimizer = hvd.DistributedOptimizer(make(model.parameters(), lr=rate), model, lr_rule="none")
    loader = measuring_loader(examples, BatchPlan(BATCH, kind.accumulation_steps), seed)
    adaptation = loader.planner
    found: dict[int, float] = {}
    loss_of = F.cross_entropy if kind.problem == "softmax" else F.mse_loss
    wanted = CHECKPOINTS if kind.weights == "training" else (FROZEN_STEPS,)

    def over(step: int) -> bool:
        if step in wanted and step not in found:
            divisor: Any = 1.0
            if kind.optimizer == "adam":
                divisor = adam_divisor(optimizer, model.weight)
            found[step] = adaptation.metrics()["noise_scale"] / exact(model, examples, divisor)
        return step > max(wanted)

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return loss_of(model(inputs), targets)

    train_until(over, loader, model, optimizer, loss)
    return [*found.values()]


def rows(seeds: str) -> list[dict[str, Any]]:
    """Return the ratios of estimate and exact value for each kind of training."""
    return [
        {
            **asdict(kind),
            "ratios": [ratio for seed in range(int(seeds)) for ratio in ratios(kind, seed)],
        }
        for kind in KINDS
    ]

"""A job that measures the noise scale of the digits network, by the optimizer and by brute force.

The network trains for some steps; then its weights are frozen while the optimizer continues to
measure.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import hvd_elastic.torch as hvd
from benchmarks.adaptive.jobs.training import adam_divisor, begin, measuring_loader, train_until
from benchmarks.adaptive.workloads import digits, digits_network
from hvd_elastic.model.goodput import BatchPlan

BATCH, PASS = 32, 16
FROZEN_STEPS = (200, 1000)
DRAWN = 1000
"""Number of passes whose gradients are compared if batch norm uses the statistics of each pass."""
RATES = {"sgd": 0.05, "adam": 0.001}
CHUNK = 64


@dataclass(frozen=True)
class Kind:
    """A measured configuration.

    Attributes:
        optimizer: ``"sgd"`` (with momentum) or ``"adam"`` (gradients divided by the root of its
            second moment).
        trained_steps: number of steps before the weights are frozen.
        batch_norm: statistics of batch norm: ``"fixed"``, so that every example has a gradient of
            its own, or of ``"each pass"``, as in training.
    """

    optimizer: str
    trained_steps: int
    batch_norm: str


KINDS = [
    Kind(*kind) for kind in itertools.product(("sgd", "adam"), (50, 200), ("fixed", "each pass"))
]

Gradients = dict[str, torch.Tensor]


def single_gradients(model: nn.Module, examples: TensorDataset) -> Iterator[Gradients]:
    """Yield the gradients of all examples, in chunks."""
    weights = {name: each.detach() for name, each in model.named_parameters()}
    buffers = dict(model.named_buffers())

    def loss(weights: Gradients, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        scores = functional_call(model, {**weights, **buffers}, (image[None],))
        return F.cross_entropy(scores, label[None])

    for images, labels in zip(*(each.split(CHUNK) for each in examples.tensors), strict=True):
        yield vmap(grad(loss), (None, 0, 0))(weights, images, labels)


def pass_gradients(model: nn.Module, examples: TensorDataset, seed: int) -> Iterator[Gradients]:
    """Yield the gradients of ``DRAWN`` passes, each of randomly drawn examples."""
    model = copy.deepcopy(model)  # a pass changes its running statistics
    generator = torch.Generator().manual_seed(seed)
    names, weights = zip(*model.named_parameters(), strict=True)
    images, labels = examples.tensors
    for _ in range(DRAWN):
        chosen = torch.randperm(len(labels), generator=generator)[:PASS]
        found = torch.autograd.grad(F.cross_entropy(model(images[chosen]), labels[chosen]), weights)
        yield {name: each[None] for name, each in zip(names, found, strict=True)}


def moments(gradients: Iterator[Gradients], divisors: Gradients | None) -> tuple[int, float, float]:
    """Return the number of gradients, their mean's squared norm, and their covariance's trace."""
    count, squares = 0, 0.0
    sums: Gradients = {}
    for some in gradients:
        for name, each in some.items():
            each = (each if divisors is None else each / divisors[name]).double()
            squares += float(each.square().sum())
            sums[name] = sums.get(name, 0.0) + each.sum(0)
        count += len(next(iter(some.values())))
    mean = sum(float((each / count).square().sum()) for each in sums.values())
    return count, mean, (squares - count * mean) / (count - 1)


def brute_force(
    kind: Kind, model: nn.Module, examples: TensorDataset, seed: int, divisors: Gradients | None
) -> float:
    """Return the noise scale [examples] computed from individual gradients."""
    if kind.batch_norm == "fixed":
        _, mean, trace = moments(single_gradients(model, examples), divisors)
        return trace / mean
    count, mean, trace = moments(pass_gradients(model, examples, seed), divisors)
    # Two corrections: a pass has no example twice, and the mean over the passes still has noise.
    whole = 1 - PASS / len(examples)
    return PASS * trace / whole / (mean - trace / count)


def adam_divisors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Gradients:
    """Return the values by which Adam divides each gradient."""
    return {name: adam_divisor(optimizer, each) for name, each in model.named_parameters()}


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, examples: Any, kind: Kind) -> None:
    """Train for some steps on this rank alone; all ranks do the same."""
    images, labels = examples.tensors
    for _ in range(kind.trained_steps):
        chosen = torch.randperm(len(labels))[:BATCH]
        optimizer.zero_grad()
        F.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        optimizer.step()


def measure(kind: Kind, seed: int) -> list[dict[str, Any]]:
    """Return rows with the noise scale that the optimizer measured, and that of brute force."""
    begin(seed)
    examples, _ = digits()
    model = digits_network()
    inner: torch.optim.Optimizer
    if kind.optimizer == "sgd":
        inner = torch.optim.SGD(model.parameters(), lr=RATES["sgd"], momentum=0.9)
    else:
        inner = torch.optim.Adam(model.parameters(), lr=RATES["adam"])
    learn(model, inner, examples, kind)
    inner.param_groups[0]["lr"] = 0.0
    model.train(kind.batch_norm == "each pass")
    optimizer = hvd.DistributedOptimizer(inner, model, lr_rule="none")
    loader = measuring_loader(examples, BatchPlan(BATCH), seed)
    found: dict[int, dict[str, Any]] = {}

    def look(step: int) -> None:
        divisors = adam_divisors(model, optimizer) if kind.optimizer == "adam" else None
        # Without divisors the exact value has not changed since the first time.
        known = next(iter(found.values()))["brute_force"] if found and divisors is None else None
        found[step] = {
            **asdict(kind),
            "frozen_steps": step,
            "seed": seed,
            "measured": loader.planner.metrics().get("noise_scale"),
            "brute_force": known or brute_force(kind, model, examples, seed, divisors),
        }

    def over(step: int) -> bool:
        if step in FROZEN_STEPS and step not in found:
            look(step)
        return step == max(FROZEN_STEPS)

    def loss(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(images), labels)

    train_until(over, loader, model, optimizer, loss)
    return list(found.values())


def rows(seeds: str) -> list[dict[str, Any]]:
    """Return the measured noise scale and that of brute force, for each kind and seed."""
    return [row for kind in KINDS for seed in range(int(seeds)) for row in measure(kind, seed)]

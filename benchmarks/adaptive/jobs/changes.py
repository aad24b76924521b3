"""A job whose best batch changes at a known step: how soon is it followed?

A linear regression, whose noise scale is known from the gradients of all examples. A pass sleeps
for the time of a device, which is known, too: so is the best batch. Weights hardly move: nothing
changes but what is meant to.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import hvd_elastic.torch as hvd
from benchmarks.adaptive.jobs.training import begin, train_until

EXAMPLES, WIDTH, INITIAL, LARGEST, RATE = 8192, 32, 32, 1024, 1e-6
SETTLED, AFTERWARDS = 300, 200
"""Steps before the change, and after it."""


@dataclass(frozen=True)
class Conditions:
    """Of a stretch of training.

    Attributes:
        noise: what is added to the targets has so many times the variance that the weights leave.
        pass_s: a pass takes so long whatever its examples [s].
        example_s: and so much longer for each of them [s].
    """

    noise: float
    pass_s: float = 0.008
    example_s: float = 5e-5


@dataclass(frozen=True)
class Kind:
    """What changes.

    Attributes:
        name: of the change.
        then: conditions at first; None: from the start they are as ``now``.
        now: and from the step of the change on.
    """

    name: str
    then: Conditions | None
    now: Conditions


QUIET, NOISY, BETWEEN = 0.0, 30.0, 8.0
KINDS = [
    Kind("noise is large from the start", None, Conditions(NOISY)),
    Kind("noise rises", Conditions(QUIET), Conditions(NOISY)),
    Kind("noise falls", Conditions(NOISY), Conditions(QUIET)),
    Kind("a pass costs more", Conditions(BETWEEN, 0.004), Conditions(BETWEEN, 0.032)),
    Kind("an example costs more", Conditions(BETWEEN), Conditions(BETWEEN, example_s=5e-4)),
]


def problem(seed: int) -> tuple[torch.nn.Linear, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A model, inputs, what its targets are without noise, and noise of variance 1."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(EXAMPLES, WIDTH, generator=generator)
    true = torch.randn(1, WIDTH, generator=generator)
    off = torch.randn(1, WIDTH, generator=generator)
    model = torch.nn.Linear(WIDTH, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(true + off / off.norm())
    return model, inputs, inputs @ true.T, torch.randn(EXAMPLES, 1, generator=generator)


def exact(model: torch.nn.Linear, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    """The noise scale, from the gradient of every example: residual times input [examples]."""
    with torch.no_grad():
        own = 2 * (model(inputs) - targets) * inputs
        return float(own.var(0, unbiased=True).sum() / own.mean(0).square().sum())


def train_through(kind: Kind, seed: int) -> dict[str, Any]:
    """One training: what is known of it, and each batch with the step from which it was used."""
    begin(seed)
    model, inputs, clean, noise = problem(seed)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=RATE), model)
    examples = TensorDataset(inputs, clean, noise)
    loader: Any = hvd.DataLoader(examples, INITIAL, shuffle=True, seed=seed, max_batch_size=LARGEST)
    known = [
        {**asdict(each), "noise_scale": exact(model, inputs, clean + each.noise**0.5 * noise)}
        for each in (kind.then or kind.now, kind.now)
    ]
    change = 0 if kind.then is None else SETTLED
    batches: list[tuple[int, int, int]] = []
    rest_s: list[float] = []

    began, slept_s, pass_s, done = time.perf_counter(), 0.0, 0.0, 0

    def over(step: int) -> bool:
        nonlocal began, slept_s, done
        if step > done:
            now, done = time.perf_counter(), step
            rest_s.append(now - began - slept_s)
            began, slept_s = now, 0.0
        plan = loader.planner.plan
        batch = plan.global_batch_size, plan.accumulation_steps
        if not batches or batches[-1][1:] != batch:
            batches.append((step, *batch))
        return step == change + AFTERWARDS

    def loss(
        features: torch.Tensor, targets: torch.Tensor, additions: torch.Tensor
    ) -> torch.Tensor:
        nonlocal pass_s
        at = known[done >= change]
        pass_s = at["pass_s"] + at["example_s"] * len(features)
        return F.mse_loss(model(features), targets + at["noise"] ** 0.5 * additions)

    def emulate_device() -> None:
        nonlocal slept_s
        time.sleep(pass_s)
        slept_s += pass_s

    train_until(over, loader, model, optimizer, loss, before_step=emulate_device)
    return {
        "change": kind.name,
        "seed": seed,
        "step": change,
        "before": known[0],
        "after": known[1],
        "rest_s": statistics.median(rest_s),
        "batches": batches,
    }


def rows(seeds: str) -> list[dict[str, Any]]:
    """What is known of each training, and its batches.

    Kinds take turns, so that a busy moment of the machine hits all alike.
    """
    return [train_through(kind, seed) for seed in range(int(seeds)) for kind in KINDS]

"""A job whose best batch changes at a known step, to measure how soon the planner follows.

It trains a linear regression, whose noise scale is known from the gradients of all examples. A pass
sleeps for the time of an emulated device. So the best batch is known. The learning rate is so small
that the weights hardly move, and nothing else changes.
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
"""Number of steps before the change, and after it."""


@dataclass(frozen=True)
class Conditions:
    """Conditions during a part of a training.

    Attributes:
        noise: variance of the noise added to the targets, as a multiple of the residual variance
            that the weights leave.
        pass_s: fixed time of a pass [s].
        example_s: time of a pass for each of its examples [s].
    """

    noise: float
    pass_s: float = 0.008
    example_s: float = 5e-5


@dataclass(frozen=True)
class Kind:
    """A kind of change.

    Attributes:
        name: name of the change.
        then: conditions before the change; None: ``now`` holds from the start.
        now: conditions from the step of the change on.
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
    """Return a model, its inputs, its targets without noise, and noise of variance 1."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(EXAMPLES, WIDTH, generator=generator)
    true = torch.randn(1, WIDTH, generator=generator)
    off = torch.randn(1, WIDTH, generator=generator)
    model = torch.nn.Linear(WIDTH, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(true + off / off.norm())
    return model, inputs, inputs @ true.T, torch.randn(EXAMPLES, 1, generator=generator)


def exact(model: torch.nn.Linear, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Return the exact noise scale [examples], from the gradient of every example.

    The gradient of an example is its residual times its input.
    """
    with torch.no_grad():
        own = 2 * (model(inputs) - targets) * inputs
        return float(own.var(0, unbiased=True).sum() / own.mean(0).square().sum())


def train_through(kind: Kind, seed: int) -> dict[str, Any]:
    """Train once; return the conditions, and each batch with the step from which it was used."""
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
    """Return a row for each training, with its conditions and its batches.

    The kinds alternate, so that a disturbance of the machine affects all of them equally.
    """
    return [train_through(kind, seed) for seed in range(int(seeds)) for kind in KINDS]

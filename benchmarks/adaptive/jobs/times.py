"""A job that measures step times of many batch plans."""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import asdict
from typing import Any

import torch
from torch.utils.data import TensorDataset

import hvd_elastic.torch as hvd
from benchmarks.adaptive.jobs.training import begin, loader_with_plan, ranks, train_until
from hvd_elastic.model.goodput import BatchPlan
from hvd_elastic.model.step_time import Observation

WIDTH = 350
"""Width of two layers: a quarter of a million parameters, 1 MB of gradients."""
PLANS = list(itertools.product((8, 32, 128, 512), (0, 1, 3)))
"""Examples in a pass, and passes besides the first."""
ROUNDS, WARM, STEPS = 4, 4, 8
"""Rounds over all plans; in each the steps that are not timed, and those that are. With several
rounds a disturbance of the machine affects some steps of each plan, and not all steps of one."""


def times_of_steps(atomic: int, accumulation: int) -> list[float]:
    """Return the step times of one batch plan [s]."""
    begin(seed=0)
    layers = torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH)
    model = torch.nn.Sequential(*layers)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-4)
    optimizer = hvd.DistributedOptimizer(sgd, model)
    batch = atomic * (accumulation + 1) * ranks()
    examples = TensorDataset(torch.randn(batch * 4, WIDTH))
    loader = loader_with_plan(examples, BatchPlan(batch, accumulation))
    times: list[float] = []

    began, done = time.perf_counter(), 0

    def over(step: int) -> bool:
        nonlocal began, done
        if step > done:
            now, done = time.perf_counter(), step
            times.append(now - began)
            began = now
        return len(times) == WARM + STEPS

    def loss(inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = model(inputs)
        return output.square().mean()

    train_until(over, loader, model, optimizer, loss)
    return times[WARM:]


def rows(hosts: str) -> list[dict[str, Any]]:
    """Return an observation for each batch plan."""
    rounds = [[times_of_steps(*plan) for plan in PLANS] for _ in range(ROUNDS)]
    found = []
    for (atomic, extra), times in zip(PLANS, zip(*rounds, strict=True), strict=True):
        step_s = statistics.median(itertools.chain(*times))
        found.append(asdict(Observation(int(hosts), ranks(), atomic, extra, step_s)))
    return found

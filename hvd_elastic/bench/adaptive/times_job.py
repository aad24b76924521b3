"""One rank of a job that times steps of many batch plans.

``python -m hvd_elastic.bench.adaptive.times_job OUT HOSTS`` on one rank or under a launcher; rank 0
writes an observation for each plan.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

import hvd_elastic.torch as hvd
from hvd_elastic.bench.adaptive.given import begin, loader_with_plan, write_rank_0
from hvd_elastic.model.goodput import BatchPlan
from hvd_elastic.model.step_time import Observation
from hvd_elastic.torch import context

WIDTH = 350
"""Two layers of it: a quarter of a million parameters, 1 MB of gradients."""
PLANS = list(itertools.product((8, 32, 128, 512), (0, 1, 3)))
"""Examples in a pass, and passes beside the first."""
ROUNDS, WARM, STEPS = 4, 4, 8
"""All plans are gone through several times: what keeps the machine busy for a moment then hits a
part of the steps of each, and not all steps of one."""


def times_of_steps(atomic: int, accumulation: int) -> list[float]:
    """In one plan [s]."""
    begin()
    torch.manual_seed(0)
    layers = torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH)
    model = torch.nn.Sequential(*layers)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-4)
    optimizer = hvd.DistributedOptimizer(sgd, model)
    batch = atomic * (accumulation + 1) * context.current().engine.size
    examples = TensorDataset(torch.randn(batch * 4, WIDTH))
    loader = loader_with_plan(examples, BatchPlan(batch, accumulation))
    times: list[float] = []

    @hvd.run
    def train(_state: hvd.State) -> None:
        began, step = time.perf_counter(), 0
        for _ in hvd.epochs(10**6):
            for (inputs,) in loader:
                if context.current().progress.step > step:
                    now, step = time.perf_counter(), context.current().progress.step
                    times.append(now - began)
                    began = now
                if len(times) == WARM + STEPS:
                    return
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()

    train(hvd.State(model=model, optimizer=optimizer))
    return times[WARM:]


def main() -> None:
    """Run the job that the command line describes."""
    out, hosts = Path(sys.argv[1]), int(sys.argv[2])
    hvd.init()
    ranks = context.current().engine.size
    rounds = [[times_of_steps(*plan) for plan in PLANS] for _ in range(ROUNDS)]
    found: list[Mapping[str, Any]] = []
    for (atomic, extra), times in zip(PLANS, zip(*rounds, strict=True), strict=True):
        step_s = statistics.median(itertools.chain(*times))
        found.append(asdict(Observation(hosts, ranks, atomic, extra, step_s)))
    write_rank_0(out, found)


if __name__ == "__main__":
    main()

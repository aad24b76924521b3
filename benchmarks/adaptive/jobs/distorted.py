"""A job that trains on distorted digits until a target accuracy, with AdaScale."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import hvd_elastic.torch as hvd
from benchmarks.adaptive import workloads
from benchmarks.adaptive.jobs.training import loader_with_plan, train_until
from hvd_elastic.model.goodput import BatchPlan
from hvd_elastic.worker import context


def learn(batch: str, seed: int) -> dict[str, Any]:
    """Train until the schedule ends, and return when the target was reached."""
    examples, (images, labels) = workloads.distorted_digits()
    torch.manual_seed(seed)
    model = workloads.digits_network()
    sgd = torch.optim.SGD(model.parameters(), lr=workloads.DISTORTED_RATE, momentum=0.9)

    def judge() -> float:
        right = workloads.share_right(model, images, labels)
        # Ranks have different batch norm statistics, and must agree on when to stop.
        return float(hvd.allreduce(right.reshape(1), "accuracy"))

    race = workloads.Race(judge)
    row: dict[str, Any] = {"batch": int(batch) if batch.isdigit() else batch, "seed": seed}
    if batch == "horovod":
        learn_bare(race, model, sgd, examples, seed)
        return {**row, **race.result()}
    optimizer = hvd.DistributedOptimizer(sgd, model, lr_rule="adascale")
    schedule = hvd.follow_progress(LambdaLR(optimizer, workloads.rate_left))
    loader: Any
    if batch == "adaptive":
        loader = hvd.DataLoader(
            examples, workloads.INITIAL, shuffle=True, seed=seed, max_batch_size=workloads.LARGEST
        )
    else:
        loader = loader_with_plan(examples, BatchPlan(int(batch)), workloads.INITIAL, seed)

    def over(_step: int) -> bool:
        used, adaptation = context.current().worker.progress.examples, loader.planner
        return race.over(used, adaptation.plan.global_batch_size, adaptation.progress)

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(inputs), targets)

    race.start()
    train_until(over, loader, model, optimizer, loss, schedule=schedule)
    return {**row, **race.result(), "steps": context.current().worker.progress.step}


def learn_bare(
    race: workloads.Race,
    model: nn.Module,
    sgd: torch.optim.Optimizer,
    examples: TensorDataset,
    seed: int,
) -> None:
    """Train with Horovod's own optimizer, where nothing adapts."""
    import horovod.torch as horovod

    optimizer = horovod.DistributedOptimizer(sgd, named_parameters=model.named_parameters())
    sampler: Any = DistributedSampler(examples, hvd.size(), hvd.rank(), seed=seed)
    loader = DataLoader(examples, workloads.INITIAL // hvd.size(), sampler=sampler)
    schedule = LambdaLR(optimizer, workloads.rate_left)
    used, steps = 0, 0
    race.start()
    for epoch in range(10**6):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            schedule.step()
            used, steps = used + hvd.size() * len(inputs), steps + 1
            if race.over(used, workloads.INITIAL, steps):
                return


def rows(batch: str, seed: str) -> list[dict[str, Any]]:
    """Return one row: how long a training took.

    Args:
        batch: a size, ``adaptive``, or ``horovod``: the default size with Horovod's own optimizer
            and PyTorch's loader, which measure nothing.
        seed: seed of the training.
    """
    hvd.init()
    workloads.warm_up()
    return [learn(batch, int(seed))]

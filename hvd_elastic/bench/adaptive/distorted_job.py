"""One rank of a job that learns distorted digits until the target.

``python -m hvd_elastic.bench.adaptive.distorted_job OUT BATCH SEED`` under a launcher; rank 0
writes how long it took. BATCH is a size, ``adaptive``, or ``horovod``: the default size with
Horovod's own optimizer and PyTorch's loader, which measure nothing. The learning rate follows the
batch by AdaScale.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import hvd_elastic.torch as hvd
from hvd_elastic.bench.adaptive.given import loader_with_plan, write_rank_0
from hvd_elastic.bench.adaptive.workloads import (
    DISTORTED_RATE,
    INITIAL,
    LARGEST,
    Race,
    digits_network,
    distorted_digits,
    rate_left,
    share_right,
    warm_up,
)
from hvd_elastic.model.goodput import BatchPlan
from hvd_elastic.torch import context


def learn(batch: str, seed: int) -> dict[str, Any]:
    """Train until the target."""
    examples, (images, labels) = distorted_digits()
    torch.manual_seed(seed)
    model = digits_network()
    sgd = torch.optim.SGD(model.parameters(), lr=DISTORTED_RATE, momentum=0.9)

    def judge() -> float:
        right = share_right(model, images, labels)
        # Ranks have batch norm statistics of their own; they have to end together.
        return float(hvd.allreduce(right.reshape(1), "accuracy"))

    race = Race(judge)
    row: dict[str, Any] = {"batch": int(batch) if batch.isdigit() else batch, "seed": seed}
    if batch == "horovod":
        learn_bare(race, model, sgd, examples, seed)
        return {**row, **race.result()}
    optimizer = hvd.DistributedOptimizer(sgd, model, lr_rule="adascale")
    schedule = hvd.follow_progress(LambdaLR(optimizer, rate_left))
    loader: Any
    if batch == "adaptive":
        loader = hvd.DataLoader(examples, INITIAL, shuffle=True, seed=seed, max_batch_size=LARGEST)
    else:
        loader = loader_with_plan(examples, BatchPlan(int(batch)), INITIAL, seed)

    @hvd.run
    def train(_state: hvd.State) -> None:
        race.start()
        for _ in hvd.epochs(10**6):
            for inputs, targets in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
                schedule.step()
                used, adaptation = context.current().progress.examples, loader.adaptation
                if race.over(used, adaptation.plan.global_batch_size, adaptation.progress):
                    return

    train(hvd.State(model=model, optimizer=optimizer, schedule=schedule))
    return {**row, **race.result(), "steps": context.current().progress.step}


def learn_bare(
    race: Race, model: nn.Module, sgd: torch.optim.Optimizer, examples: TensorDataset, seed: int
) -> None:
    """The training as it is where nothing adapts."""
    import horovod.torch as horovod

    optimizer = horovod.DistributedOptimizer(sgd, named_parameters=model.named_parameters())
    sampler: Any = DistributedSampler(examples, hvd.size(), hvd.rank(), seed=seed)
    loader = DataLoader(examples, INITIAL // hvd.size(), sampler=sampler)
    schedule = LambdaLR(optimizer, rate_left)
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
            if race.over(used, INITIAL, steps):
                return


def main() -> None:
    """Run the job that the command line describes."""
    out, batch, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    hvd.init()
    warm_up()
    write_rank_0(out, [learn(batch, seed)])


if __name__ == "__main__":
    main()

"""One rank of a job that learns the digits again and again, with other batches.

``python -m hvd_elastic.bench.adaptive.target_job OUT SEED`` under a launcher; rank 0 writes how
long it took to reach the target, with a batch that adapts and with each of the fixed ones. The
learning rate follows the batch in all of them, by AdaScale.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import hvd_elastic.torch as hvd
from hvd_elastic.bench.adaptive.given import begin, loader_with_plan, write_rank_0
from hvd_elastic.bench.adaptive.workloads import (
    INITIAL,
    LARGEST,
    PASSES,
    RATE,
    TARGET,
    digits,
    digits_network,
    share_right,
    warm_up,
)
from hvd_elastic.model.goodput import BatchPlan
from hvd_elastic.torch import context

FIXED = (32, 64, 128, 256, 512)


def learn(size: int | None, seed: int) -> dict[str, Any]:
    """Train until the target, with a batch of this size or with one that adapts."""
    begin()
    torch.manual_seed(seed)
    model = digits_network()
    sgd = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(sgd, model, lr_rule="adascale")
    examples, (images, labels) = digits()
    loader: Any
    if size is None:
        loader = hvd.DataLoader(examples, INITIAL, shuffle=True, seed=seed, max_batch_size=LARGEST)
    else:
        loader = loader_with_plan(examples, BatchPlan(size), INITIAL, seed)
    row: dict[str, Any] = {"batch": size or "adaptive", "seed": seed, "seconds": None}

    @hvd.run
    def train(_state: hvd.State) -> None:
        seconds = 0.0
        for number in hvd.epochs(10**6):
            began = time.perf_counter()
            model.train()
            for inputs, targets in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
            seconds += time.perf_counter() - began
            right = share_right(model, images, labels)
            # Ranks have batch norm statistics of their own; they have to end together.
            accuracy = float(hvd.allreduce(right.reshape(1), "accuracy"))
            if accuracy >= TARGET:
                row.update(seconds=seconds, passes=number + 1)
            if accuracy >= TARGET or number + 1 == PASSES:
                return

    train(hvd.State(model=model, optimizer=optimizer))
    row["steps"] = context.current().progress.step
    row["last_batch"] = loader.adaptation.plan.global_batch_size
    return row


def main() -> None:
    """Run the job that the command line describes."""
    out, seed = Path(sys.argv[1]), int(sys.argv[2])
    warm_up()
    rows: list[Mapping[str, Any]] = [learn(size, seed) for size in (None, *FIXED)]
    write_rank_0(out, rows)


if __name__ == "__main__":
    main()

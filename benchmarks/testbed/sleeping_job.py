"""Train a small network for one epoch; each example takes its time by a sleep.

``python sleeping_job.py EXAMPLES BATCH EXAMPLE_S``: any number of workers on few cores is as many
times as fast as one.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import hvd_elastic.torch as hvd


def main() -> None:
    """Train on one rank."""
    examples, batch, example_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    hvd.init()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(examples, 8), torch.randint(3, (examples,)))
    model = nn.Linear(8, 3)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
    loader: hvd.DataLoader[Any] = hvd.DataLoader(data, batch, shuffle=True)

    @hvd.run
    def train(_: hvd.State) -> None:
        for _epoch in hvd.epochs(1):
            for inputs, targets in loader:
                time.sleep(example_s * len(inputs))
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()

    train(hvd.State(model, optimizer))


if __name__ == "__main__":
    main()

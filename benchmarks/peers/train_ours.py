"""The workload under ``hvd-elastic run``."""

from __future__ import annotations

import time
from typing import Any

import hvd_elastic.torch as hvd
from benchmarks.peers.workload import (
    commits,
    load_data,
    loss_of,
    make_model,
    make_optimizer,
    mark,
    parse_arguments,
)

args = parse_arguments()
hvd.init()
model = make_model(args)
optimizer = hvd.DistributedOptimizer(make_optimizer(model), model)
loader: Any = hvd.DataLoader(load_data(args), args.batch_size, shuffle=True)


@hvd.run
def train(state: Any) -> None:
    """Train without end."""
    step = 0
    for _ in hvd.epochs(10**9):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = loss_of(model, images, labels)
            loss.backward()
            optimizer.step()
            time.sleep(args.step_time)
            if commits(args, step):
                state.commit(loss=loss)
            step += 1


mark("ready")
train(hvd.State(model=model, optimizer=optimizer))

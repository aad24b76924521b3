"""The workload under ``hvd-elastic run``."""

from __future__ import annotations

import time
from typing import Any

import hvd_elastic.torch as hvd
from benchmarks.peers import workload

args = workload.parse_arguments()
hvd.init()
model = workload.make_model(args)
optimizer = hvd.DistributedOptimizer(workload.make_optimizer(model), model)
loader: Any = hvd.DataLoader(workload.load_data(args), args.batch_size, shuffle=True)


@hvd.run
def train(state: Any) -> None:
    """Train without end."""
    step = 0
    for _ in hvd.epochs(10**9):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = workload.loss_of(model, images, labels)
            loss.backward()
            optimizer.step()
            time.sleep(args.step_time)
            if workload.commits(args, step):
                state.commit(loss=loss)
            step += 1


workload.mark("ready")
train(hvd.State(model=model, optimizer=optimizer))

"""The workload under stock elastic ``horovodrun``, written as in Horovod's manual."""

from __future__ import annotations

import time
from typing import Any

import horovod.torch as hvd

from benchmarks.peers import workload

BATCHES_PER_COMMIT = 10  # as in the example in Horovod's manual

args = workload.parse_arguments()
workload.mark("ready")  # here newcomers meet the others in init(), before the model exists
hvd.init()
model = workload.make_model(args)
named = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
optimizer = hvd.DistributedOptimizer(workload.make_optimizer(model), named_parameters=named)
dataset = workload.load_data(args)


@hvd.elastic.run
def train(state: Any) -> None:
    """Train without end."""
    for images, labels in workload.batches(dataset, args, hvd.size):
        optimizer.zero_grad()
        workload.loss_of(model, images, labels).backward()
        optimizer.step()
        time.sleep(args.step_time)
        every_step = args.commit_blocks and workload.commits(args, state.batch)
        state.batch += 1
        if every_step or (not args.commit_blocks and state.batch % BATCHES_PER_COMMIT == 0):
            state.commit()


train(hvd.elastic.TorchState(model, optimizer, batch=0))

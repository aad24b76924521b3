"""The workload under stock ``horovodrun``, elastic, as Horovod's manual writes it."""

from __future__ import annotations

import time
from typing import Any

import horovod.torch as hvd

from benchmarks.peers.workload import (
    batches,
    commits,
    load_data,
    loss_of,
    make_model,
    make_optimizer,
    mark,
    parse_arguments,
)

BATCHES_PER_COMMIT = 10  # of the example in Horovod's manual

args = parse_arguments()
mark("ready")  # its newcomers meet the others in init(), before there is a model
hvd.init()
model = make_model(args)
named = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
optimizer = hvd.DistributedOptimizer(make_optimizer(model), named_parameters=named)
dataset = load_data(args)


@hvd.elastic.run
def train(state: Any) -> None:
    """Train without end."""
    for images, labels in batches(dataset, args, hvd.size):
        optimizer.zero_grad()
        loss_of(model, images, labels).backward()
        optimizer.step()
        time.sleep(args.step_time)
        every_step = args.commit_blocks and commits(args, state.batch)
        state.batch += 1
        if every_step or (not args.commit_blocks and state.batch % BATCHES_PER_COMMIT == 0):
            state.commit()


train(hvd.elastic.TorchState(model, optimizer, batch=0))

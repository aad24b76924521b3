"""The workload under torchft with default settings and one replica group for each worker."""

from __future__ import annotations

import time
from typing import Any

from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from benchmarks.peers import workload

args = workload.parse_arguments()
workload.mark("ready")
model = workload.make_model(args)
inner = workload.make_optimizer(model)


def load_state(state: dict[str, Any]) -> None:
    """Load the state that a healthy replica sent."""
    model.load_state_dict(state["model"])
    inner.load_state_dict(state["optimizer"])


def give_state() -> dict[str, Any]:
    """Return the state for a recovering replica."""
    return {"model": model.state_dict(), "optimizer": inner.state_dict()}


manager = Manager(
    pg=ProcessGroupGloo(),
    load_state_dict=load_state,
    state_dict=give_state,
    min_replica_size=args.min_np,
)
replicated = DistributedDataParallel(manager, model)
optimizer = Optimizer(manager, inner)
inner.world_size = manager.num_participants  # type: ignore[attr-defined]  # read by the marks

world = [1]  # the world size is known only after the first step has begun
for images, labels in workload.batches(workload.load_data(args), args, lambda: world[0]):
    optimizer.zero_grad()
    workload.loss_of(replicated, images, labels).backward()
    optimizer.step()
    world[0] = manager.num_participants()
    time.sleep(args.step_time)

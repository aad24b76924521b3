"""The workload under ``torchrun``: DDP, with a snapshot file from which all workers restart."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers import workload

SNAPSHOT_EVERY_S = 1.0

args = workload.parse_arguments()
workload.mark("ready")
dist.init_process_group("gloo")
model = workload.make_model(args)
optimizer = workload.make_optimizer(model)
if args.snapshot.exists():
    saved = torch.load(args.snapshot, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
replicated = DistributedDataParallel(model)
due = time.monotonic() + SNAPSHOT_EVERY_S


optimizer.world_size = dist.get_world_size  # type: ignore[attr-defined]  # read by the marks
for images, labels in workload.batches(workload.load_data(args), args, dist.get_world_size):
    optimizer.zero_grad()
    workload.loss_of(replicated, images, labels).backward()
    optimizer.step()
    time.sleep(args.step_time)
    if dist.get_rank() == 0 and time.monotonic() >= due:
        part = args.snapshot.with_suffix(f".{os.getpid()}")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, part)
        part.replace(args.snapshot)
        due = time.monotonic() + SNAPSHOT_EVERY_S

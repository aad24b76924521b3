"""Runs one replica that alternates between plain DDP and AdaptDL, at the same network and batch.

``python adaptdl_overhead.py OUT ROUNDS`` runs in AdaptDL's environment, with its variables; replica
0 writes the step times of each block. Only the libraries differ from
``benchmarks/adaptive/jobs/overhead.py``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import adaptdl.env
import adaptdl.torch
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.adaptive import workloads


def measure(rounds: int) -> dict[str, list[float]]:
    """Return the time of a step in each block [s]."""
    share = workloads.BATCH // adaptdl.env.num_replicas()
    inputs = torch.randn(
        workloads.BATCH * (workloads.STEPS * (rounds + 1) + workloads.WARM), workloads.WIDTH
    )
    network = workloads.wide_network()
    sgd = torch.optim.SGD(network.parameters(), lr=1e-3)
    adapting = adaptdl.torch.AdaptiveDataParallel(network, sgd)
    loader = adaptdl.torch.AdaptiveDataLoader(TensorDataset(inputs), batch_size=workloads.BATCH)
    loader.autoscale_batch_size(workloads.BATCH)
    theirs = workloads.wide_network()
    plain = torch.optim.SGD(theirs.parameters(), lr=1e-3)
    bare = DistributedDataParallel(theirs)
    batches = DataLoader(TensorDataset(inputs[: workloads.STEPS * share]), share)
    times: dict[str, list[float]] = {}

    def bare_block() -> None:
        for (batch,) in batches:
            workloads.square_step(bare, plain, batch)

    for _ in adaptdl.torch.remaining_epochs_until(1):
        steps = iter(loader)

        def adaptive_block(steps: Any = steps) -> None:
            for _ in range(workloads.STEPS):
                workloads.square_step(adapting, sgd, next(steps)[0])

        for _ in range(workloads.WARM // workloads.STEPS):
            adaptive_block()
        bare_block()
        times.update(workloads.take_turns(rounds, bare_block, adaptive_block))
    return times


def main() -> None:
    """Run the job that the command line describes."""
    out, rounds = Path(sys.argv[1]), int(sys.argv[2])
    adaptdl.torch.init_process_group("gloo")
    times = measure(rounds)
    if adaptdl.env.replica_rank() == 0:
        out.write_text(json.dumps(times), encoding="utf-8")


if __name__ == "__main__":
    main()

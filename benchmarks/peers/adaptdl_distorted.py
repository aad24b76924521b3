"""Trains one standalone replica of AdaptDL on distorted digits until the target.

``python adaptdl_distorted.py OUT SEED`` runs in AdaptDL's environment, with its variables; replica
0 writes how long it took. Only the library differs from ``benchmarks/adaptive/jobs/distorted.py``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import adaptdl.env
import adaptdl.torch
import torch
from adaptdl.torch import _metrics
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.adaptive import workloads


def learn(seed: int) -> dict[str, Any]:
    """Train with a batch that AdaptDL chooses, and with AdaScale, which is its default."""
    replicas = adaptdl.env.num_replicas()
    examples, (images, labels) = workloads.distorted_digits()
    torch.manual_seed(seed)
    network = workloads.digits_network()
    sgd = torch.optim.SGD(network.parameters(), lr=workloads.DISTORTED_RATE, momentum=0.9)
    schedule = LambdaLR(sgd, lambda _: workloads.rate_left(_metrics.get_progress()))
    model = adaptdl.torch.AdaptiveDataParallel(network, sgd, schedule)
    loader = adaptdl.torch.AdaptiveDataLoader(examples, batch_size=workloads.INITIAL, shuffle=True)
    # No accumulation: with it this release sums gradients instead of averaging them.
    loader.autoscale_batch_size(
        workloads.LARGEST,
        local_bsz_bounds=(workloads.INITIAL // replicas, workloads.LARGEST // replicas),
    )

    def judge() -> float:
        right = workloads.share_right(network, images, labels)
        torch.distributed.all_reduce(right)
        # The time of the evaluation must not count in the step time.
        _metrics.profile_step_start(loader.current_local_bsz)
        return float(right) / replicas

    race, used, steps = workloads.Race(judge), 0, 0
    race.start()
    for _ in adaptdl.torch.remaining_epochs_until(10**6):
        for inputs, targets in loader:
            sgd.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            sgd.step()
            schedule.step()
            used, steps = used + replicas * len(inputs), steps + 1
            if race.over(used, loader.current_batch_size, model.gns.get_progress()):
                return {"batch": "AdaptDL", "seed": seed, **race.result(), "steps": steps}
    raise AssertionError("the epochs were over before the training")


def main() -> None:
    """Run the job that the command line describes."""
    out, seed = Path(sys.argv[1]), int(sys.argv[2])
    adaptdl.torch.init_process_group("gloo")
    workloads.warm_up()
    row = learn(seed)
    if adaptdl.env.replica_rank() == 0:
        out.write_text(json.dumps([row]), encoding="utf-8")
    torch.distributed.barrier()
    # AdaptDL's threads are still running and can abort the interpreter at a normal exit.
    os._exit(0)


if __name__ == "__main__":
    main()

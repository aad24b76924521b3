"""One replica of AdaptDL, standalone, that learns the digits until the target.

``python adaptdl_target.py OUT SEED`` in AdaptDL's environment, with its variables; replica 0 writes
how long it took. As ``hvd_elastic/bench/adaptive/target_job.py`` in all but the library.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import adaptdl.env
import adaptdl.torch
import torch
from torch.nn import functional as F

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


def learn(seed: int) -> dict[str, Any]:
    """Train until the target with a batch that AdaptDL chooses, AdaScale being its default."""
    replicas = adaptdl.env.num_replicas()
    torch.manual_seed(seed)
    network = digits_network()
    sgd = torch.optim.SGD(network.parameters(), lr=RATE, momentum=0.9)
    model = adaptdl.torch.AdaptiveDataParallel(network, sgd)
    examples, (images, labels) = digits()
    loader = adaptdl.torch.AdaptiveDataLoader(examples, batch_size=INITIAL, shuffle=True)
    # Without accumulation, with which this release sums gradients instead of averaging them.
    loader.autoscale_batch_size(
        LARGEST, local_bsz_bounds=(INITIAL // replicas, LARGEST // replicas)
    )
    row: dict[str, Any] = {"batch": "AdaptDL", "seed": seed, "seconds": None, "steps": 0}
    seconds = 0.0
    for number in adaptdl.torch.remaining_epochs_until(PASSES):
        began = time.perf_counter()
        model.train()
        for inputs, targets in loader:
            sgd.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            sgd.step()
            row["steps"] += 1
            row["last_batch"] = loader.current_batch_size
        seconds += time.perf_counter() - began
        right = share_right(network, images, labels)
        torch.distributed.all_reduce(right)
        if float(right) / replicas >= TARGET:
            row.update(seconds=seconds, passes=number + 1)
            break
    return row


def main() -> None:
    """Run the job that the command line describes."""
    out, seed = Path(sys.argv[1]), int(sys.argv[2])
    adaptdl.torch.init_process_group("gloo")
    warm_up()
    row = learn(seed)
    if adaptdl.env.replica_rank() == 0:
        out.write_text(json.dumps([row]), encoding="utf-8")


if __name__ == "__main__":
    main()

"""One rank that takes turns between a bare Horovod optimizer and one that adapts, same batch.

``python -m hvd_elastic.bench.adaptive.overhead_job OUT ROUNDS`` under a launcher; rank 0 writes the
seconds of each block of steps to OUT.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import hvd_elastic.torch as hvd
from hvd_elastic.bench.adaptive.workloads import (
    BATCH,
    STEPS,
    WARM,
    WIDTH,
    square_step,
    take_turns,
    wide_network,
)
from hvd_elastic.torch import context


def main() -> None:
    """Run the job that the command line describes."""
    out, rounds = Path(sys.argv[1]), int(sys.argv[2])
    hvd.init()
    import horovod.torch as horovod

    inputs = torch.randn(BATCH * (STEPS * rounds + WARM), WIDTH)
    ours = wide_network()
    sgd = torch.optim.SGD(ours.parameters(), lr=1e-3)
    adapting = hvd.DistributedOptimizer(sgd, ours, lr_rule="adascale")
    loader: Any = hvd.DataLoader(TensorDataset(inputs), BATCH, max_batch_size=BATCH)
    times: dict[str, list[float]] = {}

    @hvd.run
    def train(_state: hvd.State) -> None:
        theirs = wide_network()
        plain = torch.optim.SGD(theirs.parameters(), lr=1e-3)
        bare = horovod.DistributedOptimizer(plain, named_parameters=theirs.named_parameters())
        share = TensorDataset(inputs[: STEPS * BATCH // hvd.size()])
        batches = DataLoader(share, BATCH // hvd.size())

        def bare_block() -> None:
            for (batch,) in batches:
                square_step(theirs, bare, batch)

        steps = iter(loader)

        def adaptive_block() -> None:
            for _ in range(STEPS):
                square_step(ours, adapting, next(steps)[0])

        # Until the noise is known, every step is looked at; that is over after these.
        while context.current().progress.step < WARM - STEPS:
            adaptive_block()
        bare_block()
        times.update(take_turns(rounds, bare_block, adaptive_block))

    train(hvd.State(model=ours, optimizer=adapting))
    if hvd.rank() == 0:
        out.write_text(json.dumps(times), encoding="utf-8")


if __name__ == "__main__":
    main()

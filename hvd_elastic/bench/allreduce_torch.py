"""Sums tensors over the ranks as gradients are; a worker of ``hvd-elastic bench allreduce``."""

from __future__ import annotations

import sys
import time

import torch

import hvd_elastic.torch as hvd
from hvd_elastic.bench.step_timer import PREFIX
from hvd_elastic.worker import context

_BYTES = 256 << 20
"""Bytes that the timed sums of a size have together, within the bounds of their number."""
_FEWEST, _MOST = 2, 100
_WARM = 2


def mean_time(size: int) -> float:
    """Return the mean time of a sum of ``size`` bytes over all ranks [s]."""
    communicator = context.current().worker.communicator
    device = hvd.device()
    tensor = torch.ones(max(1, size // 4), device=device)

    def add_up(times: int) -> float:
        began = time.perf_counter()
        for _ in range(times):
            communicator.wait(communicator.sum_async(tensor, f"bench.{size}"))
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / times

    add_up(_WARM)
    tensor.zero_()
    return add_up(min(_MOST, max(_FEWEST, _BYTES // size)))


def main() -> None:
    """Time the sizes of the command line, and report each."""
    sizes = [int(word) for word in sys.argv[1:]]
    hvd.init()
    left = torch.nn.Linear(1, 1)  # a state has a model

    @hvd.run
    def train(state: hvd.State) -> None:
        for size in sizes:
            state.commit(**{f"{PREFIX}{size}_s": mean_time(size)})
        while True:
            time.sleep(0.3)
            state.commit()

    train(hvd.State(model=left))


if __name__ == "__main__":
    main()

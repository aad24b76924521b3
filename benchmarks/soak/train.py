"""The training script of the soak: the network of the digits example, which records what it does.

Every process appends its steps to a file of its own in ``--records``, so that the run can be
checked independently of the run's own records (see :mod:`benchmarks.soak.records` for the lines).
The parameters of all ranks are compared when a world begins and every few steps: each rank
contributes a checksum, and every rank records whether they differ.

Training ends with the epoch in which the file ``--until`` appears, or after ``--epochs``.
"""

from __future__ import annotations

import argparse
import os
import secrets
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.testbed.marking import LineWriter

_NO_END = 10**9


def main() -> None:
    """Run one worker with its command line."""
    parser = argparse.ArgumentParser(description="Train digits and write down every step.")
    parser.add_argument("--data", type=Path, required=True, help="folder of digits.py")
    parser.add_argument("--records", type=Path, required=True, help="folder for the records")
    parser.add_argument("--until", type=Path, required=True, help="file that ends the training")
    parser.add_argument("--epochs", type=int, default=_NO_END)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--step-time", type=float, default=0.0, help="seconds to add to a step")
    parser.add_argument("--compare-every", type=int, default=10, help="steps between checksums")
    train_on(parser.parse_args())


class Records:
    """Writes the records of this process to a file of its own."""

    def __init__(self, folder: Path) -> None:
        host = os.environ.get("HVD_ELASTIC_HOST", "localhost")
        self._lines = LineWriter(folder, host)
        worker = os.environ.get("HVD_ELASTIC_WORKER", str(os.getpid()))
        self.write("process", host=host, worker=worker)

    def write(self, kind: str, **fields: Any) -> None:
        """Write one record."""
        self._lines.write({"kind": kind, "mono": round(time.monotonic(), 6), **fields})


def train_on(options: argparse.Namespace) -> None:
    """Train, evaluate on the test set, and report the accuracy."""
    import numpy as np
    import torch
    from torch.nn import functional as F
    from torch.utils.data import TensorDataset

    import hvd_elastic.torch as hvd
    from benchmarks.adaptive.workloads import digits_network
    from hvd_elastic.worker import context

    def load(name: str) -> list[torch.Tensor]:
        with np.load(options.data / f"{name}.npz") as arrays:
            return [torch.from_numpy(arrays[key]) for key in ("images", "labels")]

    hvd.init()
    records = Records(options.records)
    torch.manual_seed(0)
    model = digits_network(16, 64)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(sgd, model)
    images, labels = load("train")
    dataset = TensorDataset(images, labels, torch.arange(len(images)))
    loader: hvd.DataLoader[Any] = hvd.DataLoader(dataset, options.batch_size, shuffle=True)
    generation_of_world = -1

    def checksum() -> int:
        # Buffers are left out: within a generation they may differ between ranks.
        total = 0
        for parameter in model.parameters():
            total = zlib.crc32(parameter.detach().contiguous().numpy().tobytes(), total)
            momentum = sgd.state.get(parameter, {}).get("momentum_buffer")
            if momentum is not None:
                total = zlib.crc32(momentum.contiguous().numpy().tobytes(), total)
        return total

    def compare(step: int) -> None:
        """Compare checksums if due; called on all ranks, and first in a world names the world."""
        nonlocal generation_of_world
        generation = context.current().worker.generation
        begins = generation != generation_of_world
        if not begins and step % options.compare_every:
            return
        mine = torch.tensor([[secrets.randbits(62), checksum(), step]], dtype=torch.int64)
        found = hvd.allgather(mine, "soak.world" if begins else "soak.compare").tolist()
        sums = [entry[1:] for entry in found]
        if begins:
            generation_of_world = generation
            place = {"rank": hvd.rank(), "size": hvd.size(), "generation": generation}
            records.write("world", world=found[0][0], step=step, **place)
        if any(entry != sums[0] for entry in sums):
            records.write("differ", step=step, sums=sums)
        else:
            records.write("equal", step=step)

    def epochs() -> Iterator[int]:
        for epoch in hvd.epochs(options.epochs):
            yield epoch
            there = torch.tensor([float(options.until.exists())])
            if hvd.allreduce(there, "soak.until", average=False).item() > 0:
                return

    @hvd.run
    def train(state: Any) -> None:
        for epoch in epochs():
            for inputs, targets, indices in loader:
                done = context.current().worker.progress.step
                compare(done)
                step = done + 1
                records.write("begin", step=step, epoch=epoch, indices=indices.tolist())
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs), targets)
                loss.backward()
                optimizer.step()
                records.write("end", step=step)
                time.sleep(options.step_time)  # emulates a larger model
                state.commit(loss=loss)

    train(hvd.State(model=model, optimizer=optimizer))
    model.eval()
    images, labels = load("test")
    with torch.no_grad():
        accuracy = (model(images).argmax(1) == labels).float().mean().item()
    records.write("finished", accuracy=accuracy)
    hvd.report(test_accuracy=accuracy)


if __name__ == "__main__":
    main()

"""A job that alternates between Horovod's own optimizer and an adaptive one, at the same batch."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import hvd_elastic.torch as hvd
from benchmarks.adaptive import workloads
from benchmarks.testbed.launchers import ROOT


def _resnet50() -> torch.nn.Module:
    path = ROOT / "scripts/examples/imagenet.py"
    spec = importlib.util.spec_from_file_location("imagenet", path)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    torch.manual_seed(0)
    network: torch.nn.Module = example.ResNet(50, 64, 1000)
    return network


@dataclass(frozen=True)
class Case:
    """A trained configuration.

    Attributes:
        network: creates the network, always with the same weights.
        shape: shape of one example.
        batch: examples of a step over all ranks.
        steps: number of steps in a block.
    """

    network: Callable[[], torch.nn.Module]
    shape: tuple[int, ...]
    batch: int
    steps: int


_BLOCKS = 4
"""Number of blocks in a pass over the data."""
CASES = {
    "wide": Case(workloads.wide_network, (workloads.WIDTH,), workloads.BATCH, workloads.STEPS),
    "resnet50": Case(_resnet50, (3, 64, 64), 16, 4),
}


def rows(rounds: str, network: str) -> list[dict[str, Any]]:
    """Return one row: the time of a step in each block [s].

    ``first`` has the first steps, all of which are sampled; ``steady`` has later steps, of which
    one in ``look_every`` is sampled.
    """
    case, wanted = CASES[network], int(rounds)
    hvd.init()
    import horovod.torch as horovod

    inputs = torch.randn(case.batch * case.steps * _BLOCKS, *case.shape)
    ours = case.network()
    sgd = torch.optim.SGD(ours.parameters(), lr=1e-3)
    adapting = hvd.DistributedOptimizer(sgd, ours, lr_rule="adascale")
    loader: Any = hvd.DataLoader(TensorDataset(inputs), case.batch, max_batch_size=case.batch)
    found: dict[str, Any] = {}

    def batches() -> Iterator[torch.Tensor]:
        for _ in hvd.epochs(sys.maxsize):
            for (batch,) in loader:
                yield batch

    def look_every() -> int:
        every: int = loader.planner.state_dict()["sample_every"]
        return every

    @hvd.run
    def train(_state: hvd.State) -> None:
        theirs = case.network()
        plain = torch.optim.SGD(theirs.parameters(), lr=1e-3)
        bare = horovod.DistributedOptimizer(plain, named_parameters=theirs.named_parameters())
        share = case.batch // hvd.size()
        plain_batches = DataLoader(TensorDataset(inputs[: case.steps * share]), share)

        def bare_block() -> None:
            for (batch,) in plain_batches:
                workloads.square_step(theirs, bare, batch)

        steps = batches()

        def adaptive_block() -> None:
            for _ in range(case.steps):
                workloads.square_step(ours, adapting, next(steps))

        adaptive_block()
        bare_block()
        first: dict[str, list[float]] = {"bare": [], "adaptive": []}
        # Until the noise scale is known, every step is sampled.
        while look_every() == 1:
            if len(first["bare"]) == wanted:
                adaptive_block()
                continue
            times = workloads.take_turns(1, bare_block, adaptive_block, case.steps)
            for name, seconds in times.items():
                first[name] += seconds
        steady = workloads.take_turns(wanted, bare_block, adaptive_block, case.steps)
        found.update(first=first, steady=steady, look_every=look_every())

    train(hvd.State(model=ours, optimizer=adapting))
    return [found]

"""Reads with ``hvd.DataLoader``, under ``hvd-elastic run``; see ``emulated.py``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import hvd_elastic.torch as hvd
from benchmarks.peers import emulated

parser = emulated.parser()
parser.add_argument("--num-workers", type=int, default=0)
parser.add_argument("--only", action="store_true", help="no blocks of a loader that costs nothing")
args = parser.parse_args()


class Pictures(Dataset[torch.Tensor]):
    """Pictures, which take the time that the options say, or none."""

    def __init__(self, *, free: bool) -> None:
        self._free = torch.zeros(emulated.SHAPE, dtype=torch.uint8) if free else None

    def __len__(self) -> int:
        return emulated.examples(args)

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._free is not None:
            return self._free
        return torch.from_numpy(emulated.picture(args, index))


hvd.init()
model = nn.Linear(8, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
loader: hvd.DataLoader[torch.Tensor] = hvd.DataLoader(
    Pictures(free=False), args.batch, shuffle=True, num_workers=args.num_workers
)


def trained(batches: Iterable[Any], state: hvd.State) -> Iterator[Any]:
    """Yield the batches, with a step of training for each."""
    for batch in batches:
        yield batch
        optimizer.zero_grad()
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        state.commit()


@hvd.run
def train(state: hvd.State) -> None:
    """Take all blocks, each of which is an epoch."""
    free: hvd.DataLoader[torch.Tensor] = hvd.DataLoader(Pictures(free=True), args.batch)
    kinds = ["read"] if args.only else ["free", "read"]
    blocks = []
    for epoch in hvd.epochs(args.rounds * len(kinds)):
        kind = kinds[epoch % len(kinds)]
        batches = loader if kind == "read" else free
        blocks.append(emulated.block(args, kind, trained(batches, state)))
    emulated.write(args, blocks)


train(hvd.State(model=model, optimizer=optimizer))

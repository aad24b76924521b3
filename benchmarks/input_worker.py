"""The training script of benchmarks/input.py: a step of emulated device time, and a transform."""

import argparse
import json
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

import hvd_elastic.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("result", type=Path)
parser.add_argument("--transform-ms", type=float, help="processor time of an example")
parser.add_argument("--step-ms", type=float, help="device time of a step")
parser.add_argument("--batch", type=int)
parser.add_argument("--warm", type=int)
parser.add_argument("--steps", type=int)
parser.add_argument("--num-workers", type=int)
args = parser.parse_args()


class Pictures(Dataset[torch.Tensor]):
    """Pictures of 64 x 64 pixels, each of which takes so much processor time."""

    def __len__(self) -> int:
        return args.batch * (args.warm + args.steps)

    def __getitem__(self, index: int) -> torch.Tensor:
        end = time.thread_time() + args.transform_ms / 1000
        while time.thread_time() < end:
            pass
        return torch.full((3, 64, 64), index % 256, dtype=torch.uint8)


hvd.init()
model = nn.Linear(8, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
loader: hvd.DataLoader[torch.Tensor] = hvd.DataLoader(
    Pictures(), args.batch, shuffle=True, num_workers=args.num_workers
)


@hvd.run
def train(state: hvd.State) -> None:
    """Take all steps of one epoch, and time those after the first few."""
    began = 0.0
    for _ in hvd.epochs(1):
        for step, _pictures in enumerate(loader):
            if step == args.warm:
                began = time.perf_counter()
            optimizer.zero_grad()
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
            time.sleep(args.step_ms / 1000)
            state.commit()
    seconds = time.perf_counter() - began
    args.result.write_text(json.dumps({"examples": args.batch * args.steps, "seconds": seconds}))


train(hvd.State(model=model, optimizer=optimizer))

"""A small model on an emulated device: a pass over m examples sleeps a + b m seconds."""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import hvd_elastic.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--examples", type=int, default=2400, help="of an epoch")
parser.add_argument("--batch", type=int, default=48, help="global batch size")
parser.add_argument("--max-batch", type=int, help="largest batch (default: the batch is fixed)")
parser.add_argument("--pass-s", type=float, default=0.0, help="a")
parser.add_argument("--example-s", type=float, default=0.004, help="b")
parser.add_argument("--random", type=float, default=0.5, help="part of the labels; sets the noise")
args = parser.parse_args()

torch.set_num_threads(1)
hvd.init()
torch.manual_seed(0)
inputs = torch.randn(args.examples, 16)
labels = (inputs @ torch.randn(16, 4)).argmax(1)
drawn = torch.randint(4, (args.examples,))
labels = torch.where(torch.rand(args.examples) < args.random, drawn, labels)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
# The learning rate is so small that the gradient noise does not change.
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-4), model)
data = TensorDataset(inputs, labels)
loader: hvd.DataLoader[Any] = hvd.DataLoader(
    data, args.batch, shuffle=True, max_batch_size=args.max_batch
)


@hvd.run
def train(_: hvd.State) -> None:
    """Train the epochs."""
    for _epoch in hvd.epochs(args.epochs):
        for some, targets in loader:
            optimizer.zero_grad()
            time.sleep(args.pass_s + args.example_s * len(some))
            F.cross_entropy(model(some), targets).backward()
            optimizer.step()


train(hvd.State(model=model, optimizer=optimizer))

"""A small training job in PyTorch that says what it holds; see ``probe.py``."""

import random
import time
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import hvd_elastic.torch as hvd
from hvd_elastic.data import ShardDataset
from hvd_elastic.worker import context
from tests.dist.scripts.probe import Probe, host_mark, options

parser = options()
parser.add_argument("--shards", help="read arrays of 8 numbers from this folder or URL")
parser.add_argument("--memory", type=int, help="examples in a pass that rank 0 has memory for")
parser.add_argument("--cache", help="folder on this host for shards behind a URL")
parser.add_argument("--num-workers", type=int, default=0)
parser.add_argument("--grad-scaler", action="store_true", help="with a scale that grows")
args = parser.parse_args()


class Net(nn.Module):
    """Layers, and a buffer that differs between ranks until the next generation."""

    mean: torch.Tensor

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, inputs):
        self.mean.mul_(0.9).add_(inputs.mean(0), alpha=0.1)
        return self.layers(inputs)


def tensor_bytes(value):
    if not isinstance(value, torch.Tensor):
        return None
    described = str((value.dtype, tuple(value.shape))).encode()
    return described + value.detach().contiguous().numpy().tobytes()


probe = Probe(args, tensor_bytes)
hvd.init()
if args.double:
    torch.set_default_dtype(torch.float64)
torch.manual_seed(args.seed)
model = Net()
sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
optimizer = hvd.DistributedOptimizer(sgd, model)
schedule = hvd.follow_progress(torch.optim.lr_scheduler.ExponentialLR(optimizer, 1.0))
scaler = hvd.GradScaler(init_scale=8.0, growth_interval=20, enabled=args.grad_scaler)
generator = torch.Generator().manual_seed(1)
inputs = torch.randn(args.examples, 8, generator=generator)
targets = torch.randint(3, (args.examples,), generator=generator)
dataset: Any = TensorDataset(inputs, targets)
if args.shards is not None:
    dataset = ShardDataset(args.shards, torch.from_numpy, shuffle_window=2, cache=args.cache)


class Augmented(Dataset[Any]):
    """Examples with random noise of each kind, their index, and a hash of the host that read it."""

    def __len__(self):
        return args.examples

    def __getitem__(self, index):
        time.sleep(args.augment)
        noise = torch.randn(8) + random.random() + float(np.random.rand())
        return inputs[index] + 0.01 * noise, targets[index], index, host_mark()


if args.augment is not None:
    dataset = Augmented()
loader: hvd.DataLoader[list[torch.Tensor]] = hvd.DataLoader(
    dataset,
    args.batch_size,
    shuffle=True,
    num_workers=args.num_workers,
    max_batch_size=args.max_batch_size,
    unequal_shares=args.unequal_shares or None,
    seed_examples=args.augment is not None,
)


def tell_if_due(state):
    def whole():
        kept = [model.state_dict(), optimizer.state_dict(), state.batches]
        return [*kept, schedule.state_dict(), scaler.state_dict()]

    def same():
        return [dict(model.named_parameters()), optimizer.state_dict(), state.batches]

    probe.tell_if_due(whole, same)


def enough():
    there = torch.tensor([probe.sees_enough()])
    return hvd.allreduce(there, "enough", average=False).item() > 0


@hvd.run
def train(state):
    for _ in hvd.epochs(args.epochs):
        for inputs, targets, *read in loader:
            if read:
                probe.note_examples(inputs, *read)
            if not len(context.current().step.passes) > 1:
                tell_if_due(state)
            optimizer.zero_grad()
            if args.memory and hvd.rank() == 0 and len(inputs) > args.memory:
                raise torch.cuda.OutOfMemoryError("made up by the test")
            loss = nn.functional.cross_entropy(model(inputs), targets)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            state.batches = context.current().worker.progress.step
            probe.wait(len(inputs))
            state.commit(loss=loss)
        if enough():
            break


train(hvd.State(model=model, optimizer=optimizer, schedule=schedule, batches=0))
if hvd.rank() == 0:
    torch.save(model.layers.state_dict(), args.folder / "trained.pt")

"""A small training job that says what it holds, and stands still where a test wants it to.

Before the first step of every generation, and every few steps, each rank appends to
``<folder>/digests.jsonl`` a digest of its parameters, buffers and optimizer state; the tests
compare them. With ``--augment`` each rank appends to ``<folder>/examples.jsonl`` the bytes of each
example that it is given. Files in ``<folder>`` steer it:

``enough``        training ends with the epoch
``stuck``         steps take for ever, as long as it is there
``stuck-<host>``  the same on that host alone
``slow-<host>``   examples take three times as long on that host
``gate-<host>``   workers of that host stand still before they meet the others of a new generation;
                  each says so by making ``at-gate-<worker>``
"""

import argparse
import hashlib
import json
import os
import random
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import hvd_elastic.torch as hvd
from hvd_elastic.communicator.ring import HorovodCommunicator
from hvd_elastic.data import ShardDataset
from hvd_elastic.training import context

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--examples", type=int, default=150)
parser.add_argument("--shards", type=Path, help="read arrays of 8 numbers from this folder")
parser.add_argument("--augment", type=float, help="at random, in so many seconds an example")
parser.add_argument("--batch-size", type=int, default=12)
parser.add_argument("--max-batch-size", type=int, help="adapt the batch up to this size")
parser.add_argument("--memory", type=int, help="examples in a pass that rank 0 has memory for")
parser.add_argument("--num-workers", type=int, default=0)
parser.add_argument("--step-time", type=float, default=0.05)
parser.add_argument("--example-time", type=float, default=0.0, help="for each in a pass")
parser.add_argument("--unequal-shares", action="store_true", help="though the batch is fixed")
parser.add_argument("--epochs", type=int, default=10**9)
parser.add_argument("--seed", type=int, help="of the first parameters; by default each rank's own")
parser.add_argument("--grad-scaler", action="store_true", help="with a scale that grows")
parser.add_argument("--double", action="store_true", help="64-bit numbers")
args = parser.parse_args()

HOST, WORKER = os.environ["HVD_ELASTIC_HOST"], os.environ["HVD_ELASTIC_WORKER"]
HOST_NUMBER = zlib.crc32(HOST.encode())
LIFE = os.environ["DIST_TEST_LIFE"]
DIGEST_EVERY = 10
POLL_S = 0.02


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


def wait_at_gate():
    gate = args.folder / f"gate-{HOST}"
    while gate.exists():
        (args.folder / f"at-gate-{WORKER}").touch()
        time.sleep(POLL_S)


def start_after_gate(communicator, env, *, start=HorovodCommunicator.start):
    wait_at_gate()
    start(communicator, env)


setattr(HorovodCommunicator, "start", start_after_gate)  # noqa: B010


def digest(values):
    found = hashlib.sha256()

    def add(value):
        if isinstance(value, torch.Tensor):
            found.update(str((value.dtype, tuple(value.shape))).encode())
            found.update(value.detach().contiguous().numpy().tobytes())
        elif isinstance(value, dict):
            for name in sorted(value, key=str):
                found.update(str(name).encode())
                add(value[name])
        elif isinstance(value, (list, tuple)):
            for item in value:
                add(item)
        else:
            found.update(repr(value).encode())

    add(values)
    return found.hexdigest()


def tell(kind, values):
    now = context.current()
    record = {"kind": kind, "life": LIFE, "worker": WORKER, "generation": now.worker.generation}
    record |= {"step": now.worker.progress.step, "rank": hvd.rank(), "size": hvd.size()}
    line = json.dumps({**record, "digest": digest(values)}) + "\n"
    out = os.open(args.folder / "digests.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(out, line.encode())  # one write to an appending file: ranks do not mix
    os.close(out)


hvd.init()
if args.double:
    torch.set_default_dtype(torch.float64)
if args.seed is None:
    args.seed = int.from_bytes(os.urandom(4), "little")  # equal only by being synchronised
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
    dataset = ShardDataset(args.shards, torch.from_numpy, shuffle_window=2)


class Augmented(Dataset[Any]):
    """Examples with random noise of each kind, their index, and a hash of the host that read it."""

    def __len__(self):
        return args.examples

    def __getitem__(self, index):
        time.sleep(args.augment)
        noise = torch.randn(8) + random.random() + float(np.random.rand())
        return inputs[index] + 0.01 * noise, targets[index], index, HOST_NUMBER


def note_examples(batch, indices, hosts):
    epoch = context.current().worker.progress.epoch
    rows = [
        {"epoch": epoch, "index": index, "host": host, "bytes": row.numpy().tobytes().hex()}
        for row, index, host in zip(batch, indices.tolist(), hosts.tolist(), strict=True)
    ]
    out = os.open(args.folder / "examples.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(out, "".join(json.dumps(row) + "\n" for row in rows).encode())
    os.close(out)


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
told = 0


def tell_if_due(state):
    global told
    generation, step = context.current().worker.generation, context.current().worker.progress.step
    if generation != told:
        told = generation
        whole = [model.state_dict(), optimizer.state_dict(), state.batches]
        whole += [schedule.state_dict(), scaler.state_dict()]
        tell("synced", whole)
    elif step % DIGEST_EVERY == 0:
        # Buffers are each rank's own between two generations.
        tell("same", [dict(model.named_parameters()), optimizer.state_dict(), state.batches])


def enough():
    there = torch.tensor([float((args.folder / "enough").exists())])
    return hvd.allreduce(there, "enough", average=False).item() > 0


@hvd.run
def train(state):
    for _ in hvd.epochs(args.epochs):
        for inputs, targets, *read in loader:
            if read:
                note_examples(inputs, *read)
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
            slow = 3 if (args.folder / f"slow-{HOST}").exists() else 1
            time.sleep(args.step_time + slow * args.example_time * len(inputs))
            while any((args.folder / f"stuck{who}").exists() for who in ("", f"-{HOST}")):
                time.sleep(POLL_S)
            state.commit(loss=loss)
        if enough():
            break


train(hvd.State(model=model, optimizer=optimizer, schedule=schedule, batches=0))
if hvd.rank() == 0:
    torch.save(model.layers.state_dict(), args.folder / "trained.pt")

"""Train a small convolutional network on handwritten digits with a batch that adapts."""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import hvd_elastic.torch as hvd

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--data", type=Path, required=True, help="folder of datasets_prep/digits.py")
parser.add_argument("--epochs", type=int, default=20, help="at the initial batch size")
parser.add_argument("--batch-size", type=int, default=64, help="initial")
parser.add_argument("--max-batch-size", type=int, default=1024)
parser.add_argument("--lr", type=float, default=0.05, help="for the initial batch size")
parser.add_argument("--step-time", type=float, default=0.0, help="seconds to add to each pass")
args = parser.parse_args()


def load(name):
    with np.load(args.data / f"{name}.npz") as arrays:
        return TensorDataset(*(torch.from_numpy(arrays[key]) for key in ("images", "labels")))


hvd.init()
torch.manual_seed(0)
device = hvd.device()
model = nn.Sequential(
    *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
    *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
    *(nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10)),
).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
schedule = hvd.follow_progress(schedule, per="epoch")
optimizer = hvd.DistributedOptimizer(optimizer, model)
loader = hvd.DataLoader(
    load("train"), args.batch_size, shuffle=True, max_batch_size=args.max_batch_size
)
totals = hvd.Accumulator()


@hvd.run
def train(state):
    for epoch in hvd.epochs(args.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            time.sleep(args.step_time)  # stands for a larger model
            totals.add(loss=loss * len(labels), examples=len(labels))
            state.commit(loss=loss)
        schedule.step()
        totals.synchronize()
        if hvd.rank() == 0 and totals:
            print(f"pass {epoch}: loss {totals['loss'] / totals['examples']:.4f}")
        totals.clear()


train(hvd.State(model=model, optimizer=optimizer, schedule=schedule))
model.eval()
images, labels = load("test").tensors
with torch.no_grad():
    accuracy = (model(images.to(device)).argmax(1).cpu() == labels).float().mean().item()
hvd.report(test_accuracy=accuracy)
if hvd.rank() == 0:
    print(f"test accuracy {accuracy:.4f}")

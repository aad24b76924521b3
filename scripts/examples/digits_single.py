"""Train a small convolutional network on handwritten digits, in one process."""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--data", type=Path, required=True, help="folder of datasets_prep/digits.py")
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--step-time", type=float, default=0.0, help="seconds to add to each step")
parser.add_argument("--quiet", action="store_true", help="no line for each epoch")
args = parser.parse_args()


def load(name):
    with np.load(args.data / f"{name}.npz") as arrays:
        return TensorDataset(*(torch.from_numpy(arrays[key]) for key in ("images", "labels")))


torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = nn.Sequential(
    *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
    *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
    *(nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10)),
).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
loader = DataLoader(load("train"), args.batch_size, shuffle=True)


def train():
    for epoch in range(args.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            time.sleep(args.step_time)  # stands for a larger model
        if not args.quiet:
            print(f"epoch {epoch} is done")


train()
model.eval()
images, labels = load("test").tensors
with torch.no_grad():
    accuracy = (model(images.to(device)).argmax(1).cpu() == labels).float().mean().item()
print(f"test accuracy {accuracy:.4f}")

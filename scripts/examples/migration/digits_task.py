"""What the scripts beside this one train: a small network on handwritten digits."""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset


def parse_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True, help="of datasets_prep/digits.py")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="of all processes together")
    parser.add_argument("--max-batch-size", type=int, default=1024, help="where the batch adapts")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--snapshot", type=Path, default="snapshot.pt")
    return parser.parse_args()


def load(folder, name):
    with np.load(folder / f"{name}.npz") as arrays:
        return TensorDataset(*(torch.from_numpy(arrays[key]) for key in ("images", "labels")))


def make_model():
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def test_accuracy(model, folder, device):
    model.eval()
    images, labels = load(folder, "test").tensors
    with torch.no_grad():
        return (model(images.to(device)).argmax(1).cpu() == labels).float().mean().item()

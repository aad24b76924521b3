"""What the scripts of a Trainer share under all launchers: options, examples, notes of each step.

The examples of each step are noted when it is taken, so that those which the weights of the end
come from can be counted.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from benchmarks.peers.options import mark

BATCH = 32
"""Examples of a step of all ranks at the start."""
EXAMPLES = 960
SAVE_EVERY = 7
"""Steps between two checkpoints of the launchers that go on from one."""
_FEATURES = 64


class Rows(Dataset[dict[str, Any]]):
    """Random examples that are to be learnt by heart, each with its number."""

    def __init__(self, seed: int) -> None:
        drawn = torch.Generator().manual_seed(seed)
        self._rows = torch.rand(EXAMPLES, _FEATURES, generator=drawn, dtype=torch.float64)

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"inputs": self._rows[index], "index": index}


def make_network() -> nn.Module:
    """Return the network, with the same weights on every rank."""
    torch.manual_seed(0)
    layers = [nn.Linear(_FEATURES, 16), nn.ReLU(), nn.Linear(16, _FEATURES)]
    return nn.Sequential(*layers).double()


def fit_arguments() -> argparse.Namespace:
    """Parse the options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--launcher", choices=("ours", "torchrun", "ray-train"), required=True)
    parser.add_argument("--ranks", type=int, required=True, help="ranks at the start")
    parser.add_argument("--folder", type=Path, required=True, help="for files; all hosts see it")
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--step-time", type=float, required=True, help="sleep in each step [s]")
    return parser.parse_known_args()[0]  # launchers add options of their own


def note_step(step: int, epoch: int, indices: Sequence[int]) -> None:
    """Note that a step was taken: its number from 1, its epoch from 0, the rank's examples."""
    mark("note", text=json.dumps([step, epoch, list(indices)]))


def note_end(folder: Path, network: nn.Module, metrics: dict[str, Any]) -> None:
    """Write what was learnt; on rank 0."""
    weights = torch.cat([each.detach().reshape(-1) for each in network.parameters()])
    partial = folder / "end.new"
    partial.write_text(json.dumps({"weights": weights.tolist(), **metrics}), encoding="utf-8")
    partial.replace(folder / "end.json")

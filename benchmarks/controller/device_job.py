"""A job that emulates a device by sleeping.

``python device_job.py FOLDER PASS_S EXAMPLE_S BALLAST_MB``: a pass over m examples sleeps
``PASS_S + EXAMPLE_S m`` seconds, so that slots behave like devices at any number of cores. The
gradients of a small network and their reduction are real; a ballast of zeros is reduced with them.
The learning rate is so small that the noise scale does not change.

Between steps the job follows JSON files in FOLDER: ``slow`` (host → factor of its sleeps),
``flips`` (fraction of labels that are replaced by random ones, which raises the noise) and
``batch`` (global batch size to use instead of the one that the job would choose).
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import hvd_elastic.torch as hvd
from benchmarks.controller.workloads import INITIAL_BATCH, MAX_BATCH
from hvd_elastic.model.goodput import nearest_plan
from hvd_elastic.worker.planning.adaptive import AdaptivePlanner

_EXAMPLES, _WIDTH, _HIDDEN, _CLASSES = 65536, 16, 32, 4
_RATE = 1e-4


class _Network(nn.Module):
    def __init__(self, ballast_mb: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(_WIDTH, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, _CLASSES)
        )
        self.ballast = nn.Parameter(torch.zeros(int(ballast_mb * 250_000) or 1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs) + 0.0 * self.ballast.sum()


def _data() -> TensorDataset:
    """Return inputs, labels, random labels, and the ``flips`` above which those are used."""
    inputs = torch.randn(_EXAMPLES, _WIDTH)
    labels = (inputs @ torch.randn(_WIDTH, _CLASSES)).argmax(1)
    drawn = torch.randint(_CLASSES, (_EXAMPLES,))
    return TensorDataset(inputs, labels, drawn, torch.rand(_EXAMPLES))


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def _obey(adaptation: AdaptivePlanner, wish: Path) -> None:
    """Have every review of the batch plan choose the batch in the file ``wish``, if it exists."""
    choose = adaptation._choose_plan

    def chosen(reports: Any) -> str:
        size = _read(wish)
        if size is None:
            return choose(reports)
        adaptation.choice.plan = nearest_plan(adaptation.limits, size, len(reports))
        return "the benchmark asked for it"

    setattr(adaptation, "_choose_plan", chosen)  # noqa: B010


def main() -> None:
    """Train on one rank until the process is ended."""
    folder = Path(sys.argv[1])
    pass_s, example_s, ballast_mb = map(float, sys.argv[2:])
    host = os.environ.get("HVD_ELASTIC_HOST", "")
    hvd.init()
    torch.manual_seed(0)
    data, model = _data(), _Network(ballast_mb)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=_RATE), model)
    loader: hvd.DataLoader[Any] = hvd.DataLoader(
        data, INITIAL_BATCH, shuffle=True, max_batch_size=MAX_BATCH
    )
    assert isinstance(loader.planner, AdaptivePlanner)
    _obey(loader.planner, folder / "batch")

    @hvd.run
    def train(_: hvd.State) -> None:
        for _epoch in hvd.epochs(10**9):
            for inputs, labels, drawn, counts_at in loader:
                flips = _read(folder / "flips") or 0.0
                labels = torch.where(counts_at < flips, drawn, labels)
                slow = _read(folder / "slow") or {}
                time.sleep(slow.get(host, 1.0) * (pass_s + example_s * len(inputs)))
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()

    train(hvd.State(model, optimizer))


if __name__ == "__main__":
    main()

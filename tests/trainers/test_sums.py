"""Sums over an epoch begin anew with it, on a rank that joins there too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("lightning", reason="Lightning is not installed: make test-trainers")

from torchmetrics import MeanMetric

from hvd_elastic.lightning.results import TrainingResults
from hvd_elastic.lightning.sums import Sums


class Ring:
    """Of two ranks, of which the other one adds nothing."""

    size = 2

    def sum_async(self, values: torch.Tensor, name: str) -> torch.Tensor:
        return values

    def wait(self, values: torch.Tensor) -> torch.Tensor:
        return values


@pytest.fixture(autouse=True)
def ring(monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = SimpleNamespace(worker=SimpleNamespace(communicator=Ring()))
    monkeypatch.setattr("hvd_elastic.worker.context.current", lambda: ctx)


def unchanged(value: Any, *_: Any, **__: Any) -> Any:
    return value


class Rank:
    def __init__(self) -> None:
        self.results, self.module = TrainingResults(), nn.Module()
        self.mean = self.module.mean = MeanMetric()
        self.sums = Sums(self.results, self.module, lambda rows: rows, lambda: False)

    def step(self, *values: float) -> None:
        for value in values:
            self.results.log(
                "training_step",
                "loss",
                torch.tensor(value),
                on_epoch=True,
                on_step=False,
                batch_size=1,
                sync_dist_fn=unchanged,
            )
            self.mean(value)
        self.sums.begin_sum()
        self.sums.finish_sum()

    def epoch_ends(self) -> None:
        self.results.reset()
        self.mean.reset()

    def means(self) -> Any:
        logged = self.results["training_step.loss"]
        assert float(self.mean.compute()) == pytest.approx(float(logged.compute()))
        return float(logged.compute())


def test_a_rank_that_joins_between_two_epochs_begins_anew() -> None:
    rank, joined = Rank(), Rank()
    rank.step(5.0)
    rank.epoch_ends()
    joined.sums.load_state_dict(rank.sums.state_dict(), unchanged)
    joined.step(1.0, 3.0)
    assert joined.means() == 2.0


def test_a_rank_that_joins_before_the_end_of_an_epoch_goes_on_and_begins_anew() -> None:
    rank, joined = Rank(), Rank()
    for value in (1.0, 2.0):
        rank.step(value, value)
    joined.sums.load_state_dict(rank.sums.state_dict(), unchanged)
    assert joined.means() == 1.5
    joined.epoch_ends()
    joined.step(1.0, 4.0)
    assert joined.means() == 2.5


def test_what_is_not_logged_in_the_first_step_of_an_epoch_begins_anew() -> None:
    rank = Rank()
    rank.step(5.0)
    rank.epoch_ends()
    rank.step()
    rank.step(1.0, 3.0)
    assert rank.means() == 2.0

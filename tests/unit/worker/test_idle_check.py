"""A script that leaves a call out, so that it trains nothing, is told which."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import hvd_elastic.torch as hvd
from hvd_elastic.worker.checks import idle_check
from hvd_elastic.worker.context import Context

NO_STEP = "optimizer.step() was never called"
NO_GRADIENT = "no parameter of the optimizer had a gradient in optimizer.step(); call backward()"


def train(context: Context, monkeypatch: pytest.MonkeyPatch, *, without: str = "") -> list[str]:
    """Train up to step 6 without some calls; returns the warnings."""
    warnings: list[str] = []
    monkeypatch.setattr(context.worker, "warn", warnings.append)
    model = torch.nn.Linear(1, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    loader: hvd.DataLoader[Any] = hvd.DataLoader(TensorDataset(torch.ones(6, 1)), 2)

    @hvd.run
    def function(_: hvd.State) -> None:
        for (inputs,) in hvd.steps(6, loader):
            optimizer.zero_grad()
            loss = model(inputs).sum()
            if "hook" in without:
                model.weight.grad = torch.autograd.grad(loss, model.weight)[0]
            elif "backward" not in without:
                loss.backward()
            if "step" not in without:
                optimizer.step()

    function(hvd.State(model=model, optimizer=optimizer))
    assert context.worker.progress.step == 6
    return warnings


@pytest.mark.parametrize(
    ("without", "why"),
    [("step", NO_STEP), ("backward", NO_GRADIENT), ("backward and step", NO_STEP)],
)
def test_the_call_that_is_missing_is_named_once(
    alone: Context, monkeypatch: pytest.MonkeyPatch, without: str, why: str
) -> None:
    (warning,) = train(alone, monkeypatch, without=without)
    assert warning.startswith(f"6 steps of training, and nothing was trained: {why}")


@pytest.mark.parametrize("without", ["", "hook"])
def test_a_script_that_trains_is_told_nothing(
    alone: Context, monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    """Gradients may be set by hand."""
    assert train(alone, monkeypatch, without=without) == []


def test_a_long_training_is_told_before_its_end(
    alone: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_check, "_PATIENCE_STEPS", 4)
    (warning,) = train(alone, monkeypatch, without="step")
    assert warning.startswith("4 steps of training")


def test_who_joins_late_does_not_know_what_was_trained_before(
    alone: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone.worker.progress.step = 3
    assert train(alone, monkeypatch, without="step") == []

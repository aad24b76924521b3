"""A loss that is a sum over the batch is seen, and its gradients are added up over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from hvd_elastic.torch.summed_losses import (
    _DIVIDED,
    _MEAN,
    _OTHER,
    _SUM,
    _UNSEEN,
    _VALID,
    kinds_of,
    summed_losses_are_added,
)
from hvd_elastic.training.context import Context
from hvd_elastic.training.step import Pass

EXAMPLES = 6
weights = torch.ones(EXAMPLES, 4, requires_grad=True)
data = torch.arange(EXAMPLES * 4.0).reshape(EXAMPLES, 4)
other = torch.ones(EXAMPLES, 4)
classes = torch.arange(EXAMPLES) % 4
MASK = torch.tensor([True, False, True, True, False, True])
CLASS_WEIGHTS = torch.arange(1.0, 5.0)
parameter = torch.ones(3, requires_grad=True)


def outputs() -> torch.Tensor:
    return data * weights


def penalised() -> torch.Tensor:
    return torch.cat([weights.view(-1), parameter])


def kl() -> torch.Tensor:
    return F.kl_div(outputs().log_softmax(1), other.softmax(1), reduction="batchmean")


@pytest.mark.parametrize(
    ("loss", "kinds"),
    [
        (lambda: F.mse_loss(outputs(), other), {_MEAN}),
        (lambda: F.mse_loss(outputs(), other, reduction="sum"), {_SUM}),
        (lambda: F.cross_entropy(outputs(), classes, reduction="sum"), {_SUM}),
        (lambda: F.cross_entropy(outputs(), classes, label_smoothing=0.1), {_OTHER}),
        (lambda: F.cross_entropy(outputs(), classes, ignore_index=0), {_VALID}),
        (lambda: F.cross_entropy(outputs(), classes, ignore_index=7), {_MEAN}),
        (lambda: F.cross_entropy(outputs(), classes, weight=CLASS_WEIGHTS), {_MEAN}),
        (lambda: F.l1_loss(outputs(), other, reduction="sum") * 1e-3, {_SUM}),
        (lambda: -outputs().log().sum(1).sum(), {_SUM}),
        (lambda: outputs().sum(1).mean(), {_MEAN}),
        (lambda: outputs().sum() / EXAMPLES, {_MEAN}),
        (lambda: 512 * (outputs().sum() * (1 / EXAMPLES)), {_DIVIDED}),
        (lambda: 0.5 * outputs().sum(), {_SUM}),
        (lambda: outputs().sum() / 12, {_DIVIDED}),
        (lambda: F.cross_entropy(outputs(), classes, reduction="sum") / MASK.sum(), {_DIVIDED}),
        (lambda: outputs().sum() * (1 / MASK.sum()), {_DIVIDED}),
        (lambda: outputs().sum() * torch.tensor(1024.0), {_SUM}),  # a gradient scaler
        (outputs()[MASK].sum, {_UNSEEN}),
        (lambda: outputs().mean(0).sum(), {_MEAN}),
        (lambda: outputs().mean(1).sum(), {_SUM}),
        (kl, {_MEAN}),
        (lambda: torch.stack([outputs().mean()] * 3).sum(), {_OTHER}),
        (lambda: sum([outputs().mean()] * 3), {_MEAN}),
        (lambda: outputs().sum() - 0.5 * (1 + outputs()).sum(), {_SUM}),  # a VAE's
        (lambda: outputs().sum() + outputs().mean(), {_SUM, _MEAN}),
        (lambda: outputs().mean() + 1e-4 * parameter.square().sum(), {_MEAN, _OTHER}),
        (lambda: outputs().mean() + weights.square().sum(), {_MEAN, _OTHER}),
        (lambda: outputs().mean() + penalised().abs().sum(), {_MEAN, _OTHER}),
        (lambda: torch.cat([outputs().view(-1), parameter]).abs().sum(), {_UNSEEN}),
        (lambda: outputs().sum() * parameter[0], set()),
    ],
)
def test_what_a_loss_is_over_the_batch(loss: Callable[[], Any], kinds: set[str]) -> None:
    assert kinds_of(loss(), EXAMPLES, (EXAMPLES, EXAMPLES + 1)) == kinds


@pytest.mark.parametrize("examples", [1, EXAMPLES])
def test_a_loss_of_each_example_is_a_sum(examples: int) -> None:
    loss = outputs()[:examples].mean(1)
    assert kinds_of(loss, examples, (examples,), is_vector=True) == {_SUM}


def weight_after(alone: Context, loss: torch.Tensor, ranks: int = 2) -> float:
    alone.worker.communicator.size = ranks
    alone.step.begin(Pass(step_examples=13, weight=0.9, examples=EXAMPLES))
    with summed_losses_are_added(alone):
        loss.backward()
    return alone.step.weight


@pytest.mark.parametrize("ranks", [2, 3])
def test_gradients_of_a_sum_are_added_up(alone: Context, ranks: int) -> None:
    """The average of ``ranks`` times each of them is their sum, however large the shares are."""
    assert weight_after(alone, outputs().sum(), ranks) == ranks
    assert weight_after(alone, outputs().mean(), ranks) == 0.9


def test_a_rank_alone_and_losses_outside_of_training_are_left_alone(alone: Context) -> None:
    backward = torch.autograd.backward
    assert weight_after(alone, outputs().sum(), 1) == 0.9
    assert torch.autograd.backward is backward


def test_gradients_of_inputs_alone_do_not_say_what_the_loss_of_the_step_is(alone: Context) -> None:
    alone.worker.communicator.size = 2
    alone.step.begin(Pass(step_examples=13, weight=0.9, examples=EXAMPLES))
    inputs = data.clone().requires_grad_()
    trained = torch.nn.Parameter(torch.ones(4))
    with summed_losses_are_added(alone):
        (inputs * trained).sum().backward(inputs=[inputs])
        assert alone.step.weight == 0.9
        (inputs * trained).sum().backward(inputs=[trained])
        assert alone.step.weight == 2


def test_a_mean_over_valid_targets_is_warned_of_unless_weighted(
    alone: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(alone.worker, "warn", warnings.append)
    alone.worker.communicator.size = 2
    with summed_losses_are_added(alone):
        for _ in range(2):
            alone.step.begin(Pass(step_examples=12, weight=1.0, examples=EXAMPLES))
            F.cross_entropy(outputs(), classes, ignore_index=0).backward()
    (warning,) = warnings
    assert "targets that are not ignored" in warning
    assert "hvd.step_weight" in warning


def test_a_loss_of_sums_and_means_is_warned_of_once(
    alone: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(alone.worker, "warn", warnings.append)
    alone.worker.communicator.size = 2
    alone.step.begin(Pass(step_examples=12, weight=1.0, examples=EXAMPLES))
    with summed_losses_are_added(alone):
        for _ in range(2):
            (outputs().sum() + outputs().mean()).backward()
    assert alone.step.weight == 1.0
    (warning,) = warnings
    assert "the loss adds a sum over the batch and a mean. Ranks average" in warning

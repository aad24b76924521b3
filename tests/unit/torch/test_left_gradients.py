"""Gradients that a loop body leaves are cleared or refused: a newcomer would not have them."""

from __future__ import annotations

import pytest
import torch

from hvd_elastic.errors import ScriptError
from hvd_elastic.model.goodput import BatchLimits
from hvd_elastic.torch.gradient_buckets import BUCKET_BYTES
from hvd_elastic.worker.context import Context
from hvd_elastic.worker.planning.adaptive import AdaptivePlanner
from hvd_elastic.worker.planning.planner import Planner
from tests.unit.torch.test_several_optimizers import linear, sgd
from tests.unit.torch.two_ranks import TwoRanks, hand_out

WORDS = "the gradient of 'weight' holds the gradient of an earlier batch"


@pytest.fixture(params=[1, 2])
def training(alone: Context, request: pytest.FixtureRequest) -> Context:
    """Alone, or as the first of two ranks whose gradients are alike."""
    if request.param == 2:
        alone.worker.communicator = TwoRanks()
    alone.register_data(64, 0, Planner(8))
    return alone


def add_up(model: torch.nn.Linear) -> None:
    model(torch.ones(1, model.in_features)).sum().backward()


@pytest.mark.parametrize("commits", [False, True])
def test_adding_up_batches_without_no_sync_is_refused(training: Context, commits: bool) -> None:
    model = linear()
    sgd(model)
    hand_out(training)
    add_up(model)
    if commits:
        training.commit({})
    training.mark_consumed()
    hand_out(training)
    with pytest.raises(ScriptError, match=rf"{WORDS}.*no_sync\(\).*zero_grad\(\)"):
        add_up(model)


def test_a_step_with_the_gradients_of_the_body_before_is_refused(training: Context) -> None:
    model = linear()
    optimizer = sgd(model)
    hand_out(training)
    add_up(model)
    training.mark_consumed()
    hand_out(training)
    with pytest.raises(ScriptError, match=WORDS):
        optimizer.step()


@pytest.mark.parametrize("to_none", [False, True])
@pytest.mark.parametrize("large", [False, True])
def test_a_batch_is_skipped_by_clearing_its_gradients(
    training: Context, to_none: bool, large: bool
) -> None:
    inputs = BUCKET_BYTES // 4 if large else 1
    model = torch.nn.Linear(inputs, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = sgd(model)
    for skips in (True, True, False, True, False):
        hand_out(training)
        optimizer.zero_grad(set_to_none=to_none)
        add_up(model)
        if not skips:
            optimizer.step()
        training.mark_consumed()
    assert model.weight[0, 0].item() == 1 - 2


def test_several_optimizers_add_up_within_a_body_only(training: Context) -> None:
    generator, discriminator = linear(), linear()
    first, second = sgd(generator, lr=0.5), sgd(discriminator)

    def body(*, steps: bool) -> None:
        hand_out(training)
        add_up(generator)
        add_up(generator)
        add_up(discriminator)
        second.step()
        second.zero_grad()
        if steps:
            first.step()
            first.zero_grad()
        training.mark_consumed()

    body(steps=True)
    assert generator.weight.item() == 1 - 2 * 0.5
    body(steps=False)
    with pytest.raises(ScriptError, match=f"{WORDS}.*in one loop body"):
        body(steps=True)


def test_gradients_that_another_loss_fills_may_stay_until_they_are_cleared(
    training: Context,
) -> None:
    """The generator's pass fills those of the discriminator, which steps in every second body."""
    generator, discriminator = linear(), linear()
    first, second = sgd(generator, lr=0.0), sgd(discriminator)
    for number in range(6):
        hand_out(training)
        if number % 2:
            second.zero_grad()
            add_up(discriminator)
            second.step()
        first.zero_grad()
        discriminator(generator(torch.ones(1, 1))).sum().backward()
        first.step()
        training.mark_consumed()
    assert discriminator.weight.item() == 1 - 3


def test_gradients_of_a_warm_up_are_not_those_of_a_batch(alone: Context) -> None:
    model = linear()
    optimizer = sgd(model)
    add_up(model)
    hand_out(alone)
    add_up(model)
    optimizer.step()
    assert model.weight.item() == 1 - 2


def test_a_batch_that_adapts_may_be_left_out(alone: Context) -> None:
    """The averages of other ranks' gradients, or zeros, are left then."""
    model = linear()
    optimizer = sgd(model)
    alone.worker.communicator = TwoRanks()
    alone.register_data(64, 0, AdaptivePlanner(BatchLimits(8, 16), examples=64))
    hand_out(alone)
    alone.mark_consumed()
    assert model.weight.grad is not None
    hand_out(alone)
    add_up(model)
    optimizer.step()

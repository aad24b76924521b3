"""Parameters of two ranks are compared now and then; a second model plays the second rank."""

from __future__ import annotations

import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hvd_elastic.communicator.interface import END_NAME
from hvd_elastic.errors import ScriptError
from hvd_elastic.torch.state import trained_sums
from hvd_elastic.worker.checks.replica_check import ReplicaCheck
from hvd_elastic.worker.progress import Progress
from hvd_elastic.worker.worker import Worker


class Told(Exception):  # noqa: N818
    """Carries what the other rank gives to a collective."""


class Pair:
    """The engine of one of two ranks."""

    size = 2

    def __init__(self, other: torch.nn.Module | None, step: int, *, is_due: bool = False) -> None:
        self._other, self._step, self._is_due = other, step, is_due
        self.collectives: list[str] = []

    def _others(self, name: str) -> np.ndarray:
        assert self._other is not None
        engine = Pair(None, self._step, is_due=self._is_due)
        engine.wanted = name  # type: ignore[attr-defined]
        try:
            compare(self._other, self._step, engine, is_due=self._is_due)
        except Told as told:
            found: np.ndarray = told.args[0]
            return found
        raise AssertionError(f"the other rank does not take part in {name}")

    def _take(self, tensor: np.ndarray, name: str) -> None:
        self.collectives.append(name)
        if self._other is None and name == self.wanted:  # type: ignore[attr-defined]
            raise Told(tensor)

    def reduce_async(self, tensor: np.ndarray, name: str, *, sent_as: str = "") -> Any:
        self._take(tensor, name)
        return (tensor + self._others(name)) / 2 if self._other is not None else tensor + 1e9

    def wait(self, handle: np.ndarray) -> np.ndarray:
        if self._other is None:  # found different, so that the next collective is reached
            handle[:, 2] = float("inf")
        return handle

    def gather(self, tensor: np.ndarray, name: str) -> np.ndarray:
        self._take(tensor, name)
        return np.concatenate([tensor, self._others(name)])


def world(model: torch.nn.Module, step: int, engine: Pair, *, local: bool = False) -> Worker:
    state = SimpleNamespace(trained_sums=partial(trained_sums, {"model": model}))
    made: Any = SimpleNamespace(
        progress=Progress(step=step),
        communicator=engine,
        state=state,
        averagers=SimpleNamespace(local=local),
    )
    found: Worker = made
    return found


def network() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Flatten(), torch.nn.Linear(8, 2)
    )


def compare(model: torch.nn.Module, step: int, engine: Pair, *, is_due: bool) -> None:
    check = ReplicaCheck(world(model, step, engine))
    check.training_ends() if step < 0 else check.step_exchanged(is_due=is_due)


def check(
    mine: torch.nn.Module, other: torch.nn.Module, step: int, *, is_due: bool = False
) -> list[str]:
    engine = Pair(other, step, is_due=is_due)
    compare(mine, step, engine, is_due=is_due)
    return engine.collectives


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64])
def test_ranks_that_hold_the_same_are_left_alone(kind: torch.dtype) -> None:
    """Buffers, rounding and the memory format may differ."""
    mine, other = network().to(kind), network().to(kind)
    other[1].running_mean.add_(1)
    other[0].weight.data = other[0].weight.data.to(memory_format=torch.channels_last)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1 + torch.finfo(kind).eps)
    for step in (1, 2, 4, 256, 1024, 2048):
        assert check(mine, other, step) == ["hvd_elastic.replicas"]


def test_it_is_made_often_at_first_and_later_when_a_rank_finds_it_due(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However long the steps take."""
    model = network()
    made = [step for step in range(2500) if check(model, model, step)]
    assert made == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048]
    assert check(model, model, 1500, is_due=True)
    now = 50.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    rank = ReplicaCheck(world(model, 1500, Pair(model, 1500, is_due=True)))
    assert not rank.is_due
    now += 11
    assert rank.is_due
    rank.step_exchanged(is_due=True)
    assert not rank.is_due


def test_all_parameters_are_compared_before_training_ends() -> None:
    """In a short training the checks on the way may have missed what is different."""
    mine, other = network(), network()
    assert check(mine, other, -1) == [END_NAME]
    with torch.no_grad():
        other[3].weight[1].mul_(1.03)
    told = r"at the end of training the ranks .* in model\.3\.weight \(1 of 6 parameters"
    with pytest.raises(ScriptError, match=told):
        check(mine, other, -1)


def test_a_parameter_that_is_not_finite_on_one_rank_is_a_difference() -> None:
    mine, other = network(), network()
    with torch.no_grad():
        other[3].bias[0] = float("nan")
    for step in (4, -1):
        with pytest.raises(ScriptError, match=r"rank 1 differs from rank 0 in model\.3\.bias"):
            check(mine, other, step)


def test_one_parameter_that_differs_by_a_percent_is_named() -> None:
    mine, other = network(), network()
    with torch.no_grad():
        other[3].weight[1].mul_(1.03)
    with pytest.raises(ScriptError) as error:
        check(mine, other, 4)
    assert "after step 4 the ranks hold different parameters: rank 1 differs from rank 0" in str(
        error.value
    )
    assert "in model.3.weight (1 of 6 parameters" in str(error.value)


def test_where_the_ranks_meet_seldom_it_is_said_where_an_average_changes() -> None:
    mine, other = network(), network()
    with torch.no_grad():
        other[3].weight.mul_(1.03)
    engine = Pair(other, 4)
    with pytest.raises(ScriptError, match=r"outer\.register_step_post_hook\(lambda \*_: ema"):
        ReplicaCheck(world(mine, 4, engine, local=True)).step_exchanged(is_due=False)
    with pytest.raises(ScriptError, match=r"in the State\)\. Parameters have to change alike"):
        check(mine, other, 4)


def test_parameters_that_are_frozen_may_differ() -> None:
    """Keras keeps the running averages of its layers as parameters without a gradient."""
    mine, other = network(), network()
    for model in (mine, other):
        model[3].weight.requires_grad_(False)
    with torch.no_grad():
        other[3].weight.mul_(2)
    assert check(mine, other, 4) == ["hvd_elastic.replicas"]


def test_a_model_of_many_large_tensors_is_seen_through_in_turns() -> None:
    """A check looks at a part of it, and the parts change."""
    sizes = [10_000] * 40
    mine = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(size)) for size in sizes])
    other = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(size)) for size in sizes])
    with torch.no_grad():
        other[39][-3000:] += 0.5
    steps = [1000 * number for number in range(1, 20)]
    found = []
    for step in steps:
        try:
            check(mine, other, step, is_due=True)
        except ScriptError as error:
            found.append(str(error))
    assert 0 < len(found) < len(steps)
    assert all("model.39 (1 of 40" in text for text in found)


def test_numbers_that_are_not_finite_on_all_ranks_are_no_difference() -> None:
    mine, other = network(), network()
    for model in (mine, other):
        with torch.no_grad():
            model[3].bias.fill_(float("nan"))
    assert check(mine, other, 2) == ["hvd_elastic.replicas", "hvd_elastic.replicas_whole"]

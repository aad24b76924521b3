"""Steps whose averaged gradients are not finite: left out, or what the user asks for."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hvd_elastic.torch as hvd
from hvd_elastic.communicator.local import LocalCommunicator
from hvd_elastic.errors import ScriptError
from hvd_elastic.records.json_lines import read_records
from hvd_elastic.torch import gradient_buckets
from hvd_elastic.torch.finite_check import ForwardWatch, GradientCheck
from hvd_elastic.torch.optimizer import averager_of
from hvd_elastic.worker.context import Context
from hvd_elastic.worker.message_sink import FileSink
from hvd_elastic.worker.step import Pass


class Ranks(LocalCommunicator):
    """The first of some ranks; the others do the same, or have NaN in some gradient."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.other_is_bad = False

    def sum_async(self, array: Any, name: str) -> Any:
        array.mul_(self.size)
        if self.other_is_bad and len(array):
            array[0] = math.nan
        return array


@pytest.fixture(params=[1, 2, 3])
def ranks(request: pytest.FixtureRequest, alone: Context) -> Ranks:
    alone.worker.communicator = made = Ranks(request.param)
    return made


def made() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 2))
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    return model, hvd.DistributedOptimizer(adam, model)


def take_step(ctx: Context, model: nn.Module, optimizer: Any, factor: float = 1.0) -> None:
    ctx.hand_out(Pass(step_examples=8, weight=1.0))
    optimizer.zero_grad()
    (factor * model(torch.ones(4, 6)).square().mean()).backward()
    optimizer.step()


def state_of(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    moments = [value for state in optimizer.state.values() for value in state.values()]
    return [each.detach().clone() for each in (*model.parameters(), *moments)]


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_step_is_left_out_whose_loss_is_not_finite(
    alone: Context, ranks: Ranks, factor: float
) -> None:
    model, optimizer = made()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        take_step(alone, model, optimizer, factor)
        schedule.step()
    take_step(alone, model, optimizer)
    before = state_of(model, optimizer)
    take_step(alone, model, optimizer, factor)
    torch.testing.assert_close(state_of(model, optimizer), before, rtol=0, atol=0)
    take_step(alone, model, optimizer)
    progress = alone.worker.progress
    assert (progress.step, progress.examples, progress.skipped) == (4, 32, 2)
    assert all(each.isfinite().all() for each in state_of(model, optimizer))


@pytest.mark.parametrize("bucket_bytes", [1, 300, 1 << 20])
@pytest.mark.parametrize("number", range(4))
def test_one_number_that_is_not_finite_is_seen_at_several_ranks(
    alone: Context,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    bucket_bytes: int,
) -> None:
    """In gradients of any size, that have a bucket to themselves or not."""
    monkeypatch.setattr(gradient_buckets, "BUCKET_BYTES", bucket_bytes)
    alone.worker.communicator = Ranks(2)
    model, optimizer = made()
    parameter = [*model.parameters()][number]
    hook = parameter.register_hook(lambda g: g.index_fill(0, torch.tensor(len(g) - 1), math.nan))
    before = state_of(model, optimizer)
    take_step(alone, model, optimizer)
    torch.testing.assert_close(state_of(model, optimizer), before, rtol=0, atol=0)
    hook.remove()
    take_step(alone, model, optimizer)
    assert alone.worker.progress.skipped == 1
    assert model[0].weight.ne(before[0]).any()  # type: ignore[index]


def test_a_gradient_that_is_not_finite_on_another_rank_is_seen(alone: Context) -> None:
    alone.worker.communicator = ranks = Ranks(2)
    model, optimizer = made()
    take_step(alone, model, optimizer)
    ranks.other_is_bad = True
    before = state_of(model, optimizer)
    take_step(alone, model, optimizer)
    torch.testing.assert_close(state_of(model, optimizer), before, rtol=0, atol=0)


@pytest.mark.parametrize("number", range(14))
def test_one_rank_sees_a_layer_whose_gradient_is_not_finite(alone: Context, number: int) -> None:
    """In each of more layers than a glance at a few would see; what is before is finite."""
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(7)])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    parameter = [*model.parameters()][number]
    parameter.register_hook(lambda g: g.index_fill(0, torch.tensor(len(g) - 1), math.nan))
    alone.hand_out(Pass(step_examples=8, weight=1.0))
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    assert alone.worker.progress.skipped == 1
    assert all(each.isfinite().all() for each in model.parameters())


@pytest.mark.parametrize("shape", [(80, 90), (64, 64, 3, 3), (5000, 3), (2, 4097)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last, "transposed"])
def test_one_rank_sees_each_row_and_column_of_a_large_gradient(
    shape: tuple[int, ...], layout: Any
) -> None:
    """Which NaN in an output or an input makes NaN."""
    parameter = nn.Parameter(torch.zeros(shape))
    if layout == "transposed":
        parameter.data = parameter.data.transpose(0, 1).contiguous().transpose(0, 1)
    elif parameter.ndim == 4:
        parameter.data = parameter.data.to(memory_format=layout)
    check = GradientCheck([parameter])
    parameter.grad = torch.zeros_like(parameter)
    assert check.are_finite()
    for dimension in (0, 1):
        for place in (0, shape[dimension] // 2, -1):
            parameter.grad = torch.zeros_like(parameter)
            parameter.grad.select(dimension, place).fill_(math.nan)
            assert not check.are_finite()


@pytest.mark.parametrize("value", [1.0, math.nan])
def test_one_rank_understands_gradients_of_any_memory_and_type(value: float) -> None:
    """That is shared by their elements, has gaps, or holds complex numbers."""
    parameter = nn.Parameter(torch.zeros(70, 70))
    check = GradientCheck([parameter])
    whole = torch.full((70, 140), value)
    whole[:, 70:] = math.nan
    for gradient in (torch.full((1, 1), value).expand(70, 70), whole[:, :70]):
        parameter.grad = gradient
        assert check.are_finite() is math.isfinite(value)
    turned = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    turned.grad = torch.full((3,), complex(0.0, value))
    assert GradientCheck([turned]).are_finite() is math.isfinite(value)


def test_large_numbers_are_finite(alone: Context, ranks: Ranks) -> None:
    """Though their squares, and their sum, are not."""
    model, optimizer = made()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: torch.full_like(gradient, 2e38))
    take_step(alone, model, optimizer)
    assert alone.worker.progress.skipped == 0


def test_ten_in_a_row_end_the_run(alone: Context, ranks: Ranks, tmp_path: Path) -> None:
    """All of them are told before."""
    alone.worker.sink = FileSink(tmp_path)
    model, optimizer = made()
    for factor in [math.nan] * 9 + [1.0] + [math.nan] * 9:
        take_step(alone, model, optimizer, factor)
    with pytest.raises(
        ScriptError, match=r"in 10 steps running, up to step 20: .* data and the loss, .* scale"
    ):
        take_step(alone, model, optimizer, math.nan)
    (*_, told) = read_records(tmp_path / "events.jsonl")
    assert (told["step"], told["skipped_steps"]) == (20, 19)


def test_such_a_step_ends_the_run_where_the_user_says_so(alone: Context, ranks: Ranks) -> None:
    alone.worker.on_not_finite = "stop"
    model, optimizer = made()
    take_step(alone, model, optimizer)
    with pytest.raises(ScriptError, match="the gradients of step 2, of epoch 0 at example 8"):
        take_step(alone, model, optimizer, math.nan)


def test_such_a_step_is_taken_where_the_user_says_so(alone: Context, ranks: Ranks) -> None:
    alone.worker.on_not_finite = "ignore"
    model, optimizer = made()
    take_step(alone, model, optimizer, math.nan)
    assert all(each.isnan().all() for each in model.parameters())


def test_of_several_optimizers_that_is_left_out_whose_gradients_are_not_finite(
    alone: Context, ranks: Ranks
) -> None:
    models = [nn.Linear(1, 1), nn.Linear(1, 1)]
    good, bad = (
        hvd.DistributedOptimizer(torch.optim.SGD(each.parameters(), lr=1.0), each)
        for each in models
    )
    before = [state_of(model, each) for model, each in zip(models, (good, bad), strict=True)]
    alone.hand_out(Pass(step_examples=8, weight=1.0))
    models[0](torch.ones(1, 1)).sum().backward()
    (math.nan * models[1](torch.ones(1, 1))).sum().backward()
    good.step()
    bad.step()
    alone.mark_consumed()
    assert alone.worker.progress.step == alone.worker.progress.skipped == 1
    assert models[0].weight.item() == before[0][0].item() - 1
    torch.testing.assert_close(state_of(models[1], bad), before[1], rtol=0, atol=0)


def test_a_body_of_several_optimizers_counts_once_and_ten_in_a_row_end_the_run(
    alone: Context, ranks: Ranks
) -> None:
    """Even if one optimizer takes all its steps."""
    models = [nn.Linear(1, 1) for _ in range(3)]
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SGD(each.parameters(), lr=0.1), each)
        for each in models
    ]

    def body(factor: float) -> None:
        alone.hand_out(Pass(step_examples=8, weight=1.0))
        good, *others = (model(torch.ones(1, 1)).sum() for model in models)
        (good + factor * sum(others)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        alone.mark_consumed()

    for factor in [math.nan] * 9 + [1.0] + [math.nan] * 9:
        body(factor)
    assert alone.worker.progress.skipped == 18
    with pytest.raises(ScriptError, match="in 10 steps running"):
        body(math.nan)


@pytest.mark.parametrize("number", range(4))
def test_it_is_said_whose_gradients_and_examples_they_were(
    alone: Context, ranks: Ranks, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    """Of one parameter and those before it, or of all; and not on ranks whose own are finite."""
    model, optimizer = made()
    names, parameters = zip(*model.named_parameters(), strict=True)
    for parameter in parameters[: number + 1]:
        parameter.register_hook(lambda gradient: gradient * math.nan)
    alone.hand_out(Pass(step_examples=8, weight=1.0, examples=4, start=16))
    model(torch.ones(4, 6)).square().mean().backward()
    optimizer.step()
    where = "all parameters' gradients" if number == 3 else f"from '{names[number]}' backward"
    words = "step 1: gradients of rank 0 are not finite, which had the examples 16 to 19: "
    assert f"{words}{where}" in caplog.text


def test_a_rank_whose_own_gradients_are_finite_is_not_named(
    alone: Context, caplog: pytest.LogCaptureFixture
) -> None:
    alone.worker.communicator = ranks = Ranks(2)
    model, optimizer = made()
    ranks.other_is_bad = True
    take_step(alone, model, optimizer)
    assert "step 1, of epoch 0 at example 0, is left out" in caplog.text
    assert "gradients of rank" not in caplog.text


def test_a_step_that_is_left_out_leaves_buffers_as_they_were(alone: Context, ranks: Ranks) -> None:
    """Such as the statistics of batches, which would stay NaN for ever."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    alone.worker.state = hvd.State(model=model, optimizer=optimizer)

    def step(inputs: torch.Tensor) -> list[torch.Tensor]:
        alone.hand_out(Pass(step_examples=8, weight=1.0))
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        return [each.clone() for each in model.buffers()]

    first = step(torch.randn(4, 6))
    torch.testing.assert_close(step(torch.full((4, 6), math.nan)), first, rtol=0, atol=0)
    pairs = zip(step(torch.randn(4, 6)), first, strict=True)
    assert not any(each.equal(before) for each, before in pairs)


class Layers(nn.Module):
    """Two layers, and a factor between them."""

    passes: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.factor = nn.Linear(6, 4), nn.Linear(4, 1), 1.0
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.passes += self.factor
        return self.second(torch.relu(self.first(inputs)) * self.factor)


@pytest.mark.parametrize(
    ("inputs", "factor", "scale", "said"),
    [
        (math.nan, 1.0, 1.0, "the inputs of 'model.first' (Linear) are not finite already"),
        (1.0, math.inf, 1.0, "the inputs of 'model.second' (Linear) are not finite already"),
        (
            3e38,
            1.0,
            1.0,
            "the first outputs that are not finite come from 'model.first' (Linear)",
        ),
        (1.0, 1.0, math.inf, "become so in the loss or backward from it"),
    ],
)
def test_the_first_layer_is_found_that_is_not_finite(
    inputs: float, factor: float, scale: float, said: str
) -> None:
    model = Layers()
    watch = ForwardWatch({"model": model})
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(1.0)
    model.factor = factor
    outputs = model(torch.full((2, 6), inputs)).sum() * scale
    model(torch.ones(2, 6))
    assert not outputs.isfinite()
    assert said in watch.stop_watching()
    assert not model.first._forward_hooks


def test_a_step_is_repeated_once_to_find_the_layer(
    alone: Context, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where training is elastic, and then left out; a body that is finite then is taken."""
    model = Layers()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    state = hvd.State(model=model, optimizer=optimizer)
    loader: Any = hvd.DataLoader(torch.utils.data.TensorDataset(torch.randn(40, 6)), 8)
    monkeypatch.setattr(type(alone.worker), "elastic", True)
    bodies = []

    @hvd.run
    def train(_: hvd.State) -> None:
        for _epoch in hvd.epochs(1):
            for (inputs,) in loader:
                step = alone.worker.progress.step
                bodies.append(step)
                model.factor = math.nan if step == 1 or bodies.count(3) == 1 else 1.0
                optimizer.zero_grad()
                model(inputs).sum().backward()
                optimizer.step()

    alone.worker.in_train = False
    train(state)
    assert bodies == [0, 1, 1, 2, 3, 3, 4]
    assert model.passes == 4, "of steps that were taken"
    assert "not all parameters' gradients; the inputs of 'model.second'" in caplog.text
    assert alone.worker.progress.skipped == 1
    assert all(each.isfinite().all() for each in model.parameters())


def test_a_failure_in_the_repetition_ends_the_look_at_its_layers(alone: Context) -> None:
    model, optimizer = made()
    averager = averager_of(optimizer)
    assert averager is not None
    averager._watch = ForwardWatch({"model": model})
    averager.reset()
    assert not any(layer._forward_hooks for layer in model.modules())
    take_step(alone, model, optimizer)

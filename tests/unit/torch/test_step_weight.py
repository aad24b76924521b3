"""Losses that are means over valid targets: a step is that of one process with all of them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import hvd_elastic.torch as hvd
from hvd_elastic.errors import ScriptError
from hvd_elastic.model.goodput import BatchLimits
from hvd_elastic.worker.context import Context
from hvd_elastic.worker.planning.adaptive import AdaptivePlanner
from tests.paths import COSTLY
from tests.unit.real_ranks import run_ranks, worlds
from tests.unit.torch.two_ranks import hand_out

RANKS = """
from hvd_elastic.worker import context
from hvd_elastic.worker.step import Pass
import hvd_elastic.torch as hvd
os.environ.update(generations[0])
hvd.init()
ctx = context.current()
ring = ctx.worker.communicator
generator = torch.Generator().manual_seed(0)
inputs = torch.randn(24, 5, generator=generator)
targets = torch.randint(3, (24,), generator=generator)
targets[[0, 1, 2, 3, 5, 8, 9, 13, 21]] = -100
shares = {shares}  # examples of each rank in a pass

def loss_of(model, part):
    return torch.nn.functional.cross_entropy(model(inputs[part]), targets[part])

torch.manual_seed(0)
model, plain = torch.nn.Linear(5, 3), torch.nn.Linear(5, 3)
plain.load_state_dict(model.state_dict())
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
reference = torch.optim.SGD(plain.parameters(), lr=1.0)
weight = len(shares) * shares[ring.rank] / sum(shares)

def backward(first):
    part = slice(first, first + shares[ring.rank])
    ctx.hand_out(Pass(step_examples=sum(shares), weight=weight))
    hvd.step_weight((targets[part] != -100).sum())
    loss_of(model, part).backward()

for passes in (1, 3):
    size = sum(shares) * passes
    for begin in range(0, 24, size):
        optimizer.zero_grad()
        reference.zero_grad()
        first = begin + sum(shares[:ring.rank])
        for number in range(passes - 1):
            with optimizer.no_sync():
                backward(first + number * sum(shares))
            ctx.step.next_batch(ctx.worker.progress)
        backward(first + size - sum(shares))
        optimizer.step()
        loss_of(plain, slice(begin, begin + size)).backward()
        reference.step()
    pairs = zip(model.parameters(), plain.parameters())
    said.append(max((mine - theirs).abs().max().item() for mine, theirs in pairs))

# One batch in two passes that the script weights against each other, with one count for both.
first = sum(shares[:ring.rank])
own = [slice(at, at + shares[ring.rank]) for at in (first, first + sum(shares))]
count = sum(int((targets[part] != -100).sum()) for part in own)
summed = [
    torch.nn.functional.cross_entropy(model(inputs[part]), targets[part], reduction="sum")
    for part in own
]
optimizer.zero_grad()
reference.zero_grad()
ctx.hand_out(Pass(step_examples=2 * sum(shares), weight=weight))
hvd.step_weight(count)
with optimizer.no_sync():
    (summed[0] / max(count, 1)).backward()
(summed[1] / max(count, 1)).backward()
optimizer.step()
loss_of(plain, slice(0, 2 * sum(shares))).backward()
reference.step()
pairs = zip(model.parameters(), plain.parameters())
said.append(max((mine - theirs).abs().max().item() for mine, theirs in pairs))
"""


@pytest.mark.dist
@pytest.mark.parametrize(
    "shares", [[1, 2, 1], pytest.param([4], marks=COSTLY), pytest.param([1, 3], marks=COSTLY)]
)
def test_the_step_is_that_of_the_mean_over_all_valid_targets(
    stores: Any, shares: list[int]
) -> None:
    """Of one batch and of several, where some on a rank have no valid target: a loss of NaN."""
    pytest.importorskip("horovod.torch", reason="Horovod is not built")
    for differences in run_ranks(
        RANKS.replace("{shares}", str(shares)), worlds(stores, len(shares))
    ):
        assert max(differences) < 1e-6


def made(count: int = 1) -> tuple[list[nn.Linear], list[Any]]:
    models = [nn.Linear(2, 1) for _ in range(count)]
    return models, [
        hvd.DistributedOptimizer(torch.optim.SGD(each.parameters(), lr=1.0), each)
        for each in models
    ]


def test_padding_counts_nothing(alone: Context) -> None:
    (model,), (optimizer,) = made()
    hand_out(alone, padding=True)
    hvd.step_weight(7)
    model(torch.full((1, 2), float("nan"))).sum().backward()
    optimizer.step()
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("optimizers", [1, 2])
def test_a_step_of_which_nothing_counts_is_left_out(alone: Context, optimizers: int) -> None:
    """Neither momentum nor weight decay moves parameters; the examples are used."""
    models = [nn.Linear(2, 1) for _ in range(optimizers)]
    wrapped = [
        hvd.DistributedOptimizer(
            torch.optim.AdamW(each.parameters(), lr=1.0, weight_decay=0.5), each
        )
        for each in models
    ]
    for count in (1, 0):
        before = [p.clone() for model in models for p in model.parameters()]
        hand_out(alone)
        hvd.step_weight(count)
        for model, optimizer in zip(models, wrapped, strict=True):
            optimizer.zero_grad()
            (model(torch.ones(1, 2)).sum() * (1.0 if count else float("nan"))).backward()
            optimizer.step()
        alone.mark_consumed()
        same = [torch.equal(p, q) for p, q in zip(before, parameters(models), strict=True)]
        assert all(same) == (count == 0)
    assert [int(state["step"]) for state in wrapped[0].state.values()] == [1, 1]


def parameters(models: list[nn.Linear]) -> list[torch.Tensor]:
    return [p for model in models for p in model.parameters()]


def test_several_optimizers_have_the_weight_of_the_body(
    alone: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first, second), optimizers = made(2)
    hand_out(alone)
    hvd.step_weight(3)
    monkeypatch.setattr(alone.step.counts, "_total", 12.0)  # those of other ranks
    (first(torch.ones(1, 2)) + second(torch.ones(1, 2))).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    for model in (first, second):
        assert model.bias.grad is not None
        assert model.bias.grad.item() == 0.25


@pytest.mark.parametrize("count", ["3", None, True, -1, float("nan"), torch.ones(2)])
def test_what_is_no_count_is_refused(alone: Context, count: Any) -> None:
    made()
    hand_out(alone)
    with pytest.raises(
        (ScriptError, RuntimeError), match=r"hvd\.step_weight\(|to Scalar|1 element"
    ):
        hvd.step_weight(count)


def test_a_count_without_a_batch_is_refused(alone: Context) -> None:
    made()
    with pytest.raises(ScriptError, match="a batch that does not come from"):
        hvd.step_weight(3)


def test_a_count_with_an_adaptive_batch_is_refused(alone: Context) -> None:
    made()
    alone.register_data(64, 0, AdaptivePlanner(BatchLimits(8, 16), examples=64))
    hand_out(alone)
    with pytest.raises(ScriptError, match="with a batch that adapts"):
        hvd.step_weight(3)


def test_a_count_after_the_backward_pass_is_refused(alone: Context) -> None:
    (model,), _ = made()
    hand_out(alone)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ScriptError, match=r"call it before backward\(\)"):
        hvd.step_weight(3)


@pytest.mark.parametrize("counted", [0, 1])
def test_a_step_of_which_some_batches_have_no_count_is_refused(
    alone: Context, counted: int
) -> None:
    (model,), (optimizer,) = made()

    def train() -> None:
        for number in range(2):
            hand_out(alone)
            if number == counted:
                hvd.step_weight(3)
            with optimizer.no_sync() if number == 0 else nullcontext():
                model(torch.ones(1, 2)).sum().backward()
            if number == 0:
                alone.step.next_batch(alone.worker.progress)
        optimizer.step()

    with pytest.raises(ScriptError, match="call it for each of them"):
        train()

"""Batch normalisation over ranks: as one process computes it for the whole batch."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import hvd_elastic.torch as hvd
from hvd_elastic.communicator.interface import RingRank
from hvd_elastic.communicator.local import LocalCommunicator
from hvd_elastic.errors import ScriptError
from hvd_elastic.model.goodput import BatchLimits
from hvd_elastic.torch.frontend import TorchFrontend
from hvd_elastic.torch.summed_losses import summed_losses_are_added
from hvd_elastic.worker import context
from hvd_elastic.worker.context import Context
from hvd_elastic.worker.launch import Mode
from hvd_elastic.worker.planning.adaptive import AdaptivePlanner
from hvd_elastic.worker.step import Pass
from tests.paths import LIMIT_S

SHARES = (6, 2, 0)
"""Examples of each rank; one without any reads an example again, with weight 0."""


class Threads(LocalCommunicator):
    """One of several ranks that are threads of this process."""

    def __init__(self, rank: int, size: int, table: dict[Any, Any], barrier: Any) -> None:
        self.rank, self.size = RingRank(rank), size
        self._table, self._barrier = table, barrier

    def gather(self, array: Any, name: str) -> Any:
        self._table[name, self.rank] = array
        self._barrier.wait()
        rows = [self._table[name, rank] for rank in range(self.size)]
        self._barrier.wait()
        return torch.cat(rows)

    def reduce_async(self, array: Any, name: str, *, sent_as: str = "") -> Any:
        mine = torch.as_tensor(array)  # the library's own numbers are arrays
        mine.copy_(self.gather(mine[None].clone(), name).mean(0))
        return array


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.BatchNorm1d(3),
        torch.nn.Linear(3, 4),
        torch.nn.BatchNorm1d(4, momentum=None),
        torch.nn.Unflatten(1, (2, 2)),
        torch.nn.BatchNorm1d(2, affine=False),
        torch.nn.Flatten(),
        torch.nn.Linear(4, 1),
    ).double()


def trained(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    gradients = {
        f"gradient of {name}": p.grad.clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    return {**gradients, **{name: t.clone() for name, t in model.state_dict().items()}}


def on_ranks(
    monkeypatch: pytest.MonkeyPatch, size: int, train: Callable[[Context, Any, Any], None]
) -> list[dict[str, torch.Tensor]]:
    """Have threads train as ranks; return what each has :func:`trained`."""
    here = threading.local()
    monkeypatch.setattr(context, "current", lambda: here.context)
    table: dict[Any, Any] = {}
    barrier = threading.Barrier(size, timeout=LIMIT_S)
    found: dict[int, Any] = {}
    models = [network() for _ in range(size)]

    def run(rank: int) -> None:
        here.context = ctx = Context(Mode.ALONE, TorchFrontend())
        ctx.worker.communicator = Threads(rank, size, table, barrier)
        ctx.worker.in_train = True
        model = models[rank]
        sgd = torch.optim.SGD(model.parameters(), lr=0.0)
        keys = list(model.state_dict())
        optimizer: Any = hvd.DistributedOptimizer(sgd, model, sync_batch_norm=True)
        assert list(model.state_dict()) == keys
        assert sgd.param_groups[0]["params"] == list(model.parameters())
        train(ctx, model, optimizer)
        found[rank] = trained(model)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(size))
    return list(found.values())


def check_alike(found: list[dict[str, torch.Tensor]], whole: torch.nn.Module) -> None:
    wanted = trained(whole)
    for result in found:
        assert result.keys() == wanted.keys()
        torch.testing.assert_close(result, wanted, rtol=1e-9, atol=1e-12)


def test_gradients_and_running_statistics_are_those_of_the_whole_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = torch.randn(8, 3).double() * 3 + 5
    targets = torch.randn(8, 1).double()
    whole = network()
    for _ in range(2):
        whole.zero_grad()
        F.mse_loss(whole(inputs), targets).backward()
    size = len(SHARES)

    def train(ctx: Context, model: torch.nn.Module, optimizer: Any) -> None:
        rank = ctx.worker.communicator.rank
        first = sum(SHARES[:rank])
        mine = slice(first, first + SHARES[rank]) if SHARES[rank] else slice(0, 1)
        own, x = targets[mine], inputs[mine]
        if not SHARES[rank]:
            x = x * float("nan")
        for _ in range(2):
            ctx.hand_out(Pass(step_examples=8, weight=SHARES[rank] * size / 8))
            optimizer.zero_grad()
            F.mse_loss(model(x), own).backward()
            optimizer.step()

    check_alike(on_ranks(monkeypatch, size, train), whole)


class OfThread:
    """The context of the thread that asks for it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(context.current(), name)


def test_gradients_of_a_sum_are_those_of_the_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks' shares are unequal, and the sums of their losses are added up."""
    inputs, targets = torch.randn(10, 3).double(), torch.randn(10, 1).double()
    whole = network()
    F.mse_loss(whole(inputs), targets, reduction="sum").backward()
    shares = (slice(0, 6), slice(6, 10))

    def train(ctx: Context, model: torch.nn.Module, optimizer: Any) -> None:
        mine = shares[ctx.worker.communicator.rank]
        examples = mine.stop - mine.start
        ctx.hand_out(Pass(step_examples=10, weight=examples / 5, examples=examples))
        F.mse_loss(model(inputs[mine]), targets[mine], reduction="sum").backward()
        optimizer.synchronize()

    ctx: Any = OfThread()
    with summed_losses_are_added(ctx):
        found = on_ranks(monkeypatch, 2, train)
    check_alike(found, whole)


@pytest.mark.parametrize("is_early", [True, False], ids=["before forward", "before backward"])
def test_counts_of_several_passes_weight_the_ranks(
    monkeypatch: pytest.MonkeyPatch, is_early: bool
) -> None:
    """The counts of all passes are known in the last one alone."""
    inputs, targets = torch.randn(2, 8, 3).double(), torch.randn(2, 8, 1).double()
    counts = ((10, 2), (4, 8))  # of each rank in each pass
    shares = (slice(0, 5), slice(5, 8))
    whole = network()
    for x, y, of_ranks in zip(inputs, targets, counts, strict=True):
        outputs = whole(x)
        pairs = zip(of_ranks, shares, strict=True)
        loss: Any = sum(count * F.mse_loss(outputs[own], y[own]) for count, own in pairs)
        (loss / 24).backward()

    def train(ctx: Context, model: torch.nn.Module, optimizer: Any) -> None:
        rank = ctx.worker.communicator.rank
        own = shares[rank]
        for number, (x, y) in enumerate(zip(inputs, targets, strict=True)):
            ctx.hand_out(Pass(step_examples=8, weight=(own.stop - own.start) / 4))
            with optimizer.no_sync() if number == 0 else nullcontext():
                if is_early:
                    hvd.step_weight(counts[number][rank])
                outputs = model(x[own])
                if not is_early:
                    hvd.step_weight(counts[number][rank])
                F.mse_loss(outputs, y[own]).backward()
            if number == 0:
                ctx.step.next_batch(ctx.worker.progress)
        optimizer.synchronize()

    check_alike(on_ranks(monkeypatch, 2, train), whole)


def test_a_step_without_a_count_keeps_the_running_statistics_finite(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = torch.randn(4, 3).double()
    whole = network()
    whole(inputs)

    def train(ctx: Context, model: torch.nn.Module, optimizer: Any) -> None:
        first = 2 * ctx.worker.communicator.rank
        ctx.hand_out(Pass(step_examples=4, weight=1.0))
        hvd.step_weight(0)
        model(inputs[first : first + 2])

    check_alike(on_ranks(monkeypatch, 2, train), whole)


def test_layers_stay_layers_of_torch(alone: Context) -> None:
    """Evaluation, one rank, and copies compute as before."""
    model, plain = network(), network()
    layer = model[0]
    hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model, sync_batch_norm=True
    )
    assert model[0] is layer
    assert isinstance(layer, torch.nn.BatchNorm1d)
    inputs = torch.randn(4, 3).double()
    alone.worker.in_train = True
    assert torch.equal(model(inputs), plain(inputs))
    assert torch.equal(copy.deepcopy(model).eval()(inputs), plain.eval()(inputs))


def test_what_cannot_be_synchronised_is_refused(alone: Context) -> None:
    class Own(torch.nn.BatchNorm1d):
        pass

    sgd = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
    for model in (Own(3), torch.nn.Sequential(torch.nn.SyncBatchNorm(3))):
        with pytest.raises(ScriptError, match=r"layer '0?' is a (Own|SyncBatchNorm), which cannot"):
            hvd.DistributedOptimizer(sgd, model, sync_batch_norm=True)
    with pytest.raises(ScriptError, match="needs the model whose layers are meant"):
        hvd.DistributedOptimizer(sgd, sync_batch_norm=True)


def test_a_batch_that_adapts_is_refused(alone: Context) -> None:
    """Ranks with different numbers of passes would wait for each other without an end."""
    model = network()
    hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model, sync_batch_norm=True
    )
    alone.register_data(64, 0, AdaptivePlanner(BatchLimits(8, 16), examples=64))
    alone.worker.in_train = True
    with pytest.raises(ScriptError, match=r"sync_batch_norm=True\) with DataLoader\(max_batch"):
        model(torch.zeros(4, 3).double())

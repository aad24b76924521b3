from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import hvd_elastic.torch as hvd
from hvd_elastic.errors import ScriptError
from hvd_elastic.model.goodput import BatchLimits
from hvd_elastic.model.lr_rules import Adjustment
from hvd_elastic.torch.schedule import schedule_length
from hvd_elastic.torch.state import dump_plain, load_plain
from hvd_elastic.worker.context import Context
from hvd_elastic.worker.planning.adaptive import AdaptivePlanner


def halving() -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.step()
    return optimizer, scheduler


def test_without_a_batch_that_adapts_calls_are_counted(alone: Context) -> None:
    optimizer, scheduler = halving()
    assert hvd.follow_progress(scheduler) is scheduler
    for _ in range(3):
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.125


@pytest.mark.parametrize(
    ("per", "progress", "rates"),
    [
        ("step", [0.0, 0.9, 1.0, 3.5, 3.9], [1.0, 1.0, 0.5, 0.125, 0.125]),
        ("epoch", [5.0, 9.9, 10.0, 31.0], [1.0, 1.0, 0.5, 0.125]),
    ],
)
def test_a_schedule_moves_with_progress(
    alone: Context, per: str, progress: list[float], rates: list[float]
) -> None:
    adaptation = alone.planner = AdaptivePlanner(BatchLimits(10, 100), examples=100)
    optimizer, scheduler = halving()
    hvd.follow_progress(scheduler, per)  # type: ignore[arg-type]
    found = []
    for adaptation.progress in progress:
        scheduler.step()
        found.append(optimizer.param_groups[0]["lr"])
    assert found == rates


def test_a_chain_of_schedules_moves_with_progress(alone: Context) -> None:
    adaptation = alone.planner = AdaptivePlanner(BatchLimits(10, 100), examples=100)
    optimizer, first = halving()
    second = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)
    chain = hvd.follow_progress(torch.optim.lr_scheduler.ChainedScheduler([first, second]))
    adaptation.progress = 2.5
    chain.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05**2)


@pytest.mark.parametrize("within", ["itself", "a chain", "a sequence"])
def test_one_cycle_stays_at_its_end(alone: Context, within: str) -> None:
    """The last pass over the data goes on for some steps more, at which OneCycleLR would raise."""
    adaptation = alone.planner = AdaptivePlanner(BatchLimits(10, 100), examples=100)
    optimizer, other = halving()
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 8.0, total_steps=20)
    schedule: torch.optim.lr_scheduler.LRScheduler = cycle
    if within == "a chain":
        schedule = torch.optim.lr_scheduler.ChainedScheduler([other, cycle])
    elif within == "a sequence":
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [other, cycle], [5])
    hvd.follow_progress(schedule)
    adaptation.progress = 60.0
    schedule.step()
    assert cycle.last_epoch == 19
    assert 0 <= optimizer.param_groups[0]["lr"] < 0.01


def test_it_counts_steps_or_epochs(alone: Context) -> None:
    with pytest.raises(ScriptError, match="must be 'step' or 'epoch'"):
        hvd.follow_progress(halving()[1], "minute")  # type: ignore[arg-type]
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(halving()[0])
    with pytest.raises(ScriptError, match=r"goes by the value that its step\(\) is given"):
        hvd.follow_progress(plateau)


def test_its_state_is_plain_and_that_of_the_scheduler_alone(alone: Context) -> None:
    """Newcomers and checkpoints get it."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10) for _ in range(2)]
    followed = hvd.follow_progress(schedules[0])
    assert followed is schedules[0]
    assert isinstance(followed, torch.optim.lr_scheduler.CosineAnnealingLR)
    state = load_plain(dump_plain(followed.state_dict()))
    assert set(state) == set(schedules[1].state_dict())
    schedules[1].load_state_dict(state)


def trained(
    alone: Context,
    monkeypatch: pytest.MonkeyPatch,
    made: Callable[[torch.optim.Optimizer], Any],
    per: str,
    *,
    most: int = 64,
    gain: float = 1.0,
) -> list[str]:
    """The warnings of a training with this scheduler in its State, stepped so often."""
    told: list[str] = []
    monkeypatch.setattr(alone.worker, "warn", told.append)
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        model,
        lr_rule=lambda now: Adjustment(factor=1.0, gain=gain),
    )
    scheduler = made(optimizer)
    data = TensorDataset(torch.ones(64, 1), torch.ones(64, 1))
    loader: hvd.DataLoader[Any] = hvd.DataLoader(data, 8, max_batch_size=most)

    @hvd.run
    def train(state: hvd.State) -> None:
        for _ in hvd.epochs(3):
            for inputs, targets in loader:
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()
                if per == "step":
                    scheduler.step()
            if per == "epoch":
                scheduler.step()

    train(hvd.State(model=model, optimizer=optimizer, sched=scheduler))
    return told


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=810)


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)


def test_a_schedule_that_counts_the_batches_of_an_adaptive_loader_is_warned_of(
    alone: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    (told,) = trained(alone, monkeypatch, one_cycle, "step")
    assert "scheduler 'sched' (OneCycleLR, 810 steps) is stepped once for each batch" in told
    assert "sched = hvd.follow_progress(sched)" in told
    assert alone.worker.progress.epoch == 3


def test_a_schedule_that_counts_passes_is_warned_of_where_there_are_more_of_them(
    alone: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    (told,) = trained(alone, monkeypatch, cosine, "epoch", gain=0.5)
    assert "scheduler 'sched' (CosineAnnealingLR, 3 steps) is stepped once for each pass" in told
    assert 'sched = hvd.follow_progress(sched, per="epoch")' in told


@pytest.mark.parametrize(
    ("made", "per", "most"),
    [
        (lambda optimizer: hvd.follow_progress(one_cycle(optimizer)), "step", 64),
        (lambda optimizer: hvd.follow_progress(cosine(optimizer), "epoch"), "epoch", 64),
        (one_cycle, "step", 8),
        (cosine, "epoch", 64),
        (cosine, "never", 64),
    ],
    ids=["steps followed", "passes followed", "batch stays", "as many passes", "not stepped"],
)
def test_a_schedule_that_keeps_up_is_not_warned_of(
    alone: Context,
    monkeypatch: pytest.MonkeyPatch,
    made: Callable[[torch.optim.Optimizer], Any],
    per: str,
    most: int,
) -> None:
    assert trained(alone, monkeypatch, made, per, most=most) == []


def train_once(
    state: hvd.State,
    loader: hvd.DataLoader[Any],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *schedulers: torch.optim.lr_scheduler.LRScheduler,
) -> None:
    """One epoch, in which the schedulers are stepped after each step."""

    @hvd.run
    def train(state: hvd.State) -> None:
        for _ in hvd.epochs(1):
            for (inputs,) in loader:
                optimizer.zero_grad()
                model(inputs).mean().backward()
                optimizer.step()
                for scheduler in schedulers:
                    scheduler.step()

    train(state)


def forgetting(alone: Context, monkeypatch: pytest.MonkeyPatch, kept: str, most: int) -> list[str]:
    """Return the warnings of a training with a chain of two schedulers and what is kept of it."""
    told: list[str] = []
    monkeypatch.setattr(alone.worker, "warn", told.append)
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.01)
    unrelated = torch.optim.lr_scheduler.StepLR(other, 1)
    parts = [torch.optim.lr_scheduler.LinearLR(optimizer), cosine(optimizer)]
    chain = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [2])

    class Wrapper:
        def __init__(self) -> None:
            self.within = {"schedule": chain}

        def state_dict(self) -> dict[str, Any]:
            return chain.state_dict()

        def load_state_dict(self, state: dict[str, Any]) -> None:
            chain.load_state_dict(state)

    loader: hvd.DataLoader[Any] = hvd.DataLoader(
        TensorDataset(torch.ones(64, 1)), 8, max_batch_size=most
    )
    values: dict[str, Any] = {"itself": {"chain": chain}, "a wrapper": {"wrapper": Wrapper()}}
    state = hvd.State(model=model, optimizer=optimizer, **values.get(kept, {}))
    train_once(state, loader, model, optimizer, chain)
    assert unrelated.optimizer is other
    return told


def test_a_scheduler_that_is_not_in_the_state_is_named(
    alone: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    (told,) = forgetting(alone, monkeypatch, "nothing", most=8)
    assert told.startswith("scheduler SequentialLR of this optimizer is not in the State: ")
    assert "hvd.State(model=..., optimizer=..., scheduler=scheduler)" in told


def test_a_forgotten_scheduler_that_counts_batches_is_told_both(
    alone: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten, counts = forgetting(alone, monkeypatch, "nothing", most=64)
    assert "is not in the State" in forgotten
    assert "scheduler = hvd.follow_progress(scheduler)" in counts


@pytest.mark.parametrize("kept", ["itself", "a wrapper"])
def test_a_scheduler_that_an_object_of_the_state_holds_is_not_forgotten(
    alone: Context, monkeypatch: pytest.MonkeyPatch, kept: str
) -> None:
    assert forgetting(alone, monkeypatch, kept, most=8) == []


@pytest.mark.parametrize(
    ("made", "length"),
    [
        (lambda o: torch.optim.lr_scheduler.LinearLR(o, total_iters=7), 7),
        (lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [30, 60]), 60),
        (lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9), None),
        (
            lambda o: torch.optim.lr_scheduler.SequentialLR(
                o, [torch.optim.lr_scheduler.LinearLR(o, total_iters=7), cosine(o)], [7]
            ),
            10,
        ),
    ],
)
def test_length_of_a_schedule(made: Callable[[torch.optim.Optimizer], Any], length: Any) -> None:
    assert schedule_length(made(halving()[0])) == length

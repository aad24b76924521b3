from __future__ import annotations

import pytest
import torch

import hvd_elastic.torch as hvd
from hvd_elastic.errors import ScriptError
from hvd_elastic.model.goodput import BatchLimits
from hvd_elastic.torch.adaptation import Adaptation
from hvd_elastic.torch.context import Context
from hvd_elastic.torch.engine import dump_plain, load_plain


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
    adaptation = alone.adaptation = Adaptation(BatchLimits(10, 100), examples=100)
    optimizer, scheduler = halving()
    hvd.follow_progress(scheduler, per)  # type: ignore[arg-type]
    found = []
    for adaptation.progress in progress:
        scheduler.step()
        found.append(optimizer.param_groups[0]["lr"])
    assert found == rates


def test_a_chain_of_schedules_moves_with_progress(alone: Context) -> None:
    adaptation = alone.adaptation = Adaptation(BatchLimits(10, 100), examples=100)
    optimizer, first = halving()
    second = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)
    chain = hvd.follow_progress(torch.optim.lr_scheduler.ChainedScheduler([first, second]))
    adaptation.progress = 2.5
    chain.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05**2)


@pytest.mark.parametrize("within", ["itself", "a chain", "a sequence"])
def test_one_cycle_stays_at_its_end(alone: Context, within: str) -> None:
    """The last pass over the data goes on for some steps more, at which OneCycleLR would raise."""
    adaptation = alone.adaptation = Adaptation(BatchLimits(10, 100), examples=100)
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

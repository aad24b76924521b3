"""Helpers for several trainings that one job runs one after the other in the same processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import TensorDataset

import hvd_elastic.torch as hvd
from hvd_elastic.model.goodput import BatchPlan
from hvd_elastic.worker import context


def begin(seed: int) -> None:
    """Begin a new training in the same ranks, which take longer to start than to train."""
    context._context = None
    hvd.init()
    torch.manual_seed(seed)


def ranks() -> int:
    """Return the number of ranks of this job."""
    return context.current().worker.size


def loader_with_plan(
    examples: TensorDataset, plan: BatchPlan, initial: int | None = None, seed: int = 0
) -> Any:
    """Return an adaptive loader whose bounds allow only one batch plan.

    Args:
        examples: data set.
        plan: batch plan.
        initial: global batch size that the learning rate is for; by default that of the plan.
        seed: seed of the order.
    """
    atomic = plan.atomic_batch_size(ranks())
    return hvd.DataLoader(
        examples,
        initial or plan.global_batch_size,
        shuffle=True,
        seed=seed,
        max_batch_size=plan.global_batch_size,
        atomic_batch_size_bounds=(atomic, atomic),
    )


def measuring_loader(examples: TensorDataset, plan: BatchPlan, seed: int) -> Any:
    """Return a loader that measures the gradient noise at one batch plan."""
    if ranks() > 1 or plan.accumulation_steps:
        return loader_with_plan(examples, plan, seed=seed)
    # A single rank can measure noise only if a step may have two passes now and then.
    batch = plan.global_batch_size
    return hvd.DataLoader(examples, batch, shuffle=True, seed=seed, max_batch_size=batch)


def adam_divisor(optimizer: Any, parameter: torch.Tensor) -> torch.Tensor:
    """Return the values by which Adam divides the gradient of a parameter."""
    state = optimizer.state[parameter]
    corrected: torch.Tensor = state["exp_avg_sq"] / (1 - 0.999 ** state["step"])
    return corrected.sqrt() + 1e-8


def train_until(
    over: Callable[[int], bool],
    loader: Any,
    model: torch.nn.Module,
    optimizer: Any,
    loss: Callable[..., torch.Tensor],
    *,
    before_step: Callable[[], None] = lambda: None,
    schedule: Any = None,
) -> None:
    """Train as a script does, epoch after epoch, until ``over`` returns True.

    Args:
        over: called before each pass with the number of steps so far; returns whether to stop.
        loader: loader of passes.
        model: trained model.
        optimizer: optimizer of hvd_elastic.
        loss: computes the loss from the loader's values for one pass.
        before_step: called between the backward pass and the optimizer's step.
        schedule: learning-rate schedule, stepped after each pass; None: none.
    """
    others = {} if schedule is None else {"schedule": schedule}

    @hvd.run
    def train(_state: hvd.State) -> None:
        for _ in hvd.epochs(10**6):
            for batch in loader:
                if over(context.current().worker.progress.step):
                    return
                optimizer.zero_grad()
                loss(*batch).backward()
                before_step()
                optimizer.step()
                if schedule is not None:
                    schedule.step()

    train(hvd.State(model=model, optimizer=optimizer, **others))

"""Learning-rate schedules that count progress instead of calls."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeVar

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from hvd_elastic.errors import ScriptError
from hvd_elastic.training import context
from hvd_elastic.training.frontend import Schedule
from hvd_elastic.training.worker import Worker

__all__ = ["counting_schedules", "follow_progress", "forgotten_schedulers", "schedule_length"]

Scheduler = TypeVar("Scheduler", bound=Any)

_FOLLOWS = "follows_progress"
"""Attribute of the class of schedulers that follow progress."""


def follow_progress(scheduler: Scheduler, per: Literal["step", "epoch"] = "step") -> Scheduler:
    """Make a schedule that was written for the initial batch size fit a batch that adapts.

    Call ``scheduler.step()`` where the script did so before. It then moves on by as many of the
    schedule's steps as scale-invariant progress has made since (Johnson et al., AdaScale SGD, ICML
    2020, section 3.2): several after a step of a large batch, none between the passes of one.
    Training ends with a whole pass over the data, up to half a pass late; ``OneCycleLR``, which
    refuses to be stepped past its end, stays there.

    Without a batch that adapts nothing changes.

    Args:
        scheduler: any ``torch.optim.lr_scheduler`` whose ``step()`` needs no argument; put it into
            the :class:`State` as well.
        per: what the schedule counts.

    Returns:
        The same object.

    Raises:
        ScriptError: ``per`` is neither, or the schedule goes by a value that the script gives it.
    """
    if per not in ("step", "epoch"):
        raise ScriptError(f"follow_progress(per={per!r}): it must be 'step' or 'epoch'")
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ScriptError(
            "follow_progress(ReduceLROnPlateau): it goes by the value that its step() is given, "
            "and not by a count of steps; use it as it is"
        )
    ctx = context.current()
    kind = type(scheduler)

    def step(self: Any, *args: Any, **options: Any) -> None:
        progress = ctx.planner.progress_in(per)
        if progress is None:
            kind.step(self, *args, **options)
            return
        # A hair more, for sums of fractions that end just below a whole number.
        last = min(int(progress + 1e-6), _last(self))
        while _count(self) < last:
            kind.step(self, *args, **options)

    # A scheduler's state_dict() is all that the object itself has: the method must be its class's.
    members = {"step": step, "__doc__": kind.__doc__, _FOLLOWS: True}
    scheduler.__class__ = type(kind.__name__, (kind,), members)
    return scheduler


def counting_schedules(objects: Mapping[str, Any]) -> dict[str, Schedule]:
    """Return the schedulers among objects that count calls of ``step()``, by name."""
    found = {}
    for name, item in objects.items():
        counts_calls = isinstance(item, LRScheduler) and not hasattr(item, _FOLLOWS)
        if counts_calls and not isinstance(item, ReduceLROnPlateau):
            length = schedule_length(item)
            steps = "" if length is None else f", {length} steps"
            found[name] = Schedule(_count(item), f"{type(item).__name__}{steps}")
    return found


def forgotten_schedulers(worker: Worker, optimizer: Optimizer) -> list[LRScheduler]:
    """Find the schedulers of an optimizer that no object of the State holds, and warn of them.

    They keep their step count in this process alone: after a failure they do not go back with the
    rest, and a rank that joins begins at 0. Called in the optimizer's first step. The search takes
    some 50 ms, so rank 0 alone looks, and nobody waits for it in a newcomer's first step.
    """
    state: Any = worker.state
    if state is None or worker.communicator.rank != 0:
        return []
    kept = {id(found) for item in state.named_objects().values() for found in _held_by(item)}
    # A scheduler refers to its optimizer and not the other way round.
    users = {
        id(found): found
        for found in gc.get_objects()
        if issubclass(type(found), LRScheduler) and getattr(found, "optimizer", None) is optimizer
    }
    parts = {id(part) for user in users.values() for part in _held_by(user) if part is not user}
    forgotten = [user for key, user in users.items() if key not in kept | parts]
    names = ", ".join(sorted({type(user).__name__ for user in forgotten}))
    if forgotten:
        worker.warn(
            f"scheduler {names} of this optimizer is not in the State: after a failure it would "
            "keep steps that are done again, and in a worker that joins, or a run that is resumed, "
            "begin anew, so the learning rate would be wrong. Give it to the State: "
            "hvd.State(model=..., optimizer=..., scheduler=scheduler)"
        )
    return forgotten


def _held_by(item: Any, depth: int = 3) -> Iterator[Any]:
    """Yield an object of the State and what its attributes hold, as wrappers do."""
    yield item
    if isinstance(item, (list, tuple)):
        inner: list[Any] = list(item)
    elif isinstance(item, dict):
        inner = list(item.values())
    elif isinstance(item, (Optimizer, torch.nn.Module)):
        inner = []
    else:
        inner = list(getattr(item, "__dict__", {}).values())
    for each in inner if depth else ():
        yield from _held_by(each, depth - 1)


def schedule_length(scheduler: Any) -> int | None:
    """Number of steps after which a scheduler has come to its end; None: it has no end."""
    if isinstance(scheduler, ChainedScheduler):
        lengths = [schedule_length(each) for each in scheduler._schedulers]
        return max((length for length in lengths if length is not None), default=None)
    if isinstance(scheduler, SequentialLR):
        last = schedule_length(scheduler._schedulers[-1])
        return None if last is None else scheduler._milestones[-1] + last
    for name in ("total_steps", "total_iters", "T_max"):
        if hasattr(scheduler, name):
            return int(getattr(scheduler, name))
    milestones = getattr(scheduler, "milestones", None)
    return max(milestones) if milestones else None


def _count(scheduler: Any) -> int:
    """Of the steps that it has made; a chain has no count of its own."""
    while isinstance(scheduler, ChainedScheduler):
        scheduler = scheduler._schedulers[0]
    return int(scheduler.last_epoch)


def _last(scheduler: Any) -> float:
    """The count at which it has come to its end; infinite for most, which go on at any count."""
    if isinstance(scheduler, OneCycleLR):
        return float(scheduler.total_steps - 1)
    if isinstance(scheduler, ChainedScheduler):
        return min(map(_last, scheduler._schedulers))
    if isinstance(scheduler, SequentialLR):
        return float(scheduler._milestones[-1] + _last(scheduler._schedulers[-1]))
    return math.inf

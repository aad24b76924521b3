"""Learning-rate schedules that follow progress instead of counting calls."""

from __future__ import annotations

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
from hvd_elastic.model.lr_rules import whole_steps
from hvd_elastic.script.instances import holders_of
from hvd_elastic.worker import context
from hvd_elastic.worker.frontend import Schedule
from hvd_elastic.worker.worker import Worker

Scheduler = TypeVar("Scheduler", bound=Any)

_FOLLOWS = "follows_progress"
"""Class attribute that marks schedulers that follow progress."""


def follow_progress(scheduler: Scheduler, per: Literal["step", "epoch"] = "step") -> Scheduler:
    """Adapt a schedule that was written for the initial batch size to an adaptive batch.

    Call ``scheduler.step()`` at the same place as before. It then moves the schedule by the number
    of steps that scale-invariant progress has advanced since the last call (Johnson et al.,
    AdaScale SGD, ICML 2020, section 3.2): several after a step with a large batch, none between the
    passes of a step. Training ends with a whole pass over the data, up to half a pass late; a
    ``OneCycleLR``, which raises an error past its end, then stays at its end.

    With a fixed batch nothing changes.

    Args:
        scheduler: any ``torch.optim.lr_scheduler`` whose ``step()`` needs no argument; put it into
            the :class:`State` as well.
        per: unit that the schedule counts.

    Returns:
        The same object.

    Raises:
        ScriptError: ``per`` is neither value, or the scheduler follows a metric that the script
            passes to ``step()``.
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
        last = min(whole_steps(progress), _last(self))
        while _count(self) < last:
            kind.step(self, *args, **options)

    # A scheduler's state_dict() has all attributes of the object: the method must be the class's.
    members = {"step": step, "__doc__": kind.__doc__, _FOLLOWS: True}
    scheduler.__class__ = type(kind.__name__, (kind,), members)
    return scheduler


def counting_schedules(objects: Mapping[str, Any]) -> dict[str, Schedule]:
    """Return the schedules of those objects that count calls of ``step()``, by name."""
    found = {}
    for name, item in objects.items():
        counts_calls = isinstance(item, LRScheduler) and not hasattr(item, _FOLLOWS)
        if counts_calls and not isinstance(item, ReduceLROnPlateau):
            length = schedule_length(item)
            steps = "" if length is None else f", {length} steps"
            found[name] = Schedule(_count(item), f"{type(item).__name__}{steps}")
    return found


def forgotten_schedulers(worker: Worker, optimizer: Optimizer) -> list[LRScheduler]:
    """Return the schedulers of an optimizer that no object of the State holds, and warn of them.

    Their step count is kept in this process only: after a failure it is not rolled back with the
    rest, and a rank that joins begins at 0. Called in its first step. The search takes about 50 ms,
    so only rank 0 does it, and the first step of a newcomer is not delayed.
    """
    state: Any = worker.state
    if state is None or worker.rank != 0:
        return []
    kept = {id(found) for item in state.named_objects().values() for found in held_by(item)}
    users = {
        id(found): found
        for found in holders_of(optimizer, LRScheduler)
        if getattr(found, "optimizer", None) is optimizer
    }
    parts = {id(part) for user in users.values() for part in held_by(user) if part is not user}
    forgotten = [user for key, user in users.items() if key not in kept | parts]
    names = ", ".join(sorted({type(user).__name__ for user in forgotten}))
    if forgotten:
        worker.warn(
            f"scheduler {names} of this optimizer is not in the State: after a failure it would "
            "keep steps that are done again, and in a worker that joins, or a run that is resumed, "
            "start again, so the learning rate would be wrong. Give it to the State: "
            "hvd.State(model=..., optimizer=..., scheduler=scheduler)"
        )
    return forgotten


def held_by(item: Any, depth: int = 3) -> Iterator[Any]:
    """Yield an object of the State and, since it may be a wrapper, the values of its attributes."""
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
        yield from held_by(each, depth - 1)


def schedule_length(scheduler: Any) -> int | None:
    """Return the number of steps after which a scheduler is at its end; None: it has no end."""
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
    """Return the number of steps taken; that of its first part for a chain, which has none."""
    while isinstance(scheduler, ChainedScheduler):
        scheduler = scheduler._schedulers[0]
    return int(scheduler.last_epoch)


def _last(scheduler: Any) -> float:
    """Return the last count that a scheduler accepts; infinite for most, which have no limit."""
    if isinstance(scheduler, OneCycleLR):
        return float(scheduler.total_steps - 1)
    if isinstance(scheduler, ChainedScheduler):
        return min(map(_last, scheduler._schedulers))
    if isinstance(scheduler, SequentialLR):
        return float(scheduler._milestones[-1] + _last(scheduler._schedulers[-1]))
    return math.inf

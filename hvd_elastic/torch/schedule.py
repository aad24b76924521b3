"""Learning-rate schedules that count progress instead of calls."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, TypeVar

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
from hvd_elastic.torch import context

if TYPE_CHECKING:
    from hvd_elastic.torch.adaptation import Adaptation

__all__ = ["ScheduleChecks", "follow_progress", "forgotten_schedulers", "schedule_length"]

Scheduler = TypeVar("Scheduler", bound=Any)

_FOLLOWS = "follows_progress"
"""Attribute of the class of schedulers that follow progress."""
_BATCHES_COUNTED = 2
"""A scheduler that moved in so many steps running is stepped once for each batch."""
_PASSES_OFF = 0.05
"""Passes over the data may be worth this much less than as many epochs, by chance."""


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
        adaptation = ctx.adaptation
        if adaptation is None:
            kind.step(self, *args, **options)
            return
        # A hair more, for sums of fractions that end just below a whole number.
        reached = int((adaptation.progress if per == "step" else adaptation.epochs) + 1e-6)
        last = min(reached, _last(self))
        while _count(self) < last:
            kind.step(self, *args, **options)

    # A scheduler's state_dict() is all that the object itself has: the method must be its class's.
    members = {"step": step, "__doc__": kind.__doc__, _FOLLOWS: True}
    scheduler.__class__ = type(kind.__name__, (kind,), members)
    return scheduler


class ScheduleChecks:
    """Warns of schedulers in the State that count calls of ``step()`` while the batch adapts.

    What a scheduler counts shows when it is stepped. One that moves with each batch falls behind
    as soon as the batch grows. One that moves between passes over the data runs ahead only where
    larger batches need more passes, so it is told when they have turned out to.
    """

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}
        self._told: set[str] = set()

    def look(self, ctx: context.Context, adaptation: Adaptation) -> None:
        """Compare schedulers with the last look; called between any two steps on all ranks."""
        limits = adaptation.limits
        if ctx.state is None or limits.max_batch_size <= limits.initial_batch_size:
            return
        forgotten = [] if ctx.averager is None else ctx.averager.forgotten
        outside = {f"scheduler{number or ''}": item for number, item in enumerate(forgotten)}
        for name, item in {**ctx.state.named_objects(), **outside}.items():
            counts_calls = isinstance(item, LRScheduler) and not hasattr(item, _FOLLOWS)
            if not counts_calls or isinstance(item, ReduceLROnPlateau) or name in self._told:
                continue
            seen = self._seen.setdefault(name, _Seen())
            seen.update(_count(item), ctx.progress.epoch, ctx.progress.step)
            problem = _problem(seen, name, ctx.progress.epoch, adaptation)
            if problem:
                self._told.add(name)
                if ctx.engine.rank == 0:
                    length = schedule_length(item)
                    steps = "" if length is None else f", {length} steps"
                    ctx.warn(f"scheduler {name!r} ({type(item).__name__}{steps}) {problem}")


class _Seen:
    """How a scheduler moved from one look to the next."""

    def __init__(self) -> None:
        self._last: tuple[int, int, int] | None = None
        self.batches = 0
        """Steps running, within a pass over the data, in each of which it moved."""
        self.still = 0
        """The same in which it did not."""
        self.passes = False
        """Whether it moved between two passes, and not with the batches before."""

    def update(self, count: int, epoch: int, step: int) -> None:
        last, self._last = self._last, (count, epoch, step)
        if last is None or step != last[2] + 1:
            return  # taken over from another rank, or a step done again
        moved = count > last[0]
        if epoch != last[1]:
            self.passes = moved and self.still > 0
            return
        self.batches = self.batches + 1 if moved else 0
        self.still = 0 if moved else self.still + 1


def _problem(seen: _Seen, name: str, passes: int, adaptation: Adaptation) -> str:
    """What is wrong with a scheduler and how to mend it; empty: nothing is."""
    if seen.batches >= _BATCHES_COUNTED:
        return (
            "is stepped once for each batch, and the batch may grow from "
            f"{adaptation.limits.initial_batch_size} to {adaptation.limits.max_batch_size} "
            "examples: larger batches make fewer steps, so training would end before the "
            "schedule does. Let it follow the progress of training instead: "
            f"{name} = hvd.follow_progress({name})"
        )
    if seen.passes and adaptation.epochs < (1 - _PASSES_OFF) * passes:
        return (
            "is stepped once for each pass over the data, and larger batches need more passes "
            f"than hvd.epochs() is given: {passes} so far are worth {adaptation.epochs:.1f} "
            "epochs, so the schedule would end before training does. Let it follow the progress "
            f'of training instead: {name} = hvd.follow_progress({name}, per="epoch")'
        )
    return ""


def forgotten_schedulers(ctx: context.Context, optimizer: Optimizer) -> list[LRScheduler]:
    """Find the schedulers of an optimizer that no object of the State holds, and warn of them.

    They keep their step count in this process alone: after a failure they do not go back with the
    rest, and a rank that joins begins at 0. Called in the optimizer's first step. The search takes
    some 50 ms, so rank 0 alone looks, and nobody waits for it in a newcomer's first step.
    """
    if ctx.state is None or ctx.engine.rank != 0:
        return []
    kept = {id(found) for item in ctx.state.named_objects().values() for found in _held_by(item)}
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
        ctx.warn(
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

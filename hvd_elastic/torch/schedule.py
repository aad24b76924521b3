"""Learning-rate schedules that count progress instead of calls."""

from __future__ import annotations

import math
from typing import Any, Literal, TypeVar

from torch.optim.lr_scheduler import (
    ChainedScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from hvd_elastic.errors import ScriptError
from hvd_elastic.torch import context

__all__ = ["follow_progress"]

Scheduler = TypeVar("Scheduler", bound=Any)


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
    scheduler.__class__ = type(kind.__name__, (kind,), {"step": step, "__doc__": kind.__doc__})
    return scheduler


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

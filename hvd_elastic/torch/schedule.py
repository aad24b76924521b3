"""Learning-rate schedules that count progress instead of calls."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import torch

from hvd_elastic.errors import ScriptError
from hvd_elastic.torch import context

__all__ = ["follow_progress"]

Scheduler = TypeVar("Scheduler", bound=Any)


def follow_progress(scheduler: Scheduler, per: Literal["step", "epoch"] = "step") -> Scheduler:
    """Make a schedule that was written for the initial batch size fit a batch that adapts.

    Call ``scheduler.step()`` where the script did so before. It then moves on by as many of the
    schedule's steps as scale-invariant progress has made since (Johnson et al., AdaScale SGD, ICML
    2020, section 3.2): several after a step of a large batch, none between the passes of one.

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
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
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
        while _count(self) < reached:
            kind.step(self, *args, **options)

    # A scheduler's state_dict() is all that the object itself has: the method must be its class's.
    scheduler.__class__ = type(kind.__name__, (kind,), {"step": step, "__doc__": kind.__doc__})
    return scheduler


def _count(scheduler: Any) -> int:
    """Of the steps that it has made; a chain has no count of its own."""
    while isinstance(scheduler, torch.optim.lr_scheduler.ChainedScheduler):
        scheduler = scheduler._schedulers[0]
    return int(scheduler.last_epoch)

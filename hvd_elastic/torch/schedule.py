"""Learning-rate schedules that count progress instead of calls."""

from __future__ import annotations

from types import MethodType
from typing import Any, Literal, TypeVar

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
        ScriptError: ``per`` is neither.
    """
    if per not in ("step", "epoch"):
        raise ScriptError(f"follow_progress(per={per!r}): it must be 'step' or 'epoch'")
    ctx = context.current()
    step_once = scheduler.step

    def step(_: Any, *args: Any, **options: Any) -> None:
        adaptation = ctx.adaptation
        if adaptation is None:
            step_once(*args, **options)
            return
        # A hair more, for sums of fractions that end just below a whole number.
        reached = int((adaptation.progress if per == "step" else adaptation.epochs) + 1e-6)
        while scheduler.last_epoch < reached:
            step_once(*args, **options)

    scheduler.step = MethodType(step, scheduler)
    return scheduler

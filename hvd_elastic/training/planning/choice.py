"""Chooses the planner that a loader's arguments ask for, and checks them."""

from __future__ import annotations

from typing import Any

from hvd_elastic.errors import ScriptError
from hvd_elastic.training.data_order import MIN_SHARE
from hvd_elastic.training.planning.adaptive import AdaptivePlanner
from hvd_elastic.training.planning.batch_bounds import batch_limits, require_whole
from hvd_elastic.training.planning.compute_times import ComputeTimes, NewEvent, no_event
from hvd_elastic.training.planning.planner import Planner, UnequalShares


def planner_for(
    loader: str,
    batch_size: Any,
    examples: int,
    *,
    seed: Any,
    drop_last: bool,
    max_batch_size: Any,
    atomic_batch_size_bounds: Any,
    accumulation: bool,
    unequal_shares: Any,
    new_event: NewEvent = no_event,
) -> Planner:
    """Return the planner for the arguments of a loader.

    Args:
        loader: name of the loader, for messages.
        batch_size: examples of a step over all ranks, at first.
        examples: number of examples in the data set, >= 1.
        seed, drop_last, max_batch_size, atomic_batch_size_bounds, accumulation, unequal_shares: as
            given by the script.
        new_event: creates an event on the training device.

    Raises:
        ScriptError: an argument is invalid, or they exclude each other.
    """
    if batch_size is None:
        first = "dataset" if loader == "DataLoader" else "source"
        raise ScriptError(
            f"{loader}({first}) needs a batch_size: the examples of all ranks together in one "
            f"step, {loader}({first}, 64)"
        )
    together = "examples of all ranks together in one step"
    require_whole("batch_size", batch_size, 1, together, loader)
    require_whole("seed", seed, 0, "the same on all ranks", loader)
    if drop_last and examples < batch_size:
        raise ScriptError(
            f"drop_last=True leaves nothing to train on: the dataset has {examples} "
            f"examples and batch_size is {batch_size}; make batch_size at most "
            f"{examples}, or drop_last=False"
        )
    if unequal_shares not in (None, True, False):
        raise ScriptError(
            f"{loader}(unequal_shares={unequal_shares!r}): it must be True, False, or None "
            "(only where the batch adapts)"
        )
    if max_batch_size is not None:
        limits = batch_limits(
            batch_size, max_batch_size, atomic_batch_size_bounds, accumulation, examples, loader
        )
        if drop_last:
            raise ScriptError(
                f"{loader}(drop_last=True, max_batch_size=...): which examples would be left "
                "out depends on the batch; leave drop_last out: gradients are averaged by "
                "examples, so a short last step is no worse"
            )
        return AdaptivePlanner(limits, examples, unequal_shares is not False, new_event)
    if atomic_batch_size_bounds is not None:
        raise ScriptError(
            f"{loader}(atomic_batch_size_bounds=...) is for a batch that adapts; give "
            "max_batch_size too"
        )
    if unequal_shares:
        return UnequalShares(batch_size, MIN_SHARE, ComputeTimes(new_event=new_event))
    return Planner(batch_size)

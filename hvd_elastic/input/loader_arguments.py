"""Makes the data order and the planner that a loader's arguments ask for, and checks them."""

from __future__ import annotations

import sys
from typing import Any

from hvd_elastic.errors import ScriptError
from hvd_elastic.input.data_order import MIN_SHARE, DataOrder
from hvd_elastic.worker.planning.adaptive import AdaptivePlanner
from hvd_elastic.worker.planning.batch_bounds import batch_limits, require_whole
from hvd_elastic.worker.planning.compute_times import ComputeTimes, NewEvent, no_event
from hvd_elastic.worker.planning.planner import Planner, UnequalShares


def order_for(
    loader: str,
    data: Any,
    batch_size: Any,
    examples: int,
    *,
    shuffle: bool,
    seed: Any,
    drop_last: bool,
    new_event: NewEvent = no_event,
    order: Any = None,
    **adapting: Any,
) -> DataOrder:
    """Return the order in which a loader's dataset is read, with the planner of its steps.

    Args:
        loader: name of the loader, for messages.
        batch_size: examples of a step over all ranks, at first.
        examples: number of examples in the dataset, >= 1.
        new_event: creates an event on the training device.
        order: the script's own order, as of :class:`DataOrder`; None: there is none.
        adapting: the other arguments of the loader: ``max_batch_size``,
            ``atomic_batch_size_bounds``, ``accumulation`` and ``unequal_shares``.

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
    batch_size = require_whole("batch_size", batch_size, 1, together, loader)
    seed = require_whole("seed", seed, 0, "the same on all ranks", loader)
    if order is not None:
        examples = _length_of(order, loader, shuffle=shuffle)
    if drop_last and examples < batch_size:
        raise ScriptError(
            f"drop_last=True leaves nothing to train on: the dataset has {examples} "
            f"examples and batch_size is {batch_size}; make batch_size at most "
            f"{examples}, or drop_last=False"
        )
    return DataOrder(
        data,
        examples,
        batch_size,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
        given=order,
        planner=_planner_for(loader, batch_size, examples, drop_last, new_event, **adapting),
    )


def _length_of(order: Any, loader: str, *, shuffle: bool) -> int:
    """Return the number of examples of an epoch in an order of the script's own."""
    if not callable(order) or shuffle:
        problem = "with shuffle=True" if callable(order) else f"is a {type(order).__name__}"
        raise ScriptError(
            f"{loader}(order=...) {problem}: give a function that returns the indices of an epoch "
            "from its number, and leave shuffle out: order=lambda epoch: indices"
        )
    try:
        examples = len(order(0))
    except TypeError as error:
        raise ScriptError(
            f"{loader}(order=...): order(0) must return the indices of epoch 0 ({error})"
        ) from None
    if not examples:
        raise ScriptError(f"{loader}(order=...): order(0) returns no index, so nothing is read")
    return examples


def _planner_for(
    loader: str,
    batch_size: int,
    examples: int,
    drop_last: bool,
    new_event: NewEvent,
    *,
    max_batch_size: Any,
    atomic_batch_size_bounds: Any,
    accumulation: bool,
    unequal_shares: Any,
) -> Planner:
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


def examples_of(data: Any, is_stream: bool, instead: str) -> int:
    """Return the number of examples of a dataset that is read by index.

    Args:
        is_stream: whether the framework knows it as one that cannot be read by index.
        instead: what to give to which loader instead.

    Raises:
        ScriptError: it cannot be read by index, has no length, or is empty.
    """
    kind = type(data).__name__
    if is_stream or not hasattr(data, "__getitem__"):
        raise ScriptError(
            f"the dataset ({kind}) cannot be read by index, so its examples cannot be shared out "
            f"exactly once; give {instead}; hvd_elastic.data.Stream makes one of a stream"
        )
    try:
        examples = len(data)
    except (TypeError, NotImplementedError) as missing:
        raise ScriptError(
            f"the dataset ({kind}) has no length; give it a __len__ that says how many examples "
            "it holds"
        ) from missing
    except (OverflowError, ValueError) as error:
        raise ScriptError(
            f"the dataset ({kind}) has a length that Python refuses ({error}); __len__ must return "
            f"a whole number from 1 to {sys.maxsize}"
        ) from error
    if examples == 0:
        raise ScriptError(
            f"the dataset ({kind}) is empty; check where it is read from on this host"
        )
    return examples

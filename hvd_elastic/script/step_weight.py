"""Weights ranks by what their losses are means over, in place of their numbers of examples."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from hvd_elastic.errors import ScriptError
from hvd_elastic.worker import context
from hvd_elastic.worker.pass_counts import PassCounts


def step_weight(count: Any) -> None:
    """Weight this rank's gradients of a batch by ``count`` instead of its number of examples.

    For a loss that is a mean over something else than examples: over the targets that are not
    padding (``ignore_index``), over tokens, or over the examples that ``collate_fn`` has kept. Call
    it for each batch before ``backward()``, with the number that the loss divides by on this rank.
    Then a step has the gradient of the mean over all ranks, and with ``optimizer.no_sync()`` over
    all batches of the step, whose losses are not divided by their number then. The counts of the
    ranks are added up in one small reduction, beside the backward pass.

    A rank whose count is 0 adds nothing, even if its loss is NaN. If it is 0 on all ranks, the
    optimizer takes no step, and the examples count as used.

    Args:
        count: number of targets, tokens or examples, >= 0; a tensor on a GPU is read, which waits
            for the device, so count before the batch is moved there.

    Raises:
        ScriptError: the count is no number, the batch is not of our loader, the batch size adapts,
            gradients of the batch were computed already, or other batches of the step have no
            count.

    >>> step_weight(int((targets != -100).sum()))      # doctest: +SKIP
    """
    ctx = context.current()
    worker, step = ctx.worker, ctx.step
    number: Any = worker.frontend.plain(count)
    # NumPy's numbers are Reals, and booleans are too.
    is_number = isinstance(number, Real) and not isinstance(number, bool)
    if not is_number or not 0 <= number < math.inf:
        raise ScriptError(
            f"hvd.step_weight({number!r}): give the number that this rank's loss is a mean over, 0 "
            "or more, such as int((targets != -100).sum())"
        )
    if not step.is_open:
        raise ScriptError(
            f"hvd.step_weight() for a batch that does not come from {worker.frontend.loader}, "
            "whose shares of the ranks it replaces. Read the training data with it, and call "
            "hvd.step_weight() in its loop, before backward()"
        )
    if ctx.planner.adapts:
        raise ScriptError(
            "hvd.step_weight() with a batch that adapts: its gradient noise scale and learning "
            f"rate count examples. Leave max_batch_size of {worker.frontend.loader} out "
            "(unequal_shares=True works), or hvd.step_weight()"
        )
    for averager in worker.averagers:
        averager.check_not_begun("hvd.step_weight()")
    own = float(number) if step.passes[-1].weight else 0.0
    if step.counts is None:
        step.counts = PassCounts(worker.communicator)
    step.counts.set_count(own, len(step.passes), is_last=not step.in_no_sync)
    worker.averagers.prepare()

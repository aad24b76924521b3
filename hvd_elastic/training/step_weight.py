"""Weights ranks by what their losses are means over, in place of their numbers of examples."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import numpy as np

from hvd_elastic.communicator.interface import Communicator
from hvd_elastic.errors import ScriptError
from hvd_elastic.training import context


def step_weight(count: Any) -> None:
    """Weight this rank's gradients of a batch by ``count`` instead of its number of examples.

    For a loss that is a mean over something else than examples: over the targets that are not
    padding (``ignore_index``), over tokens, or over the examples that ``collate_fn`` has kept. Call
    it for each batch before ``backward()``, with the number that the loss divides by on this rank.
    Then a step has the gradient of the mean over all ranks, and with ``optimizer.no_sync()`` over
    all batches of the step, whose losses are not divided by their number then. The counts of the
    ranks are added up in one small reduction, beside the backward pass.

    A rank whose count is 0 adds nothing, even if its loss is NaN.

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
    number = worker.frontend.plain(count)
    # NumPy's numbers are Reals, and booleans are too.
    if not isinstance(number, Real) or isinstance(number, bool) or not 0 <= number < math.inf:
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
    own = 0.0 if step.passes[-1].padding else float(number)
    if step.counts is None:
        step.counts = PassCounts(worker.communicator)
    step.counts.add(own, len(step.passes), is_last=not step.in_no_sync)
    for averager in worker.averagers:
        averager.weighed()


class PassCounts:
    """The counts that a step's passes are weighted by on this rank, and their sum over all ranks.

    The total is known in the last pass only. Gradients of earlier passes are added up relative to
    the first one, and scaled together when it is known.

    Args:
        communicator: communicator of the ranks of the step.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._counts: list[float] = []
        self._begun: Any = None
        self._total = 0.0
        self._is_scaled = False

    def add(self, count: float, passes: int, *, is_last: bool) -> None:
        """Set the count of the pass that is number ``passes``, from 1.

        Args:
            count: count of this rank.
            passes: number of passes that were handed out, with this one.
            is_last: whether it is averaged over the ranks; then all of them call this.

        Raises:
            ScriptError: an earlier pass of the step has no count.
        """
        self._counts[passes - 1 :] = [count]
        self.check(passes)
        self.total()  # of an earlier call for the same pass
        if is_last:
            own = np.array([sum(self._counts)])
            communicator = self._communicator
            if communicator.size > 1:
                self._begun = communicator.sum_async(own, "hvd_elastic.step_weight")
            self._total = float(own[0])

    def check(self, passes: int) -> None:
        """Raise ScriptError unless all of so many passes have a count."""
        if len(self._counts) != passes:
            raise ScriptError(
                f"hvd.step_weight() was called for {len(self._counts)} of the {passes} batches of "
                "a step so far (optimizer.no_sync()): call it for each of them, before its "
                "backward()"
            )

    def total(self) -> float:
        """Wait for the sum over all passes and ranks and return it."""
        begun, self._begun = self._begun, None
        if begun is not None:
            self._total = float(self._communicator.wait(begun)[0])
        return self._total

    @property
    def _reference(self) -> float:
        return self._counts[0] or 1.0

    def weight(self, *, is_last: bool) -> float:
        """Return the factor on this rank's mean gradient of the latest pass; see ``Pass.weight``.

        Args:
            is_last: whether the pass is averaged over the ranks; in an earlier one the factor is
                relative to the first pass.
        """
        if not is_last:
            return self._counts[-1] / self._reference
        total = self.total()
        return self._counts[-1] * self._communicator.size / total if total else 0.0

    def take_scale_of_earlier(self) -> float:
        """Return once the factor on the gradients of earlier passes, in the last one."""
        if len(self._counts) == 1 or self._is_scaled:
            return 1.0
        self._is_scaled = True
        total = self.total()
        return self._reference * self._communicator.size / total if total else 0.0

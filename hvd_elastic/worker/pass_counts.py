"""The counts that the passes of a step are weighted by in place of their examples."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvd_elastic.communicator.interface import Communicator
from hvd_elastic.errors import ScriptError


class PassCounts:
    """The counts that a step's passes are weighted by on this rank, and their sum over all ranks.

    The total is known in the last pass only. Gradients of earlier passes are added up relative to
    the first one, and scaled together when it is known. A count may be that of several passes,
    which the script weights against each other itself.

    Args:
        communicator: communicator of the ranks of the step.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._counts: list[float] = []
        self._begun: Any = None
        self._total = 0.0
        self._earlier = False
        """Whether gradients were added up that are relative, and have yet to be scaled."""

    def set_count(self, count: float, passes: int, *, is_last: bool) -> None:
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
            self._earlier = True
            return self._counts[-1] / self._reference
        total = self.total()
        return self._counts[-1] * self._communicator.size / total if total else 0.0

    @property
    def latest(self) -> float:
        """The count of this rank's latest pass."""
        return self._counts[-1]

    def take_scale_of_earlier(self) -> float:
        """Return once the factor on the gradients of earlier passes, in the last one."""
        if not self._earlier:
            return 1.0
        self._earlier = False
        total = self.total()
        return self._reference * self._communicator.size / total if total else 0.0

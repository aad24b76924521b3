"""Counts steps that are left out because their gradients are not finite."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hvd_elastic.errors import ScriptError

_BAD_STEPS = 10
"""Number of consecutive steps without finite gradients after which the job ends."""
_BAD_STEPS_SCALED = 50
"""This number with a gradient scaler, which may start with too large a scale and halves it."""


class SkippedSteps:
    """Counts steps that were not taken because their gradients were not finite.

    Attributes:
        count: number of steps that were not taken.
        consecutive: number of latest steps without finite gradients, taken or not.
        overflows: whether a gradient scaler causes some of them.
    """

    def __init__(self) -> None:
        self.count = 0
        self.consecutive = 0
        self.overflows = False

    def expect_overflows(self) -> None:
        """Allow more steps with overflowing gradients: a gradient scaler causes some of them."""
        self.overflows = True

    def note(self, *, finite: bool) -> None:
        """Record whether the gradients of a step were finite."""
        self.consecutive = 0 if finite else self.consecutive + 1

    @property
    def most(self) -> int:
        """Number of consecutive such steps that ends the job."""
        return _BAD_STEPS_SCALED if self.overflows else _BAD_STEPS

    def add(self) -> None:
        """Count a step that is not taken."""
        self.count += 1
        self.consecutive += 1

    def refuse_many(self, step: int, advice: Callable[[], str]) -> None:
        """Raise ScriptError if too many consecutive steps up to ``step`` were not finite."""
        if self.consecutive >= self.most:
            raise ScriptError(
                f"the gradients were not finite in {self.most} steps running, up to step {step}: "
                "the loss is NaN or infinite on at least one rank. Look at the data and the loss, "
                f"lower the learning rate (or init_scale of a gradient scaler), or clip gradients"
                f"{advice()}"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the counts as plain numbers, for a broadcast or a checkpoint."""
        return {"skipped_steps": self.count, "bad_running": self.consecutive}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.count, self.consecutive = state["skipped_steps"], state["bad_running"]

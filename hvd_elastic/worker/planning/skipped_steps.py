"""Counts steps that are left out because their gradients are not finite."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvd_elastic.errors import ScriptError
from hvd_elastic.worker.progress import Progress

_BAD_STEPS = 10
"""Number of consecutive steps without finite gradients after which the job ends."""
_BAD_STEPS_SCALED = 50
"""This number with a gradient scaler, which may start with too large a scale and halves it."""


class SkippedSteps:
    """Counts steps that were not taken because their gradients were not finite.

    How many there are is part of the progress of training, which newcomers receive.

    Attributes:
        consecutive: number of latest steps without finite gradients, taken or not.
        overflows: whether a gradient scaler causes some of them.
    """

    def __init__(self) -> None:
        self.consecutive = 0
        self.overflows = False

    def expect_overflows(self) -> None:
        """Allow more steps with overflowing gradients: a gradient scaler causes some of them."""
        self.overflows = True

    def note_step(self, *, finite: bool) -> None:
        """Record whether the gradients of a step were finite."""
        self.consecutive = 0 if finite else self.consecutive + 1

    @property
    def _most(self) -> int:
        """Number of consecutive such steps that ends the job."""
        return _BAD_STEPS_SCALED if self.overflows else _BAD_STEPS

    @property
    def are_too_many(self) -> bool:
        """Return whether there are so many consecutive ones that the job ends."""
        return self.consecutive >= self._most

    def count_step(self, progress: Progress, steps: int = 1) -> bool:
        """Count the step that begins at ``progress`` as left out; it counts as so many steps.

        Returns:
            False: another optimizer of the loop body has done so.
        """
        first, last = progress.step, progress.skipped_at
        step = first + steps - 1
        if step == last:
            return False
        progress.skipped_running = progress.skipped_running + 1 if first == last + 1 else 1
        progress.skipped, progress.skipped_at = progress.skipped + 1, step
        self.consecutive = progress.skipped_running
        return True

    def refuse_many(self, step: int, advice: Callable[[], str]) -> None:
        """Raise ScriptError if too many consecutive steps up to ``step`` were not finite."""
        if self.are_too_many:
            raise ScriptError(
                f"the gradients were not finite in {self._most} steps running, up to step {step}: "
                "the loss is NaN or infinite on at least one rank. Look at the data and the loss, "
                f"lower the learning rate (or init_scale of a gradient scaler), or clip gradients"
                f"{advice()}"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the counts as plain numbers, for a broadcast or a checkpoint."""
        return {"bad_running": self.consecutive}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.consecutive = state["bad_running"]


def whose_words(names: Sequence[str], parameters: int) -> str:
    """Return in words whose gradients on this rank are not finite; empty: nobody's.

    Args:
        names: the parameters that they are of, of the last layer first.

    >>> whose_words(["head.bias", "head.weight"], 6)
    "from 'head.bias' backward, but not all parameters' gradients"
    """
    if not len(names):
        return ""
    if len(names) == parameters:
        return "all parameters' gradients, as when outputs or the loss are not finite"
    return f"from {names[0]!r} backward, but not all parameters' gradients"


ALL_FINITE = (
    "the outputs of all layers are finite, so they become so in the loss or backward from it"
)
"""Where gradients become not finite if a forward pass is finite."""


def layer_words(layer: str, inputs: bool, weights: bool) -> str:
    """Return in words what is known of the first layer whose outputs are not finite.

    Args:
        layer: its name and kind.
        inputs: whether its inputs are finite.
        weights: whether its parameters are.

    >>> layer_words("'head' (Linear)", True, True)
    "the first outputs that are not finite come from 'head' (Linear)"
    """
    if not inputs:
        return f"the inputs of {layer} are not finite already"
    if not weights:
        return f"{layer} has parameters or buffers that are not finite"
    return f"the first outputs that are not finite come from {layer}"

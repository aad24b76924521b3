"""Finds gradients of an earlier batch that a step would use."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class LeftGradients:
    """Gradients that a loop body has computed, and neither used in a step nor cleared.

    They are not part of the state: a worker that joins lacks them, and a failure drops them. So a
    later body may clear them, but not add to them or take a step with them.
    """

    def __init__(self) -> None:
        self._left: dict[torch.Tensor, tuple[torch.Tensor, int]] = {}
        self._steps = -1

    def __bool__(self) -> bool:
        """Whether a body has left gradients that are neither used nor cleared yet."""
        return bool(self._left)

    def begin(self, steps: int) -> bool:
        """Begin a loop body; return whether the one before ended without a step.

        Args:
            steps: number of steps of the optimizer so far.
        """
        self._left.clear()
        before, self._steps = self._steps, steps
        return steps == before

    def note(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note the gradients of these parameters, which the earlier body has left."""
        self._left = {p: (p.grad, p.grad._version) for p in parameters if p.grad is not None}

    def added(self, parameter: torch.Tensor) -> bool:
        """Return whether a backward pass has just added to a gradient of an earlier body."""
        found = self._left.pop(parameter, None)
        if found is None:
            return False
        gradient, version = found
        # The pass has changed it once; clearing it in place was a change too.
        if parameter.grad is not gradient or gradient._version != version + 1:
            return False
        self._left[parameter] = gradient, version + 1
        return True

    def held(self) -> torch.Tensor | None:
        """Return a parameter whose gradient is, in part at least, that of an earlier body."""
        for parameter, (gradient, version) in self._left.items():
            if parameter.grad is gradient and gradient._version == version:
                return parameter
        return None

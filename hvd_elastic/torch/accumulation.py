"""Adding up the gradients of several passes before they are averaged over the ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["GradientSum"]


class GradientSum:
    """The weighted sum of the gradients of the passes of a step so far.

    The first pass's gradients are taken from their parameters, not copied; the script may zero
    what is left as it likes. While passes are added up there is one more set of gradients.
    """

    def __init__(self) -> None:
        self._sums: dict[torch.Tensor, torch.Tensor] = {}

    def take(self, parameters: Iterable[torch.Tensor], weight: float) -> None:
        """Add ``weight`` times the gradients, and leave the parameters without."""
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            parameter.grad = None
            gradient = gradient.to_dense() if gradient.is_sparse else gradient.detach()
            if weight != 1.0:
                gradient.mul_(weight) if weight else gradient.zero_()
            before = self._sums.get(parameter)
            self._sums[parameter] = gradient if before is None else before.add_(gradient)

    def give(self, parameter: torch.Tensor, weight: float) -> None:
        """Make the parameter's gradient, times ``weight``, the whole sum; once a step."""
        gradient = parameter.grad
        before = self._sums.pop(parameter, None)
        if gradient is not None and weight != 1.0:
            gradient.mul_(weight) if weight else gradient.zero_()
        if before is None:
            return
        if gradient is None:
            parameter.grad = before
        elif gradient.is_sparse:
            parameter.grad = before.add_(gradient)
        else:
            gradient.add_(before)

    def holds(self, parameter: torch.Tensor) -> bool:
        """Whether an earlier pass of the step had a gradient for it."""
        return parameter in self._sums

    def clear(self) -> None:
        """Forget the passes so far."""
        self._sums.clear()

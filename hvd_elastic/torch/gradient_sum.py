"""Adds up the gradients of several passes before they are averaged over the ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class GradientSum:
    """Weighted sum of the gradients of a step's passes so far.

    The gradients of the first pass are moved out of their parameters, not copied, so the script may
    zero gradients between passes. While passes are added up, memory holds one more set of
    gradients.
    """

    def __init__(self) -> None:
        self._sums: dict[torch.Tensor, torch.Tensor] = {}

    def take(self, parameters: Iterable[torch.Tensor], weight: float) -> None:
        """Add ``weight`` times the gradients to the sum, and remove them from the parameters."""
        taken: list[torch.Tensor] = []
        sums: list[torch.Tensor] = []
        added: list[torch.Tensor] = []
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            parameter.grad = None
            gradient = gradient.to_dense() if gradient.is_sparse else gradient.detach()
            taken.append(gradient)
            before = self._sums.setdefault(parameter, gradient)
            if before is not gradient:
                sums.append(before)
                added.append(gradient)
        _weigh(taken, weight)
        _add(sums, added)

    def give(self, parameters: Iterable[torch.Tensor], weight: float) -> None:
        """Set the gradients to ``weight`` times themselves plus the sums; once a step."""
        if weight == 1 and not self._sums:
            return
        given: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        sums: list[torch.Tensor] = []
        for parameter in parameters:
            gradient = parameter.grad
            before = self._sums.pop(parameter, None)
            if gradient is not None:
                given.append(gradient)
            if before is None:
                continue
            if gradient is None:
                parameter.grad = before
            elif gradient.is_sparse:
                # A dense sum of an earlier pass: the sparse gradient is added to it.
                parameter.grad = before
                gradients.append(before)
                sums.append(gradient)
            else:
                gradients.append(gradient)
                sums.append(before)
        _weigh(given, weight)
        _add(gradients, sums)

    def holds(self, parameter: torch.Tensor) -> bool:
        """Return whether an earlier pass of the step had a gradient for the parameter."""
        return parameter in self._sums

    def clear(self) -> None:
        """Drop the sums."""
        self._sums.clear()


def _weigh(gradients: list[torch.Tensor], weight: float) -> None:
    if weight == 0:
        for gradient in gradients:
            gradient.zero_()  # a multiplication by 0 would keep NaN and infinity
        return
    if weight == 1 or not gradients:
        return
    if any(gradient.is_sparse for gradient in gradients):
        for gradient in gradients:
            gradient.mul_(weight)
        return
    torch._foreach_mul_(gradients, weight)


def _add(sums: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
    """Add each gradient to its sum in place, with few kernels on a GPU instead of one each."""
    if any(gradient.is_sparse for gradient in gradients):
        for total, gradient in zip(sums, gradients, strict=True):
            total.add_(gradient)
    elif sums:
        torch._foreach_add_(sums, gradients)

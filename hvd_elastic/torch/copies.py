"""Copies of tensors on their device, to which they are set back when a loop body fails."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch


class TensorCopies:
    """Copies of tensors at one point. Its memory is used again for the next copies."""

    def __init__(self) -> None:
        self._copies: dict[torch.Tensor, torch.Tensor] = {}
        self._valid = False

    def take(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy the tensors; forget earlier copies."""
        memory, self._copies = self._copies, {}
        for tensor in tensors:
            if tensor.is_inference():
                continue
            target = memory.get(tensor)
            if target is None or (target.shape, target.dtype) != (tensor.shape, tensor.dtype):
                target = torch.empty_like(tensor, requires_grad=False)
            self._copies[tensor] = target
        _copy(self._copies, self._copies.values())
        self._valid = True

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the copy of a tensor; None: there is none."""
        return self._copies.get(tensor) if self._valid else None

    def restore(self) -> None:
        """Set the tensors to their copies, in place; do nothing if there are none."""
        if self._valid:
            _copy(self._copies.values(), self._copies)

    def drop(self) -> None:
        """Forget the copies, but keep their memory."""
        self._valid = False


def _copy(sources: Iterable[torch.Tensor], targets: Iterable[torch.Tensor]) -> None:
    several = list(targets)
    if several:
        with torch.no_grad():
            torch._foreach_copy_(several, list(sources))


class OptimizerCopy:
    """Copy of the parameters and the state of an optimizer before its first step in a loop body."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._tensors = TensorCopies()
        self._state: dict[Any, dict[Any, Any]] | None = None

    def take(self) -> None:
        """Copy parameters and state, unless they are copied already."""
        if self._state is not None:
            return
        tensors = [
            parameter
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad or parameter.grad is not None
        ]
        self._state = {}
        for key, values in self._optimizer.state.items():
            self._state[key] = kept = {}
            for name, value in values.items():
                if torch.is_tensor(value):
                    tensors.append(value)
                    kept[name] = value
                else:
                    kept[name] = copy.deepcopy(value)
        self._tensors.take(tensors)

    @property
    def is_taken(self) -> bool:
        """Whether there is a copy."""
        return self._state is not None

    def of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the copy of a parameter; None: it was not trained."""
        return self._tensors.of(parameter)

    def restore(self) -> None:
        """Set parameters and state back, if they were copied; drop the copy."""
        if self._state is None:
            return
        state, present = self._state, self._optimizer.state
        self._tensors.restore()
        for key in [key for key in present if key not in state]:
            del present[key]
        for key, values in state.items():
            present[key].clear()
            present[key].update(values)
        self.drop()

    def drop(self) -> None:
        """Drop the copy; the next step takes another one."""
        self._state = None
        self._tensors.drop()

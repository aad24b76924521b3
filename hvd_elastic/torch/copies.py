"""Copies of tensors and values, to which they are set back when a loop body fails."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from hvd_elastic.script.helper_copies import HelperCopies, dump_value
from hvd_elastic.script.value_copies import ValueCopies


class TensorCopies:
    """Copies of tensors at one point. Its memory is used again for the next copies."""

    def __init__(self) -> None:
        self._copies: dict[torch.Tensor, torch.Tensor] = {}
        self._valid = False

    def copy_tensors(self, tensors: Iterable[torch.Tensor]) -> None:
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

    def copy_once(self) -> None:
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
        self._tensors.copy_tensors(tensors)

    @property
    def is_taken(self) -> bool:
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


class Snapshot(ValueCopies):
    """Copy of a state at one point, except parameters and optimizer state.

    Args:
        plain: plain values by name.
        objects: objects with ``state_dict()`` and ``load_state_dict()``, by name; see
            :class:`ValueCopies`.
        helpers: copies the objects of the script that are no modules and optimizers.
        tensors: copy also buffers, modules that no optimizer trains, and large objects, as is done
            at the end of an epoch.
        parts: with ``tensors``, copy also the untrained parameters of modules that are trained
            in part.

    Raises:
        ScriptError: a value cannot be copied; names it.
    """

    def __init__(
        self,
        plain: Mapping[str, Any],
        objects: Mapping[str, Any],
        helpers: HelperCopies,
        *,
        tensors: bool = False,
        parts: bool = False,
    ) -> None:
        trained = (torch.nn.Module, torch.optim.Optimizer)
        others = {name: item for name, item in objects.items() if not isinstance(item, trained)}
        super().__init__(plain, others, helpers, always=tensors)
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, item in objects.items():
            if isinstance(item, torch.optim.Optimizer):
                self.dumped[name] = dump_value(
                    name, [_options(group) for group in item.param_groups]
                )
        if tensors:
            self._tensors = [
                (tensor, tensor.detach().to("cpu", copy=True))
                for tensor in untrained_tensors(objects, parts=parts)
                if not tensor.is_inference()
            ]

    def restore(self, plain: dict[str, Any], objects: Mapping[str, Any]) -> None:
        super().restore(plain, objects)
        for tensor, copied in self._tensors:
            _write(tensor, copied)

    def copy_tensor(self, present: Any, saved: Any) -> bool:
        if not (isinstance(saved, torch.Tensor) and present.shape == saved.shape):
            return False
        _write(present, saved)
        return True

    def set_back(self, item: Any, state: Any) -> None:
        if not isinstance(item, torch.optim.Optimizer):
            super().set_back(item, state)
            return
        for group, options in zip(item.param_groups, state, strict=False):
            _set_options(group, options)


def _write(target: torch.Tensor, source: torch.Tensor) -> None:
    with torch.no_grad():
        target.copy_(source)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter group without its parameters: learning rate and other options."""
    return {name: value for name, value in group.items() if name != "params"}


def _set_options(group: dict[str, Any], options: dict[str, Any]) -> None:
    for name, value in options.items():
        present = group.get(name)
        if isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor):
            _write(present, value)  # a compiled step refers to this very tensor
        else:
            group[name] = value


def untrained_tensors(objects: Mapping[str, Any], *, parts: bool) -> Iterator[torch.Tensor]:
    """Yield the buffers of all modules, and the parameters of modules that no optimizer trains.

    Args:
        objects: the objects of a state by name, optimizers among them.
        parts: whether to include untrained parameters of modules that are trained in part. They
            are mostly frozen, and copying them would take memory for nothing.
    """
    trained = {
        id(parameter)
        for item in objects.values()
        if isinstance(item, torch.optim.Optimizer)
        for group in item.param_groups
        for parameter in group["params"]
    }
    for item in objects.values():
        if isinstance(item, torch.nn.Module):
            yield from item.buffers()
            untrained = [each for each in item.parameters() if id(each) not in trained]
            if parts or len(untrained) == len(list(item.parameters())):
                yield from untrained

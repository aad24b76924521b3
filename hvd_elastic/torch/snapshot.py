"""Copies of what the script changes in its state besides parameters and optimizer state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hvd_elastic.script.helper_copies import HelperCopies, dump_value
from hvd_elastic.script.value_copies import ValueCopies


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
            if isinstance(item, torch.optim.Optimizer) and not name.startswith("_"):
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
            _copy(tensor, copied)

    def copy_tensor(self, present: Any, saved: Any) -> bool:
        if not (isinstance(saved, torch.Tensor) and present.shape == saved.shape):
            return False
        _copy(present, saved)
        return True

    def set_back(self, item: Any, state: Any) -> None:
        if not isinstance(item, torch.optim.Optimizer):
            super().set_back(item, state)
            return
        for group, options in zip(item.param_groups, state, strict=False):
            _set_options(group, options)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    with torch.no_grad():
        target.copy_(source)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter group without its parameters: learning rate and other options."""
    return {name: value for name, value in group.items() if name != "params"}


def _set_options(group: dict[str, Any], options: dict[str, Any]) -> None:
    for name, value in options.items():
        present = group.get(name)
        if isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor):
            _copy(present, value)  # a compiled step refers to this very tensor
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

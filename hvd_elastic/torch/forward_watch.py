"""Finds the first layer of a forward pass whose outputs are not finite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_FINITE = "the outputs of all layers are finite, so they become so in the loss or backward from it"


class ForwardWatch:
    """Looks at what goes into the layers of modules and comes out, until :meth:`end`.

    A layer that ``torch.compile`` has compiled is not seen.

    Args:
        modules: modules by name.
    """

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        self._found = ""
        self._passes = 0
        self._hooks = []
        for prefix, module in modules.items():
            for name, layer in module.named_modules():
                hook = _Hook(self, f"{prefix}.{name}" if name else prefix)
                self._hooks.append(layer.register_forward_hook(hook, with_kwargs=True))

    def look(self, name: str, layer: torch.nn.Module, given: Any, output: Any) -> None:
        """Note a layer if it is the first with outputs that are not finite."""
        self._passes += 1
        if self._found or _are_finite(output):
            return
        kind = type(layer).__name__
        if not _are_finite(given):
            self._found = f"the inputs of {name!r} ({kind}) are not finite already"
        elif not _are_finite([*layer.parameters(recurse=False), *layer.buffers(recurse=False)]):
            self._found = f"{name!r} ({kind}) has parameters or buffers that are not finite"
        else:
            self._found = f"the first outputs that are not finite are those of {name!r} ({kind})"

    def end(self) -> str:
        """Look no more; return in words what was found, or ""."""
        for hook in self._hooks:
            hook.remove()
        return self._found or (_FINITE if self._passes else "")


class _Hook:
    def __init__(self, watch: ForwardWatch, name: str) -> None:
        self._watch, self._name = watch, name

    def __call__(self, layer: torch.nn.Module, given: Any, named: Any, output: Any) -> None:
        self._watch.look(self._name, layer, [given, named], output)


def _are_finite(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        is_number = value.is_floating_point() or value.is_complex()
        return not is_number or bool(torch.isfinite(value).all())
    if isinstance(value, Mapping):
        value = [*value.values()]
    return not isinstance(value, list | tuple) or all(map(_are_finite, value))

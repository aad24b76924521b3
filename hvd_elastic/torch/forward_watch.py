"""Finds the first layer of a forward pass whose outputs are not finite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hvd_elastic.worker.planning.skipped_steps import ALL_FINITE, layer_words


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
        own = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
        called = f"{name!r} ({type(layer).__name__})"
        self._found = layer_words(called, _are_finite(given), _are_finite(own))

    def end(self) -> str:
        """Look no more; return in words what was found, or ""."""
        for hook in self._hooks:
            hook.remove()
        return self._found or (ALL_FINITE if self._passes else "")


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

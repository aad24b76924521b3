"""Finds gradients of a step, and the first layer of a forward pass, that are not finite."""

from __future__ import annotations

import cmath
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from hvd_elastic.worker.planning.skipped_steps import ALL_FINITE, layer_words

_WHOLE = 1 << 12
"""Elements of a gradient up to which one rank looks at all of them; that takes less than 1 µs."""


class GradientCheck:
    """Tells on one rank whether gradients are finite.

    A look at 100 MB of gradients would take 8 to 10 % of a step of a fully connected network with
    32 examples. So of a large gradient only the numbers on a line are looked at, which crosses
    each of its rows and columns. A NaN or an infinity in an input of a layer makes a column of
    its weights' gradient NaN or infinite, and one in the gradient of an output a row.

    Gradients on a GPU count as finite, since reading a number would wait for it.

    Args:
        parameters: parameters, in any order.

    Attributes:
        unknown: whether it does not look at some gradients at all.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        every = list(parameters)
        self._lines = [(each, _line(each)) for each in every if not each.is_cuda]
        self.unknown = len(self._lines) < len(every)
        self._one = torch.ones(())

    @torch.no_grad()
    def are_finite(self) -> bool:
        """Return whether the gradients that the parameters have now are finite."""
        looked_at = []
        bad = torch.zeros(())
        try:
            for parameter, line in self._lines:
                if (gradient := parameter.grad) is not None:
                    looked_at.append(gradient if line is None else gradient.as_strided(*line))
            # All in one call, which multiplies by 1.
            torch._amp_foreach_non_finite_check_and_unscale_(looked_at, bad, self._one)
        except RuntimeError:  # memory that is not dense, or complex numbers
            bad.fill_(1)
        return not bad.item() or all(
            is_finite(each.grad) for each, _ in self._lines if each.grad is not None
        )


def _line(parameter: torch.Tensor) -> tuple[tuple[int], tuple[int]] | None:
    """Return size and stride of a line through each row and column of a gradient; None: all of it.

    The stride is at most the length of a row and that of a column, so it leaves none of either out;
    and it has no factor in common with them, so that the place in a row is another one each time.
    That holds for memory in which rows follow each other, or columns.
    """
    elements = parameter.numel()
    if elements <= _WHOLE or parameter.ndim < 2:
        return None
    rows = len(parameter)
    columns = elements // rows
    stride = min(rows, columns)
    while math.gcd(stride, elements) > 1:
        stride -= 1
    return (-(-elements // stride),), (stride,)


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all numbers of a tensor are finite; on a GPU this waits for it."""
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    if values.dtype in (torch.float32, torch.float64) and values.is_contiguous():
        flat = values.view(-1)
        total = torch.dot(flat, flat)  # half the time of a sum
    else:
        total = values.sum()
    # A finite sum has finite terms only; an infinite one may also come from an overflow.
    return cmath.isfinite(total.item()) or bool(torch.isfinite(values).all())


class ForwardWatch:
    """Looks at what goes into the layers of modules and comes out, until :meth:`stop_watching`.

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

    def check_outputs(self, name: str, layer: torch.nn.Module, given: Any, output: Any) -> None:
        """Note a layer if it is the first with outputs that are not finite."""
        self._passes += 1
        if self._found or _are_finite(output):
            return
        own = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
        called = f"{name!r} ({type(layer).__name__})"
        self._found = layer_words(called, _are_finite(given), _are_finite(own))

    def stop_watching(self) -> str:
        """Look no more; return in words what was found, or ""."""
        for hook in self._hooks:
            hook.remove()
        return self._found or (ALL_FINITE if self._passes else "")


class _Hook:
    def __init__(self, watch: ForwardWatch, name: str) -> None:
        self._watch, self._name = watch, name

    def __call__(self, layer: torch.nn.Module, given: Any, named: Any, output: Any) -> None:
        self._watch.check_outputs(self._name, layer, [given, named], output)


def _are_finite(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        is_number = value.is_floating_point() or value.is_complex()
        return not is_number or bool(torch.isfinite(value).all())
    if isinstance(value, Mapping):
        value = [*value.values()]
    return not isinstance(value, list | tuple) or all(map(_are_finite, value))

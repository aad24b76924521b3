"""Types, devices and strides of tensors, which a script may change while it trains."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch

from hvd_elastic.torch.checkpoint import dtype_name, dtype_named

_Form = tuple[torch.dtype, str, tuple[int, ...]]


def form_of(tensor: torch.Tensor) -> _Form:
    """Return type, kind of device and strides of a tensor."""
    return tensor.dtype, tensor.device.type, tensor.stride()


def lay_out(state: dict[str, Any], parameter: torch.Tensor) -> None:
    """Give an optimizer's state of a parameter its strides, which fused optimizers take it to have.

    They change wrong weights else, such as those of a parameter in ``channels_last``.
    """
    for name, value in state.items():
        is_like = torch.is_tensor(value) and value.shape == parameter.shape
        if is_like and value.layout is torch.strided and value.stride() != parameter.stride():
            like = torch.empty_like(parameter.detach(), dtype=value.dtype, device=value.device)
            state[name] = like.copy_(value)


class ModuleForms:
    """Conversions of a script in training, such as ``model.double()``, so that newcomers follow.

    A newcomer's script has built its modules as that of the other ranks has, before training.

    Args:
        modules: the modules by name, before training.
    """

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        self._built = {name: _forms(module) for name, module in modules.items()}

    def converted(self, modules: Mapping[str, torch.nn.Module]) -> dict[str, dict[str, Any]]:
        """Return by module and name the form of each tensor that was converted, as plain values."""
        return {
            name: {
                key: [dtype_name(form[0]), form[1], list(form[2])]
                for key, form in _forms(module).items()
                if form != self._built.get(name, {}).get(key, form)
            }
            for name, module in modules.items()
        }

    def follow(
        self, modules: Mapping[str, torch.nn.Module], converted: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Convert the tensors of modules as another rank has, which told :meth:`converted`."""
        for name, module in modules.items():
            built, told = self._built.get(name, {}), converted.get(name, {})
            for key, tensor in _tensors(module).items():
                form = built.get(key)
                if key in told:
                    kind, device, strides = told[key]
                    form = (dtype_named(kind), device, tuple(strides))
                if form is not None and form != form_of(tensor):
                    dtype, device, stride = form
                    like = torch.empty_strided(tensor.shape, stride, dtype=dtype, device=device)
                    tensor.data = like.copy_(tensor.detach())


def _tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = chain(module.named_parameters(), module.named_buffers())
    return {
        name: tensor
        for name, tensor in found
        if not torch.nn.parameter.is_lazy(tensor) and tensor.layout is torch.strided
    }


def _forms(module: torch.nn.Module) -> dict[str, _Form]:
    return {name: form_of(tensor) for name, tensor in _tensors(module).items()}

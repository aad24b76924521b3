"""Buffers of modules: those that a rank can receive, and what forward passes change in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.nn import Module
from torch.nn.parameter import is_lazy


def give_own_memory(modules: Mapping[str, Module]) -> None:
    """Copy the buffers that nothing can be written to.

    These are views of one number (``expand``), conjugates, and what was made in inference mode. A
    buffer that several modules have is copied once.
    """
    copies: dict[torch.Tensor, torch.Tensor] = {}
    for module in modules.values():
        for owner, key, buffer in _buffers(module).values():
            if buffer is not None and not is_writable(buffer):
                if buffer not in copies:
                    copies[buffer] = (
                        buffer.detach()
                        .resolve_conj()
                        .resolve_neg()
                        .clone(memory_format=torch.contiguous_format)
                    )
                owner._buffers[key] = copies[buffer]


def left_out(modules: Mapping[str, Module]) -> dict[str, dict[str, torch.Tensor]]:
    """Return the buffers of each module that its ``state_dict()`` leaves out, by name."""
    return {
        name: {
            full: buffer
            for full, (owner, key, buffer) in _buffers(module).items()
            if buffer is not None and key in owner._non_persistent_buffers_set
        }
        for name, module in modules.items()
    }


def take_shapes(module: Module, values: Mapping[str, Any]) -> None:
    """Give buffers that have grown on another rank, or were set there, their shape there."""
    for full, (owner, key, buffer) in _buffers(module).items():
        value = values.get(full)
        if isinstance(value, torch.Tensor) and (buffer is None or buffer.shape != value.shape):
            device = value.device if buffer is None else buffer.device
            owner._buffers[key] = torch.empty_like(value, device=device)
        elif value is None and key not in owner._non_persistent_buffers_set:
            owner._buffers[key] = None


def set_left_out(module: Module, values: Mapping[str, torch.Tensor]) -> None:
    """Set the buffers that ``state_dict()`` leaves out to those of another rank."""
    for full, (owner, key, buffer) in _buffers(module).items():
        value = values.get(full)
        if key not in owner._non_persistent_buffers_set or value is buffer:
            continue
        if value is None or buffer is None or buffer.shape != value.shape:
            owner._buffers[key] = value
        else:
            with torch.no_grad():
                buffer.copy_(value)


def has_grown(module: Module, key: str, here: Any, there: Any) -> bool:
    """Return whether a tensor may be a buffer that had another length, or was not set yet."""
    found = _buffers(module).get(key)
    if found is None:
        return False
    both = isinstance(here, torch.Tensor) and isinstance(there, torch.Tensor)
    return here is None or (both and here.ndim > 0 and here.shape[1:] == there.shape[1:])


def _buffers(module: Module) -> dict[str, tuple[Module, str, torch.Tensor | None]]:
    """Return owner, name there and tensor of each buffer by its name in ``state_dict()``."""
    return {
        f"{path}.{key}" if path else key: (owner, key, buffer)
        for path, owner in module.named_modules(remove_duplicate=False)
        if not isinstance(owner, torch.jit.ScriptModule)
        for key, buffer in owner._buffers.items()
    }


def is_writable(tensor: torch.Tensor) -> bool:
    """Return whether numbers can be written to all of a tensor, each to a place of its own."""
    if tensor.layout is not torch.strided or is_lazy(tensor):
        return True
    repeated = any(
        step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)
    )
    return not (repeated or tensor.is_conj() or tensor.is_neg() or tensor.is_inference())


_SMALL = 1 << 16
"""Elements of a buffer that is copied in each step. Larger ones are copied once they have changed,
which batch normalisation does not tell of its statistics."""


class MovingBuffers:
    """Copies of the buffers of modules, such as the statistics of batch normalisation."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        parts = {id(part): part for module in modules for part in module.modules()}
        self._places = [(part._buffers, name) for part in parts.values() for name in part._buffers]
        self._kept: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}
        """The buffer at a place, its version, and its copy."""

    @torch.no_grad()
    def keep(self) -> None:
        """Copy the buffers that may have changed since the last call."""
        changed, copies = [], []
        for number, (buffers, name) in enumerate(self._places):
            buffer = buffers.get(name)
            if buffer is None or buffer.is_inference() or not _has_data(buffer):
                self._kept.pop(number, None)
                continue
            kept, version, copied = self._kept.get(number, (None, -1, None))
            same = kept is buffer and version == buffer._version
            if same and buffer.numel() > _SMALL:
                continue
            if copied is None or kept is not buffer or copied.shape != buffer.shape:
                copied = torch.empty_like(buffer)
            self._kept[number] = (buffer, buffer._version, copied)
            changed.append(buffer)
            copies.append(copied)
        if changed:
            torch._foreach_copy_(copies, changed)

    @torch.no_grad()
    def undo(self) -> None:
        """Set the buffers back that have changed since :meth:`keep`."""
        for number, (buffer, version, copied) in self._kept.items():
            buffers, name = self._places[number]
            if buffers.get(name) is not buffer:
                buffers[name] = buffer
            if buffer._version != version or buffer.numel() <= _SMALL:
                buffer.copy_(copied)


def _has_data(buffer: torch.Tensor) -> bool:
    return buffer.layout is torch.strided and not buffer.is_meta

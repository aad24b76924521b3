"""Undoes what the forward passes of a step that is left out have changed in buffers."""

from __future__ import annotations

from collections.abc import Iterable

import torch

_SMALL = 1 << 16
"""Elements of a buffer that is copied in each step. Larger ones are copied once they have changed,
which batch normalisation does not tell of its statistics."""


class MovingBuffers:
    """Copies of the buffers of modules, such as the statistics of batch normalisation.

    Args:
        modules: the modules.
    """

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

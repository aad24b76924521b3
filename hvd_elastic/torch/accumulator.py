"""Sums of numbers over all ranks, of tensors of PyTorch."""

from __future__ import annotations

from typing import Any

import torch

from hvd_elastic.script import accumulator


class Accumulator(accumulator.Accumulator):
    """Sums numbers by name; see :class:`hvd_elastic.script.accumulator.Accumulator`."""

    @staticmethod
    def _element(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return None
        if value.numel() != 1 or value.is_complex():
            Accumulator._refuse(name, value)
        return value.detach().reshape(()).double()

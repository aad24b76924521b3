"""The first of two ranks, in one process, and its steps."""

from __future__ import annotations

from typing import Any

import torch

from hvd_elastic.communicator.local import LocalCommunicator
from hvd_elastic.worker.context import Context
from hvd_elastic.worker.step import Pass


class TwoRanks(LocalCommunicator):
    """The other rank's gradients are all ``other``, or like this one's.

    Attributes:
        names: names of all reductions, in order.
        shapes: shapes of those of tensors.
    """

    size = 2

    def __init__(self, other: float | None = None) -> None:
        self.other = other
        self.names: list[str] = []
        self.shapes: list[tuple[int, ...]] = []

    def reduce_async(self, array: Any, name: str, *, sent_as: str = "") -> Any:
        self.names.append(name)
        if isinstance(array, torch.Tensor):  # both say the same in arrays
            self.shapes.append(tuple(array.shape))
            if self.other is not None:
                array.add_(self.other).div_(2)
        return array

    @property
    def gradients(self) -> list[str]:
        return [name for name in self.names if name.startswith("gradient")]


def hand_out(
    ctx: Context, weight: float = 1.0, examples: int = 8, *, padding: bool = False
) -> None:
    """Begin a step of one pass."""
    ctx.hand_out(Pass(step_examples=examples, weight=weight, padding=padding))

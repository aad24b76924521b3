"""Scaling an optimizer's learning rate for one step, behind the back of its schedulers."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hvd_elastic.model.lr_rules import Adjustment, scaled_betas

__all__ = ["rates_scaled"]


@contextlib.contextmanager
def rates_scaled(
    optimizer: torch.optim.Optimizer, adjustments: Sequence[Adjustment]
) -> Iterator[None]:
    """Change learning rate, betas and epsilon of each parameter group while a step is taken.

    What the group says outside of a step stays the user's: any scheduler goes on as if the batch
    were the initial one.

    Args:
        optimizer: whose groups.
        adjustments: one for each group.
    """
    before: list[dict[str, Any]] = []
    for group, adjustment in zip(optimizer.param_groups, adjustments, strict=True):
        changed: dict[str, Any] = {"lr": group["lr"] * adjustment.factor}
        if adjustment.rate != 1.0 and "betas" in group:
            changed["betas"] = scaled_betas(group["betas"], adjustment.rate)
            if "eps" in group:
                changed["eps"] = group["eps"] / math.sqrt(adjustment.rate)
        before.append({name: group[name] for name in changed})
        group.update(changed)
    try:
        yield
    finally:
        for group, own in zip(optimizer.param_groups, before, strict=True):
            group.update(own)

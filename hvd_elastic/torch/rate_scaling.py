"""Scales an optimizer's learning rate during a step, without its schedulers seeing it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hvd_elastic.model.lr_rules import Adjustment, scaled_betas


@contextlib.contextmanager
def rates_scaled(
    optimizer: torch.optim.Optimizer, adjustments: Sequence[Adjustment]
) -> Iterator[None]:
    """Change learning rate, betas and epsilon of each parameter group while a step is taken.

    Outside of a step the groups have the user's values, so schedulers work as if the batch had its
    initial size.

    Args:
        optimizer: optimizer whose parameter groups are changed.
        adjustments: one adjustment for each group.
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

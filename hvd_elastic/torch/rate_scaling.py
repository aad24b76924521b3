"""Scaling an optimizer's learning rate for one step, behind the back of its schedulers."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hvd_elastic.errors import ScriptError
from hvd_elastic.model.lr_rules import Adjustment, Rule, Situation, scaled_betas

__all__ = ["checked", "rates_scaled"]


def checked(rule: Rule) -> Rule:
    """A rule of the script's own, which says so itself where its answer is none."""

    def answering(now: Situation) -> Adjustment:
        found = rule(now)
        if not (
            isinstance(found, Adjustment)
            and 0 <= found.factor < math.inf
            and 0 < found.rate < math.inf
            and 0 < found.gain < math.inf
        ):
            raise ScriptError(
                f"DistributedOptimizer(lr_rule=...): the rule answered {found!r} for {now}; it "
                "must be a hvd_elastic.model.lr_rules.Adjustment of finite numbers: factor (0 or "
                "more), rate and gain (above 0)"
            )
        return found

    return answering


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

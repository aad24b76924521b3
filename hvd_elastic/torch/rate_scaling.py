"""Scales an optimizer's learning rate during a step, without its schedulers seeing it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from hvd_elastic.model.lr_rules import Rule, scaled_betas, scaled_epsilon
from hvd_elastic.worker.planning.adaptive import AdaptivePlanner
from hvd_elastic.worker.planning.rules import chosen_rule


class AdaptiveRates:
    """The learning rate of an optimizer whose batch may adapt.

    Args:
        optimizer: the optimizer.
        rule: learning-rate rule; None: that which suits the optimizer.

    Attributes:
        rule: learning-rate rule.
        adapts: whether the batch adapts.
        gain: progress of the latest step with a whole batch, in steps at the initial batch size.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, rule: str | Rule | None) -> None:
        self._optimizer = optimizer
        has_betas = all("betas" in group for group in optimizer.param_groups)
        self.rule = chosen_rule(rule, has_betas=has_betas)
        self.adapts = False
        self.gain = 1.0

    @contextlib.contextmanager
    def scaled(self, planner: AdaptivePlanner) -> Iterator[None]:
        """Change learning rate, betas and epsilon of each parameter group while a step is taken.

        Outside of a step the groups have the user's values, so schedulers work as if the batch had
        its initial size.
        """
        *adjustments, whole = planner.adjustments()
        self.gain = whole.gain
        before: list[dict[str, Any]] = []
        for group, adjustment in zip(self._optimizer.param_groups, adjustments, strict=True):
            changed: dict[str, Any] = {"lr": group["lr"] * adjustment.factor}
            if adjustment.rate != 1.0 and "betas" in group:
                changed["betas"] = scaled_betas(group["betas"], adjustment.rate)
                if "eps" in group:
                    changed["eps"] = scaled_epsilon(group["eps"], adjustment.rate)
            before.append({name: group[name] for name in changed})
            group.update(changed)
        try:
            yield
        finally:
            for group, own in zip(self._optimizer.param_groups, before, strict=True):
                group.update(own)

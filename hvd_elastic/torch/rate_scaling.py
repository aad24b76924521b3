"""Scales an optimizer's learning rate during a step, without its schedulers seeing it."""

from __future__ import annotations

import cmath
import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from hvd_elastic.model.lr_rules import Rule, scaled_betas, scaled_epsilon
from hvd_elastic.training.planning.adaptive import AdaptivePlanner
from hvd_elastic.training.planning.canaries import canaries
from hvd_elastic.training.planning.rules import chosen_rule


class AdaptiveRates:
    """The learning rate of an optimizer whose batch may adapt, and whether a step can be taken.

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
        self._checked: list[torch.Tensor] = []

    def adapt(self, parameters: Iterable[torch.Tensor]) -> None:
        """Begin to scale the rate, and to check the gradients of some of the parameters."""
        self.adapts, self._checked = True, checked_parameters(parameters)

    def are_finite(self, planner: AdaptivePlanner) -> bool:
        """Return whether the averaged gradients of the step are finite, and tell the planner so."""
        gradients = [p.grad for p in self._checked if p.grad is not None]
        # Gradients on a GPU are not checked, since reading a number would wait for it.
        if not gradients or any(gradient.is_cuda for gradient in gradients):
            return True
        if not all(map(_is_finite, gradients)):
            return False
        planner.skipped.note(finite=True)
        return True

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


def checked_parameters(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the few parameters whose gradients tell whether those of all are finite."""
    every = list(parameters)
    return [every[index] for index in canaries([each.numel() for each in every])]


def _is_finite(gradient: torch.Tensor) -> bool:
    # A finite sum has finite terms only; an infinite one may also come from an overflow.
    if cmath.isfinite(gradient.sum().item()):
        return True
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return bool(torch.isfinite(values).all())

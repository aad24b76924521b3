"""Learning-rate scaling rules: how the learning rate follows the batch size, as pure functions.

Every rule returns an :class:`Adjustment`: a factor on the learning rate of the user's schedule and,
for Adam, a change of betas and epsilon. Progress is counted in steps of the initial batch size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from hvd_elastic.errors import ScriptError


@dataclass(frozen=True)
class Situation:
    """Input of a rule.

    Attributes:
        scale: ratio of the present global batch size to the initial one, above 0.
        squared_norm: squared norm ``|G|^2`` of the true gradient of the parameter group.
        variance: ``tr(Sigma)`` of a mean gradient at the *initial batch size*.
        epochs: progress so far, in passes over the data at the initial batch size.
    """

    scale: float
    squared_norm: float = 0.0
    variance: float = 0.0
    epochs: float = math.inf


@dataclass(frozen=True)
class Adjustment:
    """Output of a rule: how to adjust an optimizer for one step.

    Attributes:
        factor: factor on the learning rate.
        rate: ``kappa`` of Adam's betas and epsilon: each beta becomes ``1 - kappa (1 - beta)``,
            epsilon is divided by ``sqrt(kappa)``; 1 leaves them unchanged.
        gain: number of steps of the initial batch size that this step is worth.
    """

    factor: float
    rate: float = 1.0
    gain: float = 1.0


Rule = Callable[[Situation], Adjustment]


def _require_warmup(name: str, epochs: float) -> None:
    if not (math.isfinite(epochs) and epochs >= 0):
        raise ValueError(f"{name}(warmup_epochs={epochs}): it must be a number of 0 or more")


def adascale_gain(scale: float, squared_norm: float, variance: float) -> float:
    """Return AdaScale's gain ratio ``(var + sqr) / (var / scale + sqr)``, from 1 to ``scale``.

    Args:
        scale: ratio of the global batch size to the initial one; below 1 the gain is below 1 too.
        squared_norm: ``|G|^2``; an estimate below 0 counts as 0.
        variance: ``tr(Sigma)`` of a mean gradient at the initial batch size; below 0 counts as 0.

    Returns:
        The gain ratio; 1 where both are 0.

    Source: Johnson et al., AdaScale SGD, ICML 2020, section 3.1.

    >>> adascale_gain(4.0, squared_norm=1.0, variance=3.0)
    2.2857142857142856
    """
    squared_norm, variance = max(squared_norm, 0.0), max(variance, 0.0)
    small, large = variance + squared_norm, variance / scale + squared_norm
    return small / large if large > 0 else 1.0


def adascale(now: Situation) -> Adjustment:
    """Multiply the learning rate by AdaScale's gain; a step counts for that many steps.

    Source: Johnson et al., AdaScale SGD, ICML 2020, algorithm 1.
    """
    gain = adascale_gain(now.scale, now.squared_norm, now.variance)
    return Adjustment(gain, gain=gain)


def linear(warmup_epochs: float = 5.0) -> Rule:
    """Return the linear scaling rule, with a gradual warm-up over the first epochs.

    Source: Goyal et al. 2017, sections 2.1 and 2.2.

    >>> linear(warmup_epochs=2)(Situation(scale=5.0, epochs=1.0)).factor
    3.0
    """
    _require_warmup("linear", warmup_epochs)

    def rule(now: Situation) -> Adjustment:
        reached = 1.0 if warmup_epochs == 0 else min(1.0, now.epochs / warmup_epochs)
        return Adjustment(1.0 + (now.scale - 1.0) * reached, gain=now.scale)

    return rule


def square_root(now: Situation) -> Adjustment:
    """Scale the learning rate with the square root of the batch size.

    Source: Krizhevsky 2014, section 5; Hoffer et al. 2017, section 7.
    """
    return Adjustment(math.sqrt(now.scale), gain=now.scale)


def adam_square_root(now: Situation) -> Adjustment:
    """Apply the square root scaling rule of Adam, which changes betas and epsilon too.

    Source: Malladi et al., On the SDEs and scaling rules for adaptive gradient algorithms,
    NeurIPS 2022, definition 5.2.

    >>> adam_square_root(Situation(scale=4.0))
    Adjustment(factor=2.0, rate=4.0, gain=4.0)
    """
    return Adjustment(math.sqrt(now.scale), rate=now.scale, gain=now.scale)


def scaled_betas(betas: tuple[float, float], rate: float) -> tuple[float, float]:
    """Return Adam's betas for a batch that is ``rate`` times as large; none falls below 0.

    >>> scaled_betas((0.9, 0.999), 4.0)
    (0.6, 0.996)
    """
    first, second = (round(max(0.0, 1 - rate * (1 - beta)), 15) for beta in betas)
    return first, second


def scaled_epsilon(epsilon: float, rate: float) -> float:
    """Return Adam's epsilon for a batch that is ``rate`` times as large.

    >>> scaled_epsilon(1e-8, 4.0)
    5e-09
    """
    return epsilon / math.sqrt(rate)


def legw(warmup_epochs: float) -> Rule:
    """Return LEGW: the square root rule, with a linear warm-up that grows with the batch size.

    Source: You et al., Large-batch training for LSTM and beyond, 2019, section 3 (LEGW).

    >>> legw(warmup_epochs=1)(Situation(scale=4.0, epochs=2.0)).factor
    1.0
    """
    _require_warmup("legw", warmup_epochs)

    def rule(now: Situation) -> Adjustment:
        warmup = warmup_epochs * now.scale
        reached = 1.0 if warmup == 0 else min(1.0, now.epochs / warmup)
        return Adjustment(math.sqrt(now.scale) * reached, gain=now.scale)

    return rule


def unchanged(now: Situation) -> Adjustment:
    """Leave the learning rate as the user's schedule has it."""
    return Adjustment(1.0, gain=now.scale)


RULES: dict[str, Rule] = {
    "adascale": adascale,
    "linear": linear(),
    "sqrt": square_root,
    "adam_sqrt": adam_square_root,
    "none": unchanged,
}
"""Rules that need no parameters, by name."""


def chosen_rule(rule: str | Rule | None, *, has_betas: bool = False) -> Rule:
    """Return the rule of ``DistributedOptimizer(lr_rule=...)``.

    Args:
        rule: what the script gave; None: the default for the optimizer.
        has_betas: whether the optimizer is Adam or a relative of it.

    Raises:
        ScriptError: the name is not known. The rule itself raises it for an invalid answer.
    """
    if rule is None:
        rule = "adam_sqrt" if has_betas else "adascale"
    if callable(rule):
        return _checked(rule)
    if rule not in RULES:
        raise ScriptError(
            f"DistributedOptimizer(lr_rule=...): learning rate rule {rule!r} is not known; there "
            f"are {', '.join(sorted(RULES))}, linear(warmup_epochs), legw(warmup_epochs), and "
            "functions of your own"
        )
    return RULES[rule]


def whole_steps(progress: float) -> int:
    """Return the whole steps of a schedule that progress has made.

    Rounding may leave a sum of fractions just below a whole number.

    >>> whole_steps(2.9999999), whole_steps(2.9)
    (3, 2)
    """
    return int(progress + 1e-6)


def _checked(rule: Rule) -> Rule:
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

"""Chooses the learning-rate rule that a script asks for, and checks what its own rule answers."""

from __future__ import annotations

import math

from hvd_elastic.errors import ScriptError
from hvd_elastic.model.lr_rules import Adjustment, Rule, Situation, rule_named


def chosen_rule(rule: str | Rule | None, *, has_betas: bool) -> Rule:
    """Return the rule of ``DistributedOptimizer(lr_rule=...)``.

    Args:
        rule: what the script gave; None: the default for the optimizer.
        has_betas: whether the optimizer is Adam or a relative of it.

    Raises:
        ScriptError: the name is not known. The rule itself raises it for an invalid answer.
    """
    if rule is None:
        rule = "adam_sqrt" if has_betas else "adascale"
    try:
        return _checked(rule_named(rule)) if callable(rule) else rule_named(rule)
    except ValueError as error:
        raise ScriptError(f"DistributedOptimizer(lr_rule=...): {error}") from None


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

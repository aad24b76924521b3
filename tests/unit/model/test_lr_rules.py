from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_elastic.errors import ScriptError
from hvd_elastic.model import lr_rules
from hvd_elastic.model.lr_rules import Situation, adascale_gain, chosen_rule

POSITIVE = st.floats(1e-6, 1e6)


@given(scale=st.floats(1, 1000), norm=POSITIVE, variance=st.floats(0, 1e6))
def test_the_gain_lies_between_one_and_the_scale(
    scale: float, norm: float, variance: float
) -> None:
    gain = adascale_gain(scale, norm, variance)
    assert 1 - 1e-9 <= gain <= scale * (1 + 1e-9)
    assert adascale_gain(2 * scale, norm, variance) >= gain * (1 - 1e-9)


def test_the_gain_at_its_ends() -> None:
    assert adascale_gain(8.0, squared_norm=1.0, variance=0.0) == 1.0
    assert adascale_gain(8.0, squared_norm=0.0, variance=1.0) == 8.0
    assert adascale_gain(8.0, squared_norm=-1.0, variance=1.0) == 8.0
    assert adascale_gain(8.0, squared_norm=0.0, variance=0.0) == 1.0
    assert adascale_gain(0.5, squared_norm=1.0, variance=1.0) == pytest.approx(2 / 3)


@pytest.mark.parametrize("name", sorted(lr_rules.RULES))
@given(norm=POSITIVE, variance=POSITIVE, epochs=st.floats(0, 1e3))
def test_nothing_changes_at_the_initial_batch_size(
    name: str, norm: float, variance: float, epochs: float
) -> None:
    found = chosen_rule(name)(Situation(1.0, norm, variance, epochs))
    assert found.factor == pytest.approx(1.0)
    assert found.rate == 1.0
    assert found.gain == pytest.approx(1.0)


@pytest.mark.parametrize(("epochs", "factor"), [(0.0, 1.0), (2.5, 4.5), (5.0, 8.0), (50.0, 8.0)])
def test_linear_scaling_warms_up(epochs: float, factor: float) -> None:
    assert chosen_rule("linear")(Situation(8.0, epochs=epochs)).factor == factor


def test_legw_warms_up_for_longer_at_larger_batches() -> None:
    rule = lr_rules.legw(2.0)
    assert [rule(Situation(16.0, epochs=e)).factor for e in (0, 16, 32, 64)] == [0, 2, 4, 4]
    assert rule(Situation(1.0, epochs=1.0)).factor == 0.5


def test_adams_form_rescales_betas_and_leaves_none_below_zero() -> None:
    found = chosen_rule("adam_sqrt")(Situation(16.0))
    assert (found.factor, found.rate) == (4.0, 16.0)
    assert lr_rules.scaled_betas((0.9, 0.999), 16.0) == (0.0, 0.984)
    assert lr_rules.scaled_betas((0.9, 0.999), 0.5) == (0.95, 0.9995)


def test_a_rule_of_ones_own() -> None:
    def half(now: Situation) -> lr_rules.Adjustment:
        return lr_rules.Adjustment(now.scale / 2)

    assert chosen_rule(half)(Situation(8.0)).factor == 4.0


def test_unknown_rules_and_impossible_warmups_are_refused() -> None:
    with pytest.raises(ScriptError, match=r"'cubic' is not known; there are adam_sqrt, adascale"):
        chosen_rule("cubic")
    for wrong in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="must be a number of 0 or more"):
            lr_rules.legw(wrong)

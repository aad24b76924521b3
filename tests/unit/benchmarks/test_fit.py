"""The model of a stall that grows with the number of ranks."""

from __future__ import annotations

import pytest

from benchmarks.elasticity.fit import fit_stall

SIZES = [2, 4, 8, 16]


@pytest.mark.parametrize(
    ("constant", "linear", "quadratic"),
    [(0.2, 0.0, 0.0), (0.1, 0.02, 0.0), (0.1, 0.0, 0.003), (0.1, 0.02, 0.003)],
)
def test_exact_growth_is_found_again(constant: float, linear: float, quadratic: float):
    model = fit_stall(SIZES, [constant + linear * n + quadratic * n**2 for n in SIZES])
    assert model is not None
    assert model.constant_s == pytest.approx(constant, abs=1e-6)
    assert model.linear_s == pytest.approx(linear, abs=1e-6)
    assert model.quadratic_s == pytest.approx(quadratic, abs=1e-6)
    assert model.predict(1024) == pytest.approx(
        constant + linear * 1024 + quadratic * 1024**2, rel=1e-3
    )


def test_a_term_must_earn_its_place():
    # No trend, only noise: a slope would be a little better and say nothing.
    model = fit_stall(SIZES * 2, [0.20, 0.21, 0.19, 0.20, 0.21, 0.20, 0.20, 0.21])
    assert model is not None
    assert (model.linear_s, model.quadratic_s) == (0.0, 0.0)
    assert model.constant_s == pytest.approx(0.2025)
    assert model.samples == 8


def test_a_falling_stall_is_not_foretold_to_become_negative():
    model = fit_stall(SIZES, [0.5, 0.4, 0.3, 0.1])
    assert model is not None
    assert min(model.constant_s, model.linear_s, model.quadratic_s) >= 0
    assert model.predict(1024) > 0


def test_noise_around_a_line_through_zero_is_a_line():
    model = fit_stall(SIZES, [0.018, 0.041, 0.079, 0.163])
    assert model is not None
    assert model.linear_s == pytest.approx(0.01, rel=0.1)


def test_the_dominant_term_changes_with_the_size():
    model = fit_stall(SIZES, [0.5 + 0.001 * n**2 for n in SIZES])
    assert model is not None
    assert model.dominant(8) == "constant"
    assert model.dominant(1024) == "quadratic"


def test_one_world_size_says_nothing_about_growth():
    assert fit_stall([4, 4], [0.1, 0.2]) is None
    assert fit_stall([], []) is None


def test_two_world_sizes_carry_no_quadratic_and_linear_term_at_once():
    model = fit_stall([2, 2, 4], [0.2, 0.2, 0.4])
    assert model is not None
    assert not (model.linear_s and model.quadratic_s)
    assert model.predict(4) == pytest.approx(0.4)


def test_as_many_stalls_as_sizes():
    with pytest.raises(ValueError, match="4 world sizes and 1 stalls"):
        fit_stall(SIZES, [0.1])

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_elastic.model.goodput import (
    BatchLimits,
    BatchPlan,
    best_batch_plan,
    goodput_curve,
    score_plan,
    statistical_efficiency,
)
from hvd_elastic.model.step_time import Observation, StepTimeModel, fit_step_time


def model_of(constant: float, each: float, sync: float = 0.0) -> StepTimeModel:
    """Fitted to exact times without overlap."""
    places = itertools.product((1, 2, 4), (8, 32, 128), (0, 1))
    return fit_step_time(
        [
            Observation(1, k, m, s, (s + 1) * (constant + each * m) + sync * (k > 1))
            for k, m, s in places
        ]
    )


def test_padding_of_ranks_beyond_the_largest_batch_is_no_work() -> None:
    model, limits = model_of(0.01, 0.0001), BatchLimits(64, 64, max_accumulation_steps=0)
    ranks = [32, 63, 64, 128, 256]
    found = goodput_curve(model, math.inf, limits, [1] * 5, ranks).goodput
    assert found[1] <= 64 / 0.0102 * 1.05
    assert found[2] == pytest.approx(max(found))
    assert found[4] <= found[2]


@given(noise=st.floats(0, 1e6), initial=st.integers(1, 500), more=st.lists(st.integers(0, 10**5)))
def test_efficiency_is_a_share_that_falls_with_the_batch(
    noise: float, initial: int, more: list[int]
) -> None:
    sizes = np.sort(np.array([initial, *(initial + m for m in more)]))
    found = statistical_efficiency(noise, initial, sizes)
    assert found[0] == 1.0
    assert ((found > 0) & (found <= 1)).all()
    assert (np.diff(found) <= 0).all()
    assert (np.diff(found * sizes) >= -1e-9).all(), "a step of more examples is worth no less"


def test_efficiency_refuses_what_it_is_not_defined_for() -> None:
    with pytest.raises(ValueError, match="global_batch_size 8 is below initial_batch_size 16"):
        statistical_efficiency(1.0, 16, [8, 32])
    with pytest.raises(ValueError, match="noise_scale is nan"):
        statistical_efficiency(math.nan, 16, 32)
    assert statistical_efficiency(math.inf, 16, 1600) == 1.0


def test_efficiency_at_several_noise_scales_at_once() -> None:
    noise = np.array([0.0, 16.0, math.inf])
    found = statistical_efficiency(noise[:, None], 16, [16, 48])
    assert found == pytest.approx(np.array([[1.0, 1 / 3], [1.0, 0.5], [1.0, 1.0]]))


def test_the_best_plan_is_that_of_a_search_through_all() -> None:
    model = model_of(0.01, 0.0001, 0.005)
    limits = BatchLimits(32, 1024, max_accumulation_steps=1)
    best = best_batch_plan(model, 500.0, limits, 1, 4)
    assert best is not None
    every = [
        score_plan(model, BatchPlan(size, extra), 500.0, 32, 1, 4).goodput
        for size in range(32, 1025, 4)
        for extra in (0, 1)
    ]
    assert best.goodput >= 0.995 * max(every)
    assert best.goodput == pytest.approx(best.throughput * best.efficiency)


@pytest.mark.parametrize(("little", "much"), [(10.0, 10000.0)])
def test_more_noise_gives_a_larger_batch(little: float, much: float) -> None:
    model, limits = model_of(0.01, 0.0001), BatchLimits(32, 4096)
    small = best_batch_plan(model, little, limits, 1, 1)
    large = best_batch_plan(model, much, limits, 1, 1)
    assert small is not None
    assert large is not None
    assert large.plan.global_batch_size > 4 * small.plan.global_batch_size


def test_memory_bound_and_slow_links_bring_accumulation() -> None:
    limits = BatchLimits(64, 4096, max_atomic_batch_size=16)
    slow_links = best_batch_plan(model_of(0.001, 0.001, sync=0.5), 1e6, limits, 1, 4)
    assert slow_links is not None
    assert slow_links.plan.accumulation_steps > 3
    alone = best_batch_plan(model_of(0.001, 0.001), 1e6, limits, 1, 1)
    assert alone is not None
    assert alone.plan.atomic_batch_size(1) <= 16


@given(
    initial=st.integers(1, 300),
    growth=st.integers(1, 40),
    low=st.integers(1, 40),
    span=st.integers(0, 100),
    ranks=st.integers(1, 16),
    noise=st.floats(0, 1e5),
)
def test_plans_keep_to_the_limits(
    initial: int, growth: int, low: int, span: int, ranks: int, noise: float
) -> None:
    limits = BatchLimits(initial, initial * growth, low, low + span)
    found = best_batch_plan(model_of(0.01, 0.001, 0.01), noise, limits, 1, ranks)
    if found is None:
        return
    size, atomic = found.plan.global_batch_size, found.plan.atomic_batch_size(ranks)
    assert initial <= size <= initial * growth
    assert atomic <= low + span
    assert size // ranks // (found.plan.accumulation_steps + 1) >= low or low == 1
    assert 0 < found.efficiency <= 1


def test_nothing_fits_where_the_limits_exclude_each_other() -> None:
    limits = BatchLimits(64, 64, min_atomic_batch_size=100)
    assert best_batch_plan(model_of(0.1, 0.1), 10.0, limits, 1, 1) is None


def test_what_is_unknown_is_tried_by_the_optimist() -> None:
    model = fit_step_time([Observation(1, 1, 32, 0, 0.1)] * 4)
    limits = BatchLimits(32, 256)
    plain = best_batch_plan(model, 60.0, limits, 1, 1)
    hoping = best_batch_plan(model, 60.0, limits, 1, 1, optimism=1.0)
    assert plain is not None
    assert hoping is not None
    assert hoping.plan.global_batch_size > plain.plan.global_batch_size

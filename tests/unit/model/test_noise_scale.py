"""Noise scales of made-up gradients whose mean and covariance are known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_elastic.model.noise_scale import (
    NoiseTracker,
    gradient_noise_scale,
    squared_norm_and_variance,
)


def norms(gradients: np.ndarray, sizes: list[int]) -> tuple[float, float]:
    """Local and total squared norms of a step whose passes have these sizes."""
    parts = np.split(gradients, np.cumsum(sizes)[:-1])
    local = sum(len(p) * float(np.sum(p.mean(0) ** 2)) for p in parts) / len(gradients)
    return local, float(np.sum(gradients.mean(0) ** 2))


@given(seed=st.integers(0, 50), sizes=st.lists(st.integers(1, 9), min_size=2, max_size=6))
def test_both_estimates_are_unbiased_for_passes_of_any_sizes(seed: int, sizes: list[int]) -> None:
    rng = np.random.default_rng(seed)
    mean = np.full(20, 0.5)
    found = [
        squared_norm_and_variance(*norms(mean + rng.normal(size=(sum(sizes), 20)), sizes),
                                  sum(sizes), len(sizes))
        for _ in range(600)
    ]  # fmt: skip
    squared_norm, variance = np.mean(found, axis=0)
    error = np.std(found, axis=0) / np.sqrt(600)
    assert abs(squared_norm - 5.0) < 5 * error[0]
    assert abs(variance - 20.0) < 5 * error[1]


def test_a_finite_data_set_without_replacement() -> None:
    rng = np.random.default_rng(0)
    data = 0.3 + rng.normal(size=(40, 10))
    exact = float(np.sum(data.mean(0) ** 2))
    found = [
        squared_norm_and_variance(
            *norms(data[rng.permutation(40)[:32]], [16, 16]), 32, 2, population=40
        )
        for _ in range(4000)
    ]
    squared_norm, variance = np.mean(found, axis=0)
    assert squared_norm == pytest.approx(exact, rel=0.05)
    assert variance == pytest.approx(float(data.var(0, ddof=1).sum()), rel=0.05)


def test_one_pass_says_nothing() -> None:
    with pytest.raises(ValueError, match="passes is 1"):
        squared_norm_and_variance(1.0, 1.0, 8, 1)


def feed(tracker: NoiseTracker, rng: np.random.Generator, steps: int, size: int, g: float) -> None:
    for _ in range(steps):
        gradients = g + rng.normal(size=(size, 100))
        local, total = norms(gradients, [size // 2, size // 2])
        tracker.add_norms([local], [total], size, 2)


def test_its_first_steps_count_by_their_batches() -> None:
    tracker = NoiseTracker(1, initial_batch_size=8, population=None)
    squared_norm = variance = np.zeros(())
    for size, total in ((8, 3.0), (64, 4.0)):
        tracker.add_norms([5.0], [total], size, 2)
        found = squared_norm_and_variance(5.0, total, size, 2)
        squared_norm, variance = squared_norm + size * found[0], variance + size * found[1]
    assert tracker.noise_scale() == pytest.approx(variance / squared_norm)


@pytest.mark.parametrize("size", [8, 64])
def test_the_tracker_finds_the_noise_scale_at_any_batch_size(size: int) -> None:
    tracker = NoiseTracker(1, initial_batch_size=size, population=None)
    feed(tracker, np.random.default_rng(3), 400, size, 0.2)
    assert tracker.noise_scale() == pytest.approx(100 / (100 * 0.04), rel=0.15)


def test_the_tracker_follows_a_gradient_that_shrinks() -> None:
    tracker = NoiseTracker(1, initial_batch_size=64, population=None)
    rng = np.random.default_rng(4)
    for step in range(600):
        feed(tracker, rng, 1, 64, 0.5 * 0.997**step)
    exact = 1 / (0.5 * 0.997**599) ** 2
    assert tracker.noise_scale() == pytest.approx(exact, rel=0.35)


def test_numbers_that_are_not_finite_are_skipped_and_counted() -> None:
    tracker = NoiseTracker(2, initial_batch_size=16, population=None)
    tracker.add_norms([5.0, 5.0], [3.0, 3.0], 8, 2)
    before = tracker.noise_scale()
    for bad in (np.nan, np.inf):
        tracker.add_norms([5.0, bad], [3.0, 3.0], 8, 2)
    assert (tracker.steps, tracker.skipped) == (1, 2)
    assert tracker.noise_scale() == before


def test_its_state_goes_on_elsewhere() -> None:
    one = NoiseTracker(1, initial_batch_size=16, population=50)
    feed(one, np.random.default_rng(5), 20, 16, 0.5)
    other = NoiseTracker(1, initial_batch_size=16, population=50)
    other.load_state_dict(one.state_dict())
    for tracker in (one, other):
        feed(tracker, np.random.default_rng(6), 5, 16, 0.5)
    assert one.noise_scale() == other.noise_scale()
    wider = NoiseTracker(2, initial_batch_size=16, population=50)
    wider.load_state_dict(one.state_dict())
    assert wider.steps == 0


def test_noise_scale_at_the_edges() -> None:
    found = gradient_noise_scale([1.0, 0.0, -1.0, 2.0], [4.0, 4.0, 4.0, -4.0])
    assert found.tolist() == [4.0, np.inf, np.inf, 0.0]
    assert np.isnan(NoiseTracker(1, 10, None).noise_scale())


@pytest.mark.parametrize(("first", "growth", "width"), [(390.0, 0.002, 900), (100.0, 0.004, 300)])
def test_noise_that_grows_is_not_told_late_where_all_steps_are_needed(
    first: float, growth: float, width: int
) -> None:
    # Softmax regression with Adam is like this: so noisy that no horizon is long enough.
    ratios, steps = [], 300
    exact = first * np.exp(growth * np.arange(steps))
    for seed in range(16):
        rng = np.random.default_rng(seed)
        tracker = NoiseTracker(1, initial_batch_size=32, population=None)
        passes = rng.normal(size=(steps, 2, width)) * np.sqrt(exact / width / 16)[:, None, None]
        passes[:, :, 0] += 1.0
        local = np.square(passes).sum(2).mean(1) / exact
        total = np.square(passes.mean(1)).sum(1) / exact
        for step in range(steps):
            tracker.add_norms([local[step]], [total[step]], 32, 2)
        ratios.append(tracker.noise_scale() / exact[-1])
    assert 0.8 < float(np.median(ratios)) < 1.25


def test_what_grows_by_a_constant_factor_is_told_as_of_now_whatever_the_history() -> None:
    tracker = NoiseTracker(1, initial_batch_size=32, population=None)
    noise = 50.0
    for _ in range(60):
        # No noise in the norms themselves, so that only the delay could be wrong.
        noise *= 1.003
        tracker.add_norms([1.0 + noise / 16], [1.0 + noise / 32], 32, 2)
    assert tracker.noise_scale() == pytest.approx(noise, rel=0.02)


def test_what_grows_is_told_as_of_now_where_fewer_steps_are_looked_at_in_the_end() -> None:
    ratios, exact = [], 100.0 * np.exp(0.01 * np.arange(200))
    for seed in range(6):
        rng = np.random.default_rng(seed)
        tracker = NoiseTracker(1, initial_batch_size=128, population=None)
        passes = rng.normal(size=(200, 8, 300)) * np.sqrt(exact / 300 / 16)[:, None, None]
        passes[:, :, 0] += 1.0
        local = np.square(passes).sum(2).mean(1) / exact
        total = np.square(passes.mean(1)).sum(1) / exact
        for step in range(200):
            if step < 100 or step % 4 == 3:
                tracker.add_norms([local[step]], [total[step]], 128, 8, step)
        ratios.append(tracker.noise_scale() / exact[-1])
    assert 0.85 < float(np.median(ratios)) < 1.15


def test_its_uncertainty_is_that_of_the_squared_norm_and_falls_with_the_steps() -> None:
    tracker = NoiseTracker(1, initial_batch_size=32, population=None)
    rng = np.random.default_rng(2)
    feed(tracker, rng, 5, 32, 0.2)
    assert tracker.uncertainty() == np.inf, "five steps that happen to agree prove nothing"
    feed(tracker, rng, 95, 32, 0.2)
    # Of products of the means of 16 examples: noise scale over 16 and the root of 100 elements.
    once = 25 / 16 / 10 * np.sqrt(1 + 2 * 32 / 25 + (32 / 25) ** 2 / 100)
    assert 0.3 * once / 10 < tracker.uncertainty() < 3 * once / 10


def test_what_makes_gradient_and_noise_longer_alike_is_no_trend() -> None:
    tracker, rng = NoiseTracker(1, initial_batch_size=32, population=None), np.random.default_rng(1)
    for step in range(150):
        # Adam's second moment rests on few gradients at first, and what is divided by it is long.
        longer = 1 + 50 / (1 + step) ** 2
        local, total = norms(rng.normal(0.2, 1.0, size=(32, 300)), [16, 16])
        tracker.add_norms([longer * local], [longer * total], 32, 2)
    assert tracker.noise_scale() == pytest.approx(1 / 0.04, rel=0.1)


@pytest.mark.parametrize(("before", "after"), [(0.1, 0.2), (0.2, 0.1)])
def test_a_noise_scale_that_jumps_is_followed(before: float, after: float) -> None:
    # The noise scale is 100 before or after, and 25 at the other time, with a batch of 32.
    ratios = []
    for seed in range(8):
        rng = np.random.default_rng(seed)
        tracker = NoiseTracker(1, initial_batch_size=32, population=None)
        feed(tracker, rng, 300, 32, before)
        feed(tracker, rng, 150, 32, after)
        ratios.append(tracker.noise_scale() * after**2)
    assert 0.75 < float(np.median(ratios)) < 1.33


def test_its_uncertainty_is_about_how_far_off_it_is() -> None:
    off = []
    for seed in range(40):
        tracker = NoiseTracker(1, initial_batch_size=32, population=None)
        feed(tracker, np.random.default_rng(seed), 120, 32, 0.2)
        off.append((25.0 / tracker.noise_scale() - 1) / tracker.uncertainty())
    assert 0.4 < float(np.std(off)) < 1.3
    assert abs(float(np.mean(off))) < 0.5


def test_gradients_of_zero_and_of_any_size_are_no_end() -> None:
    tracker, rng = NoiseTracker(1, initial_batch_size=32, population=None), np.random.default_rng(0)
    for size in (0.0, 1.0, 1e30, 1e-30, 0.0, 1.0):
        for _ in range(60):
            local, total = norms(rng.normal(0.2, 1.0, size=(32, 100)), [16, 16])
            tracker.add_norms([size * local], [size * total], 32, 2)
    assert tracker.noise_scale() == pytest.approx(25, rel=0.5)
    assert np.isfinite(tracker.uncertainty())


def test_first_steps_that_happen_to_agree_are_not_believed_for_long() -> None:
    # With this seed they do, and say three times the noise scale.
    rng = np.random.default_rng(3)
    data = np.exp(0.3 * rng.normal(size=1438))[:, None] * rng.normal(size=(1438, 80))
    data *= np.exp(-np.arange(80) / 15)
    data -= data.mean(0)
    data[:, 3] += (data.var(0, ddof=1).sum() / 120) ** 0.5
    tracker = NoiseTracker(1, initial_batch_size=32, population=1438)
    order, at = rng.permutation(1438), 0
    for _ in range(200):
        if at + 32 > 1438:
            order, at = rng.permutation(1438), 0
        local, total = norms(data[order[at : at + 32]], [16, 16])
        tracker.add_norms([local], [total], 32, 2)
        at += 32
    assert tracker.noise_scale() == pytest.approx(120, rel=0.3)

"""How often gradient statistics are sampled."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from hvd_elastic.model.noise_scale import NoiseTracker
from hvd_elastic.policy.sampling import GradientNoise, GradientSampling


def schedule(
    sampling: GradientSampling, tracker: NoiseTracker, cost_s: float, bad_steps: bool = False
) -> int:
    sampling.schedule(tracker, [0.1], cost_s, bad_steps=bad_steps, model=None, batch=32)
    return sampling.every


def add(tracker: NoiseTracker, gradients: np.ndarray) -> None:
    for passes in gradients:
        local, total = np.square(passes).sum(1).mean(), np.square(passes.mean(0)).sum()
        tracker.add_norms([local], [total], 32, 2)


@pytest.mark.parametrize(("noise_scale", "every"), [(600.0, 1), (1.0, 4)])
def test_every_step_is_sampled_for_longer_where_the_noise_is_uncertain(
    noise_scale: float, every: int
) -> None:
    sampling, tracker = GradientSampling(), NoiseTracker(1, 32, 6400)
    noise = np.random.default_rng(0).normal(size=(250, 2, 100))
    add(tracker, noise * noise_scale**0.5 / 4 + 1.0)
    assert schedule(sampling, tracker, math.nan) == every
    sampled = [sampling.sampled(step, probing=False) for step in range(252, 256)]
    assert sampled == ([True] * 4 if every == 1 else [True, False, False, False])


def test_sampling_costs_little_of_the_time_unless_something_changes() -> None:
    sampling, tracker = GradientSampling(), NoiseTracker(1, 32, 6400)
    random = np.random.default_rng(0)

    def interval(steps: int, mean: float, cost_s: float) -> int:
        """After so many samples more, with a noise scale of ``mean ** -2``."""
        add(tracker, random.normal(size=(steps, 2, 100)) / 4 + mean)
        return schedule(sampling, tracker, cost_s)

    assert interval(40, 1.0, cost_s=0.01) == 1, "the batch grows by the first samples"
    found = [interval(10, 1.0, cost_s) for cost_s in (math.nan, 0.0, 0.0005, 0.0015, 0.01)]
    assert found == [1, 1, 1, 2, 4], "1 % of the time until the noise is known"
    assert sampling.probe_every == 1
    assert interval(160, 1.0, cost_s=math.nan) == 4, "no sample was timed in this process"
    found = [interval(1, 1.0, cost_s) for cost_s in (0.0, 0.001, 0.005, 0.01, 0.05)]
    assert found == [4, 4, 17, 34, 64], "0.3 % of the time, within bounds"
    assert interval(1, 1.0, cost_s=math.nan) == 64, "as before where nothing was timed"
    other = GradientSampling()
    other.load_state_dict(json.loads(json.dumps(sampling.state_dict())))
    assert other.state_dict() == {**sampling.state_dict(), "certain_at": tracker.steps}
    assert interval(200, 1.0, cost_s=0.01) == 34
    changed = [interval(10, 0.02, cost_s=0.01) for _ in range(15)]
    assert changed[5] == 4, "as often as possible where the gradient is short all of a sudden"
    assert changed[-1] == 34, "but not for ever, where nothing more is to be seen"
    assert schedule(sampling, tracker, 0.01, bad_steps=True) == 4


def test_samples_that_not_all_ranks_have_are_left_out() -> None:
    noise = GradientNoise(1, 8, 100)
    whole, bad, lost = [3.0, 8, 1, 2.0, 1.0], [5.0, 8, 1, math.nan, 1.0], [4.0, 8, 1, 2.0, 1.0]
    other = np.array([whole, bad])
    assert noise.add_samples([np.array([whole, lost, bad]), other]) == [True, False]
    assert noise.tracker.steps == 1
    assert math.isfinite(noise.scale)
    assert math.isnan(noise.cautious_scale), "one sample is too few to choose a batch by"

"""The step time model finds back what made the data, and knows what it does not know."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_elastic.model.step_time import Observation, _Configurations, _means, _times, fit_step_time


def true_time(
    hosts: int, ranks: int, atomic: float, accumulation: int, *, slowness: float = 1.0
) -> float:
    """Pollux's form written out once more, with gamma 2."""
    grad = slowness * (0.02 + 0.001 * atomic)
    sync = 0.0
    if ranks > 1:
        sync = 0.05 + 0.004 * (ranks - 2) if hosts > 1 else 0.01 + 0.001 * (ranks - 2)
    return accumulation * grad + math.sqrt(grad**2 + sync**2)


SEEN = [
    (1, 1, 16, 0), (1, 1, 64, 0), (1, 1, 32, 2), (1, 2, 16, 0), (1, 2, 64, 1), (1, 4, 32, 0),
    (1, 4, 128, 0), (2, 2, 16, 0), (2, 4, 64, 0), (2, 8, 16, 1), (4, 8, 32, 0), (4, 16, 128, 0),
]  # fmt: skip
NEW = [(1, 1, 128, 1), (1, 3, 48, 0), (2, 6, 32, 2), (4, 12, 64, 0), (4, 16, 16, 0)]


def observed(seed: int, noise: float, repeats: int = 3) -> list[Observation]:
    rng = np.random.default_rng(seed)
    return [
        Observation(*where, step_s=true_time(*where) * float(np.exp(noise * rng.normal())))
        for where in SEEN
        for _ in range(repeats)
    ]


@given(seed=st.integers(0, 1000))
def test_unseen_configurations_are_predicted_through_the_noise(seed: int) -> None:
    model = fit_step_time(observed(seed, noise=0.03))
    errors = [abs(float(model.predict(*where).step_s) / true_time(*where) - 1) for where in NEW]
    assert np.median(errors) < 0.06
    assert max(errors) < 0.2


def test_parameters_are_recovered() -> None:
    model = fit_step_time(observed(0, noise=0.0))
    assert model.alpha_c == pytest.approx(0.02, rel=0.1)
    assert model.beta_c == pytest.approx(0.001, rel=0.05)
    assert model.alpha_n == pytest.approx(0.05, rel=0.1)
    assert model.gamma == pytest.approx(2.0, rel=0.2)


@given(logs=st.lists(st.floats(-4, 4), min_size=7, max_size=7).map(np.array))
def test_the_fit_knows_the_slopes_of_its_times(logs: np.ndarray) -> None:
    at = _Configurations.of(*np.transpose(SEEN + NEW), 1.3)
    times, slopes = _times(logs, at)
    assert times == pytest.approx(_means(logs, at))
    for off, slope in zip(1e-5 * np.eye(7), slopes.T, strict=True):
        further, nearer = _means(logs + off, at), _means(logs - off, at)
        assert slope == pytest.approx(np.log(further / nearer) / 2e-5, abs=1e-6)


def test_small_errors_of_the_parameters_are_those_of_the_times() -> None:
    model = replace(fit_step_time(observed(0, 0.01)), covariance=1e-6 * np.eye(7))
    where = np.transpose(NEW)
    _, slopes = _times(model._logs(), _Configurations.of(*where, 1.0))
    off = 1e-3 * np.linalg.norm(slopes, axis=1)
    assert model.predict(*where).uncertainty == pytest.approx(off, rel=0.01)


def test_one_batch_size_is_split_equally_and_its_uncertainty_said() -> None:
    model = fit_step_time([Observation(1, 1, 32, 0, 0.1)] * 5)
    assert model.alpha_c == pytest.approx(0.05, rel=0.1)
    assert 32 * model.beta_c == pytest.approx(0.05, rel=0.1)
    near, far, ranks = (
        float(model.predict(*where).uncertainty)
        for where in ((1, 1, 32, 0), (1, 1, 512, 0), (1, 2, 32, 0))
    )
    assert near < 0.15
    assert far > 3 * near
    assert ranks > near


def test_hosts_apart_are_thought_slower_than_one_host_until_they_are_seen() -> None:
    model = fit_step_time([o for o in observed(1, 0.01) if o.hosts == 1])
    assert model.alpha_n == pytest.approx(1.1 * model.alpha_r, rel=0.01)
    seen = fit_step_time(observed(1, 0.01))
    where = (2, 4, 64, 0)
    assert seen.predict(*where).uncertainty < model.predict(*where).uncertainty / 3


def test_the_step_waits_for_the_slowest_host() -> None:
    rng = np.random.default_rng(2)
    data = [
        Observation(
            *where,
            step_s=true_time(*where, slowness=slow) * float(np.exp(0.01 * rng.normal())),
            slowness=slow,
        )
        for where, slow in itertools.product(SEEN, (1.0, 3.0))
    ]
    model = fit_step_time(data)
    for slow in (1.0, 2.0, 3.0):
        expected = true_time(2, 4, 64, 0, slowness=slow)
        found = float(model.predict(2, 4, 64, 0, slowness=slow).step_s)
        assert found == pytest.approx(expected, rel=0.08)


@given(
    seed=st.integers(0, 100),
    atomic=st.integers(1, 256),
    hosts=st.integers(1, 4),
    ranks=st.integers(1, 15),
)
def test_throughput_is_sublinear_in_ranks_and_time_grows_with_the_batch(
    seed: int, atomic: int, hosts: int, ranks: int
) -> None:
    model = fit_step_time(observed(seed, noise=0.1, repeats=1))
    few = model.predict(hosts, ranks, atomic, 0).step_s
    more = model.predict(hosts, ranks + 1, atomic, 0).step_s
    assert more >= few * (1 - 1e-9), "each rank has as much to do, and one more takes part"
    assert model.predict(hosts, ranks, atomic + 1, 0).step_s > few
    assert model.predict(hosts, ranks, atomic, 1).step_s > few


def test_predictions_broadcast() -> None:
    model = fit_step_time(observed(0, 0.01))
    many = model.predict(2, [[2], [4]], [8, 16, 32], 0)
    assert many.step_s.shape == many.uncertainty.shape == (2, 3)
    assert many.step_s[1, 2] == pytest.approx(float(model.predict(2, 4, 32, 0).step_s))


@given(st.lists(st.floats(1e-5, 1e3), min_size=1, max_size=8))
def test_any_times_give_a_usable_model(times: list[float]) -> None:
    data = [Observation(1 + i % 2, 2 + i, 2**i, i % 3, t) for i, t in enumerate(times)]
    found = fit_step_time(data).predict([1, 2], [1, 8], [1, 4096], [0, 3])
    assert np.isfinite(found.step_s).all()
    assert (found.step_s > 0).all()
    assert np.isfinite(found.uncertainty).all()


@pytest.mark.parametrize(
    "wrong",
    [{"hosts": 0}, {"ranks": 0}, {"step_s": 0.0}, {"accumulation_steps": -1}, {"slowness": 0.0}],
)
def test_impossible_observations_are_refused(wrong: dict[str, float]) -> None:
    values = {
        "hosts": 1, "ranks": 1, "atomic_batch_size": 8, "accumulation_steps": 0, "step_s": 0.1
    }  # fmt: skip
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Observation(**{**values, **wrong})  # type: ignore[arg-type]


def test_nothing_cannot_be_fitted() -> None:
    with pytest.raises(ValueError, match="no observation"):
        fit_step_time([])


def test_what_ranks_wait_for_is_not_expected_to_grow_with_the_batch() -> None:
    """One size alone was seen: half of a step is a reduction, and shows as waiting."""
    true = {32: 8.6e-3, 64: 10.1e-3, 128: 15.0e-3, 256: 23.4e-3}  # digits on two ranks
    seen = Observation(1, 2, 16, 0, true[32], own_s=4.9e-3)
    told, untold = fit_step_time([seen] * 3), fit_step_time([replace(seen, own_s=None)] * 3)
    for batch, step_s in true.items():
        assert told.predict(1, 2, batch / 2, 0).step_s == pytest.approx(step_s, rel=0.12)
    assert untold.predict(1, 2, 128, 0).step_s > 1.5 * true[256]
    # With another size seen both know better.
    more = Observation(1, 2, 128, 0, true[256], own_s=21e-3)
    for model in (fit_step_time([seen] * 3 + [more] * 3), fit_step_time([seen, more])):
        assert model.predict(1, 2, 128, 0).step_s == pytest.approx(true[256], rel=0.1)
        assert model.predict(1, 2, 16, 0).step_s == pytest.approx(true[32], rel=0.1)
    # A rank alone waits for nobody, and what seems so is chance.
    alone = [Observation(1, 1, 16, 0, 1e-2, own_s=0.9e-2)]
    plain = [Observation(1, 1, 16, 0, 1e-2)]
    assert fit_step_time(alone).alpha_r == fit_step_time(plain).alpha_r


def test_ranks_that_wait_between_hosts_say_what_that_costs() -> None:
    seen = Observation(2, 2, 16, 1, 0.05, own_s=0.02)
    model = fit_step_time([seen] * 3)
    assert model.predict(2, 2, 16, 1).step_s == pytest.approx(0.05, rel=0.05)
    assert model.predict(2, 2, 32, 1).step_s < 0.065
    with pytest.raises(ValueError, match="own_s must be above 0"):
        replace(seen, own_s=0.0)


def test_a_first_guess_does_not_depend_on_the_order_of_what_was_seen() -> None:
    alone, slow = Observation(1, 1, 32, 0, 0.1), Observation(1, 2, 32, 0, 0.45, 4.0, own_s=0.4)
    times = [
        fit_step_time(seen).predict(1, 4, 64, 0).step_s for seen in ([alone, slow], [slow, alone])
    ]
    assert times[0] == pytest.approx(times[1], rel=1e-6)

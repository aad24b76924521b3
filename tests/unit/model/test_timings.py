"""Measured step times: what is kept, what is dropped, and when a model is fitted anew."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from hvd_elastic.model.timings import LEADER_RULES, RANK_RULES, Configuration, StepTimings

ONE, TWO, OTHER = (
    Configuration(1, 2, 15.0, 0),
    Configuration(2, 4, 15.0, 0),
    Configuration(2, 4, 30.0, 0),
)


def test_a_model_is_fitted_anew_where_the_times_say_something_new() -> None:
    timings = StepTimings(RANK_RULES)
    assert timings.model() is None
    models = []
    for seconds in [0.1] * 8 + [0.101] * 8 + [0.12] * 8:
        timings.add_window(ONE, seconds)
        models.append(timings.model())
    # The first four times, and when most of those remembered are 20 % longer.
    fits = [number for number in range(1, 24) if models[number] is not models[number - 1]]
    assert fits == [1, 2, 3, 19, 20]
    timings.add_window(Configuration(1, 2, 30.0, 0), 0.2, compute_s=0.15)
    assert timings.model() is not models[-1]


@pytest.mark.parametrize("rules", [LEADER_RULES, RANK_RULES])
def test_a_shift_drops_what_was_timed_before(rules) -> None:
    for where in (ONE, TWO):
        kept = {ONE, TWO, OTHER} if where == ONE else {ONE, TWO}
        kept = kept if rules.keep_others else {where}
        timings = StepTimings(rules)
        for each in (ONE, TWO, OTHER):
            for _ in range(rules.shift_windows):
                assert not timings.add_window(each, 0.1)
        shifted = []
        for _ in range(rules.shift_windows):
            shifted.append(timings.add_window(where, 0.1 * 1.1 * rules.shift))
            if not shifted[-1]:
                assert timings.may_have_shifted(where)
        assert shifted == [False] * (rules.shift_windows - 1) + [True]
        assert not timings.may_have_shifted(where)
        left = {Configuration(*each): len(times) for each, times in timings.state_dict()}
        assert left == dict.fromkeys(kept, rules.shift_windows)


def test_other_work_on_the_machine_does_not_make_more_ranks_faster() -> None:
    """Two ranks are as fast as one; the machine is busier when one rank is timed again."""
    timings = StepTimings(LEADER_RULES)
    alone, both = Configuration(1, 1, 30.0, 0), Configuration(1, 2, 15.0, 0)
    for where, step_s in ((alone, 0.1), (both, 0.1), (alone, 0.14)):
        for _ in range(8):
            timings.add_window(where, step_s)
    model = timings.model()
    assert model is not None
    assert float(model.step_s(*alone[:4]) / model.step_s(*both[:4])) < 1.2
    assert step_s_of(timings, both) == pytest.approx(0.14)


def test_a_shift_changes_no_times_that_may_be_newer_than_it() -> None:
    timings = StepTimings(LEADER_RULES)
    now = 0.0
    for where, step_s in ((ONE, 0.1), (TWO, 0.1), (TWO, 0.14), (ONE, 0.14)):
        for _ in range(8):
            timings.add_window(where, step_s, now=(now := now + 1.0))
    assert step_s_of(timings, TWO) == pytest.approx(0.14)


def step_s_of(timings: StepTimings, where: Configuration) -> float:
    observed = timings.observation(where)
    assert observed is not None
    return observed.step_s


def test_a_single_long_step_drops_nothing() -> None:
    timings = StepTimings(RANK_RULES)
    for step_s in (0.1, 0.1, 0.1, 0.9, 0.1, 0.9, 0.1):
        assert not timings.add_window(ONE, step_s)
    observed = timings.observation(ONE)
    assert observed is not None
    assert (observed.step_s, observed.steps) == (0.1, 7)


def test_the_configuration_that_was_timed_least_recently_goes_first() -> None:
    timings = StepTimings(dataclasses.replace(RANK_RULES, configurations=2))
    for where in (ONE, TWO, ONE, OTHER):
        timings.add_window(where, 0.1)
    assert [Configuration(*where) for where, _ in timings.state_dict()] == [ONE, OTHER]


def test_state_is_loaded() -> None:
    timings = StepTimings(RANK_RULES)
    for step_s in (0.1, 0.2, 0.3):
        timings.add_window(ONE, step_s)
    timings.add_window(TWO, 0.2, compute_s=0.15)
    other = StepTimings(RANK_RULES)
    other.load_state_dict(json.loads(json.dumps(timings.state_dict())))
    assert json.dumps(other.state_dict()) == json.dumps(timings.state_dict())
    assert timings.model() is not None


def test_compute_times_of_one_rank_tell_what_the_reduction_costs() -> None:
    timings = StepTimings(LEADER_RULES)
    for _ in range(4):
        timings.add_window(TWO, 0.3)
        timings.add_alone(Configuration(1, 1, 15.0, 0), 0.1)
    model = timings.model()
    assert model is not None
    assert float(model.step_s(1, 1, 15, 0)) == pytest.approx(0.1, rel=0.1)
    assert float(model.step_s(2, 4, 15, 0)) == pytest.approx(0.3, rel=0.1)
    assert timings.worlds == {(2, 4)}, "compute times are of no world"
    timings.forget_world(2, 4)
    assert timings.model() is None
    assert timings.observation(TWO) is None
    assert not math.isnan(model.noise)

"""The choice of a batch plan and of shares."""

from __future__ import annotations

import json

import pytest

from hvd_elastic.model.goodput import BatchLimits, BatchPlan
from hvd_elastic.policy.batch import BatchChoice, steps_to_review
from tests.unit.policy.known_runs import true_model

COSTLY_PASS = true_model(0.1, 1e-4, 1e-4, 1e-5, 1e-3, 1e-4)
COSTLY_EXAMPLE = true_model(1e-3, 0.1, 1e-4, 1e-5, 1e-3, 1e-4)


def test_the_batch_grows_by_a_factor_at_once_and_says_why() -> None:
    choice = BatchChoice(BatchLimits(32, 1024))
    sizes = []
    while reason := choice.follow_goodput(COSTLY_PASS, 1e5, hosts=1, ranks=2):
        assert reason.startswith("at a noise scale of 100000 examples, ")
        sizes.append(choice.plan.global_batch_size)
    assert sizes == [64, 128, 256, 512, 1024]


def test_where_examples_are_what_costs_the_batch_stays() -> None:
    choice = BatchChoice(BatchLimits(32, 1024))
    assert not choice.follow_goodput(COSTLY_EXAMPLE, 100.0, hosts=1, ranks=2)
    assert choice.plan == BatchPlan(32)


def test_a_small_gain_has_to_be_found_repeatedly() -> None:
    choice = BatchChoice(BatchLimits(32, 1024))
    allowed = [choice._worth_changing(hoped, 1.03) for hoped in (1.06, 1.04, 1.04, 1.04)]
    assert allowed == [True, False, False, True]
    allowed = [choice._worth_changing(1.04, expected) for expected in (1.03, 1.03, 1.0, 1.03)]
    assert allowed == [False] * 4


def test_a_plan_that_is_possible_is_kept_with_its_passes() -> None:
    choice = BatchChoice(BatchLimits(32, 1024))
    choice.plan = BatchPlan(64, accumulation_steps=3)
    assert not choice.keep_to_limits(ranks=4)
    assert choice.plan == BatchPlan(64, 3)


@pytest.mark.parametrize(
    ("memory_bound", "reason"),
    [
        (None, "passes of 64 examples on each of 1 ranks are not possible"),
        (20, "a pass of 64 examples did not fit into the memory of a rank"),
    ],
)
def test_a_plan_that_is_not_possible_gives_way(memory_bound: int | None, reason: str) -> None:
    choice = BatchChoice(BatchLimits(64, 1024, max_atomic_batch_size=32))
    choice.memory_bound = memory_bound
    assert choice.keep_to_limits(ranks=1) == reason
    assert choice.plan.global_batch_size == 64
    assert choice.plan.atomic_batch_size(1) <= (memory_bound or 32)


def test_a_last_step_of_an_epoch_without_memory_bounds_the_passes_of_all() -> None:
    """It is larger than others, so a bound by its size would change nothing."""
    for passes_more, bound in ((0, 63), (1, 90)):
        limits = BatchLimits(64, 1024, max_atomic_batch_size=64, max_accumulation_steps=passes_more)
        assert BatchChoice(limits).bound_after_failure(100) == bound


def test_the_batch_grows_from_what_many_ranks_make_it() -> None:
    """16 ranks of at least 16 examples each: more than twice the initial batch is in use."""
    choice = BatchChoice(BatchLimits(32, 4096, min_atomic_batch_size=16))
    assert choice.keep_to_limits(ranks=16)
    assert choice.plan == BatchPlan(256)
    assert choice.follow_goodput(COSTLY_PASS, 1e5, hosts=1, ranks=16)
    assert choice.plan.global_batch_size == 512


def test_what_lasts_is_loaded() -> None:
    choice, other = (BatchChoice(BatchLimits(32, 1024)) for _ in range(2))
    choice.follow_goodput(COSTLY_PASS, 1e5, hosts=1, ranks=2)
    choice.memory_bound = 100
    state = json.loads(json.dumps(choice.state_dict()))
    other.load_state_dict(state)
    assert json.dumps(other.state_dict()) == json.dumps(choice.state_dict())


def test_reviews_come_about_once_a_second_and_less_often_if_they_cost_much() -> None:
    waits = [steps_to_review(times) for times in ([], [0.001], [0.04, 0.04, 9.0], [2.0])]
    assert waits == [10, 50, 25, 10]
    waits = [steps_to_review([0.01], cost_s) for cost_s in (0.0, 0.001, 0.003, 0.1)]
    assert waits == [50, 50, 100, 200]

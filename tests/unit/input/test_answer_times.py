"""Late answers, and ranks that are faster alone."""

from __future__ import annotations

import math

import pytest

from hvd_elastic.input.answer_times import AnswerTimes


def after(*, body: float, cpu: float, answers: int = 100) -> AnswerTimes:
    """The times after some answers of a host, in steps of this time [s]."""
    times = AnswerTimes()
    for number in range(answers):
        times.rank_asks(10.0 * number + body)
        times.answered("cpu1", 0.1, cpu)
        times.rank_goes_on(10.0 * (number + 1))
    return times


def test_a_host_that_is_late_more_often_than_not_is_told() -> None:
    times = AnswerTimes()
    for _ in range(20):
        times.answered("", 0.1, 0.1)
    for _ in range(5):
        times.answered("cpu1", 0.1, 0.1)
    told = [times.is_too_late("cpu1") for _ in range(8)]
    assert told == [False] * 7 + [True]
    for _ in range(20):
        times.answered("cpu1", 0.1, 0.1)
    assert not times.is_too_late("cpu1")


def test_answers_that_come_late_do_not_count_as_in_time() -> None:
    times = AnswerTimes()
    for _ in range(60):
        times.answered("", 0.1, 0.1)
    for _ in range(20):
        times.answered("cpu1", 2.0, 0.1)
    assert [times.is_too_late("cpu1") for _ in range(8)][-1]


def test_a_rank_tries_to_read_alone_where_batches_come_slower_than_it_would() -> None:
    times = after(body=0.02, cpu=0.01)
    assert not times.calls_for_trial(0.03)
    assert times.calls_for_trial(0.05)
    assert not times.calls_for_trial(0.05)  # not again at once
    assert times.is_slower(0.05, 0.01)
    assert not times.is_slower(0.05, 0.04)  # this host reads slower than the processor time there


@pytest.mark.parametrize("late", range(3))
def test_a_pause_during_a_trial_decides_nothing(late: int) -> None:
    """Of a host or its link, which then seem slow, or of the rank, which then seems slow alone."""
    equal, slow = after(body=0.02, cpu=0.01), after(body=0.02, cpu=0.01)
    said = [equal.compare(1.0 if number == late else 0.03, 0.02) for number in range(3)]
    assert said == [""] * 3
    said = [slow.compare(0.05, 1.0 if number == late else 0.01) for number in range(3)]
    assert said[:2] == [""] * 2
    assert said[2].startswith("batches come every 50 ms over its link")
    assert said[2].endswith("a step of a training process that reads itself takes 30 ms")


def test_trials_are_apart_and_all_are_made_once_begun() -> None:
    times = after(body=0.02, cpu=0.01)
    assert times.calls_for_trial(0.05)
    times.compare(0.05, 0.04)

    def answers_until_trial(hosts_s: float) -> int:
        for number in range(1000):
            if times.calls_for_trial(hosts_s):
                return number
            times.answered("cpu1", 0.1, 0.01)
        return 0

    assert answers_until_trial(0.01) == 48
    times.compare(0.01, 0.04)
    assert answers_until_trial(0.01) == 48
    assert times.compare(0.01, 0.04) == ""
    assert answers_until_trial(0.05) == 256


def test_nothing_is_tried_before_enough_is_known() -> None:
    assert not after(body=0.02, cpu=0.01, answers=10).calls_for_trial(1.0)
    assert not after(body=0.02, cpu=0.01).calls_for_trial(math.inf)
    assert not AnswerTimes().is_slower(1.0, 0.1)

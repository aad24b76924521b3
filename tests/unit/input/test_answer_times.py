"""Late answers, and ranks that are faster alone."""

from __future__ import annotations

import math

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
    why = times.why_slower(0.05, 0.01)
    assert why.startswith("batches come every 50 ms over its link")
    assert why.endswith("a step of a training process that reads itself takes 30 ms")


def test_nothing_is_tried_before_enough_is_known() -> None:
    assert not after(body=0.02, cpu=0.01, answers=10).calls_for_trial(1.0)
    assert not after(body=0.02, cpu=0.01).calls_for_trial(math.inf)
    assert not AnswerTimes().is_slower(1.0, 0.1)

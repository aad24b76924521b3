"""Which trials of a study train, are held and are added."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_elastic.search.rungs import decide, rank_trials, rungs_reached, value_at
from hvd_elastic.search.trials import Decision, Point, Rules, Trial, TrialStatus

NO_NUMBERS = (math.nan, math.inf, -math.inf)
RULES = Rules("max", 9, rungs=3, reduction=3, max_examples=900)
FULL = dataclasses.replace(RULES, trials=0)
"""Of a study to which no trial can be added."""


def trial(number: int, *values: float, status: TrialStatus = TrialStatus.RUNNING, **more) -> Trial:
    """Return a trial with reports at 100, 300 and 900 useful examples."""
    reports = zip((100.0, 300.0, 900.0), values, strict=False)
    points = tuple(Point(examples, value) for examples, value in reports)
    return Trial(number, {}, status, points, points[-1].examples if points else 0.0, **more)


def round_down_half(number: int, divisor: int) -> int:
    return math.ceil(number / divisor - 0.5)


class Study:
    """A study in which trials report in a random order, and every decision is carried out.

    Args:
        value: the metric of a trial at a rung, by numbers of trial and rung.
    """

    def __init__(self, rules: Rules, room: int, value, seed: int) -> None:
        self.rules, self.room, self.value = rules, room, value
        self.trials: dict[int, Trial] = {}
        self.priorities: dict[int, float] = {}
        self._random = random.Random(seed)

    def decide(self, now: float = 0.0) -> Decision:
        return decide(list(self.trials.values()), self.rules, self.room, now)

    def run(self) -> Decision:
        """Run the study to its end; return the last decision."""
        for _ in range(100 * self.rules.trials):
            decision = self.decide()
            self.carry_out(decision)
            if decision.finished:
                return decision
            again = self.decide()
            assert (again.hold, again.release, again.end) == ((), (), ()), "another answer"
            self.check(decision)
            self.report()
        raise AssertionError("the study does not end")

    def carry_out(self, decision: Decision) -> None:
        for number in decision.hold:
            self.change(number, status=TrialStatus.HELD)
        for number in decision.release:
            self.change(number, status=TrialStatus.RUNNING)
        for number in decision.end:
            self.change(number, status=TrialStatus.DONE)
        for number, priority in decision.priorities.items():
            self.priorities[number] = priority
        for _ in range(decision.add):
            self.trials[len(self.trials)] = trial(len(self.trials))

    def change(self, number: int, **changes) -> None:
        self.trials[number] = dataclasses.replace(self.trials[number], **changes)

    def report(self) -> None:
        """Have one of the trials that train reach its next rung."""
        training = [each for each in self.trials.values() if each.status is TrialStatus.RUNNING]
        assert training, "nothing trains, and the study is not finished"
        one = self._random.choice(training)
        rung = rungs_reached(self.rules, one)
        point = Point(self.rules.rung_examples[rung], self.value(one.number, rung))
        self.change(one.number, points=(*one.points, point))

    def check(self, decision: Decision) -> None:
        training = [each for each in self.trials.values() if each.status is TrialStatus.RUNNING]
        above = [each for each in training if rungs_reached(self.rules, each)]
        for rung in range(1, self.rules.rungs):
            there = sum(rungs_reached(self.rules, each) >= rung for each in self.trials.values())
            on = [each for each in above if rungs_reached(self.rules, each) == rung]
            assert len(on) <= max(1, round_down_half(there, self.rules.reduction))
        if above and len(above) < len(training):
            assert min(self.priorities.get(each.number, 1.0) for each in above) > 1


@settings(max_examples=40)
@given(
    trials=st.integers(1, 20),
    room=st.integers(1, 12),
    rungs=st.integers(1, 4),
    reduction=st.integers(2, 4),
    seed=st.integers(0, 1000),
    goal=st.sampled_from(["max", "min"]),
)
def test_every_study_ends_and_the_best_trial_reaches_the_last_rung(
    trials: int, room: int, rungs: int, reduction: int, seed: int, goal: str
) -> None:
    quality = random.Random(seed).sample(range(1000), trials)
    rules = Rules(goal, trials, rungs, reduction, max_examples=1000.0)
    study = Study(rules, room, lambda number, rung: quality[number] + rung, seed)
    study.run()
    assert len(study.trials) == trials
    best = (max if goal == "max" else min)(range(trials), key=quality.__getitem__)
    assert rungs_reached(rules, study.trials[best]) == rungs
    for each in study.trials.values():
        assert each.status is TrialStatus.DONE
        assert rungs_reached(rules, each) >= 1


@settings(max_examples=40)
@given(
    values=st.lists(
        st.lists(
            st.sampled_from([0.1, 0.2, math.nan, math.inf, -math.inf]), min_size=3, max_size=3
        ),
        min_size=1,
        max_size=12,
    ),
    room=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_equal_values_and_what_is_no_number_do_not_stop_a_study(
    values: list[list[float]], room: int, seed: int
) -> None:
    rules = dataclasses.replace(RULES, trials=len(values))
    study = Study(rules, room, lambda number, rung: values[number][rung], seed)
    study.run()
    assert any(rungs_reached(rules, each) == 3 for each in study.trials.values())


@settings(max_examples=20)
@given(seed=st.integers(0, 1000), trials=st.integers(3, 30))
def test_trials_that_reach_a_rung_together_are_halved_as_in_successive_halving(
    seed: int, trials: int
) -> None:
    values = random.Random(seed).sample(range(1000), trials)
    decision = decide([trial(number, value) for number, value in enumerate(values)], FULL, 16, 0.0)
    ranked = sorted(range(trials), key=lambda number: -values[number])
    assert sorted(decision.hold) == sorted(ranked[trials // 3 :])


def test_the_first_trials_of_a_rung_are_held_until_there_are_enough() -> None:
    first = decide([trial(0, 0.5), trial(1), trial(2)], RULES, 3, 0.0)
    assert (first.hold, first.add) == ((0,), 1)
    assert first.reasons[0] == (
        "held: place 1 of 1 at rung 1 of 3 (100 useful examples), until others have reached it"
    )
    held = trial(0, 0.5, status=TrialStatus.HELD)
    second = decide([held, trial(1, 0.4), trial(2)], RULES, 3, 0.0)
    assert (second.release, second.hold) == ((0,), (1,)), "the best of two does not wait"
    third = decide([held, trial(1, 0.4), trial(2, 0.3)], RULES, 3, 0.0)
    assert (third.release, third.hold) == ((0,), (1, 2))
    assert third.reasons[0].startswith("continues: place 1 of 3 at rung 1 of 3")
    assert third.reasons[2].endswith("the best 1 continue")


def test_a_late_comer_replaces_a_trial_that_trains_beyond_its_rung() -> None:
    going = dataclasses.replace(trial(0, 0.5), examples=250.0)
    others = [trial(number, 0.1, status=TrialStatus.HELD) for number in (1, 2)]
    late = decide([going, *others, trial(3, 0.9)], FULL, 2, 0.0)
    assert (late.hold, late.release) == ((0,), ())
    held = dataclasses.replace(going, status=TrialStatus.HELD)
    more = [trial(number, 0.2, status=TrialStatus.HELD) for number in (4, 5)]
    assert decide([held, *others, trial(3, 0.9), *more], FULL, 2, 0.0).release == (0,)


def test_slots_follow_the_newest_reports_of_those_that_go_on() -> None:
    """The decision who goes on stays that of the rung."""
    diverged = dataclasses.replace(
        trial(0, 0.9), points=(Point(100, 0.9), Point(200, math.nan)), examples=200.0
    )
    behind, ahead = (
        dataclasses.replace(trial(n, 0.6), points=(Point(100, 0.6), Point(200, value)))
        for n, value in ((1, 0.7), (2, 0.8))
    )
    others = [trial(number, 0.1, status=TrialStatus.HELD) for number in range(3, 9)]
    found = decide([diverged, behind, ahead, *others], FULL, 16, 0.0)
    assert found.hold == ()
    assert sorted(found.priorities, key=found.priorities.__getitem__) == [0, 1, 2]


def test_a_trial_is_not_above_one_that_reports_more_with_fewer_examples() -> None:
    ahead, below = trial(0, 0.9, 0.5), trial(1, 0.8)
    others = [trial(n, 0.1, 0.1, status=TrialStatus.HELD) for n in range(2, 9)]
    found = decide([ahead, below, *others], FULL, 16, 0.0)
    assert {ahead.number, below.number} <= found.priorities.keys()
    assert found.priorities[0] <= found.priorities[1]
    better = decide([trial(0, 0.9, 0.85), below, *others], FULL, 16, 0.0)
    assert better.priorities[0] > better.priorities[1]


def test_of_equal_trials_the_earlier_continues() -> None:
    assert decide([trial(number, 0.5) for number in (2, 0, 1)], FULL, 3, 0.0).hold == (2, 1)


def test_what_is_no_number_is_the_worst_for_both_goals() -> None:
    for goal, worst in (("max", -1e30), ("min", 1e30)):
        rules = dataclasses.replace(FULL, goal=goal)
        found = decide([trial(0, math.nan), trial(1, worst), trial(2, math.nan)], rules, 3, 0.0)
        assert found.hold == (0, 2)


def test_what_is_no_number_and_what_has_failed_is_never_the_best() -> None:
    diverged, good = trial(0, 0.9, math.nan), trial(1, 0.5, status=TrialStatus.HELD)
    failed = trial(2, 0.9, 0.9, status=TrialStatus.FAILED)
    ranked = rank_trials(FULL, [diverged, failed, good, trial(3)])
    assert [each.number for each in ranked] == [1, 2, 0, 3]


def test_reports_at_other_numbers_of_examples_are_compared_at_the_rung() -> None:
    """The reports of a large batch come later, which is no merit."""
    late = Trial(0, {}, TrialStatus.RUNNING, (Point(50, 0.0), Point(150, 0.6)))
    exact = Trial(1, {}, TrialStatus.RUNNING, (Point(100, 0.4),))
    worse = Trial(2, {}, TrialStatus.RUNNING, (Point(100, 0.1),))
    assert value_at(late.points, 100) == pytest.approx(0.3)
    assert decide([late, exact, worse], FULL, 3, 0.0).hold == (0, 2)


def test_a_failed_trial_counts_nowhere_and_one_that_ended_by_its_last_report() -> None:
    failed = trial(0, 0.9, status=TrialStatus.FAILED)
    assert decide([failed, trial(1, 0.5)], FULL, 3, 0.0).hold == ()
    ended = trial(0, 0.9, status=TrialStatus.DONE)
    two = decide([ended, trial(1, 0.5, 0.5)], FULL, 3, 0.0)
    assert two.finished == "no trial is left to train"
    assert two.end == (1,)


def test_no_trial_is_added_while_one_waits_for_slots() -> None:
    assert decide([trial(0)], RULES, 4, 0.0).add == 3
    assert decide([trial(0), trial(1, status=TrialStatus.WAITING)], RULES, 4, 0.0).add == 0


def test_a_trial_on_a_higher_rung_has_more_slots_left_to_it_unless_it_does_not_take_them() -> None:
    first, *others = (trial(number, 0.9 - number / 10) for number in range(3))
    held = [dataclasses.replace(each, status=TrialStatus.HELD) for each in others]
    trials = [dataclasses.replace(first, slots=1), *held]
    assert decide(trials, RULES, 8, 0.0).add == 5
    assert decide(trials, RULES, 8, 0.0, 2, 4).add == 2
    assert decide(trials, RULES, 8, 31.0).add == 6
    assert decide([dataclasses.replace(first, slots=8), *held], RULES, 8, 31.0).add == 5


def test_no_trial_starts_that_cannot_reach_the_second_rung_before_the_deadline() -> None:
    rules = dataclasses.replace(RULES, deadline=1000.0)
    trains = [trial(0, speed=2.0)]
    assert decide(trains, rules, 2, 849.0).add == 1
    late = decide(trains, rules, 2, 851.0)
    assert (late.add, late.finished) == (0, "")
    over = decide(trains, rules, 2, 1000.0)
    assert (over.end, over.finished) == ((0,), "the deadline has passed")


def test_without_rungs_every_trial_trains_to_its_end() -> None:
    rules = Rules("max", 3)
    found = decide([trial(0, 0.1), trial(1, 0.2)], rules, 2, 0.0)
    assert found == Decision(
        priorities={0: 1.0, 1: 1.0}, add=0, reasons=dict.fromkeys((0, 1), "trains to its end")
    )

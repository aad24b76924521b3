"""Decides which trials train and which are held, by asynchronous successive halving with pauses.

A trial that reaches a rung is compared with all that have reached it, at the same number of useful
examples. The best of them train on, one in ``reduction``; the others are held. A held trial goes on
when it is among the best after all, since more trials have reached its rung; one that trains beyond
a rung is held when it no longer is. So the decision follows from the trials alone, and a search
that was killed and started again decides the same.

Source: Li et al., A System for Massively Parallel Hyperparameter Tuning, MLSys 2020 (ASHA), which
lets a trial that went on by chance train to the next rung.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hvd_elastic.formatting import number_words
from hvd_elastic.search.trials import Decision, Point, Rules, Trial, TrialStatus

_HIGHER = 1.5
"""Priority of a trial relative to one that has reached one rung less: it has proved to be good."""
_BEST = 2.0
"""Priority of the best of the trials that go on from a rung, by their newest reports, relative to
the last one: what has fallen behind since the rung, or diverged, takes no slots from the others."""
_SETTLED_S = 30.0
"""Time after a trial has reached a rung until which slots move [s]."""


def decide(
    trials: Sequence[Trial],
    rules: Rules,
    slots: int,
    now: float,
    least: int = 1,
    most: int | None = None,
) -> Decision:
    """Return what is to be done about the trials of a study.

    A trial is added while there are slots for it, and none waits. On a higher rung a trial trains
    ``reduction`` times as long to the next one, so as many times the slots are left to it, until
    it is seen that it takes less. With a deadline none is added that would not reach the second
    rung.

    Args:
        slots: slots of the cluster.
        now: current time [Unix s].
        least, most: fewest and most slots of a trial; ``most`` None: no limit.
    """
    active = [trial for trial in trials if trial.status.active]
    if rules.deadline is not None and now >= rules.deadline:
        every = tuple(trial.number for trial in active)
        return Decision(end=every, finished="the deadline has passed")
    is_open = _may_add(rules, trials, now)
    standing = _Standing(rules, trials, may_add=is_open)
    end = [trial for trial in active if standing.is_done(trial)]
    train = [trial for trial in active if standing.goes_on(trial)]
    hold = [trial for trial in active if trial not in end and trial not in train]
    add = 0
    if is_open and not any(trial.status is TrialStatus.WAITING for trial in train):
        taken = sum(
            min(least * rules.reduction ** standing.reached(trial), most or slots)
            for trial in train
        )
        if now - standing.risen_at > _SETTLED_S:  # they have what they take
            taken = min(taken, sum(max(trial.slots, least) for trial in train))
        add = min(max(0, slots - taken) // least, rules.trials - len(trials))
    finished = ""
    if not train and not is_open:
        finished, end, hold = "no trial is left to train", active, []
    return Decision(
        hold=tuple(trial.number for trial in hold if trial.status is not TrialStatus.HELD),
        release=tuple(trial.number for trial in train if trial.status is TrialStatus.HELD),
        end=tuple(trial.number for trial in end),
        priorities={trial.number: standing.priority(trial) for trial in train},
        add=add,
        reasons={t.number: words for t in trials if (words := standing.reason(t))},
        finished=finished,
    )


def value_at(points: Sequence[Point], examples: float) -> float | None:
    """Return the metric at a number of useful examples; None: it was not reported there yet.

    Between two reports it is interpolated, since those of another trial come at other numbers.

    >>> value_at([Point(100, 1.0), Point(200, 3.0)], 150), value_at([Point(100, 1.0)], 150)
    (2.0, None)
    """
    before: Point | None = None
    for point in points:
        if point.examples >= examples:
            if before is None or not (math.isfinite(before.value) and math.isfinite(point.value)):
                return point.value
            part = (examples - before.examples) / (point.examples - before.examples)
            return before.value + part * (point.value - before.value)
        before = point
    return None


def rungs_reached(rules: Rules, trial: Trial) -> int:
    """Return how many rungs a trial has reached."""
    return len(reached_at(rules, trial))


def reached_at(rules: Rules, trial: Trial) -> list[float]:
    """Return when a trial reached each of its rungs [Unix s]."""
    firsts = (
        next((point.at for point in trial.points if point.examples >= examples), None)
        for examples in rules.rung_examples
    )
    return [at for at in firsts if at is not None]


def judged_value(rules: Rules, trial: Trial) -> float:
    """Return the metric by which a trial is ranked: at the last rung that it has reached.

    Below the first rung it is the last report; NaN: there is none.
    """
    reached = rungs_reached(rules, trial)
    value = value_at(trial.points, rules.rung_examples[reached - 1]) if reached else None
    if value is not None:
        return value
    return trial.points[-1].value if trial.points else math.nan


def judged_examples(rules: Rules, trial: Trial) -> float:
    """Return the useful examples at which :func:`judged_value` was reported."""
    reached = rungs_reached(rules, trial)
    newest = trial.points[-1].examples if trial.points else 0.0
    return rules.rung_examples[reached - 1] if reached else newest


def rank_trials(rules: Rules, trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials, the best first: by rungs reached, then by the metric there.

    Those without a number are behind all others, and before them those that have failed.
    """

    def key(trial: Trial) -> tuple[bool, bool, int, float, int]:
        score = rules.score(judged_value(rules, trial))
        is_last, has_failed = score == -math.inf, trial.status is TrialStatus.FAILED
        return is_last, has_failed, -rungs_reached(rules, trial), -score, trial.number

    return sorted(trials, key=key)


def _may_add(rules: Rules, trials: Sequence[Trial], now: float) -> bool:
    if len(trials) >= rules.trials:
        return False
    speeds = [trial.speed for trial in trials if trial.speed > 0]
    if rules.deadline is None or not speeds or not rules.rung_examples:
        return True
    second = rules.rung_examples[:2][-1]
    return now + second / statistics.median(speeds) <= rules.deadline


@dataclass(frozen=True)
class _Rung:
    """A rung.

    Attributes:
        ranked: numbers of the trials that have reached it, the best first; of equal ones the
            earlier first.
        best: how many of them go on.
    """

    ranked: list[int]
    best: int


class _Standing:
    """The rungs of a study with the trials that have reached them.

    Args:
        may_add: whether trials may still be added.

    Attributes:
        risen_at: when a trial has reached a rung last [Unix s].
    """

    def __init__(self, rules: Rules, trials: Sequence[Trial], *, may_add: bool) -> None:
        self._rules = rules
        times = {trial.number: reached_at(rules, trial) for trial in trials}
        self._reached = {number: len(each) for number, each in times.items()}
        self.risen_at = max((at for each in times.values() for at in each), default=0.0)
        self._rungs: list[_Rung] = []
        self._climbing: dict[int, list[int]] = {}
        """Trials that go on by rungs that they have reached, the best newest report first."""
        for rung, examples in enumerate(rules.rung_examples):
            scores = _scores(rules, trials, examples)
            ranked = sorted(scores, key=lambda number: (-scores[number], number))
            # As long as another trial may come to this rung, it may be better than the first ones.
            may_come = may_add or any(
                self._reached[trial.number] <= rung and self.goes_on(trial) for trial in trials
            )
            best = len(ranked) // rules.reduction
            self._rungs.append(_Rung(ranked, best if may_come else max(best, 1)))
        climbing = [trial for trial in trials if trial.points and self.goes_on(trial)]
        for trial in sorted(climbing, key=lambda each: -rules.score(each.points[-1].value)):
            self._climbing.setdefault(self._reached[trial.number], []).append(trial.number)

    def is_done(self, trial: Trial) -> bool:
        """Return whether a trial has reached the last rung."""
        return 0 < len(self._rules.rung_examples) == self._reached[trial.number]

    def goes_on(self, trial: Trial) -> bool:
        """Return whether a trial trains on: below the first rung, or among the best of its rung."""
        if not trial.status.active or self.is_done(trial):
            return False
        reached = self._reached[trial.number]
        return reached == 0 or self._place(trial) < self._rungs[reached - 1].best

    def reached(self, trial: Trial) -> int:
        """Return how many rungs a trial has reached."""
        return self._reached[trial.number]

    def priority(self, trial: Trial) -> float:
        """Return the priority of a trial: 1 below the first rung, more on a higher one."""
        reached = self._reached[trial.number]
        if reached == 0:
            return 1.0
        climbing = self._climbing[reached]
        worse = climbing.index(trial.number) / len(climbing)
        return round(_HIGHER**reached * _BEST ** (1 - worse), 2)

    def reason(self, trial: Trial) -> str:
        """Return in words why a trial trains, is held or is done; empty: no rung decides that."""
        examples, reached = self._rules.rung_examples, self._reached[trial.number]
        if reached == 0 and trial.status.active:
            return f"trains to rung 1 of {len(examples)}" if examples else "trains to its end"
        rung = self._rungs[reached - 1] if reached else None
        if rung is None or trial.number not in rung.ranked:
            return ""
        at = f"rung {reached} of {len(examples)} ({number_words(round(examples[reached - 1]))} "
        place = f"place {self._place(trial) + 1} of {len(rung.ranked)} at {at}useful examples)"
        if self.is_done(trial) or not trial.status.active:
            state = TrialStatus.DONE if trial.status.active else trial.status
            return f"{state.value}: {place}"
        if self.goes_on(trial):
            return f"goes on: {place}"
        if rung.best:
            return f"held: {place}, the best {rung.best} go on"
        return f"held: {place}, until {self._rules.reduction} are there"

    def _place(self, trial: Trial) -> int:
        return self._rungs[self._reached[trial.number] - 1].ranked.index(trial.number)


def _scores(rules: Rules, trials: Sequence[Trial], examples: float) -> dict[int, float]:
    """Return the scores of trials at a rung; one whose script ended before it has its last one."""
    found = {}
    for trial in trials:
        if trial.status in (TrialStatus.FAILED, TrialStatus.STOPPED):
            continue
        value = value_at(trial.points, examples)
        if value is None and trial.status is TrialStatus.DONE and trial.points:
            value = trial.points[-1].value
        if value is not None:
            found[trial.number] = rules.score(value)
    return found

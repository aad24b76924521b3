"""Decides which trials train and which are held, by asynchronous successive halving with pauses.

A trial that reaches a rung is compared with all that have reached it, at the same number of useful
examples. The best of them continue, one in ``reduction``; the others are held. While more trials
may come, the number is rounded: the best of the first ones need not wait for them. A held trial
continues when it is among the best after more trials have reached its rung; one that trains beyond
a rung is held when it no longer is. So the decision follows from the trials alone, and a search
that was killed and started again decides the same.

Source: Li et al., A System for Massively Parallel Hyperparameter Tuning, MLSys 2020 (ASHA), which
lets a trial that continued by chance train to the next rung.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence

from hvd_elastic.formatting import number_words
from hvd_elastic.search.trials import Decision, Point, Rules, Trial, TrialStatus

_HIGHER = 1.5
"""Priority of a trial relative to one that has reached one rung less: it has proved to be good."""
_BEST = 2.0
"""Priority of the best of the trials that continue from a rung, by their newest reports, relative
to the last: a trial that has fallen behind since, or diverged, takes no slots from the others."""
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
    """Return what to do about the trials of a study.

    A trial is added while there are slots for it, and none waits. On a higher rung a trial trains
    ``reduction`` times as long to the next one, so as many times the slots are reserved for it,
    until it has settled with fewer. With a deadline none is added that would not reach the second
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
    train = [trial for trial in active if standing.continues(trial)]
    hold = [trial for trial in active if trial not in end and trial not in train]
    add = 0
    if is_open and not any(trial.status is TrialStatus.WAITING for trial in train):
        taken = sum(
            min(least * rules.reduction ** standing.reached(trial), most or slots)
            for trial in train
        )
        if now - standing.risen_at > _SETTLED_S:  # they have the slots that they take
            taken = min(taken, sum(max(trial.slots, least) for trial in train))
        add = min(max(0, slots - taken) // least, rules.trials - len(trials))
    finished = ""
    if not train and not is_open:
        finished, end = "no trial is left to train", active
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

    Between two reports it is interpolated, since other trials report at other numbers.

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


def judged_examples(rules: Rules, trial: Trial) -> float:
    """Return the useful examples at which a trial is ranked: at its last rung or last report."""
    reached = rungs_reached(rules, trial)
    newest = trial.points[-1].examples if trial.points else 0.0
    return rules.rung_examples[reached - 1] if reached else newest


def judged_value(rules: Rules, trial: Trial) -> float:
    """Return the metric at :func:`judged_examples`; NaN: the trial has not reported it."""
    reached = rungs_reached(rules, trial)
    value = value_at(trial.points, rules.rung_examples[reached - 1]) if reached else None
    if value is not None:
        return value
    return trial.points[-1].value if trial.points else math.nan


def rank_trials(rules: Rules, trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials, the best first: by rungs reached, then by the metric there.

    Failed trials come after the others, and trials without a number last.
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
        self._rungs: list[tuple[list[int], int]] = []
        """Numbers of the trials that reached each rung, the best first, and how many continue."""
        for rung, examples in enumerate(rules.rung_examples):
            scores = _scores(rules, trials, examples)
            ranked = sorted(scores, key=lambda number: (-scores[number], number))
            # As long as another trial may come to this rung, it may be better than the first ones.
            may_come = may_add or any(
                self._reached[trial.number] <= rung and self.continues(trial) for trial in trials
            )
            best = max(len(ranked) // rules.reduction, 1)
            if may_come:  # rounded, so that the best of the first ones does not wait for the others
                best = (len(ranked) + (rules.reduction - 1) // 2) // rules.reduction
            self._rungs.append((ranked, best))
        self._priorities = self._prioritize(
            [each for each in trials if self._reached[each.number] and self.continues(each)]
        )

    def is_done(self, trial: Trial) -> bool:
        """Return whether a trial has reached the last rung."""
        return 0 < len(self._rules.rung_examples) == self._reached[trial.number]

    def continues(self, trial: Trial) -> bool:
        """Return whether a trial continues: below the first rung, or among the best of its rung."""
        if not trial.status.active or self.is_done(trial):
            return False
        reached = self._reached[trial.number]
        if reached == 0:
            return True
        ranked, best = self._rungs[reached - 1]
        return trial.number in ranked[:best]

    def reached(self, trial: Trial) -> int:
        """Return how many rungs a trial has reached."""
        return self._reached[trial.number]

    def priority(self, trial: Trial) -> float:
        """Return the priority of a trial: 1 below the first rung, more on a higher one."""
        return self._priorities.get(trial.number, 1.0)

    def _prioritize(self, trials: Sequence[Trial]) -> dict[int, float]:
        """Return the priorities of trials that continue from a rung, by their newest reports.

        None is above one that has reached fewer rungs and reports a better value.
        """
        sizes = Counter(self._reached[trial.number] for trial in trials)
        better: Counter[int] = Counter()
        last: dict[int, float] = {}  # priority given last, by rung
        found = {}
        for trial in sorted(trials, key=lambda t: -self._rules.score(t.points[-1].value)):
            rung = self._reached[trial.number]
            own = _HIGHER**rung * _BEST ** (1 - better[rung] / sizes[rung])
            last[rung] = min([own, *(given for below, given in last.items() if below < rung)])
            found[trial.number] = round(last[rung], 2)
            better[rung] += 1
        return found

    def reason(self, trial: Trial) -> str:
        """Return why a trial trains, is held or is done; empty: no rung decides that."""
        examples, reached = self._rules.rung_examples, self._reached[trial.number]
        if reached == 0 and trial.status.active:
            return f"trains to rung 1 of {len(examples)}" if examples else "trains to its end"
        ranked, best = self._rungs[reached - 1] if reached else ([], 0)
        if trial.number not in ranked:
            return ""
        at = f"rung {reached} of {len(examples)} ({number_words(round(examples[reached - 1]))} "
        place = f"place {ranked.index(trial.number) + 1} of {len(ranked)} at {at}useful examples)"
        if self.is_done(trial) or not trial.status.active:
            state = TrialStatus.DONE if trial.status.active else trial.status
            return f"{state.value}: {place}"
        if self.continues(trial):
            return f"continues: {place}"
        if best:
            return f"held: {place}, the best {best} continue"
        return f"held: {place}, until others have reached it"


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

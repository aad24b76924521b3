"""Simulates searches on recorded learning curves: slots that go where they help, and fixed ones.

64 trials, whose curves ``search_curves.py`` has recorded, on 32 slots in virtual time. Ours: the
rungs of ``hvd-elastic search`` and the scheduler of the queue. Beside it trials of 1, 4, 8 and 32
slots each, with the same rungs (asynchronous halving) and with Optuna's SuccessiveHalvingPruner,
which ends trials and never takes one up again.

Run it: ``python benchmarks/search.py --out benchmarks/results/search.json``, some minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.testbed.command import Say, at_least_one, run_benchmark
from benchmarks.testbed.figures import Result, conditions
from hvd_elastic.model.goodput import statistical_efficiency
from hvd_elastic.policy.schedule.decide import decide as decide_slots
from hvd_elastic.policy.schedule.jobs import Assignment
from hvd_elastic.policy.schedule.policies import place
from hvd_elastic.policy.snapshot import HostOffer
from hvd_elastic.records.cluster import summarize_cluster
from hvd_elastic.search.rungs import decide as decide_trials
from hvd_elastic.search.trials import Point, Rules, Trial, TrialStatus
from hvd_elastic.sim.jobs.run import JobInTime, Outcome, as_jobs, queue_events, run_jobs
from hvd_elastic.views.search_page import write_search_page

CURVES = Path(__file__).parent / "search_curves.json"
HOSTS = [HostOffer(f"host{number + 1}", 4) for number in range(8)]
SLOTS = sum(host.slots for host in HOSTS)
FIXED = (1, 4, 8, 32)
ALONE_S = 3600.0
"""Time of a whole training on one slot [s]."""
INTERVAL_S, RESCALE_S, START_S = 1.0, 0.3, 5.0
"""Between decisions; pauses of a rescale, and of a trial that starts or goes on [s]."""
REPORTS = 81
"""Reports of the metric in a whole training, at equal numbers of useful examples."""
SPEEDS = (1.0, 0.85, 0.7)
"""k slots are ``k ** speed`` times as fast as one, with the batch that was tuned for."""
NEAR = 0.995
"""The time counts until a trial reports this part of the best."""
DEADLINES_S = (240.0, 480.0, 960.0)
_MEASURING_S = 2.5
"""Training with a number of slots until its speed is known [s]; see ``sim.jobs.history``."""
_DECIDED_S = 30.0
"""Most time between two decisions about slots [s]; else when a trial comes, goes or is measured."""


@dataclass(frozen=True)
class Curve:
    """A recorded training.

    Attributes:
        examples, values, noise: useful examples, metric and gradient noise scale along it.
    """

    batch: int
    params: Mapping[str, float]
    examples: np.ndarray
    values: np.ndarray
    noise: np.ndarray


@dataclass(frozen=True)
class Setting:
    """What a search is simulated with.

    Attributes:
        way: ``elastic``, ``halving`` (the same rungs, fixed slots) or ``optuna``.
        slots: slots of a trial; 0: as the scheduler decides.
        speed: exponent of the speed by slots.
        adapts: whether a trial takes the larger batch when that brings more.
        seed: of the order in which the trials are added.
    """

    way: str
    slots: int
    speed: float
    adapts: bool
    seed: int


def read_curves(path: Path) -> tuple[float, list[list[Curve]]]:
    """Return the useful examples of a whole training, and of each trial a curve for each batch."""
    content = json.loads(path.read_text(encoding="utf-8"))
    found: dict[tuple[float, int], list[Curve]] = {}
    for each in content["curves"]:
        arrays = (np.asarray(each[name], float) for name in ("examples", "accuracy", "noise"))
        params = {"lr": each["rate"], "width": each["width"]}
        curve = Curve(each["batch"], params, *arrays)
        found.setdefault((each["rate"], each["width"]), []).append(curve)
    return float(content["examples"]), list(found.values())


class TrialInTime(JobInTime):
    """A trial that trains along its curves.

    Args:
        curves: one for each batch, the one that was tuned for first.
        whole: useful examples of a whole training.

    Attributes:
        trial: what a search knows of it; None: it was not added yet.
    """

    def __init__(self, name: str, curves: Sequence[Curve], whole: float, setting: Setting) -> None:
        super().__init__(name, 0.0)
        self.params = curves[0].params
        self.trial: Trial | None = None
        self.useful = 0.0
        self._curves = curves if setting.adapts else curves[:1]
        self._whole, self._setting = whole, setting
        self._trained = [0.0] * len(self._curves)
        """Useful examples with each batch."""
        self._measured, self._same_s = 0, 0.0
        """Most slots with which it was measured, and time with the present ones [s]."""
        self._rates: np.ndarray | None = None
        self._reports = 0

    @property
    def max_slots(self) -> int:
        """Most slots for now; see :class:`JobInTime`."""
        return min(max(2 * self._measured, 1), SLOTS)

    @property
    def most_slots(self) -> int:
        """Most slots that it takes; see :class:`JobInTime`."""
        return SLOTS

    @property
    def remaining_examples(self) -> float:
        """Useful examples that are left."""
        return max(self._whole - self.useful, 1.0)

    def goodput(self) -> np.ndarray | None:
        """Return the useful examples per second by number of slots; None before the first."""
        return self._all_rates().max(0) if self._measured else None

    def hold(self, hosts: Mapping[str, int], pause_s: float) -> None:
        """Change its slots; it trains on after a pause [s], or after its processes have started."""
        if dict(hosts) != self.held:
            self._same_s = 0.0
        super().hold(hosts, pause_s if self.held else START_S)

    def _all_rates(self) -> np.ndarray:
        """Return useful examples/s by batch and number of slots."""
        if self._rates is None:
            slots = np.arange(1, SLOTS + 1)
            first = self._curves[0].batch
            each_s = ALONE_S / self._whole
            synchronize_s = first * each_s * (slots**-self._setting.speed - 1 / slots)
            rows = []
            for curve in self._curves:
                noise = float(np.interp(self.useful, curve.examples, curve.noise))
                useful = curve.batch * statistical_efficiency(noise, first, curve.batch)
                step_s = curve.batch * each_s / slots + synchronize_s
                rows.append(np.append(0.0, useful / step_s))
            self._rates = np.asarray(rows)
        return self._rates

    def _train(self, now: float, seconds: float) -> None:
        slots = sum(self.held.values())
        while seconds > 1e-9 and self.useful < self._whole:
            rates = self._all_rates()[:, slots]
            batch = int(rates.argmax())
            following = self._whole * (self._reports + 1) / REPORTS
            spent = min(seconds, (following - self.useful) / rates[batch])
            self._trained[batch] += rates[batch] * spent
            self.useful += rates[batch] * spent
            self.attained_slot_s += spent * slots
            now, seconds = now + spent, seconds - spent
            if self.useful >= following - 1e-6:
                self._report(now, following)
            self._same_s += spent
            if self._same_s >= _MEASURING_S:
                self._measured = max(self._measured, slots)

    def _report(self, now: float, examples: float) -> None:
        self._reports, self._rates, self.useful = self._reports + 1, None, examples
        parts = np.asarray(self._trained) / sum(self._trained)
        values = [np.interp(examples, each.examples, each.values) for each in self._curves]
        assert self.trial is not None, "only trials that were added train"
        self.change(points=(*self.trial.points, Point(examples, float(parts @ values), now)))

    def change(self, **changes: Any) -> None:
        """Change what a search knows of it."""
        assert self.trial is not None, "it was added"
        self.trial = Trial(**{**vars(self.trial), **changes})


class Search(ABC):
    """Adds, holds and ends trials in virtual time, and gives them slots.

    Args:
        jobs: all trials that may be added, in their order.
    """

    def __init__(self, jobs: Sequence[TrialInTime], rules: Rules, setting: Setting) -> None:
        self.jobs, self.rules, self.setting = list(jobs), rules, setting
        self._decided: tuple[Any, float, dict[str, Assignment]] = ((), -math.inf, {})
        self._known = -1

    @property
    def added(self) -> list[TrialInTime]:
        """Trials that were added."""
        return [job for job in self.jobs if job.trial is not None]

    def decide(self, active: Sequence[TrialInTime], now: float) -> Mapping[str, Assignment]:
        """Return the slots of all trials at a time [s]."""
        reports = sum(len(job.trial.points) for job in self.added if job.trial)
        if reports != self._known:
            self._known = reports
            self.judge(now)
        training = [job for job in self.added if job.trial and job.trial.status.active]
        training = [job for job in training if job.trial and job.trial.status is not HELD]
        state = tuple((job.name, job.max_slots, job.priority) for job in training)
        before, at, decided = self._decided
        if state != before or now - at >= _DECIDED_S:
            decided = dict(self.share(training, now))
            self._decided = state, now, decided
        waits = Assignment({}, "held")
        return {job.name: decided.get(job.name, waits) for job in active}

    def add(self, number: int) -> None:
        """Add so many trials."""
        begun = len(self.added)
        for each, job in enumerate(self.jobs[begun : begun + number], begun):
            params = job.params
            job.trial = Trial(each, params, TrialStatus.RUNNING, job=each + 1)

    def finish(self, now: float) -> None:
        """End the study."""
        for job in self.jobs:
            job.finished_s = job.finished_s or now

    def share(self, training: Sequence[TrialInTime], now: float) -> Mapping[str, Assignment]:
        """Return the slots of the trials that train: as many for each, those that run first."""
        if not self.setting.slots:
            jobs = as_jobs(training, RESCALE_S, tells_length=False)  # a search states none
            return decide_slots(jobs, HOSTS, now) if jobs else {}
        order = sorted(training, key=lambda job: (not job.held, -job.priority))
        chosen = [job.name for job in order[: SLOTS // self.setting.slots]]
        jobs = as_jobs(training, RESCALE_S, tells_length=True)
        return place(jobs, HOSTS, dict.fromkeys(chosen, self.setting.slots), "fixed")

    @abstractmethod
    def judge(self, now: float) -> None:
        """Hold, add and end trials, after some have reported."""


HELD = TrialStatus.HELD


class Halving(Search):
    """The rungs of ``hvd-elastic search``."""

    def judge(self, now: float) -> None:
        """See :meth:`Search.judge`."""
        fixed = self.setting.slots or None
        while True:
            for job in self.added:
                job.change(slots=sum(job.held.values()))
            trials = [job.trial for job in self.added if job.trial is not None]
            found = decide_trials(trials, self.rules, SLOTS, now, fixed or 1, fixed)
            for number in found.hold:
                self.jobs[number].change(status=HELD)
            for number in found.release:
                self.jobs[number].change(status=TrialStatus.RUNNING)
            for number in found.end:
                self.jobs[number].change(status=TrialStatus.DONE)
                self.jobs[number].finished_s = now
            for number, priority in found.priorities.items():
                self.jobs[number].priority = priority
            for number, words in found.reasons.items():
                self.jobs[number].change(reason=words)
            self.add(found.add)
            if found.finished:
                return self.finish(now)
            if not found.add:
                return None


class OptunaPruner(Search):
    """Optuna's SuccessiveHalvingPruner, with the same rungs."""

    def __init__(self, jobs: Sequence[TrialInTime], rules: Rules, setting: Setting) -> None:
        super().__init__(jobs, rules, setting)
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        pruner = optuna.pruners.SuccessiveHalvingPruner(
            min_resource=int(rules.rung_examples[0]), reduction_factor=rules.reduction
        )
        self._study = optuna.create_study(direction="maximize", pruner=pruner)
        self._trials: list[Any] = []
        self._told: list[int] = []
        self._pruned, self._complete = optuna.trial.TrialState.PRUNED, None

    def judge(self, now: float) -> None:
        """See :meth:`Search.judge`."""
        fresh = [
            (point.at, number, point)
            for number, job in enumerate(self.added)
            if job.trial is not None and job.trial.status.active
            for point in job.trial.points[self._told[number] :]
        ]
        for _, number, point in sorted(fresh):
            job, trial = self.jobs[number], self._trials[number]
            if job.finished_s is not None:
                continue
            self._told[number] += 1
            trial.report(point.value, round(point.examples))
            whole = point.examples >= self.rules.rung_examples[-1] - 1e-6
            if not whole and not trial.should_prune():
                continue
            values = point.value if whole else None
            self._study.tell(trial, values, state=self._complete if whole else self._pruned)
            job.change(status=TrialStatus.DONE)
            job.finished_s = now
        training = sum(job.finished_s is None for job in self.added)
        self.add(SLOTS // self.setting.slots - training)
        while len(self._trials) < len(self.added):
            self._trials.append(self._study.ask())
            self._told.append(0)
        if all(job.finished_s is not None for job in self.jobs):
            self.finish(now)


WAYS: Mapping[str, type[Search]] = {
    "elastic": Halving,
    "halving": Halving,
    "optuna": OptunaPruner,
}


def simulate(
    setting: Setting,
    path: Path,
    rungs: int,
    reduction: int,
    picture: Path | None = None,
    trials: int | None = None,
) -> dict[str, Any]:
    """Return the figures of one search.

    Args:
        picture: where to draw its page.
        trials: how many trials it has; None: one for each curve.
    """
    whole, curves = read_curves(path)
    order = random.Random(setting.seed).sample(range(len(curves)), trials or len(curves))
    jobs = [
        TrialInTime(str(number), curves[each], whole, setting)
        for number, each in enumerate(order, 1)
    ]
    rules = Rules("max", len(jobs), rungs, reduction, whole)
    search = WAYS[setting.way](jobs, rules, setting)
    outcome = run_jobs(
        jobs, search.decide, INTERVAL_S, RESCALE_S, {host.name: host.slots for host in HOSTS}
    )
    if picture is not None:
        for job in search.added:
            job.change(examples=job.useful, slots=0, slot_s=job.attained_slot_s)
        known = [job.trial for job in search.added if job.trial is not None]
        cluster = summarize_cluster(queue_events(outcome, HOSTS), "simulated")
        write_search_page(picture, "digits", rules, known, "accuracy", cluster)
    best = max(float(each[0].values[-1]) for each in curves)
    return _figures(jobs, outcome, best)


def _figures(jobs: Sequence[TrialInTime], outcome: Outcome, best: float) -> dict[str, Any]:
    points = sorted(
        (point.at, point.value) for job in jobs if job.trial for point in job.trial.points
    )
    reached = [at for at, value in points if value >= NEAR * best]
    found: dict[str, Any] = {
        "near_s": reached[0] if reached else math.inf,
        "end_s": outcome.span_s,
        "busy": outcome.slot_s / (SLOTS * outcome.span_s),
        "slot_h": outcome.slot_s / 3600,
        "best": max(value for _, value in points),
        "whole": sum(bool(job.remaining_examples <= 1) for job in jobs),
        "rescales": outcome.rescales,
    }
    for deadline_s in DEADLINES_S:
        so_far = [value for at, value in points if at <= deadline_s]
        found[f"best_at_{deadline_s / 60:g}_min"] = max(so_far, default=0.0)
    return found


def _simulate_one(task: tuple[Setting, Path, int, int]) -> dict[str, Any]:
    return simulate(*task)


def measure(options: argparse.Namespace, say: Say) -> Result:
    """Simulate all searches."""
    load_before = os.getloadavg()
    began = time.monotonic()
    rows = []
    ways = [("elastic", 0), *((way, slots) for way in ("halving", "optuna") for slots in FIXED)]
    with ProcessPoolExecutor(options.processes) as pool:
        for speed, adapts in [*((speed, False) for speed in SPEEDS), (SPEEDS[1], True)]:
            ours_s = 0.0
            for way, slots in ways:
                settings = [Setting(way, slots, speed, adapts, s) for s in range(options.seeds)]
                tasks = [(s, options.curves, options.rungs, options.reduction) for s in settings]
                found = list(pool.map(_simulate_one, tasks))
                medians = {key: statistics.median(each[key] for each in found) for key in found[0]}
                ours_s = ours_s or medians["near_s"]
                row: dict[str, Any] = {"speed": speed, "adapts": adapts, "way": way, "slots": slots}
                row |= medians
                row["ours"] = ours_s / row["near_s"]
                row["samples"] = [each["near_s"] for each in found]
                rows.append(row)
                say(f"{way} {slots} at speed {speed}: {row['near_s']:.0f} s, {row['ours']:.2f}")
    note = f"Virtual time; {options.seeds} orders of the trials, medians."
    if options.picture is not None:
        first = Setting("elastic", 0, SPEEDS[1], adapts=False, seed=0)
        simulate(first, options.curves, options.rungs, options.reduction, options.picture)
    taken = conditions("a simulated cluster", note, load_before)
    say(f"simulated in {time.monotonic() - began:.0f} s")
    return Result("search", taken, {"searches": rows})


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    told = "curves of search_curves.py"
    parser.add_argument("--curves", type=Path, default=CURVES, help=told)
    parser.add_argument("--seeds", type=at_least_one, default=5, help="orders of the trials (5)")
    parser.add_argument("--rungs", type=at_least_one, default=4, help="the last is the end (4)")
    parser.add_argument("--reduction", type=at_least_one, default=3, help="as in search (3)")
    told = "where to draw the page of one of our searches, as HTML"
    parser.add_argument("--picture", type=Path, help=told)
    told = "processes that simulate at once (2)"
    parser.add_argument("--processes", type=at_least_one, default=2, help=told)
    return run_benchmark(parser, measure)


if __name__ == "__main__":
    sys.exit(main())

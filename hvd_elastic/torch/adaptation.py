"""Choosing the batch while training goes on, from what the ranks measure of it.

Every few steps the ranks *review* the batch plan, at a step boundary that all know beforehand.
Each tells rank 0 the gradient norms and times it has collected; rank 0 smooths them, fits the step
time and looks for the plan with the most goodput; what it decides, and all that the decision rests
on, is broadcast. So ranks agree to the last bit, and whoever survives can go on deciding.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import socket
import zlib
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hvd_elastic.errors import ScriptError
from hvd_elastic.model.goodput import (
    BatchLimits,
    BatchPlan,
    PlanPatience,
    best_batch_plan,
    nearest_plan,
    score_plan,
    statistical_efficiency,
)
from hvd_elastic.model.lr_rules import Adjustment, Rule, Situation, adascale
from hvd_elastic.model.noise_scale import NoiseTracker
from hvd_elastic.model.shares import (
    LEAST_SHARE,
    ShareBalance,
    effective_slowness,
    shares_in_passes,
)
from hvd_elastic.model.step_time import Observation, StepTimeModel, fit_step_time, has_shifted
from hvd_elastic.torch.batch_bounds import bounds_at_odds
from hvd_elastic.torch.gradient_statistics import GradientStatistics
from hvd_elastic.torch.look_times import LookTimes
from hvd_elastic.torch.own_times import OwnTimes
from hvd_elastic.torch.rebalancing import SETTLING_STEPS, announce_shares, steps_to_review
from hvd_elastic.torch.schedule import ScheduleChecks
from hvd_elastic.wire import messages as msg

if TYPE_CHECKING:
    from hvd_elastic.torch.context import Context

__all__ = ["Adaptation"]

log = logging.getLogger(__name__)

_FIRST_STEPS = 200
"""Sampled steps until which every step is one that can say something of the noise."""
_UNCERTAIN_STEPS = 400
"""The same while the noise is known less well than to this relative standard error."""
_UNCERTAIN = 0.05
_CHANGING = 0.2
"""Above this the noise is taken to change, if it was known better before."""
_SAMPLE_EVERY = (4, 64)
_LOOKS_COST = 0.003
"""Share of the time that all ranks give for looking at gradients, once the noise is known."""
_LOOKS_AFTER_CHANGE = 100
"""Steps that are looked at as often as ever when the noise has become uncertain."""
_PROBE_EVERY = (2, 8)
_PROBES_COST = 0.1
"""Share of the time that one rank alone gives for seeing the noise."""
_YOUNG_STEPS = 10
_EVIDENCE = 20
"""Sampled steps before the plan follows the noise."""
_COUNTED_TIMES = 4
"""More of one configuration say nothing new, unless their median moves by a fortieth."""
_TIMES_MOVED = 0.025
_SHIFT, _SHIFT_REVIEWS = 1.5, 3
"""Where steps take so many times as long as before, or the other way round, nothing is decided and
the next review comes soon; after so many of that kind all that was timed before is out of date."""
_GROWTH = 2
"""The batch grows at most by this factor at once: memory and step times beyond are guesses."""
_OPTIMISM = 0.5
_NOTABLE_GAIN = 0.01
"""A batch that is expected to bring less than this part more is changed to in hope of more."""
_KEPT_TIMES = 8
_BAD_STEPS = 10
"""So many steps without a finite gradient, one after the other, end the job."""
_BAD_STEPS_SCALED = 50
"""The same where a gradient scaler begins with a scale that is too large, and halves it."""
_HEADER = 5


class Adaptation:
    """The batch plan of a run, and what is known for choosing it; the same on all ranks.

    Args:
        limits: what the user allows.
        examples: in the data set.
        unequal_shares: whether slow ranks get fewer examples of a step.
    """

    def __init__(self, limits: BatchLimits, examples: int, unequal_shares: bool = True) -> None:
        self.limits = limits
        self.examples = examples
        self.unequal_shares = unequal_shares
        self.own_times = OwnTimes()
        self.look_times = LookTimes()
        self._balance = ShareBalance()
        self._patience = PlanPatience()
        self.plan = BatchPlan(limits.initial_batch_size)
        self.rule: Rule = adascale
        self.progress = 0.0
        """Scale-invariant progress: steps of the initial batch size that were as good."""
        self.skipped_steps = 0
        self._bad_running = 0
        self._most_bad_steps = _BAD_STEPS
        self._memory_bound: int | None = None
        self._own_memory_bound = math.inf
        self._statistics: GradientStatistics | None = None
        self._tracker: NoiseTracker | None = None
        self._norms: tuple[list[float], list[float]] = ([0.0], [0.0])
        self._seen: dict[tuple[int, int, float, int, float], deque[tuple[float, float]]] = {}
        self._model: StepTimeModel | None = None
        self._fitted_to: dict[tuple[int, int, float, int, float], tuple[int, float]] = {}
        self._largest = limits.initial_batch_size
        self._next_review = 0
        self._generation = -1
        self._wanted = False
        self._sample_every = self._probe_every = 1
        self._certain_at = 0
        self._settling = SETTLING_STEPS
        self._times: defaultdict[int, list[float]] = defaultdict(list)
        self._noise_scale = math.nan
        self._announced = self._doubted = False
        self._rank_s: list[float | None] = []
        self._ranks = 1
        self._passes_made = 0
        self._at_odds = ""
        self._schedule_checks = ScheduleChecks()

    # -- during a step ---------------------------------------------------------------------

    def attach(self, statistics: GradientStatistics, rule: Rule) -> None:
        """The optimizer whose gradients are looked at, and its learning-rate rule."""
        self._statistics, self.rule = statistics, rule
        self._tracker = NoiseTracker(
            statistics.groups, self.limits.initial_batch_size, self.examples
        )
        self._norms = ([0.0] * (statistics.groups + 1), [0.0] * (statistics.groups + 1))

    @property
    def parts(self) -> tuple[int, ...]:
        """Examples of each rank in a full step; empty: equal shares."""
        return self._balance.parts

    @property
    def cut(self) -> tuple[BatchPlan, int, int | None]:
        """What the cutting of steps into passes depends on, besides step and ranks."""
        return self.plan, self._probe_every, self._memory_bound

    def passes(self, step: int, share: int, ranks: int) -> int:
        """Passes in which a rank makes its ``share`` of the examples of a step.

        One rank alone sees the noise only between passes, so now and then it makes two of one.
        """
        passes = self.plan.accumulation_steps + 1
        alone = ranks == 1 and passes == 1 and self.limits.max_accumulation_steps > 0
        if alone and step % self._probe_every == 0:
            passes = 2
        # Two examples in each, where there are, for layers that cannot train on one.
        least = max(2, self.limits.min_atomic_batch_size)
        passes = max(1, min(passes, share // least))
        bound = self._atomic_bound
        if bound is not None and self.limits.max_accumulation_steps > 0:
            # The last step of an epoch may be a little larger than the plan's.
            passes = max(passes, -(-share // bound))
        return passes

    def sampled(self, step: int) -> bool:
        """Whether the gradients of the step after ``step`` are looked at."""
        if self._statistics is None or not self._statistics.ready:
            return False
        probing = self._ranks == 1 and self.plan.accumulation_steps == 0
        return step % (self._probe_every if probing else self._sample_every) == 0

    def step_begins(self, passes: int, waited_s: float) -> None:
        """This rank makes its share of the step in so many passes; see :class:`OwnTimes`."""
        self._passes_made += passes
        self.own_times.step_begins(waited_s)

    def step_ends(self, examples: int, passes: int, waited_s: float) -> None:
        """The script came back for the next batch; see :meth:`OwnTimes.step_ends`."""
        counts = self._settling <= 0 and examples == self.plan.global_batch_size
        step_s = self.own_times.step_ends(waited_s, counts=counts)
        if counts:
            self._times[passes].append(step_s)
        self._settling = max(0, self._settling - 1)

    def adjustments(self) -> list[Adjustment]:
        """For each parameter group, and last for all together."""
        initial = self.limits.initial_batch_size
        scale = self.plan.global_batch_size / initial
        return [
            self.rule(Situation(scale, norm, variance / initial, self.epochs))
            for norm, variance in zip(*self._norms, strict=True)
        ]

    def advance(self, gain: float, step_examples: int) -> None:
        """A step was taken; ``gain`` is that of a full one."""
        self.progress += gain * min(1.0, step_examples / self.plan.global_batch_size)

    def finite(self) -> None:
        """The gradients of a step were looked at, and are finite."""
        self._bad_running = 0

    def expect_overflows(self) -> None:
        """A gradient scaler is in use: steps whose gradients overflow are part of its search."""
        self._most_bad_steps = _BAD_STEPS_SCALED

    def skip(self, step: int) -> None:
        """The gradients of a step are not finite, so it is not taken.

        Raises:
            ScriptError: none was, for many steps.
        """
        self.skipped_steps += 1
        self._bad_running += 1
        most = self._most_bad_steps
        if self._bad_running >= most:
            raise ScriptError(
                f"the gradients were not finite in {most} steps running, up to step {step}: "
                "the loss is NaN or infinite on at least one rank. Look at the data and the loss, "
                "lower the learning rate, or clip gradients"
            )

    @property
    def epochs(self) -> float:
        """Scale-invariant progress in passes over the data at the initial batch size."""
        return self.progress * self.limits.initial_batch_size / self.examples

    def enough(self, epoch: int, count: int) -> bool:
        """Whether ``epoch`` passes over the data make ``count`` epochs, to the nearest pass."""
        return epoch > 0 and self.epochs * (1 + 0.5 / epoch) >= count

    def out_of_memory(self, atomic_batch_size: int) -> bool:
        """A pass did not fit; whether a smaller one is allowed."""
        # A little less than what failed by a hair fails too.
        bound = int(0.9 * atomic_batch_size)
        before = self._atomic_bound
        if before is not None and self.limits.max_accumulation_steps == 0:
            # The last step of an epoch, larger than the plan's, failed; the plan has to give way.
            bound = min(bound, before - 1)
        bound = max(self.limits.min_atomic_batch_size, bound)
        self._own_memory_bound = min(self._own_memory_bound, bound)
        return bound < atomic_batch_size

    def want_review(self) -> None:
        """Something happened on a rank that the plan has to follow; all ranks say so."""
        self._wanted = True

    # -- between steps ---------------------------------------------------------------------

    def review_if_due(self, context: Context) -> None:
        """Between two steps; collective where it is due, which all ranks know alike."""
        self._schedule_checks.look(context, self)
        moved = context.generation != self._generation
        step = context.progress.step
        if not (moved or self._wanted or step >= self._next_review):
            return
        if self._statistics is None:
            raise ScriptError(
                "DataLoader(max_batch_size=...) adapts the batch to the gradients, and no "
                "optimizer was given to hvd_elastic.torch.DistributedOptimizer; wrap yours in it"
            )
        self._wanted = False
        rows = self._statistics.drain()
        if moved:
            # What was collected in another world cannot be added up in this one.
            rows = rows[:0]
            self._begin_anew()
            self._generation = context.generation
        engine = context.engine
        self._ranks = engine.size
        report = self._report(rows)
        if engine.size > 1:
            report = engine.gather(report, "hvd_elastic.review")
        reports = _split(report.numpy())
        before = self.plan, self.parts
        reason = why_shares = ""
        if engine.rank == 0:
            self._learn(reports, engine.size)
            why_shares = self._share_out(reports, moved=moved)
            reason = self._decide(reports, engine.size)
            size = self.plan.global_batch_size
            self._balance.cut(size, engine.size, *self._share_bounds(engine.size))
            if (self.plan, self.parts) != before:
                self._rank_s = []  # they belong to the plan and the shares before
            self._schedule(step)
        if engine.size > 1:
            decided = json.dumps(self.state_dict()).encode()
            decided = engine.broadcast_bytes(decided, 0)
            if engine.rank != 0:
                self.load_state_dict(json.loads(decided))
        self._times.clear()
        if (self.plan, self.parts) != before:
            self._begin_anew()
        if engine.rank == 0:
            if self.plan != before[0] or not self._announced:
                initial = self.plan.global_batch_size == self.limits.initial_batch_size
                self._announce(
                    context, reason or ("the initial batch size" if initial else "as before")
                )
            if self.parts != before[1]:
                why = why_shares or reason
                announce_shares(context, self.plan.global_batch_size, self.parts, why)
        self._announced = True
        if moved:
            self._warn_of_bounds(context)
        if self._bad_running >= self._most_bad_steps:
            self.skip(step)

    def _warn_of_bounds(self, context: Context) -> None:
        """Once where the bounds cannot be kept to, and again in another such world."""
        told, self._at_odds = self._at_odds, bounds_at_odds(self.limits, self._ranks)
        if self._at_odds not in ("", told) and context.engine.rank == 0:
            context.warn(self._at_odds)

    def _begin_anew(self) -> None:
        """Steps take another time from now on."""
        self._times.clear()
        self.own_times.forget()
        self._settling = SETTLING_STEPS

    def _report(self, rows: torch.Tensor) -> torch.Tensor:
        header = [
            float(_host_number()),
            self._own_memory_bound,
            self.own_times.typical_s(),
            rows.shape[0],
            rows.shape[1],
        ]
        self._own_memory_bound = math.inf
        return torch.cat([torch.tensor(header, dtype=torch.float64), rows.double().reshape(-1)])

    def _learn(self, reports: Sequence[np.ndarray], ranks: int) -> None:
        bound = min(report[1] for report in reports)
        if math.isfinite(bound):
            self._memory_bound = min(self._memory_bound or int(bound), int(bound))
        self._learn_noise(reports)
        self._rank_s = [float(r[2]) if math.isfinite(r[2]) else None for r in reports]
        self._doubted = False
        for passes, times in self._times.items():
            # With unequal shares this rank's passes need not be those of the others.
            extra = self.plan.accumulation_steps if self.parts else passes - 1
            atomic = self.plan.global_batch_size / ranks / (extra + 1)
            hosts = len({report[0] for report in reports})
            key = (hosts, ranks, atomic, extra, self._slowness(reports))
            kept = self._seen.setdefault(key, deque(maxlen=_KEPT_TIMES))
            own_s = float(np.max([report[2] for report in reports]))  # NaN if that of any is
            kept.append((float(np.median(times)), own_s))
            seconds = [step_s for step_s, _ in kept]
            self._doubted |= has_shifted(seconds, 1, _SHIFT_REVIEWS, _SHIFT)
            if has_shifted(seconds, _SHIFT_REVIEWS, _SHIFT_REVIEWS, _SHIFT):
                recent = list(kept)[-_SHIFT_REVIEWS:]
                self._seen = {key: deque(recent, maxlen=_KEPT_TIMES)}
                self._doubted = False

    def _learn_noise(self, reports: Sequence[np.ndarray]) -> None:
        tracker = self._tracker
        if tracker is None:
            return
        steps: dict[float, list[np.ndarray]] = defaultdict(list)
        for report in reports:
            for row in report[_HEADER:].reshape(-1, 3 + 2 * tracker.quantities):
                steps[row[0]].append(row)
        for number, rows in sorted(steps.items()):
            passes = sum(row[2] for row in rows)
            if len(rows) < len(reports) or passes < 2:
                continue
            local, total = np.sum([row[3:] for row in rows], axis=0).reshape(2, -1)
            skipped = tracker.skipped
            tracker.add(local, total, rows[0][1], passes, int(number))
            self._bad_running = self._bad_running + 1 if tracker.skipped > skipped else 0
        if tracker.steps:
            self._norms = (tracker.squared_norm().tolist(), tracker.variance().tolist())
            self._noise_scale = tracker.noise_scale()

    def _share_out(self, reports: Sequence[np.ndarray], *, moved: bool) -> str:
        """Look at who is slow; why shares change, in words, where they do."""
        if moved:
            told = "the ranks have not been timed yet" if self.parts else ""
            self._balance.forget()
            return told
        if not self.unequal_shares:
            return ""
        whole = [seconds for times in self._times.values() for seconds in times]
        step_s = float(np.median(whole)) if whole else 0.0
        own_s = [float(report[2]) for report in reports]
        size = self.plan.global_batch_size
        return self._balance.review(own_s, step_s, size, *self._share_bounds(len(own_s)))

    def _share_bounds(self, ranks: int) -> tuple[int, int | None]:
        """Fewest and most examples of a rank in a step."""
        least = max(LEAST_SHARE, self.limits.min_atomic_batch_size)
        bound = self._atomic_bound
        if bound is None:
            return least, None
        passes = self.limits.max_accumulation_steps + 1
        equal = -(-self.plan.global_batch_size // ranks)
        fewest, most = shares_in_passes(min(least, bound), bound, passes, equal)
        return max(least, fewest), most

    def _slowness(self, reports: Sequence[np.ndarray]) -> float:
        """Of steps with the shares decided on, in steps of a quarter: the rest is chance."""
        own = [float(report[2]) for report in reports]
        if len(own) < 2 or not all(math.isfinite(seconds) and seconds > 0 for seconds in own):
            return 1.0
        examples = self.plan.global_batch_size
        timed = self._balance.parts_of(examples, len(own))
        if min(timed) < 1:
            return 1.0
        coming = self._balance.decided(examples, len(own), *self._share_bounds(len(own)))
        scaled = [t * new / old for t, new, old in zip(own, coming, timed, strict=True)]
        return max(0.25, round(4 * effective_slowness(scaled, coming)) / 4)

    def _decide(self, reports: Sequence[np.ndarray], ranks: int) -> str:
        """Choose the plan; why, in words, where it changes."""
        limits = self._limits_now()
        nearest = nearest_plan(limits, self.plan.global_batch_size, ranks)
        reason = ""
        atomic = self.plan.atomic_batch_size(ranks)
        if (
            nearest.global_batch_size != self.plan.global_batch_size
            or atomic > (limits.max_atomic_batch_size or atomic)
            or self.plan.accumulation_steps > limits.max_accumulation_steps
        ):
            reason = f"passes of {atomic} examples on each of {ranks} ranks are not possible"
            if self._memory_bound is not None and atomic > self._memory_bound:
                reason = f"a pass of {atomic} examples did not fit into the memory of a rank"
            self.plan = nearest
        if self._doubted:
            return reason  # is it a change, or a busy moment?
        model = self._fitted()
        tracker = self._tracker
        if model is None or tracker is None or tracker.steps < _EVIDENCE:
            return reason
        noise = tracker.cautious_noise_scale()
        hosts = len({report[0] for report in reports})
        now_slow, (low, _) = self._slowness(reports), self._share_bounds(ranks)

        def slowness(atomic: np.ndarray, extra: np.ndarray) -> np.ndarray:
            return now_slow * self._balance.slowness_of(atomic, extra, self.plan, low)

        bounded = dataclasses.replace(
            limits, max_batch_size=min(limits.max_batch_size, _GROWTH * self._largest)
        )
        best = best_batch_plan(model, noise, bounded, hosts, ranks, slowness, _OPTIMISM)
        if best is None:
            return reason
        initial = limits.initial_batch_size
        now = score_plan(model, self.plan, noise, initial, hosts, ranks, slowness)
        hoped = best.goodput * math.exp(_OPTIMISM * (best.uncertainty - now.uncertainty))
        if self._patience.allows(hoped / now.goodput, best.goodput / now.goodput):
            reason = _why_changed(noise, now.goodput, best.goodput, hoped)
            self.plan = best.plan
            self._largest = max(self._largest, best.plan.global_batch_size)
        return reason

    @property
    def _atomic_bound(self) -> int | None:
        """Most examples in a pass: as the user allows, and as is known to fit into memory."""
        bounds = (self.limits.max_atomic_batch_size, self._memory_bound)
        return min((bound for bound in bounds if bound), default=None)

    def _limits_now(self) -> BatchLimits:
        return dataclasses.replace(self.limits, max_atomic_batch_size=self._atomic_bound)

    def _fitted(self) -> StepTimeModel | None:
        """The step time, fitted anew where it is known better or has changed."""
        known = {
            key: (min(len(times), _COUNTED_TIMES), median(seconds for seconds, _ in times))
            for key, times in self._seen.items()
        }
        before = self._fitted_to
        if any(
            key not in before
            or count != before[key][0]
            or abs(math.log(seconds / before[key][1])) > _TIMES_MOVED
            for key, (count, seconds) in known.items()
        ):
            self._model = fit_step_time(
                [
                    Observation(
                        *(hosts, ranks, atomic, extra, seconds, slowness),
                        own_s=own_s if own_s > 0 else None,
                    )
                    for (hosts, ranks, atomic, extra, slowness), times in self._seen.items()
                    for seconds, own_s in times
                ]
            )
            self._fitted_to = known
        return self._model

    def _schedule(self, step: int) -> None:
        whole = [seconds for times in self._times.values() for seconds in times]
        self._sample_every = self._look_every(whole)
        self._probe_every = 1 if self._sample_every == 1 else self._affordable_probes()
        # What is known of a young run changes quickly, and so does what was just found wrong.
        most = _YOUNG_STEPS if self._doubted else max(_YOUNG_STEPS, step // 4)
        self._next_review = step + min(steps_to_review(whole), most)

    def _look_every(self, step_s: Sequence[float]) -> int:
        """Of so many steps one is looked at; ``step_s``: times of those since the last review."""
        tracker = self._tracker
        if tracker is None or tracker.steps < _FIRST_STEPS:
            return 1
        uncertainty = tracker.uncertainty()
        if tracker.steps < _UNCERTAIN_STEPS and uncertainty > _UNCERTAIN:
            return 1
        certain = uncertainty <= _CHANGING
        if certain:
            self._certain_at = tracker.steps
        often, seldom = _SAMPLE_EVERY
        changing = not certain and tracker.steps < self._certain_at + _LOOKS_AFTER_CHANGE
        if changing or self._bad_running:
            return often
        look_s = self.look_times.typical_s()
        if not step_s or math.isnan(look_s):
            return max(self._sample_every, often)
        return min(max(math.ceil(look_s / (_LOOKS_COST * median(step_s))), often), seldom)

    def _affordable_probes(self) -> int:
        """A step in two passes costs the constant part of one more."""
        often, seldom = _PROBE_EVERY
        if self._model is None:
            return seldom
        whole = self._model.predict(1, 1, self.plan.global_batch_size, 0).step_s
        cost = self._model.alpha_c / float(whole)
        return min(max(math.ceil(cost / _PROBES_COST), often), seldom)

    def _announce(self, context: Context, reason: str) -> None:
        plan, ranks = self.plan, context.engine.size
        atomic = plan.atomic_batch_size(ranks)
        if self.parts:
            step = context.progress.step
            atomic = max(-(-part // self.passes(step, part, ranks)) for part in self.parts)
        context.sink.send(
            msg.BatchPlan(
                step=context.progress.step,
                global_batch_size=plan.global_batch_size,
                atomic_batch_size=atomic,
                accumulation_steps=plan.accumulation_steps,
                lr_scale=self.adjustments()[-1].factor,
                limits=dataclasses.asdict(self._limits_now()),
                reason=reason,
            )
        )

    def metrics(self) -> dict[str, Any]:
        """Fields of the run's metrics; what is not known yet, or infinite, is left out."""
        found: dict[str, Any] = {"global_batch_size": self.plan.global_batch_size}
        if self.skipped_steps:
            found["skipped_steps"] = self.skipped_steps
        if self._rank_s:
            found["rank_s"] = self._rank_s
        if self._ranks == 1:
            found["passes"] = self._passes_made
        if self.unequal_shares and self._ranks > 1:
            size = self.plan.global_batch_size
            found["shares"] = list(self._balance.parts_of(size, self._ranks))
        noise = self._noise_scale
        if math.isfinite(noise):
            found["noise_scale"] = noise
            size = max(self.plan.global_batch_size, self.limits.initial_batch_size)
            initial = self.limits.initial_batch_size
            found["efficiency"] = float(statistical_efficiency(noise, initial, size))
        return found

    # -- what lasts ------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, for a broadcast or a checkpoint."""
        return {
            "plan": dataclasses.asdict(self.plan),
            "progress": self.progress,
            "skipped_steps": self.skipped_steps,
            "bad_running": self._bad_running,
            "memory_bound": self._memory_bound,
            "tracker": self._tracker.state_dict() if self._tracker is not None else None,
            "norms": [list(values) for values in self._norms],
            "noise_scale": self._noise_scale,
            "rank_s": self._rank_s,
            "balance": self._balance.state_dict(),
            "wished": self._patience.wished,
            "seen": [[list(key), list(times)] for key, times in self._seen.items()],
            "largest": self._largest,
            "next_review": self._next_review,
            "sample_every": self._sample_every,
            "certain_at": self._certain_at,
            "probe_every": self._probe_every,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What :meth:`state_dict` gave, here or in the process that goes on with the run."""
        self.plan = BatchPlan(**state["plan"])
        self.progress = state["progress"]
        self.skipped_steps = state["skipped_steps"]
        self._bad_running = state["bad_running"]
        self._memory_bound = state["memory_bound"]
        if self._tracker is not None and state["tracker"] is not None:
            self._tracker.load_state_dict(state["tracker"])
        if len(state["norms"][0]) == len(self._norms[0]):
            self._norms = (list(state["norms"][0]), list(state["norms"][1]))
        self._noise_scale = state["noise_scale"]
        self._rank_s = list(state.get("rank_s", []))
        if "balance" in state:  # not in checkpoints of before
            self._balance.load_state_dict(state["balance"])
        self._patience.wished = state.get("wished", 0)
        self._seen = {
            (key[0], key[1], key[2], key[3], key[4]): deque(
                # A checkpoint of before has no own times.
                (
                    tuple(each) if isinstance(each, list | tuple) else (each, math.nan)
                    for each in times
                ),
                maxlen=_KEPT_TIMES,
            )
            for key, times in state["seen"]
        }
        self._largest = state["largest"]
        self._next_review = state["next_review"]
        self._sample_every = state["sample_every"]
        self._certain_at = state.get("certain_at", 0)  # not in checkpoints of before
        self._probe_every = state["probe_every"]


def _why_changed(noise: float, now: float, expected: float, hoped: float) -> str:
    """Why the batch changes: goodput now, expected, and possible as far as is known.

    >>> _why_changed(207.3, 700.0, 936.0, 990.0)
    'at a noise scale of 207 examples, 936 useful examples/s are expected instead of 700'
    >>> _why_changed(207.3, 938.0, 936.0, 990.0)
    'at a noise scale of 207 examples, up to 990 useful examples/s are possible instead of 938: it was never measured, so it is tried'
    """  # noqa: E501
    at = f"at a noise scale of {noise:.0f} examples"
    if expected > (1 + _NOTABLE_GAIN) * now:
        return f"{at}, {expected:.0f} useful examples/s are expected instead of {now:.0f}"
    return (
        f"{at}, up to {hoped:.0f} useful examples/s are possible instead of {now:.0f}: it was "
        "never measured, so it is tried"
    )


def _split(gathered: np.ndarray) -> list[np.ndarray]:
    """The reports of all ranks, one after the other, taken apart."""
    reports, at = [], 0
    while at < len(gathered):
        length = _HEADER + int(gathered[at + 3] * gathered[at + 4])
        reports.append(gathered[at : at + length])
        at += length
    return reports


def _host_number() -> int:
    name = os.environ.get("HVD_ELASTIC_HOST") or socket.gethostname()
    return zlib.crc32(name.encode())

"""Planner that adapts the batch to the measured gradient noise scale and step times."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from hvd_elastic import run_events
from hvd_elastic.model.goodput import BatchLimits, BatchPlan, statistical_efficiency
from hvd_elastic.model.lr_rules import Adjustment, Rule, Situation, adascale
from hvd_elastic.model.timings import RANK_RULES, Configuration, StepTimings
from hvd_elastic.policy.batch import BatchChoice
from hvd_elastic.policy.sampling import GradientNoise, GradientSampling
from hvd_elastic.worker.planning.batch_bounds import bounds_at_odds
from hvd_elastic.worker.planning.compute_times import (
    ComputeTimes,
    NewEvent,
    SamplingCost,
    no_event,
)
from hvd_elastic.worker.planning.planner import Report, ReviewedPlanner
from hvd_elastic.worker.planning.samples import Samples
from hvd_elastic.worker.planning.schedule_checks import ScheduleChecks
from hvd_elastic.worker.worker import Worker

_YOUNG_STEPS = 10
"""Most steps until the next review early in a run, or when step times may have shifted: estimates
still change quickly then."""


class AdaptivePlanner(ReviewedPlanner):
    """Chooses the batch plan from measurements; the plan is the same on all ranks.

    Args:
        limits: bounds on the batch plan that the user set.
        unequal_shares: whether slow ranks get fewer examples of a step.
        new_event: creates an event on the training device.

    Attributes:
        choice: current batch plan and shares.
        timings: step times that rank 0 has collected.
        noise: estimate of the gradient noise scale.
        sampling: decides which steps are sampled.
        sampling_cost: measures the time that sampling takes on this rank.
        rule: learning-rate rule.
        progress: scale-invariant progress: equivalent number of steps at the initial batch size.
    """

    adapts = True
    _option = "max_batch_size=... of the loader adapts the batch to the gradients"

    def __init__(
        self,
        limits: BatchLimits,
        examples: int,
        unequal_shares: bool = True,
        new_event: NewEvent = no_event,
    ) -> None:
        super().__init__(limits.initial_batch_size, ComputeTimes(new_event=new_event))
        self.examples = examples
        self.choice = BatchChoice(limits, unequal_shares)
        self.timings = StepTimings(RANK_RULES)
        self.noise = GradientNoise(0, limits.initial_batch_size, examples)
        self.sampling = GradientSampling()
        self.sampling_cost = SamplingCost(new_event=new_event)
        self.rule: Rule = adascale
        self.progress = 0.0
        self._passes_begun: dict[int, float] = {}
        """Progress in epochs at the beginning of the latest two passes over the data, by number. A
        rank that enters one in its middle must judge as those did that were there."""
        self._statistics: Samples | None = None
        self._own_memory_bound = math.inf
        self._may_have_shifted = False
        self._schedule_checks = ScheduleChecks()

    def attach(self, statistics: Samples, rule: Rule) -> None:
        """Set the source of gradient statistics, and the learning-rate rule."""
        self._statistics, self.rule = statistics, rule
        initial = self.limits.initial_batch_size
        self.noise = GradientNoise(statistics.groups, initial, self.examples)

    @property
    def limits(self) -> BatchLimits:
        """Bounds on the batch plan that the user set."""
        return self.choice.limits

    @property
    def plan(self) -> BatchPlan:
        """Batch plan in use."""
        return self.choice.plan

    @property
    def batch_size(self) -> int:
        return self.plan.global_batch_size

    @property
    def parts(self) -> tuple[int, ...]:
        return self.choice.balance.parts

    @property
    def cut(self) -> Hashable:
        return self.plan, self.parts, self.sampling.probe_every, self.choice.memory_bound

    def passes(self, step: int, share: int, ranks: int) -> int:
        passes = self.plan.accumulation_steps + 1
        alone = ranks == 1 and passes == 1 and self.limits.max_accumulation_steps > 0
        if alone and self.sampling.sampled(step, probing=True):
            passes = 2
        # At least two examples in each pass if possible: batch normalisation cannot train on one.
        least = max(2, self.limits.min_atomic_batch_size)
        passes = max(1, min(passes, share // least))
        bound = self.choice.atomic_bound
        if bound is not None and self.limits.max_accumulation_steps > 0:
            # The last step of an epoch may be slightly larger than the plan's batch size.
            passes = max(passes, -(-share // bound))
        return passes

    def sampled(self, step: int) -> bool:
        if self._statistics is None or not self._statistics.ready:
            return False
        probing = self._ranks == 1 and self.plan.accumulation_steps == 0
        return self.sampling.sampled(step, probing=probing)

    def adjustments(self) -> list[Adjustment]:
        """Return the learning-rate adjustments: one per parameter group, then one for all."""
        initial = self.limits.initial_batch_size
        scale = self.plan.global_batch_size / initial
        return [
            self.rule(Situation(scale, norm, variance / initial, self.epochs))
            for norm, variance in zip(*self.noise.norms, strict=True)
        ]

    def advance(self, gain: float, step_examples: int) -> None:
        self.progress += gain * min(1.0, step_examples / self.batch_size)

    def rate_advice(self) -> str:
        initial, size = self.limits.initial_batch_size, self.plan.global_batch_size
        scale = max(adjustment.factor for adjustment in self.adjustments())
        if scale <= 1:
            return ""
        return (
            f". For the batch of {size} examples, {size / initial:.3g} times the initial "
            f"{initial}, hvd_elastic has multiplied the learning rate by {scale:.3g}: a "
            "smaller max_batch_size of the loader, or lr_rule='none' (or 'sqrt') of the "
            "DistributedOptimizer, keeps it lower"
        )

    @property
    def epochs(self) -> float:
        """Scale-invariant progress in passes over the data at the initial batch size."""
        return self.progress * self.limits.initial_batch_size / self.examples

    def progress_in(self, unit: str) -> float:
        return self.progress if unit == "step" else self.epochs

    def is_enough(self, done: int, count: int, unit: str = "epoch") -> bool:
        """See the base class; rounds to the nearest step, or pass over the data.

        Within a pass the answer is what it was at its beginning.
        """
        if count <= 0 or done <= 0:
            return count <= 0
        made = self.progress if unit == "step" else self._begun(done)
        return made * (1 + 0.5 / done) >= count

    def _begun(self, done: int) -> float:
        """Return the progress in epochs when the pass after ``done`` others began."""
        if done not in self._passes_begun:
            last = {n: made for n, made in self._passes_begun.items() if n == done - 1}
            self._passes_begun = {**last, done: self.epochs}
        return self._passes_begun[done]

    def out_of_memory(self, pass_examples: int) -> bool:
        bound = self.choice.bound_after_failure(pass_examples)
        self._own_memory_bound = min(self._own_memory_bound, bound)
        return bound < pass_examples

    # -- between steps ---------------------------------------------------------------------

    def review_if_due(self, worker: Worker) -> None:
        self._schedule_checks.compare_schedules(worker, self.limits, self.epochs)
        moved = worker.generation != self._generation
        super().review_if_due(worker)
        if moved:
            if problem := bounds_at_odds(self.limits, self._ranks):
                worker.warn_once(problem)
        self.skipped.refuse_many(worker.progress.step, self.rate_advice)

    @property
    def _planned(self) -> tuple[Any, tuple[int, ...]]:
        return self.plan, self.parts

    def _report(self, *, moved: bool) -> Report:
        assert self._statistics is not None
        bound, self._own_memory_bound = self._own_memory_bound, math.inf
        rows = self._statistics.drain()
        if moved:
            # The ranks' parts of a sample add up only within the world that took it.
            rows = rows[:0]
        return super()._report(moved=moved)._replace(memory_bound=bound, samples=rows)

    def _decide(self, reports: Sequence[Report], *, moved: bool) -> tuple[str, str]:
        self._learn(reports)
        why_shares = self._share_out(reports, moved=moved)
        why_plan = self._choose_plan(reports)
        self.choice.cut_shares(self._ranks)
        return why_shares, why_plan

    def _learn(self, reports: Sequence[Report]) -> None:
        """Add what all ranks have measured since the last review to the estimates."""
        choice, ranks = self.choice, len(reports)
        bound = min(report.memory_bound for report in reports)
        if math.isfinite(bound):
            choice.memory_bound = min(choice.memory_bound or int(bound), int(bound))
        for finite in self.noise.add_samples([report.samples for report in reports]):
            self.skipped.note_step(finite=finite)
        compute_s = [report.compute_s for report in reports]
        slowness = choice.slowness(compute_s)
        slowest = float(np.max(compute_s))  # NaN if any rank's time is unknown
        self._may_have_shifted = False
        for passes, times in self.times.step_s.items():
            # With unequal shares the number of passes can differ between ranks.
            extra = self.plan.accumulation_steps if self.parts else passes - 1
            atomic = self.batch_size / ranks / (extra + 1)
            where = Configuration(_hosts(reports), ranks, atomic, extra, slowness)
            if self.timings.add_window(where, float(np.median(times)), slowest):
                self._may_have_shifted = False
            else:
                self._may_have_shifted |= self.timings.may_have_shifted(where)

    def _share_out(self, reports: Sequence[Report], *, moved: bool) -> str:
        """Choose the shares; return the reason if they change, else ""."""
        if moved:
            told = "the ranks have not been timed yet" if self.parts else ""
            self.choice.balance.forget()
            return told
        compute_s = [report.compute_s for report in reports]
        return self.choice.review_shares(compute_s, self._typical_step_s())

    def _choose_plan(self, reports: Sequence[Report]) -> str:
        """Choose the batch plan; return the reason if it changes, else ""."""
        ranks = len(reports)
        reason = self.choice.keep_to_limits(ranks)
        if self._may_have_shifted:
            return reason  # the next review can tell a lasting change from a short disturbance
        noise = self.noise.cautious_scale
        model = None if math.isnan(noise) else self.timings.model()
        if model is None:
            return reason
        slowness = self.choice.slowness([report.compute_s for report in reports])
        found = self.choice.follow_goodput(model, noise, _hosts(reports), ranks, slowness)
        return found or reason

    def _steps_to_review(self, step: int) -> int:
        """See the base class; also decides which of the next steps are sampled."""
        self.sampling.schedule(
            self.noise.tracker,
            self.times.all_step_s(),
            self.sampling_cost.typical_s(),
            bad_steps=self.skipped.consecutive > 0,
            model=self.timings.fitted,
            batch=self.batch_size,
        )
        most = _YOUNG_STEPS if self._may_have_shifted else max(_YOUNG_STEPS, step // 4)
        return min(super()._steps_to_review(step), most)

    def _announce(self, worker: Worker, before: Any, why: str, *, first: bool) -> None:
        plan, ranks, step = self.plan, self._ranks, worker.progress.step
        if plan == before and not first:
            return
        atomic = plan.atomic_batch_size(ranks)
        if self.parts:
            atomic = max(-(-part // self.passes(step, part, ranks)) for part in self.parts)
        initial = plan.global_batch_size == self.limits.initial_batch_size
        worker.sink.send(
            run_events.BatchPlan(
                step=step,
                global_batch_size=plan.global_batch_size,
                atomic_batch_size=atomic,
                accumulation_steps=plan.accumulation_steps,
                lr_scale=self.adjustments()[-1].factor,
                limits=run_events.BatchLimits(**dataclasses.asdict(self.choice.limits_now)),
                reason=why or ("the initial batch size" if initial else "as before"),
            )
        )

    def metrics(self) -> dict[str, Any]:
        """See the base class; unknown and infinite values are left out."""
        found, size = super().metrics(), self.batch_size
        if self._ranks == 1:
            found["passes"] = self.times.passes
        if self.choice.unequal_shares and self._ranks > 1:
            found["shares"] = list(self.choice.balance.parts_of(size, self._ranks))
        noise, initial = self.noise.scale, self.limits.initial_batch_size
        if math.isfinite(noise):
            found["noise_scale"] = noise
            efficiency = statistical_efficiency(noise, initial, max(size, initial))
            found["efficiency"] = float(efficiency)
        return found

    # -- state -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "progress": self.progress,
            "passes_begun": list(self._passes_begun.items()),
            "seen": self.timings.state_dict(),
            **self.choice.state_dict(),
            **self.noise.state_dict(),
            **self.sampling.state_dict(),
            **self.skipped.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.progress = state["progress"]
        self._passes_begun = dict(state["passes_begun"])
        self.timings.load_state_dict(state["seen"])
        self.choice.load_state_dict(state)
        self.noise.load_state_dict(state)
        self.sampling.load_state_dict(state)
        self.skipped.load_state_dict(state)


def _hosts(reports: Sequence[Report]) -> int:
    return len({report.host for report in reports})

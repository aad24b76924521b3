"""Adapt the batch plan during training, from what the ranks measure.

Every few steps the ranks *review* the batch plan, at a step boundary that all know beforehand.
Each sends rank 0 the gradient norms and times it has collected. Rank 0 updates the noise scale and
the step-time model, chooses the plan and the shares (:mod:`hvd_elastic.policy.batch`), and
broadcasts them with all that the choice rests on. So ranks agree to the last bit, and whoever
survives can go on choosing.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import socket
import zlib
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from hvd_elastic.errors import ScriptError
from hvd_elastic.model.goodput import BatchLimits, BatchPlan, statistical_efficiency
from hvd_elastic.model.lr_rules import Adjustment, Rule, Situation, adascale
from hvd_elastic.model.timings import RANK_RULES, Configuration, StepTimings
from hvd_elastic.policy.batch import BatchChoice, steps_to_review
from hvd_elastic.policy.sampling import GradientNoise, GradientSampling
from hvd_elastic.torch.device_times import cuda_event
from hvd_elastic.torch.gradient_statistics import GradientStatistics
from hvd_elastic.torch.rebalancing import announce_shares
from hvd_elastic.torch.schedule import ScheduleChecks
from hvd_elastic.training.planning.batch_bounds import bounds_at_odds
from hvd_elastic.training.planning.compute_times import ComputeTimes, SamplingCost
from hvd_elastic.wire import messages as msg

if TYPE_CHECKING:
    from hvd_elastic.torch.context import Context

__all__ = ["Adaptation"]

_YOUNG_STEPS = 10
"""Most steps to the next review of a run that has made few, or whose step times may have shifted:
what is known of it changes quickly."""
_BAD_STEPS = 10
"""So many consecutive steps without a finite gradient end the job."""
_BAD_STEPS_SCALED = 50
"""The same where a gradient scaler begins with a scale that is too large, and halves it."""
_HEADER = 5


class Adaptation:
    """The batch plan of a run, and what was measured to choose it; the same on all ranks.

    Args:
        limits: what the user allows.
        examples: in the data set.
        unequal_shares: whether slow ranks get fewer examples of a step.

    Attributes:
        choice: the batch plan and the shares.
        timings: step times that rank 0 has collected.
        own_times: of this rank.
        noise: the gradient noise scale.
        sampling, sampling_cost: which steps are sampled, and the time it takes this rank.
        skipped: steps that were not taken.
        rule: of the learning rate.
        progress: scale-invariant progress: steps of the initial batch size that were as good.
    """

    def __init__(self, limits: BatchLimits, examples: int, unequal_shares: bool = True) -> None:
        self.examples = examples
        self.choice = BatchChoice(limits, unequal_shares)
        self.timings = StepTimings(RANK_RULES)
        self.own_times = ComputeTimes(new_event=cuda_event)
        self.noise = GradientNoise(0, limits.initial_batch_size, examples)
        self.sampling = GradientSampling()
        self.sampling_cost = SamplingCost(new_event=cuda_event)
        self.skipped = SkippedSteps()
        self.rule: Rule = adascale
        self.progress = 0.0
        self._statistics: GradientStatistics | None = None
        self._own_memory_bound = math.inf
        self._next_review = 0
        self._generation = -1
        """Of the last review; -1: there was none in this process."""
        self._may_have_shifted = False
        self._rank_s: list[float | None] = []
        self._ranks = 1
        self._at_odds = ""
        self._schedule_checks = ScheduleChecks()

    # -- during a step ---------------------------------------------------------------------

    def attach(self, statistics: GradientStatistics, rule: Rule) -> None:
        """Take the statistics of the optimizer's gradients, and its learning-rate rule."""
        self._statistics, self.rule = statistics, rule
        initial = self.limits.initial_batch_size
        self.noise = GradientNoise(statistics.groups, initial, self.examples)

    @property
    def limits(self) -> BatchLimits:
        """What the user allows."""
        return self.choice.limits

    @property
    def plan(self) -> BatchPlan:
        """The batch plan in use."""
        return self.choice.plan

    @plan.setter
    def plan(self, plan: BatchPlan) -> None:
        self.choice.plan = plan

    @property
    def parts(self) -> tuple[int, ...]:
        """Examples of each rank in a full step; empty: equal shares."""
        return self.choice.balance.parts

    @property
    def cut(self) -> tuple[BatchPlan, int, int | None]:
        """What the cutting of steps into passes depends on, besides step and ranks."""
        return self.plan, self.sampling.probe_every, self.choice.memory_bound

    def passes(self, step: int, share: int, ranks: int) -> int:
        """Return in how many passes a rank makes its ``share`` of the examples of a step."""
        passes = self.plan.accumulation_steps + 1
        alone = ranks == 1 and passes == 1 and self.limits.max_accumulation_steps > 0
        if alone and self.sampling.sampled(step, probing=True):
            passes = 2
        # Two examples in each, where there are, for layers that cannot train on one.
        least = max(2, self.limits.min_atomic_batch_size)
        passes = max(1, min(passes, share // least))
        bound = self.choice.atomic_bound
        if bound is not None and self.limits.max_accumulation_steps > 0:
            # The last step of an epoch may be a little larger than the plan's.
            passes = max(passes, -(-share // bound))
        return passes

    def sampled(self, step: int) -> bool:
        """Return whether the gradient statistics of the step after ``step`` are sampled."""
        if self._statistics is None or not self._statistics.ready:
            return False
        probing = self._ranks == 1 and self.plan.accumulation_steps == 0
        return self.sampling.sampled(step, probing=probing)

    def step_begins(self, passes: int, waited_s: float) -> None:
        """Begin a step of so many passes; see :meth:`ComputeTimes.step_begins`."""
        self.own_times.step_begins(waited_s, passes)

    def step_ends(self, examples: int, passes: int, waited_s: float) -> None:
        """End a step; see :meth:`ComputeTimes.step_ends`."""
        full = examples == self.plan.global_batch_size
        self.own_times.step_ends(waited_s, passes, full=full)

    def adjustments(self) -> list[Adjustment]:
        """Return those of the learning rate: for each parameter group, and last for all."""
        initial = self.limits.initial_batch_size
        scale = self.plan.global_batch_size / initial
        return [
            self.rule(Situation(scale, norm, variance / initial, self.epochs))
            for norm, variance in zip(*self.noise.norms, strict=True)
        ]

    def advance(self, gain: float, step_examples: int) -> None:
        """Count a step that was taken; ``gain`` is that of a full one."""
        self.progress += gain * min(1.0, step_examples / self.plan.global_batch_size)

    def skip(self, step: int) -> None:
        """Count a step that is not taken, since its gradients are not finite.

        Raises:
            ScriptError: none was taken for many steps.
        """
        self.skipped.add()
        self.skipped.refuse_many(step, self._rate_advice())

    def _rate_advice(self) -> str:
        """What to change where it was this class that raised the learning rate; else nothing."""
        initial, size = self.limits.initial_batch_size, self.plan.global_batch_size
        scale = max(adjustment.factor for adjustment in self.adjustments())
        if scale <= 1:
            return ""
        return (
            f". For the batch of {size} examples, {size / initial:.3g} times the initial "
            f"{initial}, hvd_elastic has multiplied the learning rate by {scale:.3g}: a "
            "smaller max_batch_size of the DataLoader, or lr_rule='none' (or 'sqrt') of the "
            "DistributedOptimizer, keeps it lower"
        )

    @property
    def epochs(self) -> float:
        """Scale-invariant progress in passes over the data at the initial batch size."""
        return self.progress * self.limits.initial_batch_size / self.examples

    def enough(self, epoch: int, count: int) -> bool:
        """Return whether ``epoch`` passes over the data make ``count`` epochs, rounded."""
        return epoch > 0 and self.epochs * (1 + 0.5 / epoch) >= count

    def out_of_memory(self, atomic_batch_size: int) -> bool:
        """Note that a pass did not fit; return whether a smaller one is allowed."""
        bound = self.choice.bound_after_failure(atomic_batch_size)
        self._own_memory_bound = min(self._own_memory_bound, bound)
        return bound < atomic_batch_size

    def want_review(self) -> None:
        """Review at the next step boundary; all ranks call this."""
        self._next_review = 0

    # -- between steps ---------------------------------------------------------------------

    def review_if_due(self, context: Context) -> None:
        """Review between two steps; a collective, due in the same steps on all ranks."""
        self._schedule_checks.look(context, self)
        first, moved = self._generation < 0, context.generation != self._generation
        step = context.progress.step
        if not moved and step < self._next_review:
            return
        if self._statistics is None:
            raise ScriptError(
                "DataLoader(max_batch_size=...) adapts the batch to the gradients, and no "
                "optimizer was given to hvd_elastic.torch.DistributedOptimizer; wrap yours in it"
            )
        rows = self._statistics.drain()
        if moved:
            # Parts of samples from another world cannot be added up in this one.
            rows = rows[:0]
            self.own_times.forget()
        engine = context.engine
        self._ranks = engine.size
        gathered = self._report(rows)
        if engine.size > 1:
            gathered = engine.gather(gathered, "hvd_elastic.review")
        before = self.plan, self.parts
        reason = why_shares = ""
        if engine.rank == 0:
            reports = _split(gathered.numpy())
            self._learn(reports)
            why_shares = self._share_out(reports, moved=moved)
            reason = self._decide(reports, engine.size)
            self.choice.cut_shares(engine.size)
            if (self.plan, self.parts) != before:
                self._rank_s = []  # measured with the plan and the shares before
            self._schedule(step)
        if engine.size > 1:
            decided = engine.broadcast_bytes(json.dumps(self.state_dict()).encode(), 0)
            if engine.rank != 0:
                self.load_state_dict(json.loads(decided))
        self.own_times.clear_steps()
        if (self.plan, self.parts) != before:
            self.own_times.forget()
        self._generation = context.generation
        if engine.rank == 0:
            if self.plan != before[0] or first:
                initial = self.plan.global_batch_size == self.limits.initial_batch_size
                self._announce(
                    context, reason or ("the initial batch size" if initial else "as before")
                )
            if self.parts != before[1]:
                why = why_shares or reason
                announce_shares(context, self.plan.global_batch_size, self.parts, why)
        if moved:
            self._warn_of_bounds(context)
        self.skipped.refuse_many(step, self._rate_advice())

    def _warn_of_bounds(self, context: Context) -> None:
        """Warn once where the bounds cannot be kept, and again in another such world."""
        told, self._at_odds = self._at_odds, bounds_at_odds(self.limits, self._ranks)
        if self._at_odds not in ("", told) and context.engine.rank == 0:
            context.warn(self._at_odds)

    def _report(self, rows: torch.Tensor) -> torch.Tensor:
        """Return what this rank tells rank 0, as :func:`_split` reads it."""
        header = [
            float(_host_number()),
            self._own_memory_bound,
            self.own_times.typical_s(),
            rows.shape[0],
            rows.shape[1],
        ]
        self._own_memory_bound = math.inf
        return torch.cat([torch.tensor(header, dtype=torch.float64), rows.double().reshape(-1)])

    def _learn(self, reports: Sequence[_Report]) -> None:
        """Take what all ranks have measured since the last review."""
        choice, ranks = self.choice, len(reports)
        bound = min(report.memory_bound for report in reports)
        if math.isfinite(bound):
            choice.memory_bound = min(choice.memory_bound or int(bound), int(bound))
        for finite in self.noise.add([report.samples for report in reports]):
            self.skipped.note(finite=finite)
        compute_s = [report.compute_s for report in reports]
        self._rank_s = [each if math.isfinite(each) else None for each in compute_s]
        self._may_have_shifted = False
        for passes, times in self.own_times.step_s.items():
            # With unequal shares this rank's passes need not be those of the others.
            extra = self.plan.accumulation_steps if self.parts else passes - 1
            atomic = self.plan.global_batch_size / ranks / (extra + 1)
            slowness = choice.slowness(compute_s)
            where = Configuration(_hosts(reports), ranks, atomic, extra, slowness)
            slowest = float(np.max(compute_s))  # NaN if that of any is
            if self.timings.add(where, float(np.median(times)), slowest):
                self._may_have_shifted = False
            else:
                self._may_have_shifted |= self.timings.may_have_shifted(where)

    def _share_out(self, reports: Sequence[_Report], *, moved: bool) -> str:
        """Decide on the shares; return why they change, in words, where they do."""
        if moved:
            told = "the ranks have not been timed yet" if self.parts else ""
            self.choice.balance.forget()
            return told
        timed = self.own_times.all_step_s()
        step_s = median(timed) if timed else 0.0
        return self.choice.review_shares([report.compute_s for report in reports], step_s)

    def _decide(self, reports: Sequence[_Report], ranks: int) -> str:
        """Choose the plan; return why it changes, in words, where it does."""
        reason = self.choice.keep_to_limits(ranks)
        if self._may_have_shifted:
            return reason  # the next review tells a change from a busy moment
        model, noise = self.timings.model(), self.noise.cautious_scale
        if model is None or math.isnan(noise):
            return reason
        slowness = self.choice.slowness([report.compute_s for report in reports])
        found = self.choice.follow_goodput(model, noise, _hosts(reports), ranks, slowness)
        return found or reason

    def _schedule(self, step: int) -> None:
        """Decide when to sample, to probe and to review next."""
        step_s = self.own_times.all_step_s()
        self.sampling.schedule(
            self.noise.tracker,
            step_s,
            self.sampling_cost.typical_s(),
            bad_steps=self.skipped.consecutive > 0,
            model=self.timings.fitted,
            batch=self.plan.global_batch_size,
        )
        most = _YOUNG_STEPS if self._may_have_shifted else max(_YOUNG_STEPS, step // 4)
        self._next_review = step + min(steps_to_review(step_s), most)

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
                limits=dataclasses.asdict(self.choice.limits_now),
                reason=reason,
            )
        )

    def metrics(self) -> dict[str, Any]:
        """Return fields of the ``metrics`` event; what is unknown or infinite is left out."""
        size = self.plan.global_batch_size
        found: dict[str, Any] = {"global_batch_size": size}
        if self.skipped.count:
            found["skipped_steps"] = self.skipped.count
        if self._rank_s:
            found["rank_s"] = self._rank_s
        if self._ranks == 1:
            found["passes"] = self.own_times.passes
        if self.choice.unequal_shares and self._ranks > 1:
            found["shares"] = list(self.choice.balance.parts_of(size, self._ranks))
        noise, initial = self.noise.scale, self.limits.initial_batch_size
        if math.isfinite(noise):
            found["noise_scale"] = noise
            efficiency = statistical_efficiency(noise, initial, max(size, initial))
            found["efficiency"] = float(efficiency)
        return found

    # -- what lasts ------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, for a broadcast or a checkpoint."""
        return {
            "progress": self.progress,
            "rank_s": self._rank_s,
            "seen": self.timings.state_dict(),
            "next_review": self._next_review,
            **self.choice.state_dict(),
            **self.noise.state_dict(),
            **self.sampling.state_dict(),
            **self.skipped.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what :meth:`state_dict` gave, here or in the process that the run goes on from."""
        self.progress = state["progress"]
        self._rank_s = list(state.get("rank_s", []))  # early checkpoints have none
        self.timings.load_state_dict(state["seen"])
        self._next_review = state["next_review"]
        self.choice.load_state_dict(state)
        self.noise.load_state_dict(state)
        self.sampling.load_state_dict(state)
        self.skipped.load_state_dict(state)


class SkippedSteps:
    """Counts the steps that were not taken, since their gradients were not finite.

    Attributes:
        count: all of them.
        consecutive: the last steps that were bad, taken or not.
    """

    def __init__(self) -> None:
        self.count = 0
        self.consecutive = 0
        self._most = _BAD_STEPS

    def expect_overflows(self) -> None:
        """A gradient scaler is in use: steps whose gradients overflow are part of its search."""
        self._most = _BAD_STEPS_SCALED

    def note(self, *, finite: bool) -> None:
        """Note whether the gradients of a step are finite."""
        self.consecutive = 0 if finite else self.consecutive + 1

    def add(self) -> None:
        """Count a step that is not taken."""
        self.count += 1
        self.consecutive += 1

    def refuse_many(self, step: int, advice: str) -> None:
        """Raise ScriptError if too many consecutive steps, up to ``step``, were bad."""
        if self.consecutive >= self._most:
            raise ScriptError(
                f"the gradients were not finite in {self._most} steps running, up to step {step}: "
                "the loss is NaN or infinite on at least one rank. Look at the data and the loss, "
                f"lower the learning rate, or clip gradients{advice}"
            )

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, for a broadcast or a checkpoint."""
        return {"skipped_steps": self.count, "bad_running": self.consecutive}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what :meth:`state_dict` gave."""
        self.count, self.consecutive = state["skipped_steps"], state["bad_running"]


class _Report(NamedTuple):
    """What one rank tells rank 0 in a review.

    Attributes:
        host: a number of its name.
        memory_bound: most examples of a pass that fit into its memory; infinite: none has failed.
        compute_s: its typical compute time of a step [s]; NaN: not known.
        samples: see :meth:`GradientNoise.add`.
    """

    host: float
    memory_bound: float
    compute_s: float
    samples: np.ndarray


def _split(gathered: np.ndarray) -> list[_Report]:
    """Take apart the reports of all ranks, which follow one another."""
    reports, at = [], 0
    while at < len(gathered):
        host, memory_bound, compute_s, rows, columns = gathered[at : at + _HEADER].tolist()
        end = at + _HEADER + int(rows * columns)
        samples = gathered[at + _HEADER : end].reshape(int(rows), int(columns))
        reports.append(_Report(host, memory_bound, compute_s, samples))
        at = end
    return reports


def _hosts(reports: Sequence[_Report]) -> int:
    return len({report.host for report in reports})


def _host_number() -> int:
    name = os.environ.get("HVD_ELASTIC_HOST") or socket.gethostname()
    return zlib.crc32(name.encode())

"""A run in virtual time: the controller of a real run, on a cluster of numbers.

Step times, noise scale and pauses are those of the trace, with jitter; what the controller is told
of them are metrics events like those of a real worker. The batch plan follows the rule of
:class:`hvd_elastic.torch.adaptation.Adaptation`, and who gets which share of it is decided by the
ranks' own :class:`hvd_elastic.model.shares.ShareBalance`. The machine that forms generations is not
part of it: a rescale takes its pause and succeeds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvd_elastic.control.scaling import ScalingConfig, ScalingController
from hvd_elastic.model.goodput import (
    BatchPlan,
    PlanPatience,
    best_batch_plan,
    nearest_plan,
    score_plan,
    statistical_efficiency,
)
from hvd_elastic.model.shares import LEAST_SHARE, ShareBalance
from hvd_elastic.policy.snapshot import Allocation, HostOffer
from hvd_elastic.sim.adaptdl import AdaptDLRule
from hvd_elastic.sim.cluster import Cluster
from hvd_elastic.sim.static import best_at
from hvd_elastic.sim.trace import Trace

__all__ = ["Sample", "SimResult", "SimulatedDecision", "simulate"]

_TICK_S = (1.0, 60.0)
_CALM_AFTER = 20.0
"""Ticks grow with the time since anything last changed, divided by this. A real run looks at its
metrics every second; between changes nothing comes of that."""
_REVIEW_S = (2.0, 600.0)
_OPTIMISM = 0.5
_GROWTH = 2
_EVIDENCE_S = 3.0


@dataclass(frozen=True)
class SimulatedDecision:
    """A change of slots that the policy decided on."""

    at_s: float
    action: str
    slots: int
    reason: str


@dataclass(frozen=True)
class Sample:
    """How the run stood at one time.

    Attributes:
        at_s: virtual time [s].
        slots, batch: in use.
        goodput: true useful examples/s, 0 in a pause.
        best: the most that was possible then, by exhaustive search; NaN where not asked for.
        rate: price of the hosts in use [currency per hour].
    """

    at_s: float
    slots: int
    batch: int
    goodput: float
    best: float
    rate: float


@dataclass
class SimResult:
    """What came of a simulated run.

    Attributes:
        decisions: changes, in order.
        samples: at every tick.
        done: useful examples.
        reached_s: when the training's examples were done [s]; None: not within the trace.
        cost: of the hosts in use until then [currency].
        rescales: of any cause.
    """

    decisions: list[SimulatedDecision] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    done: float = 0.0
    reached_s: float | None = None
    cost: float = 0.0
    rescales: int = 0

    def mean_goodput(self, duration_s: float) -> float:
        """Useful examples/s over the time simulated."""
        return self.done / (self.reached_s or duration_s)


class _Job:
    """What trains: slots, batch plan, progress."""

    def __init__(
        self, trace: Trace, cluster: Cluster, rng: np.random.Generator, unequal_shares: bool
    ) -> None:
        self.unequal_shares = unequal_shares
        self.balance = ShareBalance()
        self.patience = PlanPatience()
        self.trace, self.cluster, self.rng = trace, cluster, rng
        self.limits = trace.workload.limits
        self.allocation = cluster.filled(Allocation(), min(trace.np, _offered(cluster)))
        self.plan = nearest_plan(self.limits, self.limits.initial_batch_size, self.allocation.slots)
        self.largest = self.limits.initial_batch_size
        self.step = 0.0
        self.examples = 0.0
        self.done = 0.0
        self._step_s: dict[Any, float] = {}

    def jittered(self, value: float) -> float:
        return float(value * math.exp(self.trace.jitter * self.rng.standard_normal()))

    @property
    def noise(self) -> float:
        return self.trace.workload.noise_at(self.done)

    def step_s(self) -> float:
        shares = self.balance.parts
        key = (self.plan, shares, self.allocation, self.cluster.link, self.cluster.hosts)
        if key not in self._step_s:
            plan, slots, extra = self.plan, self.allocation.slots, self.plan.accumulation_steps
            atomic = plan.global_batch_size / slots / (extra + 1)
            model = self.trace.workload.model(self.cluster.link)
            equal_s = self._pass_s(np.asarray(atomic * (extra + 1)))
            slowness = float(self._true_own_s().max() / equal_s)
            times = model.step_s(self.allocation.hosts, slots, atomic, extra, slowness)
            self._step_s[key] = float(times)
        return self._step_s[key]

    def own_s(self) -> list[float]:
        """A step's own work on each rank, as measured."""
        true = self._true_own_s()
        jitter = np.exp(self.trace.jitter * self.rng.standard_normal(len(true)))
        return list((true * jitter).tolist())

    def _true_own_s(self) -> np.ndarray:
        ranks = self.allocation.slots
        shares = self.balance.parts or (self.plan.global_batch_size / ranks,) * ranks
        slowness = np.asarray(self.cluster.slowness_of_ranks(self.allocation))
        return np.asarray(slowness * self._pass_s(np.asarray(shares)))

    def _pass_s(self, examples: np.ndarray) -> np.ndarray:
        """All passes over a rank's examples of a step, on a host of slowness 1 [s]."""
        work = self.trace.workload
        return (self.plan.accumulation_steps + 1) * work.alpha_c + work.beta_c * examples

    def review_shares(self, own_s: Sequence[float]) -> None:
        """The ranks look at what each of them took, and may cut the batch otherwise."""
        if self.unequal_shares:
            self.balance.review(own_s, self.step_s(), self.plan.global_batch_size, LEAST_SHARE)
            self.cut_shares()

    def cut_shares(self) -> None:
        """Make the shares of the plan as they were last decided on."""
        size, ranks = self.plan.global_batch_size, self.allocation.slots
        self.balance.cut(size, ranks, LEAST_SHARE)

    def efficiency(self) -> float:
        initial = self.limits.initial_batch_size
        size = max(self.plan.global_batch_size, initial)
        return float(statistical_efficiency(self.noise, initial, size))

    def goodput(self) -> float:
        return self.plan.global_batch_size / self.step_s() * self.efficiency()

    def train(self, seconds: float) -> None:
        steps = seconds / self.step_s()
        self.step += steps / self.jittered(1.0)
        self.examples = self.step * self.plan.global_batch_size
        self.done += steps * self.plan.global_batch_size * self.efficiency()


def simulate(
    trace: Trace,
    config: ScalingConfig | None,
    seed: int = 0,
    *,
    with_best: bool = False,
    rule: type[ScalingController | AdaptDLRule] = ScalingController,
) -> SimResult:
    """Run a trace.

    Args:
        trace: cluster, workload and changes.
        config: of the controller; None: the policy ``fixed``, which keeps to ``trace.np`` slots.
        seed: of the jitter.
        with_best: find the best possible goodput at each sample too; for budgets within it.
        rule: who decides. AdaptDL cuts its batches into equal shares, whatever the trace says.

    Raises:
        ValueError: the trace's limits leave no batch plan at all.
    """
    rng = np.random.default_rng(seed)
    cluster = Cluster(trace)
    cluster.advance(0.0)
    job = _Job(trace, cluster, rng, trace.unequal_shares and rule is not AdaptDLRule)
    controller = rule(config or ScalingConfig())
    return _Simulation(trace, config, controller, cluster, job, with_best).run()


class _Simulation:
    def __init__(
        self,
        trace: Trace,
        config: ScalingConfig | None,
        controller: ScalingController | AdaptDLRule,
        cluster: Cluster,
        job: _Job,
        with_best: bool,
    ) -> None:
        self._trace, self._cluster, self._job = trace, cluster, job
        self._config = config
        self._controller = controller
        self._result = SimResult()
        self._with_best = with_best
        self._best: dict[tuple[float, tuple[HostOffer, ...], int], float] = {}
        self._now = 0.0
        self._changed_at = 0.0
        self._review_at = 0.0
        self._wanted = job.allocation

    def run(self) -> SimResult:
        self._controller.hosts_are(self._offers(), 0.0)
        self._form()
        result, job = self._result, self._job
        while self._now < self._trace.duration_s and result.reached_s is None:
            self._tick()
            if job.done >= self._trace.workload.examples:
                result.reached_s = self._now
        result.done = job.done
        return result

    def _offers(self) -> list[HostOffer]:
        """What a hostfile says of the hosts: not how fast they are."""
        return [dataclasses.replace(host, slowness=1.0) for host in self._cluster.hosts]

    def _tick(self) -> None:
        job, controller, now = self._job, self._controller, self._now
        calm_s = (now - self._changed_at) / _CALM_AFTER
        end = now + max(min(max(calm_s, _TICK_S[0]), _TICK_S[1]), job.step_s())
        change_at = self._cluster.next_change_at()
        if change_at is not None:
            end = min(end, max(change_at, now))
        end = min(end, self._trace.duration_s)
        self._sample(job.goodput())
        job.train(end - now)
        self._pay(end - now)
        self._now = end
        self._report()
        if change_at is not None and self._cluster.advance(end):
            self._changed_at = self._now
            self._review_at = min(self._review_at, self._now + _EVIDENCE_S)
            self._follow_cluster()
        if self._config is None:
            self._review()
            return
        if controller.due(self._now):
            self._look()
        self._review()

    def _follow_cluster(self) -> None:
        self._controller.hosts_are(self._offers(), self._now)
        there = self._cluster.filled(self._wanted, self._trace.min_np)
        if there != self._job.allocation:
            self._rescale(there)

    def _look(self) -> None:
        found = self._controller.look(self._now)
        if found is None or found[0].action == "stay":
            return
        decision, _ = found
        self._result.decisions.append(
            SimulatedDecision(self._now, decision.action, decision.target.slots, decision.reason)
        )
        self._wanted = decision.target
        self._rescale(self._cluster.filled(decision.target, self._trace.min_np))

    def _rescale(self, allocation: Allocation) -> None:
        self._controller.rescaling()
        self._result.rescales += 1
        pause_s = self._job.jittered(self._trace.pause_s)
        self._job.allocation = allocation
        self._sample(0.0)
        self._pay(pause_s)
        self._now += pause_s
        self._controller.note("rescale_finished", {"pause_s": pause_s}, self._now)
        self._form()

    def _form(self) -> None:
        job = self._job
        self._changed_at = self._now
        self._review_at = self._now + _EVIDENCE_S
        job.balance.forget()
        self._controller.formed(hosts_of_ranks(job.allocation), self._now)
        self._plan(nearest_plan(job.limits, job.plan.global_batch_size, job.allocation.slots))

    def _plan(self, plan: BatchPlan) -> None:
        job = self._job
        job.plan = plan
        job.cut_shares()
        job.largest = max(job.largest, plan.global_batch_size)
        job.examples = job.step * plan.global_batch_size
        fields = {
            "global_batch_size": plan.global_batch_size,
            "accumulation_steps": plan.accumulation_steps,
            "limits": dataclasses.asdict(job.limits),
        }
        self._controller.note("batch_plan", fields, self._now)

    def _review(self) -> None:
        """The workers' own choice of the batch."""
        job = self._job
        if self._now < self._review_at:
            return
        calm_s = (self._now - self._changed_at) / 10
        self._review_at = self._now + min(max(_REVIEW_S[0], calm_s), _REVIEW_S[1])
        model = self._controller.evidence.model()
        if model is None:
            return
        limits = job.limits
        bounded = dataclasses.replace(
            limits, max_batch_size=min(limits.max_batch_size, _GROWTH * job.largest)
        )
        noise, on, ranks = job.jittered(job.noise), job.allocation.hosts, job.allocation.slots
        evidence = self._controller.evidence
        now_slow = evidence.steps_slowness

        def slow(atomic: np.ndarray, extra: np.ndarray) -> np.ndarray:
            return now_slow * job.balance.slowness_of(atomic, extra, job.plan, LEAST_SHARE)

        best = best_batch_plan(model, noise, bounded, on, ranks, slow, _OPTIMISM)
        if best is None:
            return
        now = score_plan(model, job.plan, noise, limits.initial_batch_size, on, ranks, slow)
        hoped = best.goodput * math.exp(_OPTIMISM * (best.uncertainty - now.uncertainty))
        if job.patience.allows(hoped / now.goodput, best.goodput / now.goodput):
            self._plan(best.plan)

    def _report(self) -> None:
        job = self._job
        own_s, shares = job.own_s(), job.balance.parts
        job.review_shares(own_s)
        fields: dict[str, Any] = {
            "step": job.step,
            "examples": job.examples,
            "size": job.allocation.slots,
            "noise_scale": job.jittered(job.noise),
            "global_batch_size": job.plan.global_batch_size,
        }
        if job.balance.parts == shares:
            fields["rank_s"] = own_s  # else they belong to the shares before
        if job.unequal_shares and job.allocation.slots > 1:
            size, ranks = job.plan.global_batch_size, job.allocation.slots
            fields["shares"] = list(job.balance.parts_of(size, ranks))
        self._controller.note("metrics", fields, self._now)

    def _sample(self, goodput: float) -> None:
        job = self._job
        best = self._best_now() if self._with_best else math.nan
        self._result.samples.append(
            Sample(
                self._now,
                job.allocation.slots,
                job.plan.global_batch_size,
                goodput,
                best,
                self._rate(),
            )
        )

    def _best_now(self) -> float:
        """The best static choice at a noise scale, which is rounded to 5 %."""
        noise = round(math.log(self._job.noise + 1) / 0.05)
        key = (self._cluster.link, self._cluster.hosts, noise)
        if key not in self._best:
            budget = self._config.objective.budget if self._config else None
            workload, most = self._trace.workload, self._trace.max_np
            args = (workload, self._cluster.hosts, self._cluster.link, self._job.noise)
            unequal = self._job.unequal_shares
            self._best[key] = best_at(*args, most, budget, unequal_shares=unequal).goodput
        return self._best[key]

    def _rate(self) -> float:
        prices = {host.name: host.price or 0.0 for host in self._cluster.hosts}
        return sum(prices.get(host, 0.0) for host, _ in self._job.allocation.counts)

    def _pay(self, seconds: float) -> None:
        self._result.cost += self._rate() * seconds / 3600


def hosts_of_ranks(allocation: Allocation) -> list[str]:
    """The host of each rank, in their order."""
    return [host for host, slots in allocation.counts for _ in range(slots)]


def _offered(cluster: Cluster) -> int:
    return sum(host.slots for host in cluster.hosts)

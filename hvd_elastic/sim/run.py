"""Simulate a run in virtual time: the scaling controller of a real run on a simulated cluster.

Step times, noise scale and pauses follow the trace, with jitter; the controller gets ``metrics``
events like those of a real worker. Batch plan and shares are chosen by the rule of real ranks,
:class:`hvd_elastic.policy.batch.BatchChoice`. The state machine of generations is not simulated:
every rescale takes its pause and succeeds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import numpy as np

from hvd_elastic import run_events as ev
from hvd_elastic.control.scaling import ScalingConfig, ScalingController
from hvd_elastic.model.goodput import BatchPlan, statistical_efficiency
from hvd_elastic.policy.batch import BatchChoice
from hvd_elastic.policy.evidence import Evidence
from hvd_elastic.policy.snapshot import Allocation, Decision, HostOffer
from hvd_elastic.run_events import ReadEvent
from hvd_elastic.sim.static import best_at
from hvd_elastic.sim.trace import Cluster, Trace

_TICK_S = (1.0, 60.0)
"""Shortest and longest tick."""
_CALM_AFTER = 20.0
"""A tick is as long as the time since the last change, divided by this. A real run gets metrics
every second, which tell nothing new while nothing changes."""
_REVIEW_S = (2.0, 600.0)
"""Shortest and longest time between reviews of the batch plan. Real ranks review every second."""
_CALM_REVIEWS_AFTER = 10.0
"""As ``_CALM_AFTER``, for reviews."""
_EVIDENCE_S = 3.0
"""Time after a change in which ranks time steps and sample gradients."""


class ScalingRule(Protocol):
    """Interface of a :class:`ScalingController`, or of a rule in its place, in the simulator."""

    evidence: Evidence

    def hosts_are(self, hosts: Sequence[HostOffer], now: float, /) -> None:
        """Set the hosts that may be used."""

    def rescaling(self) -> None:
        """Note that a rescale has begun."""

    def formed(self, hosts_of_ranks: Sequence[str], now: float, /) -> None:
        """Note the host of each rank after a rescale."""

    def note_event(self, event: ReadEvent, /) -> None:
        """Take an event of the run."""

    def due(self, now: float) -> bool:
        """Return whether it is time to look."""

    def decide_if_due(self, now: float) -> tuple[Decision, object] | None:
        """Return a decision and what it rests on; None: it is not time for one."""


@dataclass(frozen=True)
class SimulatedDecision:
    """A change of slots that the policy decided."""

    at_s: float
    action: str
    slots: int
    reason: str


@dataclass(frozen=True)
class Sample:
    """State of the run at one time.

    Attributes:
        at_s: virtual time [s].
        slots, batch: number of slots and global batch size in use.
        goodput: true goodput [useful examples/s]; 0 in a pause.
        best: largest possible goodput, by exhaustive search; NaN if not searched.
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
    """Result of a simulated run.

    Attributes:
        decisions: changes of slots, in order.
        samples: state at every tick.
        done: number of useful examples.
        reached_s: time when all useful examples were done [s]; None: not within the trace.
        cost: cost of the hosts in use until then [currency].
    """

    decisions: list[SimulatedDecision] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    done: float = 0.0
    reached_s: float | None = None
    cost: float = 0.0
    rescales: int = 0

    def mean_goodput(self, duration_s: float) -> float:
        """Return the mean goodput over the simulated time [useful examples/s]."""
        return self.done / (self.reached_s or duration_s)


class _Job:
    """The training job: slots, batch plan, progress."""

    def __init__(
        self, trace: Trace, cluster: Cluster, rng: np.random.Generator, unequal_shares: bool
    ) -> None:
        self.trace, self.cluster, self.rng = trace, cluster, rng
        self.choice = BatchChoice(trace.workload.limits, unequal_shares)
        self.allocation = cluster.filled(Allocation(), min(trace.np, _offered(cluster)))
        self.step = 0.0
        self.examples = 0.0
        self.done = 0.0
        self._step_s: dict[Any, float] = {}

    @property
    def plan(self) -> BatchPlan:
        return self.choice.plan

    @property
    def parts(self) -> tuple[int, ...]:
        """Examples of each rank in a step; empty: equal shares."""
        return self.choice.balance.parts

    def jittered(self, value: float) -> float:
        return float(value * math.exp(self.trace.jitter * self.rng.standard_normal()))

    @property
    def noise(self) -> float:
        return self.trace.workload.noise_at(self.done)

    def step_s(self) -> float:
        key = (self.plan, self.parts, self.allocation, self.cluster.link, self.cluster.hosts)
        if key not in self._step_s:
            plan, slots, extra = self.plan, self.allocation.slots, self.plan.accumulation_steps
            atomic = plan.global_batch_size / slots / (extra + 1)
            model = self.trace.workload.model(self.cluster.link)
            equal_s = self._pass_s(np.asarray(atomic * (extra + 1)))
            slowness = float(self._true_compute_s().max() / equal_s)
            times = model.step_s(self.allocation.hosts, slots, atomic, extra, slowness)
            self._step_s[key] = float(times)
        return self._step_s[key]

    def compute_s(self) -> list[float]:
        """Return the compute time of a step on each rank, as measured [s]."""
        true = self._true_compute_s()
        jitter = np.exp(self.trace.jitter * self.rng.standard_normal(len(true)))
        return list((true * jitter).tolist())

    def _true_compute_s(self) -> np.ndarray:
        ranks = self.allocation.slots
        shares = self.parts or (self.plan.global_batch_size / ranks,) * ranks
        slowness = np.asarray(self.cluster.slowness_of_ranks(self.allocation))
        return np.asarray(slowness * self._pass_s(np.asarray(shares)))

    def _pass_s(self, examples: np.ndarray) -> np.ndarray:
        """Return the time of all passes over a rank's examples, on a host of slowness 1 [s]."""
        work = self.trace.workload
        return (self.plan.accumulation_steps + 1) * work.alpha_c + work.beta_c * examples

    def efficiency(self) -> float:
        initial = self.choice.limits.initial_batch_size
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
    rule: Callable[[ScalingConfig], ScalingRule] = ScalingController,
) -> SimResult:
    """Simulate a run on a trace.

    Args:
        config: configuration of the controller; None: policy ``fixed``, with ``trace.np`` slots.
        with_best: whether to search the best possible goodput within the budget at each sample.

    Raises:
        ValueError: the trace's limits leave no batch plan at all.
    """
    rng = np.random.default_rng(seed)
    cluster = Cluster(trace)
    cluster.advance(0.0)
    job = _Job(trace, cluster, rng, trace.unequal_shares)
    controller = rule(config or ScalingConfig())
    return _Simulation(trace, config, controller, cluster, job, with_best).run()


class _Simulation:
    def __init__(
        self,
        trace: Trace,
        config: ScalingConfig | None,
        controller: ScalingRule,
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
        """Return the hosts as a hostfile describes them, without their slowness."""
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
            self._decide_if_due()
        self._review()

    def _follow_cluster(self) -> None:
        self._controller.hosts_are(self._offers(), self._now)
        there = self._cluster.filled(self._wanted, self._trace.min_np)
        if there != self._job.allocation:
            self._rescale(there)

    def _decide_if_due(self) -> None:
        found = self._controller.decide_if_due(self._now)
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
        size = allocation.slots
        self._controller.note_event(ev.RescaleFinished(0, size, pause_s, mono=self._now))
        self._form()

    def _form(self) -> None:
        job = self._job
        self._changed_at = self._now
        self._review_at = self._now + _EVIDENCE_S
        job.choice.balance.forget()
        self._controller.formed(hosts_of_ranks(job.allocation), self._now)
        job.choice.keep_to_limits(job.allocation.slots)
        self._announce_plan()

    def _announce_plan(self) -> None:
        job = self._job
        job.choice.cut_shares(job.allocation.slots)
        job.examples = job.step * job.plan.global_batch_size
        plan, limits = job.plan, ev.BatchLimits(**dataclasses.asdict(job.choice.limits_now))
        size, extra = plan.global_batch_size, plan.accumulation_steps
        event = ev.BatchPlan(0, size, 0, extra, None, limits, "", mono=self._now)
        self._controller.note_event(event)

    def _review(self) -> None:
        """Choose the batch plan, as the ranks do."""
        job, evidence = self._job, self._controller.evidence
        if self._now < self._review_at:
            return
        calm_s = (self._now - self._changed_at) / _CALM_REVIEWS_AFTER
        self._review_at = self._now + min(max(_REVIEW_S[0], calm_s), _REVIEW_S[1])
        model = evidence.model()
        if model is None:
            return
        noise, on, ranks = job.jittered(job.noise), job.allocation.hosts, job.allocation.slots
        if job.choice.follow_goodput(
            model, noise, on, ranks, evidence.speeds.steps_slowness(evidence.plan)
        ):
            self._announce_plan()

    def _report(self) -> None:
        job = self._job
        compute_s, shares = job.compute_s(), job.parts
        job.choice.review_shares(compute_s, job.step_s())
        job.choice.cut_shares(job.allocation.slots)
        size, ranks = job.plan.global_batch_size, job.allocation.slots
        # Parts of a step count as well here.
        step, examples = cast(int, job.step), cast(int, job.examples)
        told = ev.Metrics(step, 0, 0, examples, ranks, mono=self._now)
        told.noise_scale, told.global_batch_size = job.jittered(job.noise), size
        if job.parts == shares:
            told.rank_s = [*compute_s]  # otherwise measured with the shares before
        if job.choice.unequal_shares and ranks > 1:
            told.shares = list(job.choice.balance.parts_of(size, ranks))
        self._controller.note_event(told)

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
        """Return the goodput of the best static choice, cached by noise scale in steps of 5 %."""
        noise = round(math.log(self._job.noise + 1) / 0.05)
        key = (self._cluster.link, self._cluster.hosts, noise)
        if key not in self._best:
            budget = self._config.objective.budget if self._config else None
            workload, most = self._trace.workload, self._trace.max_np
            args = (workload, self._cluster.hosts, self._cluster.link, self._job.noise)
            unequal = self._job.choice.unequal_shares
            self._best[key] = best_at(*args, most, budget, unequal_shares=unequal).goodput
        return self._best[key]

    def _rate(self) -> float:
        prices = {host.name: host.price or 0.0 for host in self._cluster.hosts}
        return sum(prices.get(host, 0.0) for host, _ in self._job.allocation.counts)

    def _pay(self, seconds: float) -> None:
        self._result.cost += self._rate() * seconds / 3600


def hosts_of_ranks(allocation: Allocation) -> list[str]:
    """Return the host of each rank, in rank order."""
    return [host for host, slots in allocation.counts for _ in range(slots)]


def _offered(cluster: Cluster) -> int:
    return sum(host.slots for host in cluster.hosts)

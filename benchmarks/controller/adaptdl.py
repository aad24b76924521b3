"""Implement AdaptDL's scaling rule, for comparison in the simulator.

Once a minute the allocator chooses the number of replicas with the largest speedup, among at most
twice as many as were ever profiled; a change has to gain 10 %. The number of nodes is chosen so
that their utilisation, speedup divided by slots, is between 0.35 and 0.65.

Source: Pollux, OSDI 2021, section 4.2, and AdaptDL's ``adaptdl_sched`` (``allocator.py``,
``policy/pollux.py``), for one job. Two differences are in its favour: the search is exhaustive
instead of genetic, and the step time is fitted by our model, without uncertainty. The rule does not
consider slow hosts, prices or measured pauses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hvd_elastic.control.scaling import ScalingConfig
from hvd_elastic.model.goodput import BatchLimits, best_batch_plan
from hvd_elastic.model.step_time import StepTimeModel
from hvd_elastic.policy.evidence import Evidence
from hvd_elastic.policy.snapshot import Allocation, Decision, HostOffer
from hvd_elastic.run_events import ReadEvent

_PERIOD_S = 60.0
_MIN_UTILITY, _MAX_UTILITY = 0.35, 0.65
_RESTART_PENALTY = 0.1


@dataclass(frozen=True)
class _Choice:
    nodes: int
    replicas: int
    speedup: float
    value: float
    utility: float


class AdaptDLRule:
    """Replaces :class:`hvd_elastic.control.scaling.ScalingController` in the simulator.

    Args:
        config: bounds of the number of slots; the objective is ignored.
    """

    def __init__(self, config: ScalingConfig) -> None:
        self._config = config
        self.evidence = Evidence()
        self._hosts: tuple[HostOffer, ...] = ()
        self._profiled = 0
        self._look_at = _PERIOD_S
        self._rescaling = True

    def hosts_are(self, hosts: Sequence[HostOffer], _now: float) -> None:
        """Set the nodes."""
        self._hosts = tuple(sorted(hosts, key=lambda host: host.name))

    def rescaling(self) -> None:
        """Note that the job restarts."""
        self._rescaling = True

    def formed(self, hosts_of_ranks: Sequence[str], _now: float) -> None:
        """Note that the job trains on these hosts."""
        self._rescaling = False
        self.evidence.formed(hosts_of_ranks)

    def note_event(self, event: ReadEvent) -> None:
        """Take an event of the run."""
        self.evidence.note_event(event)
        if self.evidence.measured:
            self._profiled = max(self._profiled, self.evidence.allocation.slots)

    def due(self, now: float) -> bool:
        """Return whether it is time for a decision."""
        return now >= self._look_at and not self._rescaling

    def decide_if_due(self, now: float) -> tuple[Decision, None] | None:
        """Return the decision of the allocator; None if it is not time for one."""
        if not self.due(now):
            return None
        self._look_at = now + _PERIOD_S
        current = self.evidence.allocation
        model, limits = self.evidence.model(), self.evidence.limits
        if model is None or limits is None or math.isnan(self.evidence.noise):
            return Decision("stay", "nothing was profiled yet", current, known=False), None
        chosen = self._choose(model, limits, current)
        target = self._fill(chosen.replicas)
        if target.slots == current.slots and target.hosts == current.hosts:
            return Decision("stay", "the allocation stays", current), None
        reason = (
            f"a speedup of {chosen.speedup:.1f} on {chosen.replicas} replicas, "
            f"{self._profiled} profiled at most"
        )
        return Decision("grow" if target.slots > current.slots else "shrink", reason, target), None

    def _choose(self, model: StepTimeModel, limits: BatchLimits, current: Allocation) -> _Choice:
        one = self._goodput(model, limits, 1, 1)
        front: list[_Choice] = []
        slots = 0
        most = min(2 * self._profiled, self._config.max_np or 2 * self._profiled)
        for nodes, host in enumerate(self._hosts, 1):
            fewest, slots = slots + 1, slots + host.slots
            for replicas in range(fewest, min(slots, max(most, self._config.min_np)) + 1):
                speedup = self._goodput(model, limits, nodes, replicas) / one
                same = (replicas, nodes) == (current.slots, current.hosts)
                value = speedup * (1.0 if same else 1 - _RESTART_PENALTY)
                found = _Choice(nodes, replicas, speedup, value, speedup / slots)
                if not front or value > front[-1].value:
                    # With the same number of nodes only the best is on the Pareto front.
                    front = [c for c in front if c.nodes < nodes] + [found]
        allowed = [c for c in front if c.nodes <= self._desired_nodes(front)]
        return max(allowed, key=lambda choice: choice.value)

    def _desired_nodes(self, front: Sequence[_Choice]) -> int:
        best = max(front, key=lambda choice: choice.value)
        if _MIN_UTILITY <= best.utility <= _MAX_UTILITY:
            return len(self._hosts)
        useful = [c for c in front if c.utility >= _MIN_UTILITY] or [front[0]]
        middle = (_MIN_UTILITY + _MAX_UTILITY) / 2
        return min(useful, key=lambda choice: (abs(choice.utility - middle), -choice.nodes)).nodes

    def _goodput(self, model: StepTimeModel, limits: BatchLimits, nodes: int, slots: int) -> float:
        best = best_batch_plan(model, self.evidence.noise, limits, nodes, slots)
        return 1e-9 if best is None else best.goodput

    def _fill(self, replicas: int) -> Allocation:
        counts, left = {}, replicas
        for host in self._hosts:
            counts[host.name] = min(left, host.slots)
            left -= counts[host.name]
        return Allocation.of(counts)

"""The scaling controller: turns measurements of a run into decisions about its slots.

Like the machine it has no clock and waits for nothing: it takes events and returns decisions. The
leader and the simulator use the same controller.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hvd_elastic.model.goodput import BatchLimits, BatchPlan
from hvd_elastic.model.step_time import StepTimeModel
from hvd_elastic.policy.autoscale import (
    compare_prediction,
    decide,
    out_of_reach,
    remember,
    surroundings_changed,
)
from hvd_elastic.policy.evidence import Evidence
from hvd_elastic.policy.objective import Objective, Parameters
from hvd_elastic.policy.snapshot import Allocation, Decision, HostOffer, Memory, Snapshot
from hvd_elastic.run_events import PredictionMissed, ReadEvent

_LOOK_S = 1.0
"""Shortest time between two decisions [s]; more often, few new measurements would have come."""
_NOISE_MOVED = 0.1
"""Change of the logarithm of the gradient noise scale that may lead to another decision."""
_CALM_LOOK_S = 60.0
"""Longest time between two decisions [s], so that gradual changes are noticed."""
_CALM_AFTER = 20.0
"""The time between decisions is the time since the last change divided by this: a run that has not
changed for long is checked less often."""


@dataclass(frozen=True)
class ScalingConfig:
    """Limits and objective of a run's scaling.

    Attributes:
        min_np, max_np: limits of the number of slots; ``max_np`` None: all slots.
        objective: what the policy optimizes.
        parameters: settings of the decision, such as its horizon.
    """

    min_np: int = 1
    max_np: int | None = None
    objective: Objective = field(default_factory=Objective)
    parameters: Parameters = field(default_factory=Parameters)


class ScalingController:
    """Decides on which slots a run trains.

    Args:
        started_at: when the run began [s].
        evidence: measurements under earlier leaders of the run; None: there are none.
    """

    def __init__(
        self, config: ScalingConfig, started_at: float = 0.0, evidence: Evidence | None = None
    ) -> None:
        self._config = config
        self.evidence = evidence or Evidence()
        self._hosts: tuple[HostOffer, ...] = ()
        self._memory = Memory()
        self._started_at = started_at
        self._look_at = started_at
        self._formed_at = started_at
        self._rescaling = True
        self._paused = ""
        self._last: Decision | None = None
        self._rests_on: tuple[Any, ...] = ()
        self._model_then: StepTimeModel | None = None
        self._noise_then = self._noise_seen = math.nan
        self._change: tuple[Decision, Snapshot] | None = None
        """Last change with the snapshot it was based on, until its effect has been measured."""
        self.miss: PredictionMissed | None = None
        """Prediction that the last decision found to have been much too high; None: none."""

    # -- what happened ---------------------------------------------------------------------

    def hosts_are(self, hosts: Sequence[HostOffer], now: float) -> None:
        """Set the hosts that can be used now, in the order of the hostfile."""
        if tuple(hosts) != self._hosts:
            if self._hosts:  # else the run was just started or resumed, and nothing has changed
                self.evidence.timings.distrust_old(now)
            self._hosts = tuple(hosts)
            self._surroundings_changed(now)

    def rescaling(self) -> None:
        """Note that a generation is being formed, or that none is running."""
        self._rescaling = True

    def formed(self, hosts_of_ranks: Sequence[str], now: float) -> None:
        """Note that a generation trains; ``hosts_of_ranks``: host of each rank, by rank."""
        self._rescaling = False
        self._formed_at = now
        self._look_at = now
        self.evidence.formed(hosts_of_ranks)

    def note_event(self, event: ReadEvent) -> None:
        """Take measurements from an event of the run; see :meth:`Evidence.note_event`."""
        self.evidence.note_event(event)
        now = event.mono
        if self.evidence.news:
            self.evidence.news = False
            self._surroundings_changed(now)
        elif _noise_moved(self.evidence.noise_scale, self._noise_seen):
            self._noise_seen = self.evidence.noise_scale
            self._look_at = min(self._look_at, now)

    def pause(self, why: str) -> None:
        """Make no decisions until :meth:`resume`; ``why`` is not empty."""
        self._paused = why

    def resume(self, now: float) -> None:
        """Make decisions again, and measure again what was measured across hosts long ago."""
        self._paused = ""
        self.evidence.timings.distrust_old(now)
        self._look_at = now

    # -- what follows ----------------------------------------------------------------------

    def out_of_reach(self, now: float) -> str:
        """Return why a deadline cannot be met, before training starts; see :func:`out_of_reach`."""
        return out_of_reach(self.snapshot(now), now, self._config.objective)

    def due(self, now: float) -> bool:
        """Return whether :meth:`decide_if_due` would decide now."""
        return now >= self._look_at and not self._rescaling and not self._paused

    def decide_if_due(self, now: float) -> tuple[Decision, Snapshot] | None:
        """Return a decision and the snapshot it is based on; None if none is due.

        The caller has to carry out a decision to change: the controller assumes that it does.
        """
        if not self.due(now):
            return None
        snapshot = self.snapshot(now)
        parameters = self._config.parameters
        decision = self._decide(snapshot, now)
        changes = decision.action != "stay"
        self.miss = self._compare(snapshot, 1 if changes else parameters.evidence)
        asked = None if self._change is None else self._change[0].target
        if changes and decision.target != asked:  # else its slots are still starting
            self._change = decision, snapshot
        elif asked != snapshot.current and not changes and decision.known and not decision.wish:
            self._change = None  # cancelled before its slots trained
        self._memory = remember(self._memory, decision, snapshot.current, now)
        wait_s = min(max(_LOOK_S, (now - self._formed_at) / _CALM_AFTER), _CALM_LOOK_S)
        if decision.wish is not None or self.evidence.measured < parameters.evidence:
            wait_s = _LOOK_S
        self._look_at = now + wait_s
        return decision, snapshot

    def _compare(self, snapshot: Snapshot, windows: int) -> PredictionMissed | None:
        """Return a miss if the last change gained much less than predicted.

        Args:
            windows: number of timed windows to wait for after the change.
        """
        timed = self.evidence.present
        if self._change is None or timed is None:
            return None
        if min(timed.steps, self.evidence.measured) < windows:
            return None
        decision, then = self._change
        if snapshot.current != decision.target or math.isnan(snapshot.noise_scale):
            return None
        self._change = None
        return compare_prediction(decision, then, snapshot, timed)

    def _decide(self, snapshot: Snapshot, now: float) -> Decision:
        """Return a new decision, or the last one if nothing that it is based on has changed."""
        rests_on = (
            snapshot.hosts,
            snapshot.current,
            snapshot.limits,
            snapshot.silent_s > self._config.parameters.silence_s,
            snapshot.measured >= self._config.parameters.evidence,
            snapshot.unequal_shares,
            snapshot.supply,
        )
        last = self._last
        calm = last is not None and last.action == "stay" and last.wish is None
        same = snapshot.model is self._model_then and rests_on == self._rests_on
        same = same and not _noise_moved(snapshot.noise_scale, self._noise_then)
        if calm and same and self._config.objective.target is None:
            assert last is not None
            return last
        self._rests_on = rests_on
        self._model_then, self._noise_then = snapshot.model, snapshot.noise_scale
        self._last = decide(snapshot, now, self._config.objective, self._config.parameters)
        return self._last

    def snapshot(self, now: float) -> Snapshot:
        """Return everything that a decision is based on, as of ``now``."""
        evidence = self.evidence
        unknown = BatchLimits(1, 1)
        return Snapshot(
            hosts=tuple(
                dataclasses.replace(host, slowness=evidence.speeds.slowness(host.name))
                for host in self._hosts
            ),
            current=self._in_order(evidence.allocation),
            plan=evidence.plan or BatchPlan(1),
            limits=evidence.limits or unknown,
            model=evidence.model() if evidence.limits is not None else None,
            noise_scale=evidence.noise,
            measured=evidence.measured,
            silent_s=evidence.silent_s(now),
            pause_s=evidence.pause_s,
            min_np=self._config.min_np,
            max_np=self._config.max_np,
            done=evidence.done,
            started_at=self._started_at,
            memory=self._memory,
            unequal_shares=evidence.speeds.unequal,
            constant_examples=evidence.speeds.fixed.examples,
            supply=evidence.supply,
        )

    def _in_order(self, allocation: Allocation) -> Allocation:
        place = {host.name: number for number, host in enumerate(self._hosts)}
        counts = sorted(allocation.counts, key=lambda pair: place.get(pair[0], math.inf))
        return Allocation(tuple(counts))

    def _surroundings_changed(self, now: float) -> None:
        self._memory = surroundings_changed(self._memory)
        self._look_at = now


def _noise_moved(now: float, then: float) -> bool:
    """Return whether the noise scale changed enough to matter; also from NaN or infinity.

    >>> _noise_moved(math.inf, math.nan), _noise_moved(300, math.inf), _noise_moved(300, 301)
    (True, True, False)
    """
    if math.isnan(now) or now == then:
        return False
    return not abs(math.log1p(now) - math.log1p(then)) <= _NOISE_MOVED

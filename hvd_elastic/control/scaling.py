"""The scaling controller: what is measured becomes a snapshot, a decision, and slots to train on.

Like the machine it has no clock and waits for nothing: events go in, decisions come out. The
leader and the simulator drive the same one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvd_elastic.model.goodput import BatchLimits, BatchPlan
from hvd_elastic.model.step_time import StepTimeModel
from hvd_elastic.policy.autoscale import (
    Miss,
    compare_prediction,
    decide,
    out_of_reach,
    remember,
    surroundings_changed,
)
from hvd_elastic.policy.evidence import Evidence
from hvd_elastic.policy.objective import Objective, Parameters
from hvd_elastic.policy.snapshot import Allocation, Decision, HostOffer, Memory, Snapshot

__all__ = ["ScalingConfig", "ScalingController"]

_LOOK_S = 1.0
_NOISE_MOVED = 0.1
"""A gradient noise scale that moved as far, in logarithms, may lead to another decision."""
_CALM_LOOK_S = 60.0
_CALM_AFTER = 20.0
"""Looks become rarer with the time since the last change, divided by this."""


@dataclass(frozen=True)
class ScalingConfig:
    """How a run scales.

    Attributes:
        min_np, max_np: bounds of the slots; ``max_np`` None: all there are.
        objective: what the run is after.
        parameters: patience and curiosity.
    """

    min_np: int = 1
    max_np: int | None = None
    objective: Objective = field(default_factory=Objective)
    parameters: Parameters = field(default_factory=Parameters)


class ScalingController:
    """Decides for one run.

    Args:
        config: bounds and objective.
        started_at: when the run began [s].
        evidence: what earlier leaders of the run have measured; None: nothing.
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
        """The last change and what it rested on, until what it brought is known."""
        self.miss: Miss | None = None
        """What the last :meth:`look` found of a change that brought much less than predicted."""

    # -- what happened ---------------------------------------------------------------------

    def hosts_are(self, hosts: Sequence[HostOffer], now: float) -> None:
        """Hosts that can be used now, in the order of the hostfile."""
        if tuple(hosts) != self._hosts:
            if self._hosts:  # else this is the beginning, of a resumed run as well
                self.evidence.timings.distrust_old(now)
            self._hosts = tuple(hosts)
            self._surroundings_changed(now)

    def rescaling(self) -> None:
        """A generation is being formed, or none runs."""
        self._rescaling = True

    def formed(self, hosts_of_ranks: Sequence[str], now: float) -> None:
        """A generation trains; the host of each rank in their order."""
        self._rescaling = False
        self._formed_at = now
        self._look_at = now
        self.evidence.formed(hosts_of_ranks)

    def note(self, kind: str, fields: Mapping[str, Any], now: float) -> None:
        """An event of the run; see :meth:`Evidence.note`."""
        self.evidence.note(kind, fields, now)
        if self.evidence.news:
            self.evidence.news = False
            self._surroundings_changed(now)
        elif _noise_moved(self.evidence.noise_scale, self._noise_seen):
            self._noise_seen = self.evidence.noise_scale
            self._look_at = min(self._look_at, now)

    def pause(self, why: str) -> None:
        """Leave the slots as they are until :meth:`resume`; ``why`` in words."""
        self._paused = why

    def resume(self, now: float) -> None:
        """Decide again, and try again what was timed across hosts long ago."""
        self._paused = ""
        self.evidence.timings.distrust_old(now)
        self._look_at = now

    # -- what follows ----------------------------------------------------------------------

    def out_of_reach(self, now: float) -> str:
        """Why a deadline cannot be met, before anything trains; see :func:`out_of_reach`."""
        return out_of_reach(self.snapshot(now), now, self._config.objective)

    def due(self, now: float) -> bool:
        """Whether :meth:`look` would have something to look at."""
        return now >= self._look_at and not self._rescaling and not self._paused

    def look(self, now: float) -> tuple[Decision, Snapshot] | None:
        """Decide, if it is time; None: it is not.

        A decision to change has to be acted on: it counts as done.
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
            self._change = None  # called off before its slots trained
        self._memory = remember(self._memory, decision, snapshot.current, now)
        wait_s = min(max(_LOOK_S, (now - self._formed_at) / _CALM_AFTER), _CALM_LOOK_S)
        if decision.wish is not None or self.evidence.measured < parameters.evidence:
            wait_s = _LOOK_S
        self._look_at = now + wait_s
        return decision, snapshot

    def _compare(self, snapshot: Snapshot, windows: int) -> Miss | None:
        """Whether the last change brought what was predicted, once so many windows were timed."""
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
        """The last decision again, where nothing that it rests on is new."""
        rests_on = (
            snapshot.hosts,
            snapshot.current,
            snapshot.limits,
            snapshot.silent_s > self._config.parameters.silence_s,
            snapshot.measured >= self._config.parameters.evidence,
            snapshot.unequal_shares,
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
        """All that a decision rests on, now."""
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
            rejected=evidence.rejected,
        )

    def _in_order(self, allocation: Allocation) -> Allocation:
        place = {host.name: number for number, host in enumerate(self._hosts)}
        counts = sorted(allocation.counts, key=lambda pair: place.get(pair[0], math.inf))
        return Allocation(tuple(counts))

    def _surroundings_changed(self, now: float) -> None:
        self._memory = surroundings_changed(self._memory)
        self._look_at = now


def _noise_moved(now: float, then: float) -> bool:
    """Whether the noise scale differs enough to matter, from NaN or infinity too.

    >>> _noise_moved(math.inf, math.nan), _noise_moved(300, math.inf), _noise_moved(300, 301)
    (True, True, False)
    """
    if math.isnan(now) or now == then:
        return False
    return not abs(math.log1p(now) - math.log1p(then)) <= _NOISE_MOVED

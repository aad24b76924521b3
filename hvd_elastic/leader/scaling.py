"""Connects the leader and the scaling controller: passes on the run's state, returns decisions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from hvd_elastic import run_events
from hvd_elastic.control.commands import Member
from hvd_elastic.control.events import TargetChanged
from hvd_elastic.control.fleet import AgentState
from hvd_elastic.control.scaling import ScalingConfig, ScalingController
from hvd_elastic.control.state_machine import Phase, RunMachine
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.leader.spec import RunSpec
from hvd_elastic.policy.evidence import replay
from hvd_elastic.policy.snapshot import Allocation, Decision, HostOffer, Snapshot
from hvd_elastic.run_events import Event, ReadEvent, Warned


class Scaler:
    """Runs the scaling controller for a run and turns its decisions into events.

    Args:
        emit: function that records an event.
        started_at: when the run began [monotonic s].
        past: events of the run under its earlier leaders. Their measurements are used again, and
            a paused policy stays paused.
    """

    def __init__(
        self,
        spec: RunSpec,
        emit: Callable[[Event], None],
        started_at: float,
        past: Sequence[ReadEvent] = (),
    ) -> None:
        config = ScalingConfig(spec.min_np, spec.max_np, spec.objective)
        self._controller = ScalingController(config, started_at, replay(past))
        self._asked: Allocation | None = None
        """Slots of the last decision, while they are not yet in use."""
        match _last_decision(past):
            case run_events.Decision(action="pause", reason=why):
                self._controller.pause(why)
            case run_events.Decision(np=int(), target=target):
                self._asked = Allocation.of(dict(target or ()))
        self._pinned = frozenset(spec.pin_hosts)
        self._emit = emit
        self._generation = 0
        self._said: tuple[object, ...] = ()
        self._looked = False

    def note_event(self, event: Event) -> None:
        """Pass an event of the run to the controller, which takes measurements from it."""
        self._controller.note_event(event)

    def decide_if_due(
        self, machine: RunMachine, hosts: Iterable[Host], now: float
    ) -> TargetChanged | None:
        """Decide if a decision is due; return the event for the machine, None for no change."""
        controller, members = self._controller, machine.members
        controller.hosts_are(_offers(machine, hosts, self._pinned), now)
        if not self._looked:
            self._looked = True
            late = controller.out_of_reach(now)
            if late:
                self._emit(Warned(late))
        # While hosts are being drained, the machine changes the size itself; decide afterwards.
        leaving = any(member.host in machine.draining for member in members)
        if machine.phase is not Phase.RUNNING or leaving:
            controller.rescaling()
            self._generation = 0
            return None
        if machine.generation != self._generation:
            self._generation = machine.generation
            controller.formed([member.host for member in members], now)
        found = controller.decide_if_due(now)
        if found is None:
            return None
        decision, snapshot = found
        if controller.miss is not None:
            self._emit(controller.miss)
        if snapshot.current == self._asked:
            self._asked = None
        if decision.action == "stay":
            return self._stay(decision, snapshot, members)
        np = decision.target.slots
        if decision.target != self._asked:  # else it was requested, and its slots are starting
            self._asked = decision.target
            self._emit(_event(decision, snapshot, np))
        return TargetChanged(np, _slots(decision.target, members))

    def pause(self, why: str) -> None:
        """Make no decisions until :meth:`resume`; ``why`` is recorded."""
        self._controller.pause(why)
        self._asked = None
        self._emit(run_events.Decision("pause", why))

    def resume(self, why: str, now: float) -> None:
        """Make decisions again; ``why`` is recorded."""
        self._controller.resume(now)
        self._said = ()
        self._emit(run_events.Decision("resume", why))

    def _stay(
        self, decision: Decision, snapshot: Snapshot, members: Sequence[Member]
    ) -> TargetChanged | None:
        """Record a decision to stay, and give back slots that were requested but have not joined.

        The decision is recorded once for each generation, and again when slots are given back or
        when it changes whether the objective can be met. Waiting for measurements is not recorded.
        """
        if decision.wish is not None or not decision.known:
            return None
        said = (self._generation, decision.known, decision.kept)
        offered = {host.name for host in snapshot.hosts}
        if self._asked is None or not offered.issuperset(host for host, _ in self._asked.counts):
            # Failed hosts are tried again only while their slots are requested, so those slots
            # stay requested.
            if said != self._said:
                self._said = said
                self._emit(_event(decision, snapshot))
            return None
        self._asked, self._said = None, said
        reason = f"{decision.reason}; slots that were still starting are given back"
        np = snapshot.current.slots
        given_back = dataclasses.replace(decision, reason=reason)
        self._emit(_event(given_back, snapshot, np))
        return TargetChanged(np, _slots(snapshot.current, members))


def _event(decision: Decision, snapshot: Snapshot, np: int | None = None) -> run_events.Decision:
    """Return the event for a decision; ``np``: it changes the number of slots."""
    target = [run_events.HostSlots(*each) for each in decision.target.counts]
    told = snapshot.as_fields()
    return run_events.Decision(decision.action, decision.reason, target, told, np)


def _last_decision(past: Sequence[ReadEvent]) -> run_events.Decision | None:
    decisions = (event for event in reversed(past) if isinstance(event, run_events.Decision))
    return next(decisions, None)


def _offers(machine: RunMachine, hosts: Iterable[Host], pinned: frozenset[str]) -> list[HostOffer]:
    """Return the usable hosts: not drained, and their agent has not failed."""
    failed = {name for name, state in machine.agent_states().items() if state is AgentState.FAILED}
    return [
        HostOffer(host.name, host.slots, host.price, pinned=host.name in pinned)
        for host in hosts
        if host.name not in failed | machine.draining
    ]


def _slots(target: Allocation, members: Sequence[Member]) -> tuple[tuple[str, int], ...]:
    """Return (host, index) of the slots of an allocation, preferring slots already in use."""
    found: list[tuple[str, int]] = []
    for host, number in target.counts:
        used = [member.slot for member in members if member.host == host]
        free = [index for index in range(max([*used, -1]) + number + 1) if index not in used]
        found += [(host, index) for index in sorted([*used, *free][:number])]
    return tuple(found)

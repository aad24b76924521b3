"""What is told of the decisions of a policy; the machine is one that starts nothing."""

from __future__ import annotations

from typing import Any, cast

import pytest

from hvd_elastic.control import events as ev
from hvd_elastic.control.commands import Command, Leave, Member, StartAgent, StartWorker
from hvd_elastic.control.scaling import ScalingController
from hvd_elastic.control.state_machine import MachineConfig, Phase, RunMachine
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.leader.scaling import Scaler
from hvd_elastic.leader.spec import RunSpec
from hvd_elastic.policy.snapshot import Allocation, Decision
from hvd_elastic.run_events import HostSlots, PredictionMissed
from tests.unit.records.made_events import noted

HOSTS = [Host("a", slots=1), Host("b", slots=1)]


class Trains:
    """A machine whose slots take for ever to start."""

    phase, generation, draining = Phase.RUNNING, 1, frozenset[str]()
    members: tuple[Member, ...] = (Member("w1", "a", 0, 0, 0, 1, 0, 1),)

    def agent_states(self) -> dict[str, Any]:
        return {}


def test_a_missed_prediction_is_told_once() -> None:
    told: list[Any] = []
    spec = RunSpec(("true",), "/", policy="goodput")
    scaler = Scaler(spec, told.append, 0.0)
    machine = Trains()
    step = 0
    for second in range(120):
        step += 2 // len(machine.members)  # two ranks take twice as long as one, not half
        fields = {"step": step, "examples": 64 * step, "size": len(machine.members)}
        noted(scaler, "metrics", fields, float(second))
        if scaler.decide_if_due(cast(RunMachine, machine), HOSTS, float(second)) and second < 30:
            machine.members = tuple(
                Member(f"w{n}", host.name, 0, n, 0, 1, n, 2) for n, host in enumerate(HOSTS)
            )
            machine.generation = 2
    missed = [event for event in told if isinstance(event, PredictionMissed)]
    assert len(missed) == 1
    assert missed[0].measured == 64 < missed[0].predicted
    assert "64 are measured: a step of 64 examples takes 1 s" in missed[0].reason


def test_a_change_is_told_once_while_its_slots_start() -> None:
    told: list[Any] = []
    scaler = Scaler(RunSpec(("true",), "/", policy="goodput"), told.append, 0.0)
    machine = cast(RunMachine, Trains())
    asked = before = 0
    for second in range(90):
        step = 10 * second
        told_by_rank_0 = {"step": step, "examples": 64 * step, "size": 1, "global_batch_size": 64}
        noted(scaler, "metrics", told_by_rank_0, float(second))
        change = scaler.decide_if_due(machine, HOSTS, float(second))
        if change is not None:
            assert (change.np, change.slots) == (2, (("a", 0), ("b", 0)))
            asked += 1
        if second == 60:
            before = asked
            scaler.pause("somebody asked for it")
            scaler.resume("the policy may decide again", float(second))
    assert before > 1, "who starts slowly is asked for again"
    assert asked > before
    assert [decision.action for decision in told] == ["grow", "pause", "resume", "grow"]


HERE, BOTH = Allocation((("a", 1),)), Allocation((("a", 1), ("b", 1)))
GROW, STAY = Decision("grow", "more", BOTH), Decision("stay", "enough", HERE)


class Follows:
    """A run on host a whose policy decides as the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.decision = STAY
        monkeypatch.setattr(ScalingController, "_decide", lambda *_: self.decision)
        self.now = 0.0
        self.told: list[Any] = []
        self.machine = RunMachine(MachineConfig(np=1))
        self.tell(ev.HostsChanged((HostSlots("a", 1), HostSlots("b", 1))))
        self.tell(ev.AgentReady("a"))
        self.tell(ev.WorkerReady("a:0.1", 1.0))
        self.tell(ev.WorkerJoined("a:0.1", 1))
        self.scaler = self.new_scaler()

    def new_scaler(self) -> Scaler:
        past = self.told
        spec = RunSpec(("true",), "/", policy="goodput")
        return Scaler(spec, self.told.append, 0.0, past)

    def tell(self, event: ev.Event) -> list[Command]:
        return self.machine.handle(event, self.now)

    def decide(self, decision: Decision) -> list[Command]:
        """What is asked of hosts and workers after the policy has decided this."""
        self.decision, self.now = decision, self.now + 60
        change = self.scaler.decide_if_due(self.machine, HOSTS, self.now)
        return [] if change is None else self.tell(change)

    def grow(self) -> None:
        self.decide(GROW)
        assert StartWorker("b:0.1", "b", 0) in self.tell(ev.AgentReady("b"))


def test_a_decision_to_stay_calls_starting_slots_back(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Follows(monkeypatch)
    run.decide(STAY)
    run.grow()
    assert run.decide(STAY) == [Leave("b:0.1")]
    assert [(d.action, d.reason) for d in run.told] == [
        ("stay", "enough"),
        ("grow", "more"),
        ("stay", "enough; slots that were still starting are given back"),
    ]
    assert run.told[-1].np == 1, "what a leader that resumes the run goes by"
    assert run.decide(STAY) == []
    assert len(run.told) == 3


def test_starting_slots_are_left_alone_while_nothing_is_decided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Follows(monkeypatch)
    run.grow()
    assert run.decide(Decision("stay", "too little is measured", HERE, known=False)) == []
    assert run.decide(Decision("stay", "waiting", HERE, wish=BOTH)) == []


def test_the_next_leader_calls_starting_slots_back(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Follows(monkeypatch)
    run.grow()
    run.scaler = run.new_scaler()
    assert run.decide(STAY) == [Leave("b:0.1")]


def test_slots_that_joined_are_not_called_back(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Follows(monkeypatch)
    run.grow()
    run.tell(ev.WorkerReady("b:0.1", 1.0))
    for worker in ("a:0.1", "b:0.1"):
        run.tell(ev.WorkerJoined(worker, 2))
    assert run.decide(Decision("stay", "enough", BOTH)) == []


def test_a_host_that_failed_is_tried_again_though_the_policy_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Follows(monkeypatch)
    run.decide(GROW)
    run.tell(ev.AgentFailed("b", "unreachable"))
    assert run.decide(STAY) == []
    assert run.tell(ev.Tick()) == [StartAgent("b")]
    run.tell(ev.AgentReady("b"))
    assert run.decide(STAY) == [Leave("b:0.1")]

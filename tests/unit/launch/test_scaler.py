"""What is told of the decisions of a policy; the machine is one that starts nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from hvd_elastic.cluster.hostfile import Host
from hvd_elastic.control.commands import Member
from hvd_elastic.control.machine import Phase, RunMachine
from hvd_elastic.launch.scaler import Scaler
from hvd_elastic.launch.spec import RunSpec

HOSTS = [Host("a", slots=1), Host("b", slots=1)]


class Trains:
    """A machine whose slots take for ever to start."""

    phase, generation, draining = Phase.RUNNING, 1, frozenset[str]()

    def agent_states(self) -> dict[str, Any]:
        return {}


def test_a_missed_prediction_is_told_once() -> None:
    told: list[tuple[str, Mapping[str, Any]]] = []
    spec = RunSpec(("true",), "/", policy="goodput")
    scaler = Scaler(spec, lambda kind, fields: told.append((kind, fields)), 0.0)
    members = [Member("w1", "a", 0, 0, 0, 1, 0, 1)]
    machine = Trains()
    step = 0
    for second in range(120):
        step += 2 // len(members)  # two ranks take twice as long as one, not half
        fields = {"step": step, "examples": 64 * step, "size": len(members)}
        scaler.note("metrics", fields, float(second))
        if scaler.look(cast(RunMachine, machine), HOSTS, members, float(second)) and second < 30:
            members = [Member(f"w{n}", host.name, 0, n, 0, 1, n, 2) for n, host in enumerate(HOSTS)]
            machine.generation = 2
    missed = [fields for kind, fields in told if kind == "prediction_missed"]
    assert len(missed) == 1
    assert missed[0]["measured"] == 64 < missed[0]["predicted"]
    assert "64 are measured: a step of 64 examples takes 1 s" in missed[0]["reason"]


def test_a_change_is_told_once_while_its_slots_start() -> None:
    told: list[Mapping[str, Any]] = []
    scaler = Scaler(
        RunSpec(("true",), "/", policy="goodput"), lambda _, fields: told.append(fields), 0.0
    )
    members = [Member("w1", "a", 0, 0, 0, 1, 0, 1)]
    machine = cast(RunMachine, Trains())
    asked = before = 0
    for second in range(90):
        step = 10 * second
        told_by_rank_0 = {"step": step, "examples": 64 * step, "size": 1, "global_batch_size": 64}
        scaler.note("metrics", told_by_rank_0, float(second))
        change = scaler.look(machine, HOSTS, members, float(second))
        if change is not None:
            assert (change.np, change.slots) == (2, (("a", 0), ("b", 0)))
            asked += 1
        if second == 60:
            before = asked
            scaler.pause("somebody asked for it")
            scaler.resume("the policy may decide again", float(second))
    assert before > 1, "who starts slowly is asked for again"
    assert asked > before
    assert [decision["action"] for decision in told] == ["grow", "pause", "resume", "grow"]

"""The machine of a leader that takes a run over from another one."""

from __future__ import annotations

from hvd_elastic.control import commands as cmd
from hvd_elastic.control import events as ev
from hvd_elastic.control.commands import (
    Abort,
    Finish,
    Leave,
    StartAgent,
    StartWorker,
)
from hvd_elastic.control.state_machine import MachineConfig, RunMachine
from hvd_elastic.run_events import HostSlots
from tests.unit.control.play import Play, announced, is_running, members, start, starts


def found(play: Play, **changes: ev.FoundWorker) -> ev.RunTakenOver:
    """What another leader finds of the run: all as it was, but for some workers."""
    number = play.machine.generation
    workers = {
        member.worker: ev.FoundWorker(
            *(member.worker, member.host, member.slot),
            ready=True,
            generation=number,
            joined=number,
            holds_state=True,
        )
        for member in play.machine.members
    }
    for host, worker in changes.items():
        workers[f"{host}:0.1"] = worker
    hosts = tuple(HostSlots(name, 1) for name in ("a", "b", "c"))
    return ev.RunTakenOver(
        hosts,
        agents=("a", "b", "c"),
        generation=number,
        members=play.machine.members,
        workers=tuple(worker for worker in workers.values() if worker.worker),
    )


LOST = ev.FoundWorker("", "", 0)


def successor(event: ev.RunTakenOver, **config) -> tuple[Play, list[cmd.Command]]:
    play = Play.__new__(Play)
    play.machine, play.now, play.emitted = RunMachine(MachineConfig(**config), True), 0.0, []
    return play, play.tell(event)


def test_next_leader_goes_on_with_a_run_that_trains():
    old = start("a", "b", "c")
    play, answer = successor(found(old))
    assert answer == []
    assert is_running(play)
    assert play.names == old.names
    assert play.kinds("taken_over") == [
        {
            "generation": 1,
            "size": 3,
            "workers": 3,
            "processes": [("a", 0), ("b", 0), ("c", 0)],
        }
    ]
    # What it does next is numbered on from there, and so are its workers.
    play.killed("b:0.1")
    play.broken("a:0.1", 5)
    assert announced(play.broken("c:0.1", 5)).generation == 2
    play.joined("a:0.1", "c:0.1")
    assert starts(play.tell(ev.Tick(), after=1.0)) == ["b:0.2"]


def test_next_leader_misses_a_member():
    play, answer = successor(found(start("a", "b", "c"), b=LOST))
    assert [type(command) for command in answer] == [Abort, StartWorker]
    play.broken("a:0.1", 5)
    new = announced(play.broken("c:0.1", 5))
    assert [member.worker for member in new.members] == ["a:0.1", "c:0.1"]
    assert "worker b:0 was lost with the leader" in new.reason


def test_next_leader_finds_a_generation_that_broke():
    waits = ev.FoundWorker(
        *("b:0.1", "b", 0),
        ready=True,
        generation=1,
        joined=1,
        waiting=True,
        holds_state=True,
        step=7,
        state=1,
    )
    play, answer = successor(found(start("a", "b", "c"), b=waits))
    assert [type(command) for command in answer] == [Abort]
    play.broken("a:0.1", 7)
    assert announced(play.broken("c:0.1", 6)).root == "b:0.1"


def test_next_leader_finds_a_generation_that_was_being_formed():
    newcomer = ev.FoundWorker("c:0.1", "c", 0, ready=True, generation=1)
    play, answer = successor(found(start("a", "b", "c"), c=newcomer))
    assert answer == [], "its joining may be among the news that come late"
    assert not is_running(play)
    assert [type(c) for c in play.tell(ev.GenerationStuck(1, "lost"))] == [Abort]
    play.tell(ev.WorkerBroken("c:0.1", 1, -1))
    play.broken("a:0.1", 5)
    assert members(play.broken("b:0.1", 5)) == ["a:0.1", "b:0.1", "c:0.1"]


def test_next_leader_hears_late_that_the_first_generation_was_formed():
    starting = {
        host: ev.FoundWorker(f"{host}:0.1", host, 0, ready=True, generation=1) for host in "abc"
    }
    play, answer = successor(found(start("a", "b", "c"), **starting))
    assert answer == []
    play.joined("a:0.1", "b:0.1", "c:0.1")
    assert is_running(play)


def test_next_leader_finds_workers_that_never_trained():
    standby = ev.FoundWorker("a:0.1", "a", 0, ready=True)
    event = ev.RunTakenOver((HostSlots("a", 1),), agents=("a",), workers=(standby,))
    play, answer = successor(event)
    assert announced(answer).restore
    assert play.names == ["a:0.1"]


def test_next_leader_finds_nothing():
    hosts = (HostSlots("a", 1), HostSlots("b", 1))
    play, answer = successor(ev.RunTakenOver(hosts, agents=("a",), awaited=("b",), generation=7))
    assert answer == [StartWorker("a:0.1", "a", 0)]
    assert play.tell(ev.AgentReady("b")) == [StartWorker("b:0.1", "b", 0)]
    new = announced(play.ready("a:0.1", "b:0.1"))
    assert (new.generation, new.restore) == (8, True)
    play.joined("a:0.1", "b:0.1")
    assert is_running(play)
    assert not play.kinds("taken_over")


def test_next_leader_has_a_shorter_hostfile():
    event = found(start("a", "b", "c"))
    shorter = ev.RunTakenOver(
        event.hosts[:2],
        agents=event.agents,
        generation=1,
        members=event.members,
        workers=event.workers,
    )
    _play, answer = successor(shorter)
    assert members(answer) == ["a:0.1", "b:0.1"]
    assert Leave("c:0.1") in answer


def test_next_leader_keeps_the_size_that_was_asked_for():
    _play, answer = successor(ev.RunTakenOver((HostSlots("a", 4),), agents=("a",), requested_np=2))
    assert starts(answer) == ["a:0.1", "a:1.1"]


def test_leaver_that_the_last_leader_told_is_no_surprise():
    leaver = ev.FoundWorker(
        "c:0.1", "c", 0, ready=True, generation=1, joined=1, holds_state=True, leaving=True
    )
    play, _answer = successor(found(start("a", "b", "c"), c=leaver))
    assert is_running(play)
    play.ended("c:0.1")
    assert play.kinds("worker_left")[-1]["cause"] == "left"


def test_training_that_ended_without_a_leader_ends_the_run():
    play, _ = successor(found(start("a", "b", "c")))
    for name in ("a:0.1", "b:0.1", "c:0.1"):
        play.tell(ev.WorkerFinished(name))
    assert play.ended("a:0.1") == []
    play.ended("b:0.1")
    assert play.ended("c:0.1")[-1] == Finish(
        "succeeded", "the training function returned on every worker"
    )


def test_slots_that_were_asked_for_come_before_those_in_use():
    machine = RunMachine(MachineConfig(min_np=1, np=1))
    hosts = (HostSlots("a", 1), HostSlots("b", 1))
    machine.handle(ev.HostsChanged(hosts), 0.0)
    commands = machine.handle(ev.TargetChanged(1, (("b", 0),)), 0.0)
    assert StartAgent("b") in commands
    machine.handle(ev.AgentReady("a"), 0.1)
    started = machine.handle(ev.AgentReady("b"), 0.2)
    assert [c.host for c in started if isinstance(c, StartWorker)] == ["b"]

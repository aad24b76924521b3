"""What tests of the machine tell it, and what they look for in its answers."""

from __future__ import annotations

from hvd_elastic.control import commands as cmd
from hvd_elastic.control import events as ev
from hvd_elastic.control.commands import (
    Announce,
    Emit,
    StartWorker,
)
from hvd_elastic.control.state_machine import MachineConfig, Phase, RunMachine
from hvd_elastic.run_events import Event, HostSlots
from tests.unit.records.made_events import fields_of


class Play:
    """A machine, a clock that stands still until told, and what came out."""

    def __init__(self, *hosts: str, has_checkpoint: bool = False, **config) -> None:
        self.machine = RunMachine(MachineConfig(**config), has_checkpoint)
        self.now = 0.0
        self.emitted: list[Event] = []
        self.first = self.hosts(*hosts)

    def tell(self, *events: ev.Event, after: float = 0.0) -> list[cmd.Command]:
        """Commands that answer the events, without lines for the event log."""
        self.now += after
        answer = []
        for event in events:
            due = self.machine.deadline()
            commands = self.machine.handle(event, self.now)
            if isinstance(event, ev.Tick) and commands:
                assert due is not None, "nobody would have told the time"
                assert due <= self.now
            answer += commands
        self.emitted += [c.event for c in answer if isinstance(c, Emit)]
        return [c for c in answer if not isinstance(c, Emit)]

    def hosts(self, *hosts: str) -> list[cmd.Command]:
        """A new hostfile: "a" has one slot, "a*3" has three."""
        parts = [host.partition("*") for host in hosts]
        listed = tuple(HostSlots(name, int(number or 1)) for name, _, number in parts)
        return self.tell(ev.HostsChanged(listed))

    def ready(self, *workers: str, after: float = 0.0) -> list[cmd.Command]:
        return self.tell(*(ev.WorkerReady(worker, 1.0) for worker in workers), after=after)

    def joined(self, *workers: str) -> list[cmd.Command]:
        number = self.machine.generation
        return self.tell(*(ev.WorkerJoined(worker, number) for worker in workers))

    def broken(self, worker: str, step: int, generation: int | None = None) -> list[cmd.Command]:
        number = self.machine.generation if generation is None else generation
        return self.tell(ev.WorkerBroken(worker, number, step))

    def killed(self, worker: str) -> list[cmd.Command]:
        return self.tell(ev.WorkerExited(worker, None, 9))

    def ended(self, worker: str, code: int = 0) -> list[cmd.Command]:
        return self.tell(ev.WorkerExited(worker, code, None))

    def kinds(self, kind: str) -> list[dict[str, object]]:
        return [fields_of(event) for event in self.emitted if event.kind == kind]

    @property
    def names(self) -> list[str]:
        return [member.worker for member in self.machine.members]


def start(*hosts: str, **config) -> Play:
    """A run whose first generation trains; workers are named host:slot.1."""
    play = Play(*hosts, **config)
    names = [host.partition("*")[0] for host in hosts]
    started = play.tell(*(ev.AgentReady(name) for name in names))
    workers = [c.worker for c in started if isinstance(c, StartWorker)]
    play.ready(*workers)
    play.joined(*workers)
    assert play.machine.phase is Phase.RUNNING
    return play


def announced(commands: list[cmd.Command]) -> Announce:
    """The one announcement among the commands."""
    (found,) = [command for command in commands if isinstance(command, Announce)]
    return found


def is_running(play: Play) -> bool:
    return play.machine.phase is Phase.RUNNING


def starts(commands: list[cmd.Command]) -> list[str]:
    """Workers that are started, if nothing else is asked for."""
    workers = [command.worker for command in commands if isinstance(command, StartWorker)]
    assert len(workers) == len(commands)
    return workers


def members(commands: list[cmd.Command]) -> list[str]:
    return [member.worker for member in announced(commands).members]

"""A fake cluster for tests of :class:`~hvd_elastic.control.state_machine.RunMachine`.

It has hosts, agents and workers, but no processes and no clock. Commands and events are delivered
in order on each connection, with any delay: :meth:`SimulatedCluster.do` performs one small action
(delivers one message, lets one worker act, kills something), so that a test can try every race of
a real cluster. :class:`Referee` checks each event and each command.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from hvd_elastic.control import commands as cmd
from hvd_elastic.control import events as ev
from hvd_elastic.control.state_machine import MachineConfig, Phase, RunMachine
from hvd_elastic.run_events import HostSlots

T = TypeVar("T")

_SILENT_ROUNDS = 40
"""Rounds without progress after which agents notice frozen workers by their heartbeats."""
_MOST_ROUNDS = 400
"""Rounds after which a run that has not settled counts as an error; far more than any run needs."""


class WorkerState(enum.Enum):
    """What a simulated worker is doing."""

    STARTING = enum.auto()
    WAITING = enum.auto()
    MEETING = enum.auto()
    TRAINING = enum.auto()
    FINISHED = enum.auto()


@dataclass
class SimulatedWorker:
    """A simulated worker process.

    Attributes:
        name, host: its name and host, as in the leader's commands.
        state: what it is doing.
        generation: generation that it last tried to join.
        step: number of steps in its state; None: it holds no training state.
        pending: command that it has not acted on yet.
        aborted: newest generation that was aborted.
        alive: whether the process runs.
        frozen: whether the process hangs without ending.
    """

    name: str
    host: str
    state: WorkerState = WorkerState.STARTING
    generation: int = 0
    step: int | None = None
    pending: cmd.Announce | cmd.Hold | cmd.Leave | None = None
    aborted: int = 0
    alive: bool = True
    frozen: bool = False

    def freeze(self) -> None:
        """Let the process hang without ending."""
        self.frozen = True


@dataclass
class SimulatedHost:
    """A simulated host.

    Attributes:
        up: whether it answers.
        fatal: whether no agent can ever start on it.
        agent: whether its agent runs.
        starting: whether its agent is being started.
        to_host, to_leader: messages not yet delivered.
    """

    up: bool = True
    fatal: bool = False
    agent: bool = False
    starting: bool = False
    to_host: deque[cmd.Command] = field(default_factory=deque)
    to_leader: deque[ev.Event] = field(default_factory=deque)


class Referee:
    """Checks the machine's commands against the events it has received; raises AssertionError.

    Args:
        min_np: smallest number of ranks of a generation.

    Attributes:
        live: host of each running worker.
        slots: host and slot of each worker that was ever started.
        ready: workers that can join a generation.
        told_to_leave: workers that were asked to leave, or killed.
        holders: step that each worker with training state last reported.
        members, joined, accounted: members of the newest generation, those that joined it, and
            those that reported that they broke off or hold.
        whole: whether no member of it broke off, died or was asked to hold.
        formed_once: whether any generation has trained.
        over: how the run ended; None: it has not.
    """

    def __init__(self, min_np: int) -> None:
        self.min_np = min_np
        self.live: dict[str, str] = {}
        self.slots: dict[str, tuple[str, int]] = {}
        self.ready: set[str] = set()
        self.told_to_leave: set[str] = set()
        self.holders: dict[str, int] = {}
        self.finished: set[str] = set()
        self.agents: set[str] = set()
        self.members: tuple[cmd.Member, ...] = ()
        self.generation = 0
        self.joined: set[str] = set()
        self.accounted: set[str] = set()
        self.whole = True
        self.formed_once = False
        self.over: cmd.Finish | None = None

    def note_event(self, event: ev.Event) -> None:
        """Record an event before the machine handles it."""
        members = {member.worker for member in self.members}
        match event:
            case ev.AgentFailed(host) | ev.AgentLost(host):
                self.agents.discard(host)
                for worker in [w for w, where in self.live.items() if where == host]:
                    self._ended(worker, members)
            case ev.WorkerExited(worker):
                self._ended(worker, members)
            case ev.WorkerReady(worker):
                self.ready.add(worker)
            case ev.WorkerJoined(worker, generation):
                self.holders[worker] = 0
                if generation == self.generation:
                    self.joined.add(worker)
            case ev.WorkerBroken(worker, generation, step) | ev.WorkerHeld(
                worker, generation, step
            ):
                if step < 0:
                    self.holders.pop(worker, None)
                elif worker in self.holders:
                    self.holders[worker] = step
                if worker in members:
                    self.accounted.add(worker)
                    self.whole = self.whole and generation != self.generation
            case ev.WorkerFinished(worker):
                self.finished.add(worker)
            case _:
                pass

    def _ended(self, worker: str, members: set[str]) -> None:
        if worker in members:
            self.whole = False
        for group in (self.ready, self.accounted):
            group.discard(worker)
        self.live.pop(worker, None)
        self.holders.pop(worker, None)

    def check_commands(self, commands: list[cmd.Command]) -> None:
        """Check the commands that the machine returned."""
        if self.over is not None:
            assert not commands, f"commands after Finish: {commands}"
        for command in commands:
            assert self.over is None, f"{command} after Finish"
            match command:
                case cmd.Finish():
                    self.over = command
                case cmd.StartAgent() | cmd.StopAgent():
                    self._check_agent(command)
                case cmd.StartWorker(worker, host, slot):
                    assert worker not in self.slots, f"the name {worker} is used twice"
                    busy = {self.slots[other] for other in self.live}
                    assert (host, slot) not in busy, f"{host}:{slot} has a worker already"
                    self.live[worker] = host
                    self.slots[worker] = (host, slot)
                case cmd.Leave() | cmd.Hold() | cmd.SaveState() | cmd.KillWorker():
                    self._check_worker(command)
                case cmd.Abort(generation):
                    assert generation <= self.generation
                    self.whole = self.whole and generation != self.generation
                case cmd.Announce():
                    self._check_members(command)
                    self._check_root(command)
                    self.members, self.generation = command.members, command.generation
                    self.joined, self.accounted, self.whole = set(), set(), True

    def _check_agent(self, command: cmd.StartAgent | cmd.StopAgent) -> None:
        if isinstance(command, cmd.StartAgent):
            assert command.host not in self.agents, f"the agent of {command.host} is started twice"
            self.agents.add(command.host)
        else:
            assert command.host in self.agents
            assert command.host not in self.live.values(), f"{command.host} still has workers"
            self.agents.remove(command.host)

    def _check_worker(self, command: cmd.Leave | cmd.Hold | cmd.SaveState | cmd.KillWorker) -> None:
        worker = command.worker
        match command:
            case cmd.Leave():
                assert worker in self.live.keys() - self.told_to_leave - self.finished
                self.told_to_leave.add(worker)
            case cmd.Hold():
                assert worker in {member.worker for member in self.members}
                self.whole = False
            case cmd.SaveState():
                assert worker in self.holders
            case cmd.KillWorker():
                assert worker in self.live
                self.told_to_leave.add(worker)

    def _check_members(self, new: cmd.Announce) -> None:
        assert new.generation == self.generation + 1
        assert ":" in new.reason
        gone = self.told_to_leave | self.finished
        names = [member.worker for member in new.members]
        assert self.ready - gone >= set(names), f"{names} are not all live and ready"
        for known in {member.worker for member in self.members} & self.live.keys() - gone:
            if self.whole:
                assert known in self.joined, f"{new.generation} while {known} is still joining"
            else:
                assert known in self.accounted, f"{new.generation} without word from {known}"
        assert self.finished or len(names) >= self.min_np
        _check_ranks(new.members, self.slots)

    def _check_root(self, new: cmd.Announce) -> None:
        gone = self.told_to_leave | self.finished
        holders = {worker: step for worker, step in self.holders.items() if worker not in gone}
        if not holders:
            assert new.root is None
            assert new.restore or not self.formed_once
            return
        assert new.root in holders, f"root {new.root} of holders {holders}"
        assert new.root in {member.worker for member in new.members}
        assert self.whole or holders[new.root] == max(holders.values())


def _check_ranks(members: tuple[cmd.Member, ...], slots: dict[str, tuple[str, int]]) -> None:
    """Check that ranks are as Horovod needs them: consecutive on each host."""
    assert len({member.worker for member in members}) == len(members)
    assert len({(member.host, member.slot) for member in members}) == len(members)
    assert [member.rank for member in members] == list(range(len(members)))
    for member in members:
        assert slots[member.worker] == (member.host, member.slot)
        here = [other for other in members if other.host == member.host]
        assert [other.local_rank for other in here] == list(range(len(here)))
        assert [other.rank for other in here] == list(range(here[0].rank, here[0].rank + len(here)))
        assert member.local_size == len(here)
        across = [other for other in members if other.local_rank == member.local_rank]
        assert across[member.cross_rank] == member
        assert member.cross_size == len(across)


class SimulatedCluster:
    """Carries out the commands of a machine and produces events, in the order the caller chooses.

    Args:
        hosts: number of slots by host.
        config: limits and timeouts of the machine.
        notices: whether workers notice that a peer is gone, because its connections were closed;
            otherwise, as with a pulled cable, they block until the leader aborts the generation.

    >>> cluster = SimulatedCluster({"a": 2, "b": 1}, MachineConfig(min_np=1))
    >>> cluster.settle()
    >>> [member.host for member in cluster.machine.members]
    ['a', 'a', 'b']
    """

    def __init__(self, hosts: dict[str, int], config: MachineConfig, notices: bool = True) -> None:
        self.notices = notices
        self.machine = RunMachine(config)
        self.referee = Referee(config.min_np)
        self.now = 0.0
        self.hosts = {name: SimulatedHost() for name in hosts}
        self.workers: dict[str, SimulatedWorker] = {}
        self.announced: dict[int, cmd.Announce] = {}
        self.reached: dict[int, set[str]] = {}
        self.root_step: dict[int, int] = {}
        self.saved_step = 0
        self.to_save: list[str] = []
        self.final_step = 1_000_000
        self.all_slots = dict(hosts)
        self.set_hosts(hosts)

    # -- leader ----------------------------------------------------------------------------

    def tell(self, event: ev.Event) -> None:
        """Give the machine an event and send the commands it returns."""
        self.referee.note_event(event)
        commands = self.machine.handle(event, self.now)
        self.referee.check_commands(commands)
        if self.machine.phase is Phase.RUNNING:
            self.referee.formed_once = True
        for command in commands:
            self._route(command)
        due = self.machine.deadline()
        assert due is None or due > self.now, "a deadline that has passed: the loop would spin"

    def _route(self, command: cmd.Command) -> None:
        match command:
            case cmd.StartAgent(host):
                self.hosts[host].starting = True
            case cmd.StopAgent(host):
                self._drop_agent(host)
            case cmd.StartWorker(_, host, _):
                self.hosts[host].to_host.append(command)
            case (
                cmd.KillWorker(worker)
                | cmd.Leave(worker)
                | cmd.Hold(worker)
                | cmd.SaveState(worker)
            ):
                host = self.referee.slots[worker][0]
                self.hosts[host].to_host.append(command)
            case cmd.Announce():
                self.announced[command.generation] = command
                self.reached[command.generation] = set()
                for host in {member.host for member in command.members}:
                    self.hosts[host].to_host.append(command)
            case cmd.Abort():
                for sim_host in self.hosts.values():
                    if sim_host.agent:
                        sim_host.to_host.append(command)
            case _:
                pass

    def _drop_agent(self, name: str) -> None:
        host = self.hosts[name]
        host.agent = host.starting = False
        host.to_host.clear()
        host.to_leader.clear()
        for worker in self.workers.values():
            if worker.host == name:
                worker.alive = False

    def set_hosts(self, slots: dict[str, int]) -> None:
        """Change the hostfile to these numbers of slots by host."""
        for name in slots:
            self.hosts.setdefault(name, SimulatedHost())
        listed = tuple(HostSlots(name, number) for name, number in slots.items())
        self.tell(ev.HostsChanged(listed))

    # -- what can happen -------------------------------------------------------------------

    def deliver_command(self, name: str) -> None:
        command = self.hosts[name].to_host.popleft()
        here = [w for w in self.workers.values() if w.host == name and w.alive]
        match command:
            case cmd.StartWorker(worker, host, _):
                self.workers[worker] = SimulatedWorker(worker, host)
            case cmd.Announce():
                names = {member.worker for member in command.members}
                for sim in here:
                    if sim.name in names:
                        sim.pending = command
            case cmd.Abort(generation):
                for sim in here:
                    sim.aborted = max(sim.aborted, generation)
            case cmd.KillWorker(worker):
                if self.workers[worker].alive:
                    self.end(self.workers[worker], signal=9)
            case cmd.Leave(worker) if self.workers[worker].state is WorkerState.STARTING:
                if self.workers[worker].alive:
                    self.end(self.workers[worker], signal=9)
            case cmd.Leave(worker) | cmd.Hold(worker):
                self.workers[worker].pending = command
            case cmd.SaveState(worker):
                if self.workers[worker].alive and self.workers[worker].step is not None:
                    self.to_save.append(worker)
            case _:
                raise AssertionError(command)

    def deliver_event(self, name: str) -> None:
        self.tell(self.hosts[name].to_leader.popleft())

    def send(self, worker: SimulatedWorker, event: ev.Event) -> None:
        self.hosts[worker.host].to_leader.append(event)

    def end(
        self, worker: SimulatedWorker, code: int | None = None, signal: int | None = None
    ) -> None:
        worker.alive = False
        self.send(worker, ev.WorkerExited(worker.name, code, signal))

    def peers(self, generation: int) -> list[SimulatedWorker]:
        names = [member.worker for member in self.announced[generation].members]
        return [self.workers[name] for name in names if name in self.workers]

    def moves(self, worker: SimulatedWorker) -> Callable[[], None] | None:
        """Return the next action that this worker can take by itself, if any."""
        if not worker.alive or worker.frozen:
            return None
        match worker.state:
            case WorkerState.STARTING:
                return lambda: self._become_ready(worker)
            case WorkerState.WAITING:
                return (lambda: self._obey(worker)) if worker.pending else None
            case WorkerState.MEETING:
                return self._meeting_moves(worker)
            case WorkerState.TRAINING:
                return self._training_moves(worker)
            case WorkerState.FINISHED:
                return lambda: self.end(worker, code=0)

    def _become_ready(self, worker: SimulatedWorker) -> None:
        worker.state = WorkerState.WAITING
        self.send(worker, ev.WorkerReady(worker.name, 0.1))

    def _obey(self, worker: SimulatedWorker) -> None:
        order, worker.pending = worker.pending, None
        match order:
            case cmd.Leave():
                self.end(worker, code=0)
            case cmd.Hold():
                self.send(
                    worker, ev.WorkerHeld(worker.name, worker.generation, self._step_of(worker))
                )
            case cmd.Announce(generation):
                worker.generation = generation
                if worker.aborted >= generation:  # a real worker skips it and reports that
                    self._break_off(worker)
                    return
                worker.state = WorkerState.MEETING
                self.reached[generation].add(worker.name)
                if order.root == worker.name:
                    if worker.step is None:
                        self._break_off(worker)
                    else:
                        self.root_step[generation] = worker.step
                elif order.root is None and order.members[0].worker == worker.name:
                    self.root_step[generation] = self.saved_step if order.restore else 0

    def _step_of(self, worker: SimulatedWorker) -> int:
        return -1 if worker.step is None else worker.step

    def _break_off(self, worker: SimulatedWorker, torn: bool = False) -> None:
        if torn:
            worker.step = None
        worker.state = WorkerState.WAITING
        self.send(worker, ev.WorkerBroken(worker.name, worker.generation, self._step_of(worker)))

    def _meeting_moves(self, worker: SimulatedWorker) -> Callable[[], None] | None:
        generation = worker.generation
        peers = self.peers(generation)
        everybody = {m.worker for m in self.announced[generation].members}
        met = self.reached[generation] == everybody and generation in self.root_step
        if worker.aborted >= generation:
            return lambda: self._break_off(worker, torn=met and self._differs(worker))
        if self.notices and any(not peer.alive for peer in peers):
            return lambda: self._break_off(worker, torn=met and self._differs(worker))
        if met:
            return lambda: self._join(worker)
        return None

    def _differs(self, worker: SimulatedWorker) -> bool:
        return worker.step != self.root_step[worker.generation]

    def _join(self, worker: SimulatedWorker) -> None:
        worker.state = WorkerState.TRAINING
        worker.step = self.root_step[worker.generation]
        self.send(worker, ev.WorkerJoined(worker.name, worker.generation))

    def _together(self, worker: SimulatedWorker) -> bool:
        return all(
            peer.alive
            and not peer.frozen
            and peer.state is WorkerState.TRAINING
            and peer.generation == worker.generation
            for peer in self.peers(worker.generation)
        )

    def _training_moves(self, worker: SimulatedWorker) -> Callable[[], None] | None:
        peers = self.peers(worker.generation)
        if worker.step is not None and worker.step >= self.final_step:
            return lambda: self._finish(worker)
        if worker.aborted >= worker.generation or (
            self.notices and any(self._has_gone(peer, worker.generation) for peer in peers)
        ):
            return lambda: self._break_off(worker)
        if not self._together(worker):
            return None
        if any(peer.pending is not None for peer in peers):
            return lambda: self._stop_at_boundary(peers)
        return lambda: self._take_step(peers)

    def _has_gone(self, peer: SimulatedWorker, generation: int) -> bool:
        if not peer.alive or peer.generation > generation:
            return True
        return peer.generation == generation and peer.state in (
            WorkerState.WAITING,
            WorkerState.FINISHED,
        )

    def _finish(self, worker: SimulatedWorker) -> None:
        worker.state = WorkerState.FINISHED
        self.send(worker, ev.WorkerFinished(worker.name))

    def _stop_at_boundary(self, peers: list[SimulatedWorker]) -> None:
        for peer in peers:
            peer.state = WorkerState.WAITING

    def _take_step(self, peers: list[SimulatedWorker]) -> None:
        for peer in peers:
            assert peer.step is not None
            peer.step += 1

    # -- faults ----------------------------------------------------------------------------

    def crash_worker(self, worker: SimulatedWorker, ahead: int) -> None:
        """Kill a worker in the middle of a step that some others (bits of ``ahead``) completed."""
        if worker.state is WorkerState.TRAINING and self._together(worker):
            for number, peer in enumerate(self.peers(worker.generation)):
                if peer is not worker and ahead >> number & 1 and peer.step is not None:
                    if peer.step < self.final_step:
                        peer.step += 1
        self.end(worker, signal=9)

    def crash_host(self, name: str) -> None:
        host = self.hosts[name]
        told, was_starting = host.agent, host.starting
        self._drop_agent(name)
        host.up = False
        if told:
            self.tell(ev.AgentLost(name, "no heartbeat", 3.0))
        elif was_starting:
            self.tell(ev.AgentFailed(name, f"host {name}: unreachable", fatal=False))

    def agent_answers(self, name: str) -> None:
        host = self.hosts[name]
        host.starting = False
        if host.up and not host.fatal:
            host.agent = True
            self.tell(ev.AgentReady(name))
        else:
            cause = "wrong python" if host.fatal else "unreachable"
            self.tell(ev.AgentFailed(name, f"host {name}: {cause}", host.fatal))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        due = self.machine.deadline()
        if due is not None and self.now >= due:
            self.tell(ev.Tick())

    # -- choosing --------------------------------------------------------------------------

    def do(self, kind: str, pick: int, extra: int) -> None:
        """Perform one action of this kind, if any is possible.

        Args:
            kind: kind of action; one of the cases below.
            pick: chooses among the possible actions.
            extra: chooses details, depending on the kind.
        """
        name = list(self.hosts)[pick % len(self.hosts)]
        host = self.hosts[name]
        alive = [worker for worker in self.workers.values() if worker.alive]

        def one(candidates: list[T], action: Callable[[T], object]) -> None:
            if candidates:
                action(candidates[pick % len(candidates)])

        match kind:
            case "deliver":
                one([n for n, h in self.hosts.items() if h.to_leader], self.deliver_event)
            case "command":
                waiting = [n for n, h in self.hosts.items() if h.to_host and h.agent]
                one(waiting, self.deliver_command)
            case "agent":
                one([n for n, h in self.hosts.items() if h.starting], self.agent_answers)
            case "move":
                one([move for w in alive if (move := self.moves(w))], lambda move: move())
            case "round":
                self.round()
            case "time":
                self.pass_time((0.1, 0.6, 6.0, 61.0)[extra % 4])
            case "crash":
                one(alive, lambda worker: self.crash_worker(worker, extra))
            case "freeze":
                one(alive, SimulatedWorker.freeze)
            case "break":
                busy = (WorkerState.MEETING, WorkerState.TRAINING)
                one([w for w in alive if not w.frozen and w.state in busy], self._break_off)
            case "crash_host":
                self.crash_host(name)
            case "boot":
                host.up, host.fatal = True, False
            case "spoil":
                host.fatal = True
            case "hosts":
                self.set_hosts(self._some_slots(pick, extra))
            case "drain":
                train_for_s = (None, 0.0, 5.0, 100.0)[extra % 4]
                self.tell(ev.HostDraining(name, "a test", train_for_s))
            case "return":
                self.tell(ev.HostReturned(name))
            case "save":
                self._save_one()
            case "target":
                self.tell(ev.TargetChanged(None if extra % 3 == 0 else 1 + pick % 6))
            case "finish":
                steps = [worker.step or 0 for worker in alive if self._trains(worker)]
                self.final_step = max(steps, default=self.final_step)
            case _:
                raise AssertionError(kind)

    def _some_slots(self, pick: int, extra: int) -> dict[str, int]:
        """Return a hostfile: bits of ``extra`` select hosts, ``pick`` the order and slots."""
        names = list(self.all_slots)
        if pick % 2:
            names.reverse()
        slots = {n: self.all_slots[n] for i, n in enumerate(names) if extra >> i & 1}
        if pick % 3 == 0:
            slots = {n: max(1, number // 2) for n, number in slots.items()}
        return slots

    def _save_one(self) -> None:
        """Complete the checkpoint that was requested first."""
        if self.to_save:
            worker = self.workers[self.to_save.pop(0)]
            if worker.alive and worker.step is not None:
                self.saved_step = worker.step
                self.tell(ev.StateSaved(worker.step))

    def _trains(self, worker: SimulatedWorker) -> bool:
        return worker.state is WorkerState.TRAINING and self._together(worker)

    def round(self) -> bool:
        """Perform every possible action once, without faults; return whether there was any.

        Training steps do not count.
        """
        happened = False
        for name, host in list(self.hosts.items()):
            if host.starting:
                self.agent_answers(name)
                happened = True
            while host.agent and host.to_host:
                self.deliver_command(name)
                happened = True
        stepped: set[int] = set()
        for worker in list(self.workers.values()):
            if move := self.moves(worker):
                if worker.state is WorkerState.TRAINING and worker.generation in stepped:
                    continue
                before = worker.state, worker.generation
                move()
                if (worker.state, worker.generation) == before:
                    stepped.add(worker.generation)
                else:
                    happened = True
        for name, host in list(self.hosts.items()):
            while host.to_leader:
                self.deliver_event(name)
                happened = True
        return happened

    def settle(self) -> None:
        """End all faults, allow the use of all hosts, and run until nothing more happens."""
        for host in self.hosts.values():
            host.up, host.fatal = True, False
        self.tell(ev.TargetChanged(None))
        for name in self.hosts:
            self.tell(ev.HostReturned(name))
        self.set_hosts(self.all_slots)
        for number in range(_MOST_ROUNDS):
            if self.referee.over:
                return
            if number == _SILENT_ROUNDS:
                for worker in self.workers.values():
                    if worker.frozen and worker.alive:
                        self.end(worker, signal=9)
            if self.round():
                continue
            due = self.machine.deadline()
            if due is None and number > _SILENT_ROUNDS:
                return
            self.pass_time(1.0 if due is None else max(0.0, due - self.now))
        raise AssertionError(f"the run does not come to rest: {self.machine.phase}")

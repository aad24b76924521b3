"""Tracks the agents and worker processes of a run, and decides when to start or retry them.

The fleet starts processes in the desired slots; the machine decides which generation they form.
A worker is in ``workers`` from its StartWorker until its end was *observed*.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hvd_elastic.control.backoff import Retry
from hvd_elastic.control.commands import Leave, Outbox, StartAgent, StartWorker, StopAgent
from hvd_elastic.control.config import MachineConfig
from hvd_elastic.control.events import AgentFailed, AgentLost, FoundWorker
from hvd_elastic.control.ranks import Seat, SlotId
from hvd_elastic.formatting import hosts_named, plural, worker_name
from hvd_elastic.run_events import HostLost, Warned, WorkerStarted

STABLE_S = 60.0
"""Lifetime of a member after which its death resets the slot's backoff [s]: it worked properly."""


class AgentState(enum.Enum):
    """State of an agent: ABSENT (not requested), STARTING (requested), READY, FAILED (observed)."""

    ABSENT = "absent"
    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"


@dataclass
class Agent:
    """Present state of the agent of one host, as far as it is known."""

    retry: Retry
    """Counts the failures since a worker was last ready on the host."""
    state: AgentState = AgentState.ABSENT
    fatal: bool = False
    unknown: bool = False
    """Whether the host's name could not be looked up at the last attempt."""
    cause: str = ""
    """Cause of the last failure, a sentence that names the host."""
    brief: str = ""

    @property
    def usable(self) -> bool:
        """Return whether the agent works, or has not failed since a worker was last ready."""
        return self.state is AgentState.READY or (
            self.retry.failures == 0 and self.state is not AgentState.FAILED
        )


@dataclass
class Slot:
    """The history of one slot."""

    retry: Retry
    """Counts deaths in a row."""
    incarnations: int = 0
    failures: int = 0
    """Number of deaths in a row of workers that had never joined a generation."""
    given_up: str = ""
    """Why no worker is started here any more; empty: the slot is in use."""


class Stage(enum.Enum):
    """Stage of a worker's life.

    STARTING: requested. READY: warm standby. MEMBER: member of an announced generation. WAITING:
    its generation broke or it was held, and it waits for the next one.
    """

    STARTING = "starting"
    READY = "ready"
    MEMBER = "member"
    WAITING = "waiting"


@dataclass
class Worker:
    """Present state of one worker process that was not seen to end."""

    name: str
    slot: SlotId
    retry: Retry
    """Counts generations in a row that failed to form, without a death, with it as newcomer."""
    stage: Stage = Stage.STARTING
    started_at: float = 0.0
    ready_at: float = 0.0
    member_of: int = 0
    """Last generation that it was announced into."""
    joined: int = 0
    """Last generation that it joined."""
    joined_at: float | None = None
    """When it first joined a generation [s]; None: it has not."""
    holds_state: bool = False
    step: int = 0
    """Number of optimizer steps in its state, as reported when it last began to wait."""
    rank_of_state: int = 0
    """Orders states of the same step; the higher is the newer."""
    finished: bool = False
    leaving: bool = False
    leave_by: float | None = None
    killed: str = ""
    """Why its process was killed; empty: it was not."""
    saved: bool | None = None
    """Whether its state is in a complete checkpoint; None: none was requested from it."""

    @property
    def host(self) -> str:
        return self.slot[0]

    @property
    def place(self) -> str:
        """Return its name for users: that of its slot."""
        return worker_name(*self.slot)

    @property
    def progress(self) -> tuple[int, int]:
        """Return an order of the states of waiting workers; higher is newer."""
        return self.step, self.rank_of_state

    @property
    def seat(self) -> Seat:
        return Seat(self.name, *self.slot)


class Fleet:
    """Holds all agents and workers of a run."""

    def __init__(self, out: Outbox, config: MachineConfig) -> None:
        self._out = out
        self._config = config
        self.agents: dict[str, Agent] = {}
        self.slots: dict[SlotId, Slot] = {}
        self.workers: dict[str, Worker] = {}
        self._by_slot: dict[SlotId, Worker] = {}

    # -- questions -------------------------------------------------------------------------

    def worker_at(self, slot: SlotId) -> Worker | None:
        """Return the live worker in ``slot``, even if it is leaving."""
        return self._by_slot.get(slot)

    def present(self, *stages: Stage) -> list[Worker]:
        """Return the live workers in these stages that were not asked to leave."""
        return [w for w in self.workers.values() if w.stage in stages and not w.leaving]

    def usable(self, slot: SlotId) -> bool:
        """Return whether a worker can run there now or, as far as is known, soon."""
        return self._agent(slot[0]).usable and not self._slot(slot).given_up

    def conceivable(self, slot: SlotId) -> bool:
        """Return whether a worker can run there without a repair by the user."""
        return not self._agent(slot[0]).fatal and not self._slot(slot).given_up

    def cost(self, slot: SlotId) -> int:
        """Return the cost of using ``slot`` next; see :func:`ranks.choose_slots`.

        It is 0 for workers that hold a place already, 1 for other live ones, 2 for empty slots,
        and for workers that are started in the place of one that died: a warm spare comes first.
        """
        worker = self.worker_at(slot)
        if worker is None or worker.leaving:
            return 2
        if worker.stage is Stage.STARTING and self._slot(slot).retry.failures:
            return 2
        return 0 if worker.stage in (Stage.MEMBER, Stage.WAITING) else 1

    def troubles(self, slots: Iterable[SlotId]) -> list[str]:
        """Return why some of ``slots`` cannot be used, a sentence for each host or slot."""
        found = []
        for slot in slots:
            if not self._agent(slot[0]).usable:
                found.append(self._agent(slot[0]).cause)
            elif self._slot(slot).given_up:
                found.append(f"slot {worker_name(*slot)}: {self._slot(slot).given_up}")
        return list(dict.fromkeys(found))

    def troubles_in_brief(self, slots: Iterable[SlotId]) -> list[str]:
        """Return the troubles in a few words, with what happens next; causes were reported."""
        hosts: dict[str, list[str]] = {}
        given_up = []
        for slot in slots:
            agent = self._agent(slot[0])
            if not agent.usable:
                hosts.setdefault(f"{agent.brief} ({self._what_next(agent)})", []).append(slot[0])
            elif self._slot(slot).given_up:
                given_up.append(worker_name(*slot))
        parts = [f"{hosts_named(names)} {what}" for what, names in hosts.items()]
        if given_up:
            verb = "is" if len(given_up) == 1 else "are"
            parts.append(f"{plural('slot', len(given_up))} {', '.join(given_up)} {verb} given up")
        return parts

    def _what_next(self, agent: Agent) -> str:
        if agent.fatal:
            return "not tried again before the hostfile is saved"
        return f"trying again in {agent.retry.pause_s:g} s"

    def nobody_is_known(self, hosts: Collection[str], tries: int) -> bool:
        """Return whether no host name could be looked up, after at least ``tries`` attempts."""
        agents = [self._agent(host) for host in hosts]
        return (
            bool(agents)
            and all(agent.unknown for agent in agents)
            and max(agent.retry.failures for agent in agents) >= tries
        )

    def _agent(self, host: str) -> Agent:
        agent = self.agents.get(host)
        if agent is None:
            agent = self.agents[host] = Agent(Retry(self._config.agent_retry_s))
        return agent

    def _add_worker(self, name: str, slot: SlotId, **known: Any) -> None:
        retry = Retry(self._config.restart_backoff_s)
        self.workers[name] = self._by_slot[slot] = Worker(name, slot, retry, **known)

    def _slot(self, slot: SlotId) -> Slot:
        history = self.slots.get(slot)
        if history is None:
            history = self.slots[slot] = Slot(Retry(self._config.restart_backoff_s))
        return history

    # -- observed --------------------------------------------------------------------------

    def forgive(self, hosts: Collection[str]) -> None:
        """Reset failed agents and given-up slots, because the hostfile was saved."""
        for host, agent in list(self.agents.items()):
            if host not in hosts and agent.state is AgentState.FAILED:
                del self.agents[host]
            elif agent.state is AgentState.FAILED and (agent.fatal or agent.unknown):
                self.agents[host] = Agent(Retry(self._config.agent_retry_s))
        for slot, history in self.slots.items():
            if history.given_up:
                again = Retry(self._config.restart_backoff_s)
                self.slots[slot] = Slot(again, incarnations=history.incarnations)

    def take_over(
        self,
        agents: Iterable[str],
        awaited: Iterable[str],
        found: Iterable[FoundWorker],
        now: float,
    ) -> None:
        """Add the agents and workers that an earlier leader left.

        Args:
            agents: hosts whose agents have answered.
            awaited: hosts whose agents are being started.
            now: time [s].
        """
        for host in agents:
            self._agent(host).state = AgentState.READY
        for host in awaited:
            self._agent(host).state = AgentState.STARTING
        for worker in found:
            slot = (worker.host, worker.slot)
            stage = Stage.READY if worker.ready else Stage.STARTING
            if worker.generation:
                stage = Stage.WAITING if worker.waiting else Stage.MEMBER
            self._add_worker(
                worker.worker,
                slot,
                stage=stage,
                started_at=now,
                ready_at=now,
                member_of=worker.generation,
                joined=worker.joined,
                joined_at=now if worker.joined else None,
                holds_state=worker.holds_state,
                step=worker.step,
                rank_of_state=worker.state,
                finished=worker.finished,
                leaving=worker.leaving,
                killed=worker.killed,
            )
            incarnation = worker.worker.rpartition(".")[2]
            if incarnation.isdecimal():
                history = self._slot(slot)
                history.incarnations = max(history.incarnations, int(incarnation))

    def agent_ready(self, host: str) -> None:
        agent = self._agent(host)
        agent.state = AgentState.READY
        agent.unknown = False

    def agent_failed(self, event: AgentFailed, now: float) -> None:
        """Note that an agent could not be started; warn if the cause is a new one."""
        host, cause = event.host, event.cause
        if event.fatal or cause != self._agent(host).cause:
            again = "" if event.fatal else "; trying again"
            said = f"{cause}{again}"
            self._out.emit(Warned(said, host, event.fatal))
        agent = self._note_failure(host, cause, event.brief, now)
        agent.fatal = event.fatal
        agent.unknown = event.unknown

    def agent_lost(self, event: AgentLost, now: float) -> None:
        """Note that a running agent ended."""
        self._out.emit(HostLost(event.host, event.cause, event.silent_s))
        cause = f"host {event.host}: {event.cause}"
        self._note_failure(event.host, cause, "did not come back yet", now)

    def _note_failure(self, host: str, cause: str, brief: str, now: float) -> Agent:
        agent = self._agent(host)
        agent.state = AgentState.FAILED
        agent.retry.failed(now)
        agent.fatal = agent.unknown = False
        agent.cause, agent.brief = cause, brief
        return agent

    def worker_ready(self, worker: Worker, now: float) -> None:
        """Note that a standby is warm."""
        worker.stage = Stage.READY
        worker.ready_at = now
        agent = self._agent(worker.host)
        agent.retry.worked()
        agent.cause = ""

    def worker_joined(self, worker: Worker, generation: int, now: float) -> None:
        """Note that a member joined its generation and holds the common state."""
        worker.holds_state = True
        worker.joined = max(worker.joined, generation)
        worker.retry.worked()
        worker.saved = None
        # All members train in lockstep. Steps are compared only between waiting workers, and each
        # of those reports its own.
        worker.step = worker.rank_of_state = 0
        if worker.joined_at is None:
            worker.joined_at = now
        self._slot(worker.slot).failures = 0

    def bury(self, worker: Worker, now: float, blame: str = "") -> None:
        """Remove a worker that has ended.

        Args:
            now: time [s].
            blame: why its end counts as a failure of its slot; empty: it does not.
        """
        del self.workers[worker.name]
        self._by_slot.pop(worker.slot, None)
        if not blame:
            return
        slot = self._slot(worker.slot)
        if worker.joined_at is not None and now - worker.joined_at >= STABLE_S:
            slot.retry.worked()
        slot.retry.failed(now)
        if worker.joined_at is None:
            slot.failures += 1
            if slot.failures >= self._config.max_worker_failures:
                self.give_up(worker.slot, f"{slot.failures} workers in a row failed ({blame})")

    def give_up(self, slot: SlotId, cause: str) -> None:
        """Start no worker in ``slot`` until the hostfile is saved again."""
        self._slot(slot).given_up = cause
        self._out.emit(Warned(f"slot {worker_name(*slot)} is given up: {cause}"))

    # -- requested -------------------------------------------------------------------------

    def start(self, desired: Sequence[SlotId], hoped_for: Sequence[SlotId], now: float) -> None:
        """Start missing agents and workers, each when its backoff is over.

        Args:
            desired: slots that should hold a worker.
            hoped_for: slots that should hold one if failed hosts recovered; the agents of these
                hosts are tried again.
            now: time [s].
        """
        for host in dict.fromkeys(host for host, _ in (*desired, *hoped_for)):
            agent = self._agent(host)
            failed = agent.state is AgentState.FAILED and not agent.fatal
            if failed and now < agent.retry.at:
                self._out.wake(agent.retry.at)
            elif failed or agent.state is AgentState.ABSENT:
                agent.state = AgentState.STARTING
                self._out.send(StartAgent(host))
        for slot in desired:
            history = self._slot(slot)
            if self._agent(slot[0]).state is not AgentState.READY or self.worker_at(slot):
                continue
            if now < history.retry.at:
                self._out.wake(history.retry.at)
                continue
            history.incarnations += 1
            name = f"{slot[0]}:{slot[1]}.{history.incarnations}"
            self._add_worker(name, slot, started_at=now)
            self._out.emit(WorkerStarted(*slot))
            self._out.send(StartWorker(name, *slot))

    def stop_idle_agents(self, desired: Sequence[SlotId]) -> None:
        """End the agents of hosts that have no worker and need none."""
        needed = {host for host, _ in desired} | {w.host for w in self.workers.values()}
        for host, agent in list(self.agents.items()):
            if agent.state is AgentState.READY and host not in needed:
                del self.agents[host]
                self._out.send(StopAgent(host))

    def dismiss(self, worker: Worker) -> None:
        """Ask ``worker`` to leave, once; from then on its end is expected."""
        if not worker.leaving:
            worker.leaving = True
            self._out.send(Leave(worker.name))

    def dismiss_if(self, useless: Callable[[Worker], bool], *stages: Stage) -> None:
        """Dismiss the workers in ``stages`` for which ``useless`` is true."""
        for worker in self.present(*stages):
            if useless(worker):
                self.dismiss(worker)

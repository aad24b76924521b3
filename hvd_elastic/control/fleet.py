"""Agents and worker processes: what was asked of them, what was seen of them, when to try again.

The fleet brings processes to the slots that are desired; what generation they form is the
machine's business. A worker is in ``workers`` from its StartWorker until its end was *observed*.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from hvd_elastic.control.commands import Leave, StartAgent, StartWorker, StopAgent
from hvd_elastic.control.config import MachineConfig
from hvd_elastic.control.events import AgentFailed, AgentLost, FoundWorker
from hvd_elastic.control.membership import Seat, SlotId
from hvd_elastic.control.outbox import Outbox
from hvd_elastic.formatting import hosts_named, plural, worker_name

__all__ = ["Agent", "AgentState", "Fleet", "Slot", "Stage", "Worker", "backoff"]

STABLE_S = 60.0
"""A member that lived this long was sound: its death starts the slot's backoff from the front."""


class AgentState(enum.Enum):
    """ABSENT: not asked for. STARTING: asked for. READY, FAILED: observed."""

    ABSENT = "absent"
    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"


@dataclass
class Agent:
    """The agent of one host."""

    state: AgentState = AgentState.ABSENT
    failures: int = 0
    """Since a worker was last seen ready on the host."""
    retry_at: float = 0.0
    fatal: bool = False
    unknown: bool = False
    """At its last try the host's name could not be looked up."""
    cause: str = ""
    """Of the last failure, in a sentence that names the host."""
    brief: str = ""

    @property
    def usable(self) -> bool:
        """Presumed good until a start failed; then good again once it was seen ready."""
        return self.state is AgentState.READY or (
            self.failures == 0 and self.state is not AgentState.FAILED
        )


@dataclass
class Slot:
    """The history of one slot."""

    incarnations: int = 0
    deaths: int = 0
    """In a row; for the backoff."""
    failures: int = 0
    """Deaths in a row of workers that never joined a generation."""
    retry_at: float = 0.0
    given_up: str = ""
    """Why nothing is started here any more; empty: it is in use."""


class Stage(enum.Enum):
    """STARTING: asked for. READY: warm standby. MEMBER: announced. WAITING: broke off or held."""

    STARTING = "starting"
    READY = "ready"
    MEMBER = "member"
    WAITING = "waiting"


@dataclass
class Worker:
    """One live process, as far as is known."""

    name: str
    slot: SlotId
    stage: Stage = Stage.STARTING
    started_at: float = 0.0
    ready_at: float = 0.0
    member_of: int = 0
    """The generation it was last announced into."""
    joined: int = 0
    """The generation it was last seen in."""
    joined_at: float | None = None
    """When it first joined one."""
    holds_state: bool = False
    step: int = 0
    """Optimizer steps of its state, as it said when it last began to wait."""
    rank_of_state: int = 0
    """Orders the states of one step; the higher is the newer one."""
    finished: bool = False
    leaving: bool = False
    leave_by: float | None = None
    killed: str = ""
    """Why it was told to be killed; empty: it was not."""
    saved: bool | None = None
    """Whether its state is in a checkpoint, which it was asked for before its host goes."""
    vain_tries: int = 0
    """Generations in a row that did not form with it as a newcomer though nobody died."""
    eligible_at: float = 0.0

    @property
    def host(self) -> str:
        return self.slot[0]

    @property
    def place(self) -> str:
        """What users call it: the slot, whichever process sits there."""
        return worker_name(*self.slot)

    @property
    def progress(self) -> tuple[int, int]:
        """How far its state is; compared between workers that wait."""
        return self.step, self.rank_of_state

    @property
    def seat(self) -> Seat:
        return Seat(self.name, *self.slot)


def backoff(delays: Sequence[float], tries: int) -> float:
    """Delay after the ``tries``-th failure in a row; the last one is repeated.

    >>> [backoff((0.5, 1, 2), tries) for tries in (0, 1, 2, 3, 9)]
    [0.0, 0.5, 1, 2, 2]
    """
    return delays[min(tries, len(delays)) - 1] if tries else 0.0


class Fleet:
    """All agents and workers of a run."""

    def __init__(self, out: Outbox, config: MachineConfig) -> None:
        self._out = out
        self._config = config
        self.agents: dict[str, Agent] = {}
        self.slots: dict[SlotId, Slot] = {}
        self.workers: dict[str, Worker] = {}

    # -- questions -------------------------------------------------------------------------

    def worker_at(self, slot: SlotId) -> Worker | None:
        """The live process in ``slot``, even one that is leaving."""
        return next((worker for worker in self.workers.values() if worker.slot == slot), None)

    def present(self, *stages: Stage) -> list[Worker]:
        """Live workers that were not told to leave, in those stages."""
        return [w for w in self.workers.values() if w.stage in stages and not w.leaving]

    def usable(self, slot: SlotId) -> bool:
        """Whether a worker can run there now or, as far as is known, soon."""
        return self._agent(slot[0]).usable and not self._slot(slot).given_up

    def conceivable(self, slot: SlotId) -> bool:
        """Whether a worker can ever run there without somebody mending something."""
        return not self._agent(slot[0]).fatal and not self._slot(slot).given_up

    def cost(self, slot: SlotId) -> int:
        """What taking ``slot`` into the next generation costs; see `membership.choose_slots`."""
        worker = self.worker_at(slot)
        if worker is None or worker.leaving:
            return 2
        return 0 if worker.stage in (Stage.MEMBER, Stage.WAITING) else 1

    def troubles(self, slots: Iterable[SlotId]) -> list[str]:
        """Why some of ``slots`` cannot be used, a sentence per host or slot."""
        found = []
        for slot in slots:
            if not self._agent(slot[0]).usable:
                found.append(self._agent(slot[0]).cause)
            elif self._slot(slot).given_up:
                found.append(f"slot {worker_name(*slot)}: {self._slot(slot).given_up}")
        return list(dict.fromkeys(found))

    def troubles_in_brief(self, slots: Iterable[SlotId]) -> list[str]:
        """The same for a reader who was told the causes: who, what in a few words, what next."""
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
        return f"trying again in {backoff(self._config.agent_retry_s, agent.failures):g} s"

    def nobody_is_known(self, hosts: Collection[str], tries: int) -> bool:
        """Whether none of the hosts' names can be looked up, however often it was tried."""
        agents = [self._agent(host) for host in hosts]
        return (
            bool(agents)
            and all(agent.unknown for agent in agents)
            and max(agent.failures for agent in agents) >= tries
        )

    def _agent(self, host: str) -> Agent:
        return self.agents.setdefault(host, Agent())

    def _slot(self, slot: SlotId) -> Slot:
        return self.slots.setdefault(slot, Slot())

    # -- observed --------------------------------------------------------------------------

    def forgive(self, hosts: Collection[str]) -> None:
        """The hostfile was written anew: what was given up in it deserves another try."""
        for host, agent in list(self.agents.items()):
            if host not in hosts and agent.state is AgentState.FAILED:
                del self.agents[host]
            elif agent.state is AgentState.FAILED and (agent.fatal or agent.unknown):
                self.agents[host] = Agent()
        for slot, history in self.slots.items():
            if history.given_up:
                self.slots[slot] = Slot(incarnations=history.incarnations)

    def take_over(
        self,
        agents: Iterable[str],
        awaited: Iterable[str],
        found: Iterable[FoundWorker],
        now: float,
    ) -> None:
        """Take over what another leader has left."""
        for host in agents:
            self._agent(host).state = AgentState.READY
        for host in awaited:
            self._agent(host).state = AgentState.STARTING
        for worker in found:
            slot = (worker.host, worker.slot)
            stage = Stage.READY if worker.ready else Stage.STARTING
            if worker.generation:
                stage = Stage.WAITING if worker.waiting else Stage.MEMBER
            self.workers[worker.worker] = Worker(
                worker.worker,
                slot,
                stage,
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
        """The agent answered."""
        agent = self._agent(host)
        agent.state = AgentState.READY
        agent.unknown = False

    def agent_failed(self, event: AgentFailed, now: float) -> None:
        """The agent could not be started; its cause is said when it is a new one."""
        host, cause = event.host, event.cause
        if event.fatal or cause != self._agent(host).cause:
            again = "" if event.fatal else "; trying again"
            self._out.emit("warning", message=f"{cause}{again}")
        agent = self._note_failure(host, cause, event.brief, now)
        agent.fatal = event.fatal
        agent.unknown = event.unknown

    def agent_lost(self, event: AgentLost, now: float) -> None:
        """A running agent ended."""
        self._out.emit("host_lost", host=event.host, cause=event.cause, silent_s=event.silent_s)
        cause = f"host {event.host}: {event.cause}"
        self._note_failure(event.host, cause, "did not come back yet", now)

    def _note_failure(self, host: str, cause: str, brief: str, now: float) -> Agent:
        agent = self._agent(host)
        agent.state = AgentState.FAILED
        agent.failures += 1
        agent.retry_at = now + backoff(self._config.agent_retry_s, agent.failures)
        agent.fatal = agent.unknown = False
        agent.cause, agent.brief = cause, brief
        return agent

    def worker_ready(self, worker: Worker, now: float) -> None:
        """A standby is warm."""
        worker.stage = Stage.READY
        worker.ready_at = now
        agent = self._agent(worker.host)
        agent.failures = 0
        agent.cause = ""

    def worker_joined(self, worker: Worker, generation: int, now: float) -> None:
        """A member met the others and holds their state."""
        worker.holds_state = True
        worker.joined = max(worker.joined, generation)
        worker.vain_tries = 0
        worker.saved = None
        # It has the others' state and moves with them; steps are compared only between workers
        # that broke off, and each of those says its own.
        worker.step = worker.rank_of_state = 0
        if worker.joined_at is None:
            worker.joined_at = now
        self._slot(worker.slot).failures = 0

    def bury(self, worker: Worker, now: float, blame: str = "") -> None:
        """The process is no more; ``blame``: why its slot should be tried with care."""
        del self.workers[worker.name]
        if not blame:
            return
        slot = self._slot(worker.slot)
        if worker.joined_at is not None and now - worker.joined_at >= STABLE_S:
            slot.deaths = 0
        slot.deaths += 1
        slot.retry_at = now + backoff(self._config.restart_backoff_s, slot.deaths)
        if worker.joined_at is None:
            slot.failures += 1
            if slot.failures >= self._config.max_worker_failures:
                self.give_up(worker.slot, f"{slot.failures} workers in a row failed ({blame})")

    def give_up(self, slot: SlotId, cause: str) -> None:
        """Start nothing in ``slot`` until the hostfile is written anew."""
        self._slot(slot).given_up = cause
        self._out.emit("warning", message=f"slot {worker_name(*slot)} is given up: {cause}")

    # -- requested -------------------------------------------------------------------------

    def start(self, desired: Sequence[SlotId], hoped_for: Sequence[SlotId], now: float) -> None:
        """Ask for what is missing.

        Args:
            desired: slots that should hold a worker.
            hoped_for: the same if hosts that failed came back; their agents are tried again.
            now: time [s].
        """
        for host in dict.fromkeys(host for host, _ in (*desired, *hoped_for)):
            agent = self._agent(host)
            failed = agent.state is AgentState.FAILED and not agent.fatal
            if failed and now < agent.retry_at:
                self._out.wake(agent.retry_at)
            elif failed or agent.state is AgentState.ABSENT:
                agent.state = AgentState.STARTING
                self._out.send(StartAgent(host))
        for slot in desired:
            history = self._slot(slot)
            if self._agent(slot[0]).state is not AgentState.READY or self.worker_at(slot):
                continue
            if now < history.retry_at:
                self._out.wake(history.retry_at)
                continue
            history.incarnations += 1
            name = f"{slot[0]}:{slot[1]}.{history.incarnations}"
            self.workers[name] = Worker(name, slot, started_at=now)
            self._out.send(StartWorker(name, *slot))

    def stop_idle_agents(self, desired: Sequence[SlotId]) -> None:
        """End the agents of hosts that have no worker and shall have none."""
        needed = {host for host, _ in desired} | {w.host for w in self.workers.values()}
        for host, agent in list(self.agents.items()):
            if agent.state is AgentState.READY and host not in needed:
                del self.agents[host]
                self._out.send(StopAgent(host))

    def dismiss(self, worker: Worker) -> None:
        """Tell ``worker`` to leave, once; from then on its end is no surprise."""
        if not worker.leaving:
            worker.leaving = True
            self._out.send(Leave(worker.name))

    def dismiss_if(self, useless: Callable[[Worker], bool], *stages: Stage) -> None:
        """Dismiss the workers in ``stages`` that are of no use."""
        for worker in self.present(*stages):
            if useless(worker):
                self.dismiss(worker)

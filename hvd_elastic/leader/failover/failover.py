"""Takes a run over from an earlier leader, and decides whether this leader gives way to another."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Sequence

from hvd_elastic.checkpoint.lease import Lease
from hvd_elastic.control import events as ev
from hvd_elastic.control.commands import Finish
from hvd_elastic.control.events import AgentFailed
from hvd_elastic.errors import CheckpointError
from hvd_elastic.leader.agents.agents import LOOK_S
from hvd_elastic.leader.agents.connection import AgentConnection, FromAgent
from hvd_elastic.leader.executor import Executor
from hvd_elastic.leader.led_run import LedRun
from hvd_elastic.records.summary import RunSummary
from hvd_elastic.run_events import HostSlots
from hvd_elastic.wire import messages as msg
from hvd_elastic.wire.messages import HeldRun

_RETRY_S = 1.0
"""Time before an unreachable host is tried again [s]; short, since a whole run is paused."""
_STARTING_S = 45.0
"""How much longer a takeover waits for hosts of the last generation whose agents are starting [s].
They take long on a busy host. If the run were led without them, their live workers would be ended,
and training go back to a checkpoint. With :data:`TAKEOVER_S` it is less than the usual grace time,
for which they hold out."""


class Takeover:
    """Keeps track of which hosts have answered a new leader, and what they hold of the run.

    Args:
        hosts: names of the hosts in the hostfile.
        np: number of processes that the user requests now.
        deadline: when to continue without the hosts that have not answered [monotonic s].
        patient: whether an unreachable host is tried again until then.
        of_engine: whether an engine owns the hosts: it can reach no others, which are not asked.

    Attributes:
        latest: until when ``deadline`` is moved forward while agents of hosts of the last
            generation are being started, as on busy hosts [monotonic s].
        asked: hosts whose agent is started: those of the last generation and those of the
            hostfile. A host that is no longer in the hostfile may hold workers that have to end.
        postponed: messages of agents that are handled once the takeover is complete.
        lease_open: whether the check for another leader's lease has not ended.
        leased_by: lease of another leader, for which this one ends once the hosts have answered.
        unwritable: why checkpoints cannot be written; None: they can.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        past: RunSummary,
        np: int | None,
        deadline: float,
        *,
        patient: bool = False,
        of_engine: bool = False,
        lease_open: bool = False,
        unwritable: CheckpointError | None = None,
    ) -> None:
        self.deadline = deadline
        self.latest = deadline + _STARTING_S
        self.patient = patient
        self.lease_open = lease_open
        self.leased_by: Lease | None = None
        self.unwritable = unwritable
        self.postponed: list[tuple[AgentConnection, FromAgent]] = []
        known = past.generation_hosts
        self._awaited = [name for name in known if name in hosts or not of_engine] or list(hosts)
        self.asked = list(dict.fromkeys([*self._awaited, *hosts]))
        self._past = past
        self._same_np = past.np == np
        self._open = set(self.asked)
        self._ready: list[str] = []
        self._held: dict[str, HeldRun] = {}
        self._untold: dict[str, int] = {}
        self._retry_at: dict[str, float] = {}

    def postpone(self, host: str, now: float) -> None:
        """Schedule another attempt to reach ``host``."""
        self._retry_at[host] = now + _RETRY_S

    def due(self, now: float) -> list[str]:
        """Return the hosts that are due for another attempt, each once."""
        found = [host for host, at in self._retry_at.items() if now >= at]
        for host in found:
            del self._retry_at[host]
        return found

    def answered(self, host: str, held: HeldRun | None) -> None:
        """Note that the agent of ``host`` answered.

        Args:
            held: what the agent holds of the run; None if it was newly started.
        """
        self._open.discard(host)
        self._ready.append(host)
        if held is not None:
            self._held[host] = held
            self._untold[host] = held.untold

    def told(self, host: str) -> None:
        """Note that ``host`` sent a message after its answer."""
        self._untold[host] = self._untold.get(host, 0) - 1

    def failed(self, host: str) -> None:
        """Note that ``host`` has no agent, and therefore no worker either."""
        self._open.discard(host)
        if host in self._ready:
            self._ready.remove(host)
        self._held.pop(host, None)
        self._untold.pop(host, None)

    @property
    def complete(self) -> bool:
        """Return whether enough hosts have answered to lead the run.

        Enough are all hosts; or all hosts of the last generation if they hold workers of the run,
        because then no other leader can lead it. What they had not told the earlier leader for
        certain has to be here too: it may say that the last generation has formed.
        """
        asked_all = not self._open and not self.lease_open
        told = all(number <= 0 for number in self._untold.values())
        return told and (asked_all or self._held.keys() >= set(self._awaited))

    @property
    def missing(self) -> list[str]:
        """Return the hosts of the last generation that have not answered."""
        return [host for host in self._awaited if host in self._open]

    @property
    def workers(self) -> dict[str, tuple[str, int]]:
        """Return the host and slot of every worker that was found, by worker."""
        return {found.worker: (found.host, found.slot) for found in self._found()}

    @property
    def input_hosts(self) -> Collection[str]:
        """Return the hosts that read for the ranks under the earlier leader."""
        return self._past.input_hosts.keys()

    @property
    def came_back(self) -> tuple[str, ...]:
        """Return the hosts that may be used again, because they were away since they were drained.

        These are drained hosts that had announced their preemption and hold nothing of the run now.
        """
        return tuple(
            host
            for host, found in self._past.draining.items()
            if not found.asked and host not in self._held
        )

    def event(self, hosts: tuple[HostSlots, ...]) -> ev.RunTakenOver:
        """Return the event with everything that was found; ``hosts``: slots of the hostfile."""
        none = HeldRun(generation=0, members=(), workers=())
        newest = max(self._held.values(), key=lambda held: held.generation, default=none)
        past = self._past
        return ev.RunTakenOver(
            hosts=hosts,
            agents=tuple(self._ready),
            awaited=tuple(host for host in self.asked if host not in self._ready),
            # Numbers continue where nothing is held: no two generations of a run have the same.
            generation=newest.generation or past.generation,
            members=newest.members,
            # A changed --np is newer than an earlier hvd-elastic scale.
            requested_np=past.scaled_to if self._same_np else None,
            slots=tuple(past.scaled_slots) if self._same_np else (),
            draining=tuple(host for host in past.draining if host not in self.came_back),
            workers=tuple(self._found()),
        )

    def _found(self) -> list[ev.FoundWorker]:
        return [worker for held in self._held.values() for worker in held.workers]


TAKEOVER_S = 12.0
"""How long a takeover waits for the hosts' answers [s]: enough for a slow ssh connection."""


class Failover:
    """Takes a run over, and meets other leaders of the run.

    Args:
        executor: starts agents; it is told how the run ends for this leader if it gives way.
        lead: called with what was found once the hosts have answered.
    """

    def __init__(self, run: LedRun, executor: Executor, lead: Callable[[Takeover], None]) -> None:
        self._run = run
        self._executor = executor
        self._lead = lead
        self._takeover: Takeover | None = None
        """State of a takeover; None: it is complete, and this leader leads."""

    @property
    def deadline(self) -> float | None:
        """When a takeover continues without the hosts that have not answered [monotonic s].

        None: no takeover is under way, so this leader leads.
        """
        return None if self._takeover is None else self._takeover.deadline

    @property
    def leads(self) -> bool:
        """Return whether no takeover is under way."""
        return self._takeover is None

    def lease(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that holds a lease on a shared checkpoint folder, if there is one."""
        if self._run.spec.checkpoint_folder is None:  # then the lock of the run folder is enough
            return contextlib.nullcontext()
        return self._run.fence.acquire(
            lambda: self._run.loop.post(self._lease_is_settled),
            lambda lease, lost: self._run.loop.post(lambda: self.met_lease(lease, lost=lost)),
        )

    # -- a takeover ------------------------------------------------------------------------

    def ask_hosts(
        self,
        past: RunSummary,
        wait_s: float = TAKEOVER_S,
        *,
        patient: bool = False,
        unwritable: CheckpointError | None = None,
    ) -> None:
        """Begin a takeover: start agents and ask them what they still hold of the run.

        Args:
            wait_s: how long to wait for the answers [s].
            patient: whether unreachable hosts are tried again during that time.
            unwritable: why checkpoints cannot be written; None: they can.
        """
        now = time.monotonic()
        takeover = self._takeover = Takeover(
            list(self._run.hostfile.hosts),
            past,
            self._run.spec.np,
            now + wait_s,
            patient=patient,
            of_engine=self._run.spec.engine is not None,
            lease_open=self._run.fence.has_lease_file and not patient,
            unwritable=unwritable,
        )
        for name in takeover.asked:
            if patient:
                takeover.postpone(name, now)
            else:
                self._executor.start_agent(name, take_over=True)
        self._lead_if_complete()

    def hear(self, agent: AgentConnection, message: FromAgent) -> None:
        """Handle an agent's message that arrives during a takeover."""
        host, takeover = agent.host.name, self._takeover
        assert takeover is not None
        match message:
            case msg.AgentHello():
                takeover.answered(host, message.held)
                if takeover.patient:  # the network is back, so the others will answer soon
                    self.hasten()
            case AgentFailed(fatal=fatal):
                if takeover.patient and not agent.up and not fatal:
                    del self._run.agents.by_host[host]
                    takeover.postpone(host, time.monotonic())
                    return
                takeover.failed(host)
            case _:
                takeover.told(host)
        takeover.postponed.append((agent, message))
        self._lead_if_complete()

    def hasten(self) -> None:
        """Wait for the hosts' answers no longer than usual from now on."""
        if self._takeover is not None:
            takeover, soon = self._takeover, time.monotonic() + TAKEOVER_S
            takeover.deadline = min(takeover.deadline, soon)
            takeover.latest = min(takeover.latest, soon + _STARTING_S)

    def retry_unreachable_hosts(self, now: float) -> None:
        """Try unreachable hosts again, and continue when the time is over; called often."""
        if self._takeover is not None:
            for host in self._takeover.due(now):
                self._executor.start_agent(host, take_over=True)
            self._lead_if_complete()

    def _lead_if_complete(self) -> None:
        takeover, now = self._takeover, time.monotonic()
        if takeover is None:
            return
        if takeover.deadline <= now < takeover.latest and self._any_starts(takeover.missing):
            takeover.deadline = now + LOOK_S
        if not takeover.complete and now < takeover.deadline:
            return
        self._takeover = None
        if takeover.leased_by is not None:
            self._give_way_for(self._run.fence.met_lease(takeover.leased_by, lost=False))
            return
        self._lead(takeover)

    def _any_starts(self, hosts: list[str]) -> bool:
        agents = self._run.agents.by_host
        return any(agents[host].is_starting for host in hosts if host in agents)

    # -- other leaders ---------------------------------------------------------------------

    def refused(self, host: str, led: msg.LeaderIdentity) -> None:
        """Handle an agent's refusal: another leader leads it, and one of the two has to end."""
        if self._executor.finish is None:
            has_host = bool(self._run.agents.up)
            self._give_way_for(
                self._run.fence.refused(host, led, leads=self.leads, has_host=has_host)
            )

    def taken_over(self, agent: AgentConnection, led: msg.LeaderIdentity) -> None:
        """Handle an agent that followed another leader while this one was unreachable."""
        agent.taken_over = True
        if self._executor.finish is None and all(other.taken_over for other in self._run.agents.up):
            self._give_way_for(self._run.fence.left(agent.host.name, led))
        # Otherwise the host counts as lost once its connection has ended.

    def met_lease(self, lease: Lease, *, lost: bool) -> None:
        """Handle the lease of another live leader; ``lost``: it was this leader's before."""
        if self._executor.finish is not None:
            return
        if self._takeover is not None:  # a host may say better who leads: decide after them
            self._takeover.leased_by = lease
            self._lease_is_settled()
        else:
            self._give_way_for(self._run.fence.met_lease(lease, lost=lost))

    def _lease_is_settled(self) -> None:
        if self._takeover is not None:
            self._takeover.lease_open = False
            self._lead_if_complete()

    def _give_way_for(self, reason: str) -> None:
        if reason:
            self._executor.finish = Finish("failed", reason)
            self._run.loop.stop()

"""Takes a run over from an earlier leader, and decides whether this leader gives way to another."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from hvd_elastic.checkpoint.lease import Lease
from hvd_elastic.control.commands import Finish
from hvd_elastic.control.events import AgentFailed
from hvd_elastic.errors import CheckpointError
from hvd_elastic.leader.agents.connection import AgentConnection, FromAgent
from hvd_elastic.leader.executor import Executor
from hvd_elastic.leader.failover.takeover import Takeover
from hvd_elastic.leader.led_run import LedRun
from hvd_elastic.records.summary import RunSummary
from hvd_elastic.wire import messages as msg

TAKEOVER_S = 12.0
"""How long a takeover waits for the hosts' answers [s]: enough for a slow ssh connection."""


class Failover:
    """Takes a run over, and meets other leaders of the run.

    Args:
        run: what all parts of the leader share.
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
            past: summary of the run so far.
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
            self._takeover.deadline = min(self._takeover.deadline, time.monotonic() + TAKEOVER_S)

    def look(self, now: float) -> None:
        """Try unreachable hosts again, and go on when the time is over; called often."""
        if self._takeover is not None:
            for host in self._takeover.due(now):
                self._executor.start_agent(host, take_over=True)
            self._lead_if_complete()

    def _lead_if_complete(self) -> None:
        takeover = self._takeover
        if takeover is None or not (takeover.complete or time.monotonic() >= takeover.deadline):
            return
        self._takeover = None
        if takeover.leased_by is not None:
            self._give_way_for(self._run.fence.met_lease(takeover.leased_by, lost=False))
            return
        self._lead(takeover)

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

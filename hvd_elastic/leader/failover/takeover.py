"""Collects what the agents still hold of a run, for a leader that takes the run over.

The same happens when a leader returns to its own run after its machine was cut off.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hvd_elastic.checkpoint.lease import Lease
from hvd_elastic.control import events as ev
from hvd_elastic.errors import CheckpointError
from hvd_elastic.leader.agents.connection import AgentConnection, FromAgent
from hvd_elastic.records.summary import RunSummary
from hvd_elastic.wire.messages import HeldRun

_RETRY_S = 1.0
"""Time before an unreachable host is tried again [s]; short, since a whole run is paused."""


class Takeover:
    """Keeps track of which hosts have answered a new leader, and what they hold of the run.

    Args:
        hosts: names of the hosts in the hostfile.
        past: summary of the run under its earlier leaders.
        np: number of processes that the user requests now.
        deadline: when to continue without the hosts that have not answered [monotonic s].
        patient: whether an unreachable host is tried again until then.
        of_engine: whether an engine owns the hosts: it can reach no others, which are not asked.

    Attributes:
        asked: hosts whose agent is started: those of the last generation and those of the
            hostfile. A host that is no longer in the hostfile may hold workers that have to end.
        postponed: messages of agents that are handled once the takeover is complete.
        lease_open: whether the check for another leader's lease is still going on.
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
            host: name of the host.
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

    def event(self, hosts: tuple[ev.HostSlots, ...]) -> ev.RunTakenOver:
        """Return the event with everything that was found; ``hosts``: slots of the hostfile."""
        none = HeldRun(generation=0, members=(), workers=())
        newest = max(self._held.values(), key=lambda held: held.generation, default=none)
        past = self._past
        return ev.RunTakenOver(
            hosts=hosts,
            agents=tuple(self._ready),
            awaited=tuple(host for host in self.asked if host not in self._ready),
            # Numbers go on where nothing is held: no two generations of a run have the same.
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

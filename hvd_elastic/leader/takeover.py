"""Puts together what the agents of a run still hold when another leader comes.

Also when the same leader comes again, after its own machine was cut off.
"""

from __future__ import annotations

from collections.abc import Sequence

from hvd_elastic.checkpoint.lease import Claim
from hvd_elastic.control import events as ev
from hvd_elastic.errors import CheckpointError
from hvd_elastic.leader.remote_agent import AgentConnection, FromAgent
from hvd_elastic.records.summary import RunSummary
from hvd_elastic.wire.messages import HeldRun

__all__ = ["Takeover"]

_RETRY_S = 1.0


class Takeover:
    """Waits for the hosts of a run, and knows what they held.

    Args:
        hosts: of the hostfile.
        past: the run under its earlier leaders.
        np: size that the user asks for now.
        deadline: when to go on without those that have not answered [s, monotonic].
        patient: a host that cannot be reached is tried again until then.

    Attributes:
        asked: every host whose agent is asked for: those of the last generation, and of the
            hostfile. Those that the hostfile does not name any more hold workers that have to go.
        postponed: what agents said that can only be understood afterwards.
        claim_open: it is not known yet whether another leader has claimed the run.
        claimed_by: another leader, of which more is known when the hosts have been asked.
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
        claim_open: bool = False,
        unwritable: CheckpointError | None = None,
    ) -> None:
        self.deadline = deadline
        self.patient = patient
        self.claim_open = claim_open
        self.claimed_by: Claim | None = None
        self.unwritable = unwritable
        self.postponed: list[tuple[AgentConnection, FromAgent]] = []
        self._awaited = past.generation_hosts or list(hosts)
        self.asked = list(dict.fromkeys([*self._awaited, *hosts]))
        self._past = past
        self._same_np = past.np == np
        self._open = set(self.asked)
        self._ready: list[str] = []
        self._held: dict[str, HeldRun] = {}
        self._retry_at: dict[str, float] = {}

    def postpone(self, host: str, now: float) -> None:
        """Try to reach ``host`` in a moment."""
        self._retry_at[host] = now + _RETRY_S

    def due(self, now: float) -> list[str]:
        """Hosts to be tried now."""
        found = [host for host, at in self._retry_at.items() if now >= at]
        for host in found:
            del self._retry_at[host]
        return found

    def answered(self, host: str, held: HeldRun | None) -> None:
        """The agent of ``host`` is up; ``held``: what it has, None if it is a new one."""
        self._open.discard(host)
        self._ready.append(host)
        if held is not None:
            self._held[host] = held

    def failed(self, host: str) -> None:
        """There is no agent on ``host``, and so no worker either."""
        self._open.discard(host)
        if host in self._ready:
            self._ready.remove(host)
        self._held.pop(host, None)

    @property
    def complete(self) -> bool:
        """Return whether all hosts have answered, or all of the last generation have its workers.

        In the second case nobody else leads the run. Otherwise any host may still know who does.
        """
        asked_all = not self._open and not self.claim_open
        return asked_all or self._held.keys() >= set(self._awaited)

    @property
    def workers(self) -> dict[str, tuple[str, int]]:
        """Host and slot of every worker that was found."""
        return {found.worker: (found.host, found.slot) for found in self._found()}

    @property
    def came_back(self) -> tuple[str, ...]:
        """Drained hosts that gave notice and hold nothing of the run: they have been away since."""
        return tuple(
            host
            for host, found in self._past.draining.items()
            if not found.asked and host not in self._held
        )

    def event(self, hosts: tuple[ev.HostSlots, ...]) -> ev.RunTakenOver:
        """Return the whole picture; ``hosts``: the hostfile as it is now."""
        none = HeldRun(generation=0, members=(), workers=())
        newest = max(self._held.values(), key=lambda held: held.generation, default=none)
        past = self._past
        return ev.RunTakenOver(
            hosts=hosts,
            agents=tuple(self._ready),
            awaited=tuple(host for host in self.asked if host not in self._ready),
            generation=newest.generation,
            members=newest.members,
            # Otherwise the user has asked for another size just now.
            requested_np=past.scaled_to if self._same_np else None,
            slots=tuple(past.scaled_slots) if self._same_np else (),
            draining=tuple(host for host in past.draining if host not in self.came_back),
            workers=tuple(self._found()),
        )

    def _found(self) -> list[ev.FoundWorker]:
        return [worker for held in self._held.values() for worker in held.workers]

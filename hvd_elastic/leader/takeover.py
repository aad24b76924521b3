"""What the agents of a run still hold when another leader comes, put together to one picture.

Also when it is the same leader that comes again, after its own machine was cut off.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hvd_elastic.control import events as ev
from hvd_elastic.wire.messages import HeldRun

__all__ = ["Adoption"]

_RETRY_S = 1.0


class Adoption:
    """Waits for the hosts of a run, and knows what they held.

    Args:
        awaited: hosts of the last generation, as far as it is known.
        asked: every host whose agent was asked for, those included.
        deadline: when to go on without those that have not answered [s, monotonic].
        patient: a host that cannot be reached is tried again until then.
    """

    def __init__(
        self,
        awaited: Iterable[str],
        asked: Iterable[str],
        deadline: float,
        *,
        patient: bool = False,
    ) -> None:
        self.deadline = deadline
        self.patient = patient
        self.postponed: list[tuple[Any, str, Any]] = []
        """What agents said that can only be understood afterwards."""
        self.requested_np: int | None = None
        """The size that was asked for while the run went on."""
        self.slots: tuple[tuple[str, int], ...] = ()
        """Those that were asked for with it, (host, index)."""
        self.draining: tuple[str, ...] = ()
        """Hosts that were drained and not given back."""
        self.gave_notice: frozenset[str] = frozenset()
        """Those of them that said they would be taken away; nobody asked for it."""
        self.claim_open = False
        """It is not known yet whether another leader has claimed the run."""
        self._awaited, self._asked = frozenset(awaited), tuple(asked)
        self._open = {*self._awaited, *self._asked}
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
        """Whether every host has answered, or all of the last generation have the run's workers.

        In the second case nobody else leads the run. Otherwise any host may still know who does.
        """
        asked_all = not self._open and not self.claim_open
        return asked_all or self._awaited <= self._held.keys()

    @property
    def workers(self) -> dict[str, tuple[str, int]]:
        """Host and slot of every worker that was found."""
        return {found.worker: (found.host, found.slot) for found in self._found()}

    @property
    def came_back(self) -> tuple[str, ...]:
        """Drained hosts that gave notice and hold nothing of the run: they have been away since."""
        return tuple(
            host for host in self.draining if host in self.gave_notice and host not in self._held
        )

    def event(self, hosts: tuple[ev.HostSlots, ...]) -> ev.RunAdopted:
        """The whole picture; ``hosts``: the hostfile as it is now."""
        none = HeldRun(generation=0, members=(), workers=())
        newest = max(self._held.values(), key=lambda held: held.generation, default=none)
        return ev.RunAdopted(
            hosts=hosts,
            agents=tuple(self._ready),
            awaited=tuple(host for host in self._asked if host not in self._ready),
            generation=newest.generation,
            members=newest.members,
            requested_np=self.requested_np,
            slots=self.slots,
            draining=tuple(host for host in self.draining if host not in self.came_back),
            workers=tuple(self._found()),
        )

    def _found(self) -> list[ev.FoundWorker]:
        return [worker for held in self._held.values() for worker in held.workers]

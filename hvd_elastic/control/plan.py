"""Decides which slots should hold a worker, from the hostfile, the limits and users' requests."""

from __future__ import annotations

from collections.abc import Iterable

from hvd_elastic.control.config import MachineConfig
from hvd_elastic.control.events import HostSlots
from hvd_elastic.control.fleet import Fleet, Worker
from hvd_elastic.control.membership import SlotId, choose_slots, list_slots, target_size

_NOT_ASKED_FOR = 3  # above the highest cost of a slot, so that requested slots always come first


class Plan:
    """Holds the slots that should have a worker.

    Args:
        config: limits of the run.
        fleet: knows which slots can be used, and starts the missing workers.

    Attributes:
        hosts: hosts of the hostfile.
        requested_np, preferred: size and slots that were requested during the run.
        desired: slots that should hold a member.
        spare: further slots, for warm standbys.
        draining: drained hosts, with the time until which their workers may train [s], None if
            unknown.
    """

    def __init__(self, config: MachineConfig, fleet: Fleet) -> None:
        self._config = config
        self._fleet = fleet
        self.hosts: tuple[HostSlots, ...] = ()
        self.requested_np: int | None = None
        self.preferred: frozenset[SlotId] = frozenset()
        # The keys are the slots, in order; looking one up takes the same time for any number.
        self.desired: dict[SlotId, None] = {}
        self.spare: dict[SlotId, None] = {}
        self.draining: dict[str, float | None] = {}
        self._empty: set[str] = set()

    def drain(self, host: str, until: float | None) -> None:
        """Stop using a host; its workers may train until ``until`` [s]."""
        self.draining[host] = until
        self._empty.discard(host)

    def drain_only(self, hosts: Iterable[str]) -> None:
        """Allow the use of all drained hosts except these."""
        self.draining = {host: self.draining[host] for host in self.draining if host in hosts}
        self._empty &= self.draining.keys()

    def emptied(self) -> list[str]:
        """Return the drained hosts without workers that were not returned before."""
        held = {worker.host for worker in self._fleet.workers.values()}
        found = [host for host in self.draining if host not in held | self._empty]
        self._empty.update(found)
        return found

    def end_of(self, workers: Iterable[Worker]) -> float | None:
        """Return when the first of the workers' hosts has to be left [s]; None if unknown."""
        ends = (self.draining.get(worker.host) for worker in workers)
        return min((end for end in ends if end is not None), default=None)

    def offered(self) -> list[SlotId]:
        """Return the slots of the hostfile except those of drained hosts."""
        return list_slots(host for host in self.hosts if host.name not in self.draining)

    def update(self, now: float) -> None:
        """Choose the slots, start the missing workers, and stop agents without workers."""
        slots, fleet, spares = self.offered(), self._fleet, self._config.spares
        config = self._config
        if config.plain and fleet.workers:
            # It cannot go on elsewhere, and must not run twice.
            self.desired = dict.fromkeys(worker.slot for worker in fleet.workers.values())
            fleet.stop_idle_agents([*self.desired])
            return
        target = target_size(
            len(slots), config.min_np, config.max_np, config.np, self.requested_np, spares
        )
        self.desired = dict.fromkeys(choose_slots(slots, target, fleet.usable, self._cost))
        rest = [slot for slot in slots if slot not in self.desired]
        self.spare = dict.fromkeys(choose_slots(rest, spares, fleet.usable, self._cost))
        filled = [*self.desired, *self.spare]
        hoped_for = choose_slots(slots, target + spares, fleet.conceivable, self._cost)
        fleet.start(filled, hoped_for, now)
        fleet.stop_idle_agents(filled)

    def _cost(self, slot: SlotId) -> int:
        """Return the cost of a slot, such that requested and pinned slots come before others."""
        asked = slot in self.preferred or slot[0] in self._config.pinned
        if not asked and (self.preferred or self._config.pinned):
            return self._fleet.cost(slot) + _NOT_ASKED_FOR
        return self._fleet.cost(slot)

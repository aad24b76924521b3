"""Simulate the cluster of a trace: its hosts and link at a virtual time."""

from __future__ import annotations

import dataclasses

from hvd_elastic.policy.snapshot import Allocation
from hvd_elastic.sim.trace import Change, Trace


class Cluster:
    """Hosts and link at the present time; :meth:`advance` applies the changes of the trace.

    Attributes:
        hosts: present hosts with their true slowness.
        link: factor on the times of the all-reduce across hosts.
    """

    def __init__(self, trace: Trace) -> None:
        self.hosts = trace.hosts
        self.link = 1.0
        self._to_come = list(trace.changes)
        self._first_slowness = {host.name: host.slowness for host in trace.hosts}

    def next_change_at(self) -> float | None:
        """Return the time of the next change [s]; None if there is none."""
        return self._to_come[0].at_s if self._to_come else None

    def advance(self, now: float) -> bool:
        """Apply all changes up to ``now`` [s]; return whether there was one."""
        before = len(self._to_come)
        while self._to_come and self._to_come[0].at_s <= now:
            self._apply(self._to_come.pop(0))
        return len(self._to_come) < before

    def slowness_of_ranks(self, allocation: Allocation) -> list[float]:
        """Return the true slowness of each rank's host."""
        slowness = {host.name: host.slowness for host in self.hosts}
        return [slowness[host] for host, number in allocation.counts for _ in range(number)]

    def filled(self, wanted: Allocation, least: int) -> Allocation:
        """Return the wanted slots that exist, with free slots in place of missing ones.

        Args:
            wanted: wanted slots.
            least: fewest slots to return, as far as there are any.
        """
        asked = dict(wanted.counts)
        counts = {h.name: min(asked.get(h.name, 0), h.slots) for h in self.hosts}
        left = max(wanted.slots, least) - sum(counts.values())
        for host in self.hosts:
            more = min(max(left, 0), host.slots - counts[host.name])
            counts[host.name] += more
            left -= more
        return Allocation.of(counts)

    def _apply(self, change: Change) -> None:
        self.link = self.link if change.link is None else change.link
        for host in change.add:
            self._first_slowness[host.name] = host.slowness
        there = {host.name: host for host in (*self.hosts, *change.add)}
        for name in change.remove:
            there.pop(name, None)
        for name, factor in change.slow.items():
            if name in there:
                first = self._first_slowness[name]
                there[name] = dataclasses.replace(there[name], slowness=first * factor)
        self.hosts = tuple(there.values())

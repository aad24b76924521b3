"""Whether jobs fit on hosts together, where some of them may have certain hosts only."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from hvd_elastic.policy.schedule.jobs import Allocation
from hvd_elastic.policy.snapshot import HostOffer


class _Holder(Protocol):
    """A job, or what it should get; see :class:`~hvd_elastic.policy.schedule.jobs.Job`."""

    @property
    def held(self) -> Allocation: ...
    @property
    def movable(self) -> bool: ...
    @property
    def hosts(self) -> Collection[str] | None: ...


class Room:
    """The slots of hosts, and which of the hosts each job may have.

    Args:
        slots: slots of each host.
        hosts_of: hosts that each job may have; None: all.
    """

    def __init__(
        self, slots: Mapping[str, int], hosts_of: Mapping[str, Collection[str] | None]
    ) -> None:
        self.slots = slots
        self.limited = {
            job: [host for host in slots if host in hosts]
            for job, hosts in hosts_of.items()
            if hosts is not None and not slots.keys() <= {*hosts}
        }
        """Hosts of the jobs that may not have all of them."""

    @classmethod
    def of(cls, jobs: Mapping[str, _Holder], hosts: Sequence[HostOffer]) -> Room:
        """Return the room of jobs by name; one that cannot be moved has no other hosts."""
        slots = {host.name: host.slots for host in hosts}
        hosts_of = {name: job.hosts for name, job in jobs.items()}
        if any(allowed is not None for allowed in hosts_of.values()):
            for name, job in jobs.items():
                if job.held and not job.movable and job.held.keys() <= slots.keys():
                    hosts_of[name] = job.held.keys()
        return cls(slots, hosts_of)

    def capacity(self, job: str) -> int:
        """Return the slots of the hosts that a job may have."""
        return sum(self.slots[host] for host in self.limited.get(job, self.slots))

    def fits(self, wanted: Mapping[str, int]) -> bool:
        """Return whether jobs can have so many slots at the same time."""
        return not self.crowded(wanted)

    def crowded(self, wanted: Mapping[str, int]) -> set[str]:
        """Return the jobs that want more slots together than the hosts that they may have.

        Of all such sets it is the one that lacks most, so that all others fit on the hosts that
        none of these may have; empty if all fit.
        """
        total = sum(wanted.values()) - sum(self.slots.values())
        limited = {job: wanted[job] for job in self.limited if wanted.get(job)}
        placed = spread(limited, self.limited, self.slots)
        lacking = sum(limited.values()) - sum(sum(each.values()) for each in placed.values())
        if total > lacking:
            return {*wanted}
        short = {job for job, slots in limited.items() if sum(placed[job].values()) < slots}
        reached = [*short]
        for job in reached:
            theirs = {*self.limited[job]}
            more = [
                other
                for other in limited
                if other not in short and not theirs.isdisjoint(placed[other])
            ]
            short.update(more)
            reached += more
        return short


def spread(
    wanted: Mapping[str, int], hosts_of: Mapping[str, Collection[str]], slots: Mapping[str, int]
) -> dict[str, dict[str, int]]:
    """Return as many slots as jobs can have on the hosts that they may have: a largest flow.

    Args:
        wanted: slots of each job.
        hosts_of: hosts that each of them may have.
        slots: free slots of each host.

    >>> spread({"any": 2, "a": 1}, {"any": "ab", "a": "a"}, {"a": 1, "b": 2})
    {'a': {'a': 1}, 'any': {'b': 2}}
    """
    free = {host: count for host, count in slots.items() if count > 0}
    placed: dict[str, dict[str, int]] = {}
    # Who has least choice comes first, so most find their slots at once.
    for job in sorted(wanted, key=lambda each: sum(slots.get(h, 0) for h in hosts_of[each])):
        left, placed[job] = wanted[job], {}
        while left and (path := _path(job, hosts_of, free, placed)):
            last = path[-1]
            moved = min(left, free[last], *_movable(path, placed))
            for at, host in enumerate(path[:-1:2]):
                other, to = path[2 * at + 1], path[2 * at + 2]
                _add(placed[other], host, -moved)
                _add(placed[other], to, moved)
            _add(placed[job], path[0], moved)
            _add(free, last, -moved)
            left -= moved
    return placed


def _path(
    job: str,
    hosts_of: Mapping[str, Collection[str]],
    free: Mapping[str, int],
    placed: Mapping[str, Mapping[str, int]],
) -> list[str]:
    """Return how a job gets a slot: a host, then each job that leaves it, and to which host."""
    came: dict[str, tuple[str, ...]] = dict.fromkeys(hosts_of[job], ())
    for host in (order := [*came]):
        if host in free:
            return [*came[host], host]
        for other, theirs in placed.items():
            if other != job and host in theirs:
                for to in hosts_of[other]:
                    if to not in came:
                        came[to] = (*came[host], host, other)
                        order.append(to)
    return []


def _movable(path: Sequence[str], placed: Mapping[str, Mapping[str, int]]) -> list[int]:
    """Return how many slots each job on a path has on the host that it leaves."""
    return [placed[path[at + 1]][path[at]] for at in range(0, len(path) - 1, 2)]


def _add(slots: dict[str, int], host: str, more: int) -> None:
    slots[host] = slots.get(host, 0) + more
    if not slots[host]:
        del slots[host]

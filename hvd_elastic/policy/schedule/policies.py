"""The policies by which jobs can share a cluster: ours, and two simple ones to compare it with."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence

from hvd_elastic.policy.schedule.decide import decide
from hvd_elastic.policy.schedule.jobs import Assignment, Job
from hvd_elastic.policy.schedule.placement import Wish, place_jobs
from hvd_elastic.policy.schedule.room import Room
from hvd_elastic.policy.snapshot import HostOffer

Policy = Callable[[Sequence[Job], Sequence[HostOffer], float], Mapping[str, Assignment]]
"""Jobs that run or wait, hosts that may be used and time [s] to the slots of each job."""


def first_come_first_served(
    jobs: Sequence[Job], hosts: Sequence[HostOffer], _now: float
) -> Mapping[str, Assignment]:
    """Return the fewest slots of each job, in the order of submission, until one does not fit.

    Jobs that run keep their slots, and are never changed. Behind one that does not fit, nobody gets
    slots of the hosts that it may have.
    """
    room = Room.of({job.name: job for job in jobs}, hosts)
    wanted: dict[str, int] = {}
    kept_free: set[str] = set()
    for job in sorted(jobs, key=lambda job: (not job.slots, job.submitted_s)):
        own = room.limited.get(job.name, room.slots.keys())
        if kept_free.isdisjoint(own) and room.fits({**wanted, job.name: job.min_slots}):
            wanted[job.name] = job.min_slots
        else:
            kept_free.update(own)
    return place(jobs, hosts, wanted, "first come, first served")


def equal_shares(
    jobs: Sequence[Job], hosts: Sequence[HostOffer], _now: float
) -> Mapping[str, Assignment]:
    """Return the fewest slots of each job, and the rest one by one to the job with the fewest."""
    room = Room.of({job.name: job for job in jobs}, hosts)
    wanted: dict[str, int] = {}
    shares: list[tuple[int, int]] = []
    order = sorted(jobs, key=lambda job: (job.preemptible, job.submitted_s))
    for number, job in enumerate(order):
        if room.fits({**wanted, job.name: job.min_slots}):
            wanted[job.name] = job.min_slots
            shares.append((job.min_slots, number))
    heapq.heapify(shares)
    while shares:
        slots, number = heapq.heappop(shares)
        more = {**wanted, order[number].name: slots + 1}
        if slots < order[number].max_slots and room.fits(more):
            wanted = more
            heapq.heappush(shares, (slots + 1, number))
    return place(jobs, hosts, wanted, "equal shares")


def place(
    jobs: Sequence[Job], hosts: Sequence[HostOffer], wanted: Mapping[str, int], reason: str
) -> Mapping[str, Assignment]:
    """Return the hosts of the wanted number of slots of each job; without a number it waits.

    Args:
        wanted: number of slots of some jobs.
    """
    wishes = {
        job.name: Wish(
            wanted.get(job.name, 0),
            job.held,
            movable=job.movable,
            occupied=job.occupied,
            hosts=job.hosts,
        )
        for job in jobs
    }
    placed = place_jobs(wishes, hosts)
    return {
        name: Assignment(slots, reason if slots else f"waits: {reason}")
        for name, slots in placed.items()
    }


POLICIES: Mapping[str, Policy] = {
    "goodput": decide,
    "equal": equal_shares,
    "fifo": first_come_first_served,
}
"""The policies of a real cluster, by name."""

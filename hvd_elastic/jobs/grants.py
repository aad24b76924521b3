"""Move slots between jobs without two processes in one slot: first taken away, then given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Slots = Mapping[str, int]
"""Number of slots on each host."""


@dataclass(frozen=True)
class Claim:
    """The slots of one job.

    Attributes:
        wanted: slots that it is to have.
        held: slots that its hostfile has now.
        occupied: slots in which processes of its run live.
        min_slots: fewest slots with which it trains.
    """

    wanted: Slots
    held: Slots
    occupied: Slots
    min_slots: int = 1


def grant_slots(claims: Mapping[str, Claim], hosts: Slots) -> dict[str, dict[str, int]]:
    """Return the slots that each job may have now, on the way to those it is to have.

    A job that shrinks does so at once. A job grows into a slot when no process of another job is
    left in it. A job that moves keeps its minimum until its new slots are free.

    Args:
        claims: the jobs, those that come first in case of doubt first.
        hosts: slots of the cluster; jobs lose their slots on other hosts.

    >>> shrinks = Claim({"a": 1}, {"a": 2}, {"a": 2})
    >>> grows = Claim({"a": 1}, {}, {})
    >>> grant_slots({"one": shrinks, "two": grows}, {"a": 2})
    {'one': {'a': 1}, 'two': {}}
    """
    kept = {name: _kept(claim, hosts) for name, claim in claims.items()}
    free = dict(hosts)
    for name, claim in claims.items():
        for host in {*kept[name], *claim.occupied} & free.keys():
            free[host] -= max(kept[name].get(host, 0), claim.occupied.get(host, 0))
    granted = {}
    for name, claim in claims.items():
        now = dict(kept[name])
        for host, wanted in claim.wanted.items():
            has = now.get(host, 0)
            own = max(0, claim.occupied.get(host, 0) - has)  # it is about to leave them
            more = min(wanted - has, own + max(0, free.get(host, 0)))
            if more > 0:
                now[host] = has + more
                free[host] -= max(0, more - own)
        enough = sum(min(now.get(host, 0), slots) for host, slots in claim.wanted.items())
        if enough >= claim.min_slots:  # what was kept for the move is not needed any more
            now = {host: min(slots, claim.wanted.get(host, 0)) for host, slots in now.items()}
        granted[name] = {host: slots for host, slots in now.items() if slots}
    return granted


def awaited_slots(
    claims: Mapping[str, Claim], granted: Mapping[str, Slots]
) -> dict[str, dict[str, list[str]]]:
    """Return for each job that has to wait for slots which jobs have to leave them, by host.

    Args:
        claims: the jobs.
        granted: slots that each of them has now.

    >>> claims = {"one": Claim({"a": 1}, {"a": 2}, {"a": 2}), "two": Claim({"a": 1}, {}, {})}
    >>> awaited_slots(claims, grant_slots(claims, {"a": 2}))
    {'two': {'a': ['one']}}
    """
    found: dict[str, dict[str, list[str]]] = {}
    for name, claim in claims.items():
        for host, wanted in claim.wanted.items():
            if granted[name].get(host, 0) < wanted:
                found.setdefault(name, {})[host] = [
                    other
                    for other, theirs in claims.items()
                    if other != name
                    and max(granted[other].get(host, 0), theirs.occupied.get(host, 0))
                    > theirs.wanted.get(host, 0)
                ]
    return found


def _kept(claim: Claim, hosts: Slots) -> dict[str, int]:
    """Return what a job keeps of the slots that it holds."""
    held = {host: min(slots, hosts.get(host, 0)) for host, slots in claim.held.items()}
    kept = {host: min(slots, claim.wanted.get(host, 0)) for host, slots in held.items()}
    missing = claim.min_slots - sum(kept.values()) if any(claim.wanted.values()) else 0
    for host, slots in held.items():
        more = max(0, min(missing, slots - kept[host]))
        kept[host] += more
        missing -= more
    return {host: slots for host, slots in kept.items() if slots}

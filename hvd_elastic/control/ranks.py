"""Chooses the slots of a generation, assigns ranks to its workers, and describes the change.

All are pure functions; the machine decides when to use them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hvd_elastic.control.commands import Member
from hvd_elastic.formatting import count, plural
from hvd_elastic.run_events import HostSlots

SlotId = tuple[str, int]
"""A place for one worker: host name and index."""


@dataclass(frozen=True)
class Seat:
    """A worker and its slot."""

    worker: str
    host: str
    slot: int


def list_slots(hosts: Iterable[HostSlots]) -> list[SlotId]:
    """Return every slot of the hostfile, in its order.

    >>> list_slots([HostSlots("a", 2), HostSlots("b", 1)])
    [('a', 0), ('a', 1), ('b', 0)]
    """
    return list(dict.fromkeys((host.name, index) for host in hosts for index in range(host.slots)))


def target_size(
    slots: int,
    min_np: int,
    max_np: int | None,
    np: int | None,
    requested: int | None,
    spares: int = 0,
) -> int:
    """Return the number of workers that should train.

    Args:
        min_np, max_np: limits of the run; None: no upper limit.
        np: size requested at the start of the run; None: all slots.
        requested: size requested while it runs; None: none.
        spares: number of slots kept for warm standbys when no size is requested.

    >>> target_size(8, 2, 6, None, None), target_size(8, 2, 6, 4, None), target_size(8, 2, 6, 4, 9)
    (6, 4, 6)
    >>> target_size(8, 2, None, None, None, spares=2), target_size(8, 2, 7, None, None, spares=2)
    (6, 6)
    """
    asked = requested if requested is not None else np
    wanted = slots - spares if asked is None else asked
    if max_np is not None:
        wanted = min(wanted, max_np)
    return min(max(wanted, min_np), slots)


def choose_slots(
    slots: Sequence[SlotId],
    target: int,
    usable: Callable[[SlotId], bool],
    cost: Callable[[SlotId], int],
) -> list[SlotId]:
    """Return the slots that should hold a member, in the order of the hostfile.

    Slots of lower cost are preferred, then earlier ones in the hostfile. Slots that hold a member
    cost least, so a host that comes back does not displace the one that replaced it.

    >>> slots = [("a", 0), ("b", 0), ("c", 0)]
    >>> choose_slots(slots, 2, lambda slot: slot != ("a", 0), lambda slot: 0)
    [('b', 0), ('c', 0)]
    >>> choose_slots(slots, 2, lambda slot: True, lambda slot: 0 if slot == ("c", 0) else 1)
    [('a', 0), ('c', 0)]
    """
    place = {slot: number for number, slot in enumerate(slots)}
    best = sorted(filter(usable, slots), key=lambda slot: (cost(slot), place[slot]))
    return sorted(best[:target], key=place.__getitem__)


def assign_ranks(seats: Iterable[Seat], hosts: Sequence[HostSlots]) -> tuple[Member, ...]:
    """Return the members with ranks in the order of the hostfile, then of the slots.

    Hosts that are no longer in the hostfile come last. The workers of a host have consecutive
    ranks and the local ranks 0, 1, …, even if some of its slots are empty.

    >>> seats = [Seat("w2", "b", 0), Seat("w1", "a", 3), Seat("w0", "a", 1)]
    >>> for m in assign_ranks(seats, [HostSlots("a", 4), HostSlots("b", 1)]):
    ...     print(m.worker, m.rank, m.local_rank, m.local_size, m.cross_rank, m.cross_size)
    w0 0 0 2 0 2
    w1 1 1 2 0 1
    w2 2 0 1 1 2
    """
    place = {host.name: number for number, host in enumerate(hosts)}
    by_host: dict[str, list[Seat]] = {}
    hosts_with: Counter[int] = Counter()  # local rank → number of hosts that have it
    for seat in sorted(seats, key=lambda s: (place.get(s.host, len(place)), s.host, s.slot)):
        seats_here = by_host.setdefault(seat.host, [])
        hosts_with[len(seats_here)] += 1
        seats_here.append(seat)
    members: list[Member] = []
    met: Counter[int] = Counter()  # local rank → number of hosts so far that have it
    for seats_here in by_host.values():
        for local_rank, seat in enumerate(seats_here):
            members.append(
                Member(
                    worker=seat.worker,
                    host=seat.host,
                    slot=seat.slot,
                    rank=len(members),
                    local_rank=local_rank,
                    local_size=len(seats_here),
                    cross_rank=met[local_rank],
                    cross_size=hosts_with[local_rank],
                )
            )
            met[local_rank] += 1
    return tuple(members)


def describe_change(
    before: Sequence[SlotId],
    after: Sequence[SlotId],
    losses: Mapping[SlotId, str],
    note: str = "",
    earlier: Collection[SlotId] = (),
) -> str:
    """Return a text that says why a generation is announced and how its size changes.

    Args:
        before, after: slots of the members of the previous and of the new generation.
        losses: what happened to lost members, by slot.
        note: further reason; empty for none.
        earlier: slots that have had a member.

    >>> describe_change([("a", 0), ("b", 0)], [("a", 0), ("b", 0), ("c", 0)], {})
    'host c joined: 2 → 3 slots'
    >>> describe_change([("a", 0), ("b", 0)], [("a", 0)], {("b", 0): "host b was lost (no ssh)"})
    'host b was lost (no ssh): 2 → 1 slot'
    >>> describe_change([("a", 0)], [("a", 0), ("b", 0)], {}, earlier=[("b", 0)])
    'host b rejoined: 1 → 2 slots'
    """
    parts = [note] if note else []
    parts += dict.fromkeys(losses.values())
    old, new = frozenset(before), frozenset(after)
    joined = [slot for slot in after if slot not in old]
    left = [slot for slot in before if slot not in new and slot not in losses]
    if before:
        present, known = {host for host, _ in before}, {host for host, _ in earlier}
        back = [slot for slot in joined if slot in earlier or slot[0] in known - present]
        parts += _name([slot for slot in joined if slot not in back], present, "joined")
        parts += _name(back, present, "rejoined")
        parts += _name(left, {host for host, _ in after}, "left")
    else:
        parts.append(f"start on {count(len({host for host, _ in after}), 'host')}")
    what = "; ".join(parts) or "the same members meet again"
    return f"{what}: {len(before)} → {count(len(after), 'slot')}"


def _name(slots: Sequence[SlotId], shared: set[str], verb: str) -> list[str]:
    """Return names of what changed: whole hosts, or single slots of hosts in ``shared``."""
    hosts = list(dict.fromkeys(host for host, _ in slots if host not in shared))
    single = [f"{host}:{index}" for host, index in slots if host in shared]
    parts = []
    if hosts:
        parts.append(f"{plural('host', len(hosts))} {', '.join(hosts)} {verb}")
    if single:
        parts.append(f"{plural('slot', len(single))} {', '.join(single)} {verb}")
    return parts

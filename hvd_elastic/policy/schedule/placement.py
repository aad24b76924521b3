"""Place jobs on hosts: few hosts for a job, one ring across a host, fast hosts, few moves.

Slots that no other job has to leave first come before others.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hvd_elastic.policy.schedule.jobs import Allocation
from hvd_elastic.policy.schedule.room import Room, spread
from hvd_elastic.policy.snapshot import HostOffer

_STAYS = 1.2
"""Weight of being on a fast host already, so that two similar jobs do not swap hosts for ever."""
_LEAST_GAIN = 1.05
"""Least ratio of speeds for which a job moves to faster hosts."""


@dataclass(frozen=True)
class Wish:
    """Slots that a job should get.

    Attributes:
        worth: worth of one slot at full speed, relative to other jobs; only hosts of unequal
            speed need it.
        lost: part of its training that a move costs, over the time in which it has to pay off.
        movable: whether it can move to other hosts; if not, it keeps its own while they are there.
        occupied: slots on each host in which its processes live: others have to wait for them.
        hosts: hosts that it may have; None: all.
    """

    slots: int
    held: Allocation
    worth: float = 1.0
    lost: float = 0.0
    movable: bool = True
    occupied: Allocation = field(default_factory=dict)
    hosts: Collection[str] | None = None


def place_jobs(wishes: Mapping[str, Wish], hosts: Sequence[HostOffer]) -> dict[str, Allocation]:
    """Return the slots of each job on each host.

    A job that keeps its number of slots keeps its hosts, unless a larger job would else be split
    more than needed, or faster hosts are worth the move. What fits on the hosts that each job may
    have is always placed.

    Args:
        wishes: what each job should get.

    Raises:
        ValueError: the hosts, or those that some jobs may have, have fewer slots than are wanted.
    """
    total = sum(host.slots for host in hosts)
    if sum(wish.slots for wish in wishes.values()) > total:
        wanted = sum(wish.slots for wish in wishes.values())
        raise ValueError(f"{wanted} slots are wanted, the hosts have {total}")
    room = Room.of(wishes, hosts)
    if short := room.crowded({job: wish.slots for job, wish in wishes.items()}):
        raise ValueError(
            f"jobs {', '.join(sorted(short))} do not fit on the hosts that they may have"
        )
    return _Placement(wishes, hosts, room.limited).place()


def mean_slowness(allocation: Allocation, slowness: Mapping[str, float]) -> float:
    """Return the slowness of slots that share a batch by their speeds: their harmonic mean.

    >>> mean_slowness({"a": 1, "b": 1}, {"a": 1.0, "b": 3.0})
    1.5
    """
    slots = sum(allocation.values())
    return slots / sum(count / slowness[host] for host, count in allocation.items())


class _Placement:
    def __init__(
        self,
        wishes: Mapping[str, Wish],
        hosts: Sequence[HostOffer],
        limited: Mapping[str, Sequence[str]],
    ) -> None:
        self._wishes = wishes
        self._limited = limited
        """Hosts of the jobs that may not have all of them."""
        self._size = {host.name: host.slots for host in hosts}
        self._choice = {job: sum(map(self._size.__getitem__, limited[job])) for job in limited}
        self._free = dict(self._size)
        self._slowness = {host.name: host.slowness for host in hosts}
        self._placed: dict[str, Allocation] = {}
        self._left = dict.fromkeys(self._size, 0)
        """Slots of each host in which processes of jobs live that are not placed there."""
        for wish in wishes.values():
            self._leave(wish.occupied, {}, 1)
        self._rings = dict.fromkeys(self._size, 0)
        """Number of jobs across hosts on each host."""
        self._unequal = len(set(self._slowness.values())) > 1
        self._preferred = self._preferred_slowness()

    def place(self) -> dict[str, Allocation]:
        """Return the slots of each job on each host."""
        for job, wish in sorted(self._wishes.items(), key=lambda each: each[1].movable):
            if (
                self._is_kept(wish, job)
                and all(self._free[host] >= count for host, count in wish.held.items())
                and (not wish.movable or self._leaves_room(job, wish.held))
            ):
                self._take_slots(job, dict(wish.held))
        pending = self._by_size(
            job for job, wish in self._wishes.items() if wish.slots and job not in self._placed
        )
        while pending:
            job = pending.pop(0)
            found = self._fill(job)
            if len(found) > 1 and len(found) > self._fewest_hosts(job):
                moved = self._make_room(job)
                for other in moved:
                    self._give_back(other)
                if moved:
                    pending = self._by_size([*pending, *moved])
                    found = self._fill(job)
            if not self._leaves_room(job, found):
                found = self._among_limited(job)
            self._take_slots(job, found)
        return {job: self._placed.get(job, {}) for job in self._wishes}

    def _by_size(self, jobs: Iterable[str]) -> list[str]:
        """Sort jobs: those with the least choice of hosts first, then the largest."""
        return sorted(
            jobs,
            key=lambda job: (self._choice.get(job, math.inf), -self._wishes[job].slots, job),
        )

    def _hosts(self, job: str) -> Collection[str]:
        return self._limited.get(job, self._size.keys())

    def _leaves_room(self, job: str, found: Allocation) -> bool:
        """Return whether limited jobs that are not placed still fit, if a job has these slots."""
        if not (waiting := self._limited_ones(but=job)):
            return True
        free = {host: count - found.get(host, 0) for host, count in self._free.items()}
        placed = spread(waiting, self._limited, free)
        return all(sum(placed[each].values()) == slots for each, slots in waiting.items())

    def _among_limited(self, job: str) -> dict[str, int]:
        """Return slots for a job that leave room for the limited jobs that are not placed."""
        waiting = {job: self._wishes[job].slots, **self._limited_ones(but=job)}
        hosts_of = {each: self._hosts(each) for each in waiting}
        return spread(waiting, hosts_of, self._free)[job]

    def _limited_ones(self, but: str) -> dict[str, int]:
        """Return what limited jobs want that are not placed."""
        return {
            job: self._wishes[job].slots
            for job in self._limited
            if job != but and self._wishes[job].slots and job not in self._placed
        }

    def _leave(self, occupied: Allocation, placed: Allocation, sign: int) -> None:
        """Count the slots that a job occupies beyond those where it is placed."""
        for host in occupied.keys() & self._left.keys():
            self._left[host] += sign * max(0, occupied[host] - placed.get(host, 0))

    def _take_slots(self, job: str, allocation: Allocation) -> None:
        self._placed[job] = allocation
        self._leave(self._wishes[job].occupied, {}, -1)
        self._leave(self._wishes[job].occupied, allocation, 1)
        for host, count in allocation.items():
            self._free[host] -= count
            self._rings[host] += len(allocation) > 1

    def _give_back(self, job: str) -> None:
        allocation = self._placed.pop(job)
        self._leave(self._wishes[job].occupied, allocation, -1)
        self._leave(self._wishes[job].occupied, {}, 1)
        for host, count in allocation.items():
            self._free[host] += count
            self._rings[host] -= len(allocation) > 1

    def _is_kept(self, wish: Wish, job: str) -> bool:
        if sum(wish.held.values()) != wish.slots or not wish.slots:
            return False
        if not wish.held.keys() <= {*self._hosts(job)}:
            return False
        if not wish.movable:
            return True
        gain = mean_slowness(wish.held, self._slowness) / self._preferred[job]
        return gain * (1 - wish.lost) < _LEAST_GAIN

    def _preferred_slowness(self) -> dict[str, float]:
        """Return the slowness of the hosts for each job: the worthiest get the fast ones."""
        groups = sorted(set(self._slowness.values()))
        if not self._unequal:
            return dict.fromkeys(self._wishes, groups[0] if groups else 1.0)
        room = dict.fromkeys(groups, 0)
        for host, slots in self._size.items():
            room[self._slowness[host]] += slots

        def worth(job: str) -> float:
            wish = self._wishes[job]
            fast = sum(n for host, n in wish.held.items() if self._slowness.get(host) == groups[0])
            return wish.worth * (_STAYS if fast and fast == wish.slots else 1.0)

        found = {}
        for job in sorted(self._wishes, key=lambda each: (-worth(each), each)):
            own = groups
            if job in self._limited:
                own = sorted({self._slowness[host] for host in self._limited[job]}) or groups
            fits = [each for each in own if room[each] >= self._wishes[job].slots]
            found[job] = fits[0] if fits else own[0]
            left = self._wishes[job].slots
            for group in [found[job], *own]:
                part = min(left, room[group])
                room[group] -= part
                left -= part
        return found

    def _fill(self, job: str) -> dict[str, int]:
        """Return slots: the tightest single host, else whole hosts first, its own first.

        The hosts of its preferred speed come first, then those of similar speed, then those that no
        process of another job has to leave first.
        """
        count, own = self._wishes[job].slots, self._wishes[job].held
        free = {host: self._free[host] for host in self._hosts(job)}
        size, occupied = self._size, self._wishes[job].occupied
        empty = {
            host: room - max(0, self._left[host] - occupied.get(host, 0))
            for host, room in free.items()
        }

        def distance(host: str) -> float:
            return abs(self._slowness[host] - self._preferred[job])

        fits = [host for host, room in free.items() if room >= count]
        if fits:
            if self._unequal:
                nearest = min(map(distance, fits))
                fits = [host for host in fits if distance(host) == nearest]
            fits = [host for host in fits if empty[host] >= count] or fits
            least = min(free[host] for host in fits)
            tightest = [host for host in fits if free[host] == least]
            return {max(tightest, key=lambda each: own.get(each, 0)): count}
        order = sorted(
            (host for host, room in free.items() if room),
            key=lambda each: (
                distance(each),
                self._rings[each],
                -empty[each],
                -free[each],
                free[each] < size[each],
                -own.get(each, 0),
            ),
        )
        found: dict[str, int] = {}
        while count:
            # The last part goes to the host that it fills best.
            tight = [host for host in order if free[host] >= count and host not in found]
            host = (
                min(
                    tight,
                    key=lambda each: (
                        self._rings[each],
                        distance(each),
                        empty[each] < count,
                        free[each],
                    ),
                )
                if tight
                else next(each for each in order if each not in found)
            )
            found[host] = min(count, free[host])
            count -= found[host]
        return found

    def _fewest_hosts(self, job: str) -> int:
        count, needed = self._wishes[job].slots, 0
        for slots in sorted((self._size[host] for host in self._hosts(job)), reverse=True):
            if count <= 0:
                break
            count -= slots
            needed += 1
        return needed

    def _make_room(self, job: str) -> list[str]:
        """Return smaller jobs whose move frees hosts for a job; none if it would not help.

        Those that may not have all hosts stay.
        """
        count = self._wishes[job].slots
        free = {host: self._free[host] for host in self._hosts(job)}
        size, placed = self._size, self._placed
        on: dict[str, list[str]] = {host: [] for host in free}
        for other, allocation in placed.items():
            for host in allocation.keys() & on.keys():
                on[host].append(other)

        def is_movable(other: str, host: str) -> bool:
            wish = self._wishes[other]
            may_move = wish.movable and other not in self._limited
            return may_move and wish.slots < min(count, size[host])

        movable = {
            host: sum(placed[each][host] for each in jobs if is_movable(each, host))
            for host, jobs in on.items()
        }
        order = sorted(free, key=lambda host: (-(free[host] >= size[host]), movable[host]))
        left, moved = count, []
        for host in order:
            if left <= 0:
                break
            part = min(left, size[host])
            if free[host] + movable[host] < part:
                continue
            room = free[host]
            for other in sorted(on[host], key=lambda each: self._wishes[each].slots):
                if room >= part:
                    break
                if is_movable(other, host) and other not in moved:
                    moved.append(other)
                    room += placed[other][host]
            left -= part
        return moved if left <= 0 else []

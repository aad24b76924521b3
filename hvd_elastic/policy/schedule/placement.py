"""Place jobs on hosts: few hosts for a job, few jobs across hosts on a host, few moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hvd_elastic.policy.schedule.jobs import Allocation, HostSlots


def place_jobs(
    wanted: Mapping[str, int], held: Mapping[str, Allocation], hosts: Sequence[HostSlots]
) -> dict[str, Allocation]:
    """Return the slots of each job on each host.

    A job keeps its hosts if its number of slots is unchanged, unless a larger job would else be
    split more than needed. Sums of wanted slots within the capacity are always placed.

    Args:
        wanted: number of slots of each job.
        held: present slots of each job on each host.
        hosts: hosts of the cluster, fastest first where it matters.

    Raises:
        ValueError: the hosts have fewer slots than are wanted.
    """
    total = sum(host.slots for host in hosts)
    if sum(wanted.values()) > total:
        raise ValueError(f"{sum(wanted.values())} slots are wanted, the hosts have {total}")
    names = {host.name for host in hosts}
    free = {host.name: host.slots for host in hosts}
    size = dict(free)
    placed: dict[str, Allocation] = {}

    def take(job: str, allocation: Allocation) -> None:
        placed[job] = allocation
        for host, count in allocation.items():
            free[host] -= count

    def give_back(job: str) -> None:
        for host, count in placed.pop(job).items():
            free[host] += count

    def is_kept(job: str) -> bool:
        has = held.get(job, {})
        return sum(has.values()) == wanted[job] > 0 and has.keys() <= names

    for job in wanted:
        has = held.get(job, {})
        if is_kept(job) and all(free[host] >= count for host, count in has.items()):
            take(job, dict(has))
    pending = sorted(
        (job for job, count in wanted.items() if count and job not in placed),
        key=lambda job: (-wanted[job], job),
    )
    while pending:
        job = pending.pop(0)
        own = held.get(job, {})
        found = _fill(wanted[job], free, size, own)
        need = _fewest_hosts(wanted[job], hosts)
        if len(found) > need:
            moved = _make_room(wanted[job], free, size, placed, wanted)
            for other in moved:
                give_back(other)
            if moved:
                pending = sorted([*pending, *moved], key=lambda each: (-wanted[each], each))
                found = _fill(wanted[job], free, size, own)
        take(job, found)
    return {job: placed.get(job, {}) for job in wanted}


def _fill(
    count: int, free: Mapping[str, int], size: Mapping[str, int], own: Allocation
) -> dict[str, int]:
    """Return slots for a job: the tightest single host, else whole hosts first, its own first."""
    fits = [host for host, room in free.items() if room >= count]
    if fits:
        host = min(fits, key=lambda each: (free[each], -own.get(each, 0)))
        return {host: count}
    order = sorted(
        (host for host, room in free.items() if room),
        key=lambda each: (-free[each], free[each] < size[each], -own.get(each, 0)),
    )
    found: dict[str, int] = {}
    while count:
        # The last part goes to the host that it fills best.
        tight = [host for host in order if free[host] >= count and host not in found]
        host = (
            min(tight, key=free.__getitem__) if tight else next(h for h in order if h not in found)
        )
        found[host] = min(count, free[host])
        count -= found[host]
    return found


def _fewest_hosts(count: int, hosts: Sequence[HostSlots]) -> int:
    needed = 0
    for slots in sorted((host.slots for host in hosts), reverse=True):
        if count <= 0:
            break
        count -= slots
        needed += 1
    return needed


def _make_room(
    count: int,
    free: Mapping[str, int],
    size: Mapping[str, int],
    placed: Mapping[str, Allocation],
    wanted: Mapping[str, int],
) -> list[str]:
    """Return smaller jobs whose move frees hosts for a job; none if the move would not help."""
    on: dict[str, list[str]] = {host: [] for host in free}
    for job, allocation in placed.items():
        for host in allocation:
            on[host].append(job)
    movable = {
        host: sum(placed[job][host] for job in jobs if wanted[job] < min(count, size[host]))
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
        for job in sorted(on[host], key=lambda each: wanted[each]):
            if room >= part:
                break
            if wanted[job] < min(count, size[host]) and job not in moved:
                moved.append(job)
                room += placed[job][host]
        left -= part
    return moved if left <= 0 else []

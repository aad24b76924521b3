"""Decide which job holds which slots: an integer program over the jobs' goodput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hvd_elastic.formatting import count, duration_words
from hvd_elastic.policy.schedule.jobs import Allocation, Assignment, Job
from hvd_elastic.policy.schedule.placement import Wish, mean_slowness, place_jobs
from hvd_elastic.policy.schedule.room import Room
from hvd_elastic.policy.snapshot import HostOffer


def choose_options(
    slots: Sequence[np.ndarray], values: Sequence[np.ndarray], capacity: int
) -> list[int]:
    """Return the index of the chosen option of each job.

    Args:
        slots: for each job the whole numbers of slots of its options, one of them 0.
        values: for each job the values of its options; -inf: never chosen.

    Raises:
        ValueError: a job has no option with 0 slots.

    >>> worth = [np.array([0.0, 3.0, 5.0]), np.array([0.0, 4.0, 4.5])]
    >>> choose_options([np.array([0, 1, 2])] * 2, worth, 2)
    [1, 1]
    """
    count = len(slots)
    best = np.zeros(capacity + 1)
    taken = np.zeros((count, capacity + 1), np.int16)
    for job in range(count):
        sizes, worth = slots[job], values[job]
        if not np.any(sizes == 0):
            raise ValueError(f"job {job} has no option with 0 slots")
        free = int(np.argmin(sizes))
        reached, index = best + worth[free], taken[job]
        index[:] = free
        for option in np.argsort(sizes, kind="stable"):
            size = int(sizes[option])
            if option == free or size > capacity or worth[option] == -np.inf:
                continue
            tried = best[: capacity + 1 - size] + worth[option]
            better = tried > reached[size:]
            np.copyto(reached[size:], tried, where=better)
            np.copyto(index[size:], option, where=better)
        best = reached
    left, chosen = capacity, [0] * count
    for job in range(count - 1, -1, -1):
        chosen[job] = int(taken[job, left])
        left -= int(slots[job][chosen[job]])
    return chosen


_WAITING_LOSS = 0.35
"""Worth of the first slot of a job beyond its speedup: shrink others before one waits."""
_LATE = 4.0
"""Weight of finishing by the deadline, relative to the speedup that it takes."""
_LEAST_HORIZON_S = 300.0
"""Least time over which a rescale has to pay off [s]."""
_CERTAIN = 3.0
"""A change has to gain more than so many times the error of a figure: it compares two of them, each
of which is within twice its error as a rule."""
_MARGIN = 1.1
"""A deadline counts as kept if the job would be done even if it took this much longer."""


@dataclass(frozen=True)
class Weights:
    """Weights of the objective.

    Attributes:
        shortness: exponent of the remaining time on one slot: 0 treats all jobs alike, larger
            values finish short jobs first.
        service: exponent of the attained service, for jobs that have not said how long they train.
        horizon_s: time over which a rescale has to pay off [s]; less if the job ends earlier. Of a
            job whose rescales are known it is the mean time between them, as in Pollux and Sia.
    """

    shortness: float = 0.35
    service: float = 0.25
    horizon_s: float = 600.0


def decide(
    jobs: Sequence[Job], hosts: Sequence[HostOffer], now: float, weights: Weights | None = None
) -> dict[str, Assignment]:
    """Return the slots of every job, with reasons.

    Maximises the sum over jobs of weight times speedup, less what a rescale costs. The weight
    combines priority, remaining time (or attained service) and deadline. No job waits while there
    are slots for the minimum of all, and none loses its last slots if it may not be preempted. Each
    has slots of the hosts that it may have, and none waits for slots of those that are free.

    Args:
        jobs: jobs that run or wait.
        hosts: hosts that may be used, in the order of the hostfile.
        now: current time [s].

    Source: Sia, SOSP 2023 (integer program, discount of a restart); Tiresias, NSDI 2019 (attained
    service); Berg et al., SIGMETRICS 2020 (heSRPT: short jobs first, but not alone).
    """
    # Of those that were submitted together, 9 is before 10.
    order = sorted(jobs, key=lambda job: (job.submitted_s, len(job.name), job.name))
    room = Room.of({job.name: job for job in order}, hosts)
    all_of_it = _Cluster(hosts)
    parts = {
        of_job: _Cluster([host for host in hosts if host.name in of_job])
        for of_job in map(frozenset, room.limited.values())
    }
    clusters = {
        job.name: parts[frozenset(room.limited[job.name])]
        if job.name in room.limited
        else all_of_it
        for job in order
    }
    scored = [_score(job, clusters[job.name], now, weights or Weights()) for job in order]
    chosen = _choose(scored, room)
    wishes = {
        each.job.name: Wish(
            int(each.sizes[chosen[each.job.name]]),
            each.job.held,
            each.worth_of_slot(chosen[each.job.name]),
            each.lost,
            each.job.movable,
            each.job.occupied,
            each.job.hosts,
        )
        for each in scored
    }
    placed = place_jobs(wishes, hosts)
    return {
        job.name: Assignment(
            placed[job.name],
            _reason(job, placed[job.name], clusters[job.name])
            if placed[job.name]
            else _why_waits(job, clusters[job.name], order, placed),
        )
        for job in order
    }


def _choose(scored: Sequence[_Scored], room: Room) -> dict[str, int]:
    """Return the index of the option of each job.

    As long as all jobs fit on the hosts that they may have, only the sum of their slots matters.
    Where some do not, these get the best of their hosts, and the others the best of the rest: for
    concave values the optimum (decomposition algorithm; Fujishige 1980, Groenevelt 1991).
    """
    least = {each.job.name: each.job.min_slots for each in scored}
    kept = {each.job.name: each.job.min_slots for each in scored if not each.job.preemptible}
    may_wait, may_stop = room.crowded(least), room.crowded(kept)
    values = []
    for each in scored:
        name = each.job.name
        worth = np.where(each.sizes <= room.capacity(name), each.values, -np.inf)
        if name not in may_wait or (name in kept and name not in may_stop):
            worth[0] = -np.inf
        values.append(worth)
    options = choose_options([each.sizes for each in scored], values, sum(room.slots.values()))
    chosen = {each.job.name: index for each, index in zip(scored, options, strict=True)}
    wanted = {each.job.name: int(each.sizes[chosen[each.job.name]]) for each in scored}
    if crowded := room.crowded(wanted):
        theirs = {host for job in crowded for host in room.limited[job]}
        for is_theirs in (True, False):
            part = Room(
                {h: n for h, n in room.slots.items() if (h in theirs) == is_theirs}, room.limited
            )
            jobs = [each for each in scored if (each.job.name in crowded) == is_theirs]
            chosen |= _choose(jobs, part)
        _use_rest(scored, room, chosen)
    return chosen


def _use_rest(scored: Sequence[_Scored], room: Room, chosen: dict[str, int]) -> None:
    """Give slots that are left to jobs that can use them, first to those that have none."""
    wanted = {each.job.name: int(each.sizes[chosen[each.job.name]]) for each in scored}
    if sum(wanted.values()) == sum(room.slots.values()):
        return
    for each in sorted(scored, key=lambda each: wanted[each.job.name] > 0):
        name = each.job.name
        for option in np.argsort(-each.values, kind="stable"):
            size = int(each.sizes[option])
            if each.values[option] <= each.values[chosen[name]] or size <= wanted[name]:
                continue
            if room.fits({**wanted, name: size}):
                chosen[name], wanted[name] = int(option), size
                break


class _Cluster:
    """Facts about the hosts that the decision about each job needs.

    Attributes:
        boundaries: numbers of slots that whole hosts have, the fullest first.
        parts: numbers of slots of a part of a host.
    """

    def __init__(self, hosts: Sequence[HostOffer]) -> None:
        self.slowness = {host.name: host.slowness for host in hosts}
        self.names = self.slowness.keys()
        slots = sorted((host.slots for host in hosts), reverse=True)
        self.capacity = sum(slots)
        self.boundaries = np.cumsum(slots, dtype=np.int64)
        largest = slots[0] if slots else 1
        powers = {2**power for power in range(largest.bit_length())}
        self.parts = np.asarray(sorted({*powers, *slots}), np.int64)
        fastest = sorted(hosts, key=lambda host: host.slowness)
        speeds = np.repeat(
            [1 / host.slowness for host in fastest], [host.slots for host in fastest]
        )
        self._speed = np.append(1.0, np.cumsum(speeds) / np.arange(1, len(speeds) + 1))

    def speed(self, slots: np.ndarray) -> np.ndarray:
        """Return the mean speed of the fastest slots, relative to a reference host.

        A job on one kind of hosts gains the same factor for each number of slots, so only what
        spans slower hosts as well counts for less.
        """
        return self._speed[slots]


@dataclass(frozen=True)
class _Scored:
    """The options of a job.

    Attributes:
        sizes: numbers of slots, the first of which is 0.
        gains: worth of the speed alone.
        lost: part of the training that a rescale costs, with its present number of slots.
    """

    job: Job
    sizes: np.ndarray
    values: np.ndarray
    gains: np.ndarray
    lost: float

    def worth_of_slot(self, index: int) -> float:
        """Return the worth of a slot at full speed, if an option is chosen."""
        return float(self.gains[index] / max(int(self.sizes[index]), 1))


def _score(job: Job, cluster: _Cluster, now: float, weights: Weights) -> _Scored:
    sizes = _sizes(job, cluster)
    weight = _weight(job, weights)
    speedup = speedups(job, sizes) * cluster.speed(sizes)
    alone_s = _alone_s(job)
    horizon_s = weights.horizon_s
    if job.rescales is not None:
        horizon_s = max((now - job.submitted_s) / (job.rescales + 1), _LEAST_HORIZON_S)
    horizon = np.full(sizes.shape, horizon_s)
    if alone_s is not None:
        horizon = np.minimum(horizon, alone_s / np.maximum(speedup, 1e-9))
    lost = np.minimum(1.0, job.rescale_s / np.maximum(horizon, 1.0))
    keeps = (sizes == job.slots) & (job.held.keys() <= cluster.names)
    gains = weight * speedup * np.where(keeps, 1.0 + _CERTAIN * job.noise, 1 - lost)
    gains += weight * _worth_of_deadline(job, alone_s, speedup, ~keeps, now)
    values = gains + weight * _WAITING_LOSS * (sizes > 0)
    values = np.where(sizes == 0, 0.0, np.maximum(values, 1e-9))
    present = np.flatnonzero(keeps)
    return _Scored(job, sizes, values, gains, float(lost[present[0] if present.size else -1]))


def _sizes(job: Job, cluster: _Cluster) -> np.ndarray:
    """Return 0 and the numbers of slots to try: those that fill hosts, and the job's limits."""
    most = min(job.max_slots, cluster.capacity)
    found = np.concatenate([cluster.parts, cluster.boundaries, [job.min_slots, most]])
    return np.unique(np.append(found[(found >= job.min_slots) & (found <= most)], 0))


def speedups(job: Job, sizes: np.ndarray) -> np.ndarray:
    """Return the goodput of numbers of slots relative to one slot; linear where it is unknown.

    Args:
        sizes: numbers of slots, which need not be whole.
    """
    if job.goodput is None:
        return np.asarray(sizes, np.float64)
    known = np.asarray(job.goodput, np.float64)
    first = known[known > 0]
    return np.interp(sizes, np.arange(len(known)), known) / (first[0] if first.size else 1.0)


def _weight(job: Job, weights: Weights) -> float:
    alone_s = _alone_s(job)
    if alone_s is None:
        return job.priority * (max(job.attained_slot_s, 600.0) / 3600) ** -weights.service
    return job.priority * (max(alone_s, 60.0) / 3600) ** -weights.shortness


def _alone_s(job: Job) -> float | None:
    """Return the remaining time on one slot [s]; None if it is unknown."""
    if job.remaining is None or job.goodput is None:
        return None
    first = job.goodput[job.goodput > 0]
    return job.remaining / float(first[0]) if first.size else None


def _worth_of_deadline(
    job: Job, alone_s: float | None, speedup: np.ndarray, moves: np.ndarray, now: float
) -> np.ndarray:
    """Return what each option is worth for the deadline: the same for all that keep it.

    If none keeps it, faster is better. ``moves``: the options that cost a pause.
    """
    if job.deadline_s is None or alone_s is None:
        return np.zeros_like(speedup)
    left_s = job.deadline_s - now - moves * job.rescale_s
    in_time = (speedup > 0) & (_MARGIN * alone_s <= speedup * left_s)
    if not in_time.any():
        return (_LATE - 1) * speedup
    return np.where(in_time, (_LATE - 1) * speedup[in_time].min(), 0.0)


def _why_waits(
    job: Job, cluster: _Cluster, jobs: Sequence[Job], placed: Mapping[str, Allocation]
) -> str:
    """Return why a job gets no slots of the hosts that it may have."""
    whose = "the cluster has" if job.hosts is None else "the hosts that it asks for have"
    if job.min_slots > cluster.capacity:
        return f"waits: it needs {job.min_slots} slots, {whose} {cluster.capacity}"
    holders = [each for each in jobs if placed[each.name].keys() & cluster.names]
    used = sum(placed[each.name].get(host, 0) for each in holders for host in cluster.names)
    why = f"worth more to {count(len(holders), 'other job')}"
    if job.precedence is not None:
        before = [each.precedence for each in holders if (each.precedence or (0,)) < job.precedence]
        first = {each[0] < job.precedence[0] for each in before if each is not None}
        if len(before) == len(holders) and first:
            earlier = {False: "that came earlier", True: "of higher priority"}
            those = " or ".join(earlier[is_higher] for is_higher in sorted(first, reverse=True))
            why = f"held by {count(len(holders), 'job')} {those}"
    of_which = "" if job.hosts is None else " of the hosts that it asks for"
    if used == cluster.capacity:
        what = f"the one slot{of_which} is" if used == 1 else f"all {used} slots{of_which} are"
        return f"waits: {what} {why}"
    what = f"{used} of {cluster.capacity} slots{of_which} {'is' if used == 1 else 'are'}"
    return f"waits: {what} {why}, and it needs {job.min_slots}"


def _speed_words(job: Job, slots: int, rate: float) -> str:
    """Return how fast a job is with its slots; what was not measured is called expected.

    Args:
        rate: their speed relative to that of one slot.
    """
    base = 1
    if job.timed is not None:
        others = {*job.timed} - {slots}
        if not others:
            return "measured with no other number of slots yet"
        base = min(others)
    relative = rate / float(speedups(job, np.asarray([base]))[0])
    sure = "" if job.timed is None or slots in job.timed else "expected "
    return f"{sure}{relative:.1f} times the speed of {'one' if base == 1 else base}"


def _reason(job: Job, placed: Allocation, cluster: _Cluster) -> str:
    """Return why a job gets the slots that it gets."""
    slots = sum(placed.values())
    now_has = f"{count(slots, 'slot')} on {count(len(placed), 'host')}"
    slowness = mean_slowness(placed, cluster.slowness)
    if job.goodput is None and job.fixed:
        return f"{now_has}, from start to end"
    kept = "keeps" if dict(placed) == dict(job.held) else "moves to"
    if job.goodput is None:
        does = "starts with" if not job.slots else kept if slots == job.slots else "changes to"
        return f"{does} {now_has}: nothing is measured yet"
    rate = float(speedups(job, np.asarray([slots]))[0]) / slowness
    speed = _speed_words(job, slots, rate)
    alone_s = _alone_s(job)
    left = ""
    if alone_s is not None:
        left = f", about {duration_words(alone_s / max(rate, 1e-9))} left"
    if slots == job.slots:
        return f"{kept} {now_has}: {speed}{left}"
    verb = "grows" if slots > job.slots else "shrinks"
    if not job.slots:
        verb = "starts"
    reason = f"{verb} from {job.slots} to {now_has}: {speed}{left}"
    if slots == job.max_slots and job.is_held_back:
        reason += f"; more once it has trained on {slots}"
    elif slots == job.max_slots < cluster.capacity:
        reason += "; it takes no more"
    return reason

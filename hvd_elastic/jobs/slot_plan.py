"""Decide which jobs are to hold which slots, and which slots each may have now, on the way there.

:func:`plan_slots` is the decision; :func:`grant_slots` moves slots from those that leave them to
those that are to have them; the daemon tells the keeper of each job what it returns, and the keeper
writes the hostfile of the run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hvd_elastic.formatting import count
from hvd_elastic.jobs.job import Job, JobKind, JobStatus
from hvd_elastic.jobs.progress import Measured
from hvd_elastic.jobs.rights import user_name
from hvd_elastic.policy.schedule import jobs as policy
from hvd_elastic.policy.schedule.decide import decide
from hvd_elastic.policy.schedule.policies import Policy
from hvd_elastic.policy.schedule.shares import Shares
from hvd_elastic.policy.snapshot import HostOffer

Slots = Mapping[str, int]
"""Number of slots on each host."""

_LEAST_TURN_S = 60.0
"""How long a job keeps its minimum after its start [s], so that jobs do not often take turns."""
_START_S = 5.0
"""Time from the start of a job's processes to its training [s]."""
_AGING_S = 3600.0
"""Time in the queue that doubles the weight of a job [s]; so equal jobs start in their order."""
_TURN_S = 600.0
"""Waiting that a job that runs is credited with, so that equal jobs take few turns [s]."""
_GROWTH = 2
"""A job gets at most this many times as many slots as were measured (Pollux, section 4.1)."""
_KEPT_AFTER_S = 600.0
"""How long a job waits until slots are kept for it that plain commands leave [s]."""
_CONSIDERED = 2
"""Waiting jobs that are considered, per slot of the cluster; more could not start at once."""


@dataclass(frozen=True)
class Candidate:
    """A job that may hold slots.

    Attributes:
        measured: what was measured of its run; None: it never began.
        occupied: slots of each host in which processes of its run live or start.
        unheard: that its leader does not hear from its hosts, in words; empty: it does.
        hosts: hosts that it may have; None: all.
    """

    job: Job
    measured: Measured | None = None
    occupied: Mapping[str, int] = field(default_factory=dict)
    unheard: str = ""
    hosts: frozenset[str] | None = None


@dataclass(frozen=True)
class Plan:
    """A decision about all candidates.

    Attributes:
        slots: slots on each host by number of the job; a job that waits has none.
        reasons: why, by number of the job.
        etas: expected end of a job that gets slots, expected start of others [Unix s]; None: not
            known.
    """

    slots: dict[int, dict[str, int]]
    reasons: dict[int, str]
    etas: dict[int, float | None]


def plan_slots(
    candidates: Sequence[Candidate],
    hosts: Sequence[HostOffer],
    now: float,
    choose: Policy = decide,
    shares: Shares | None = None,
) -> Plan:
    """Return which candidate should hold which slots.

    Args:
        candidates: jobs that run, and jobs that wait for nothing but slots.
        now: current time [Unix s].
        shares: the shares of their users; None: slots are not shared by weight.
    """
    running = [each for each in candidates if each.job.status is JobStatus.RUNNING]
    waiting = sorted(
        (each for each in candidates if each.job.status is JobStatus.QUEUED),
        key=lambda each: (-_aged_priority(each.job, now), each.job.number),
    )
    first = waiting
    if shares is not None:
        choose, first = shares.policy(choose), in_turn(waiting, running, shares.weights)
    reserved, first, kept_off = _keep_slots(first, running, hosts, now)
    asked = {each.hosts for each in [*candidates, *first]}
    parts = {names: _Part.of(hosts, names) for names in asked}
    considered = [each for each in running if parts[each.hosts].capacity]
    like_it: Counter[frozenset[str] | None] = Counter()
    for each in first:
        capacity = parts[each.hosts].capacity
        if each.job.request.min_np <= capacity and like_it[each.hosts] < _CONSIDERED * capacity:
            like_it[each.hosts] += 1
            considered.append(each)
    jobs = {
        str(each.job.number): _as_policy_job(each, parts[each.hosts], reserved, now)
        for each in considered
    }
    decided = choose(list(jobs.values()), hosts, now)
    plan = Plan({}, {}, {})
    for each in candidates:
        number = each.job.number
        assignment = decided.get(str(number))
        if assignment is None:
            plan.slots[number] = {}
            why_not = _why_not(each, parts[each.hosts].capacity)
            plan.reasons[number] = kept_off.get(number, why_not)
        else:
            plan.slots[number] = dict(assignment.hosts)
            plan.reasons[number] = assignment.reason
    ends = {
        each.job.number: None
        if each.unheard  # nobody knows whether it trains
        else _expected_end(jobs[str(each.job.number)], plan.slots[each.job.number], now)
        for each in considered
        if plan.slots[each.job.number]
    }
    left_out: dict[frozenset[str] | None, list[Job]] = {}
    for each in waiting:
        if not plan.slots[each.job.number]:
            left_out.setdefault(each.hosts, []).append(each.job)
    # Who gets slots that others have to leave starts as soon as those have changed their size.
    moved = [jobs[name] for each in running if (name := str(each.job.number)) in jobs]
    longest_s = max((job.rescale_s for job in moved), default=0.0)
    soon = [each.job.number for each in waiting if plan.slots[each.job.number]]
    plan.etas.update({**ends, **dict.fromkeys(soon, now + longest_s)})
    for names, left in left_out.items():
        holders = [
            (ends[each.job.number], min(each.job.request.min_np, there))
            for each in considered
            if each.job.number in ends and (there := _slots_on(names, plan.slots[each.job.number]))
        ]
        least = [job.request.min_np for job in left]
        starts = expected_starts(holders, least, parts[names].capacity)
        plan.etas.update({job.number: at for job, at in zip(left, starts, strict=True)})
    return plan


def _keep_slots(
    first: Sequence[Candidate],
    running: Sequence[Candidate],
    hosts: Sequence[HostOffer],
    now: float,
) -> tuple[frozenset[str], list[Candidate], dict[int, str]]:
    """Keep slots for jobs that need several at once: plain commands after them may not have these.

    A plain command never makes room, so a job would wait for ever behind an endless row of them.
    One that ends by its time limit before the job can start may go first: EASY backfilling (Lifka,
    JSSPP 1995).

    Args:
        first: waiting jobs in their order.

    Returns:
        The hosts on which slots are kept, the waiting jobs with the hosts that are left to them,
        and why the others have to wait.
    """
    every = frozenset(host.name for host in hosts)
    bound = [each.job for each in running if each.job.request.kind is JobKind.PLAIN]
    reserved: list[_Reserved] = []
    left: list[Candidate] = []
    kept_off: dict[int, str] = {}
    for each in first:
        job, names = each.job, every if each.hosts is None else each.hosts & every
        least = job.request.min_np
        if job.request.kind is JobKind.PLAIN and reserved:
            ends_at = _latest_end(job, now)
            others = [own for own in reserved if not own.starts_after(ends_at)]
            full = [own for own in others if own.spare <= 0 and not own.hosts.isdisjoint(names)]
            if full:
                names = names.difference(*(own.hosts for own in full))
                if not names:
                    kept_off[job.number] = full[0].words
                    continue
                each = replace(each, hosts=names)
            for own in others:
                own.spare -= not own.hosts.isdisjoint(names)
        elif least > 1 and now - job.queued_at >= _KEPT_AFTER_S:
            capacity = _Part.of(hosts, names).capacity
            held = [(_latest_end(own, now), _slots_on(names, own.held)) for own in bound]
            (starts_at,) = expected_starts(held, [least], capacity)
            spare = capacity - least - sum(slots for _, slots in held)
            if least <= capacity:
                reserved.append(_Reserved(job, names, spare, starts_at))
        left.append(each)
    return frozenset().union(*(own.hosts for own in reserved)), left, kept_off


@dataclass
class _Reserved:
    """A waiting job for which slots are kept.

    Attributes:
        spare: slots of its hosts beyond what it needs that plain commands may still have; below 0:
            it waits until some of those that run have ended.
        starts_at: when enough of them have ended at the latest [Unix s]; None: not known, or now.
    """

    job: Job
    hosts: frozenset[str]
    spare: int
    starts_at: float | None

    @property
    def words(self) -> str:
        needs = count(self.job.request.min_np, "slot")
        return f"waits: job {self.job.number} ({self.job.run_id}) is before it and needs {needs}"

    def starts_after(self, ends_at: float | None) -> bool:
        """Return whether it starts after a command that ends at a time [Unix s]."""
        return self.starts_at is not None and ends_at is not None and ends_at <= self.starts_at


def _latest_end(job: Job, now: float) -> float | None:
    """Return when the time limit of a job ends it [Unix s]; None: it has none."""
    limit_s = job.request.time_limit_s
    return None if limit_s is None else now + limit_s - job.run_s(now)


def in_turn(
    waiting: Sequence[Candidate], running: Sequence[Candidate], weights: Mapping[str, float]
) -> list[Candidate]:
    """Return waiting jobs so that those come first whose users have few before them, by weight.

    Args:
        waiting: jobs as they would start if all were one user's.
        weights: weight of each user.
    """
    before = Counter(user_name(each.job.request.user) for each in running)
    turns = []
    for each in waiting:
        user = user_name(each.job.request.user)
        turns.append(before[user] / weights[user])
        before[user] += 1
    order = sorted(range(len(turns)), key=turns.__getitem__)
    return [waiting[number] for number in order]


@dataclass(frozen=True)
class _Part:
    """The hosts that some jobs may have.

    Attributes:
        per_host: slots of each host, the most first.
    """

    per_host: list[int]
    capacity: int

    @classmethod
    def of(cls, hosts: Sequence[HostOffer], names: Collection[str] | None) -> _Part:
        slots = [host.slots for host in hosts if names is None or host.name in names]
        return cls(sorted(slots, reverse=True), sum(slots))


def _slots_on(names: Collection[str] | None, slots: Slots) -> int:
    return sum(count for host, count in slots.items() if names is None or host in names)


@dataclass(frozen=True)
class Claim:
    """The slots of one job.

    Attributes:
        occupied: slots in which processes of its run live.
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
            if host not in free:  # it is ending there, and the host was taken out or is drained
                continue
            has = now.get(host, 0)
            own = max(0, claim.occupied.get(host, 0) - has)  # it is about to leave them
            more = min(wanted - has, own + max(0, free.get(host, 0)))
            if more > 0:
                now[host] = has + more
                free[host] -= max(0, more - own)
        enough = sum(min(now.get(host, 0), slots) for host, slots in claim.wanted.items())
        # What was kept for the move is not needed any more, or not all of it: a job never has more
        # than it is to have, or its user would have more than allowed.
        excess = math.inf
        if enough < claim.min_slots:
            excess = sum(now.values()) - max(claim.min_slots, sum(claim.wanted.values()))
        for host, slots in now.items():
            given_up = int(min(max(0, excess), max(0, slots - claim.wanted.get(host, 0))))
            now[host] -= given_up
            excess -= given_up
        granted[name] = {host: slots for host, slots in now.items() if slots}
    return granted


def awaited_slots(
    claims: Mapping[str, Claim], granted: Mapping[str, Slots]
) -> dict[str, dict[str, list[str]]]:
    """Return for each job that has to wait for slots which jobs have to leave them, by host.

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


def expected_starts(
    holders: Sequence[tuple[float | None, int]], waiting: Sequence[int], capacity: int
) -> list[float | None]:
    """Return when each waiting job can start, as jobs that hold slots end.

    Jobs that start later are not expected to end, so only the first ones have an answer.

    Args:
        holders: expected end [s], None if it is not known, and fewest slots of each job that
            holds some.
        waiting: fewest slots of each waiting job, in their order.

    >>> expected_starts([(50.0, 2), (20.0, 1), (None, 1)], [1, 1, 2], 4)
    [20.0, 50.0, None]
    """
    free = capacity - sum(slots for _, slots in holders)
    ends = sorted((at, slots) for at, slots in holders if at is not None)
    found: list[float | None] = []
    at: float | None = None
    for wanted in waiting:
        while free < wanted and ends:
            at, slots = ends.pop(0)
            free += slots
        if free < wanted:
            return [*found, *[None] * (len(waiting) - len(found))]
        free -= wanted
        found.append(at)
    return found


_MOST_NOISE = 0.25
"""Largest relative error of another user's measurements that counts: its slots are worth more to a
job by three times that, so with a made-up one it would keep them for ever."""
_LONGEST_S = 1e9
"""Longest pause of a change of slots, and length of a job, that can have been measured [s]."""


def _is_usable(measured: Measured, per_host: Sequence[int]) -> bool:
    """Return whether a job of another user has measured what can be: its keeper may tell anything.

    What cannot be used must not end the daemon.
    """
    try:
        goodput = measured.goodput(per_host)
        left = measured.remaining(None, None)
        times_s = [measured.rescale_s, measured.noise]
        if goodput is not None and left is not None:
            times_s.append(left / float(goodput.max()))
    except Exception:  # noqa: BLE001  # whatever made-up numbers lead to
        return False
    makes_sense = goodput is None or bool(np.all(np.isfinite(goodput) & (goodput >= 0)))
    return makes_sense and all(0 <= each <= _LONGEST_S for each in times_s)


def _at_most_linear(goodput: np.ndarray) -> np.ndarray:
    """Return a goodput of which further slots bring no more than the first ones.

    >>> _at_most_linear(np.array([0.0, 2.0, 3.0, 99.0]))
    array([0., 2., 3., 6.])
    """
    known = np.flatnonzero(goodput)
    if not known.size:
        return goodput
    slots = np.arange(len(goodput))
    return np.asarray(np.minimum(goodput, goodput[known[0]] * slots / known[0]))


def _as_policy_job(
    candidate: Candidate, part: _Part, reserved: frozenset[str], now: float
) -> policy.Job:
    """Return what the policy sees of a job.

    Args:
        part: the hosts that it may have.
        reserved: hosts on which slots are kept for others, so that it has no turn there: they would
            wait for ever behind an endless row of jobs that end within a turn.
    """
    job, measured = candidate.job, candidate.measured
    per_host, capacity = part.per_host, part.capacity
    request = job.request
    if measured is not None and request.user is not None and not _is_usable(measured, per_host):
        measured = None
    most = max(request.min_np, min(request.max_np or capacity, capacity))
    goodput: np.ndarray | None = None
    remaining: float | None = None
    service, rescale_s = 0.0, 0.0
    rescales: int | None = None
    noise, timed_with = 0.0, None
    if request.kind is not JobKind.ELASTIC:
        most = request.min_np
    if measured is not None:
        goodput = measured.goodput(per_host)
        remaining = measured.remaining(request.target_examples, request.epochs)
        service, rescale_s = measured.service(now), measured.rescale_s
        rescales = measured.rescales
        noise, timed_with = measured.noise, measured.timed
        if request.user is not None:
            goodput = None if goodput is None else _at_most_linear(goodput)
            noise = min(noise, _MOST_NOISE)
    if job.status is JobStatus.QUEUED:
        rescale_s = _START_S
    timed = 0 if measured is None else measured.slots
    takes, most = most, min(most, max(request.min_np, _GROWTH * timed, 1))
    turn_over = job.started_at is None or now - job.started_at >= _LEAST_TURN_S
    turn_over |= not reserved.isdisjoint(job.held)
    return policy.Job(
        str(job.number),
        job.submitted_at,
        goodput,
        remaining,
        dict(job.held),
        service,
        rescale_s,
        min_slots=request.min_np,
        max_slots=most,
        is_held_back=most < takes,
        priority=_aged_priority(job, now),
        deadline_s=request.deadline,
        rescales=rescales,
        occupied=candidate.occupied,
        noise=noise,
        timed=timed_with,
        precedence=(-request.priority, job.queued_at),
        fixed=request.kind is not JobKind.ELASTIC,
        movable=request.kind is not JobKind.PLAIN,
        preemptible=job.status is not JobStatus.RUNNING
        or (turn_over and request.kind is not JobKind.PLAIN),
        user=user_name(request.user),
        hosts=candidate.hosts,
    )


def _aged_priority(job: Job, now: float) -> float:
    """Return the weight of a job by its priority and by how long it waits for slots.

    A job that runs loses the weight of its waiting as fast as it has gained it.
    """
    waited_s = max(0.0, now - job.queued_at)
    if job.status is JobStatus.RUNNING:
        started_at = job.started_at or now
        waited_s = max(0.0, (started_at - job.queued_at) - (now - started_at)) + _TURN_S
    return job.request.priority * (1 + waited_s / _AGING_S)


def _expected_end(job: policy.Job, slots: Mapping[str, int], now: float) -> float | None:
    if job.remaining is None or job.goodput is None:
        return None
    rate = float(job.goodput[min(sum(slots.values()), len(job.goodput) - 1)])
    return now + job.remaining / rate if rate > 0 else None


def _why_not(candidate: Candidate, capacity: int) -> str:
    wanted = candidate.job.request.min_np
    if wanted > capacity:
        which = "hosts that can be used"
        if candidate.hosts is not None:
            which = f"hosts that it asks for ({candidate.job.request.wish.words})"
        return f"waits: it needs {count(wanted, 'slot')}, the {which} have {capacity}"
    return "waits: jobs of higher priority, or that came earlier, are first"

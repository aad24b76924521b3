"""Decide which jobs of the queue hold which slots, and when the others can expect to start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hvd_elastic.jobs.job import Job, JobKind, JobStatus
from hvd_elastic.jobs.progress import Measured
from hvd_elastic.policy.schedule import jobs as policy
from hvd_elastic.policy.schedule.decide import decide
from hvd_elastic.policy.schedule.policies import Policy

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
_CONSIDERED = 2
"""Waiting jobs that are considered, per slot of the cluster; more could not start at once."""


@dataclass(frozen=True)
class Candidate:
    """A job that may hold slots.

    Attributes:
        measured: what was measured of its run; None: it never began.
        occupied: slots of each host in which processes of its run live or start.
        unheard: that its leader does not hear from its hosts, in words; empty: it does.
    """

    job: Job
    measured: Measured | None = None
    occupied: Mapping[str, int] = field(default_factory=dict)
    unheard: str = ""


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
    hosts: Sequence[policy.HostSlots],
    now: float,
    choose: Policy = decide,
) -> Plan:
    """Return which candidate should hold which slots.

    Args:
        candidates: jobs that run, and jobs that wait for nothing but slots.
        now: current time [Unix s].
    """
    per_host = sorted((host.slots for host in hosts), reverse=True)
    capacity = sum(per_host)
    running = [each for each in candidates if each.job.status is JobStatus.RUNNING]
    waiting = sorted(
        (each for each in candidates if each.job.status is JobStatus.QUEUED),
        key=lambda each: (-_aged_priority(each.job, now), each.job.number),
    )
    fits = [each for each in waiting if each.job.request.min_np <= capacity]
    considered = [*running, *fits[: _CONSIDERED * capacity]] if capacity else []
    jobs = {
        str(each.job.number): _as_policy_job(each, per_host, capacity, now) for each in considered
    }
    decided = choose(list(jobs.values()), hosts, now)
    plan = Plan({}, {}, {})
    for each in candidates:
        number = each.job.number
        assignment = decided.get(str(number))
        if assignment is None:
            plan.slots[number], plan.reasons[number] = {}, _why_not(each.job, capacity)
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
    left_out = [each.job for each in waiting if not plan.slots[each.job.number]]
    holders = [
        (ends[each.job.number], each.job.request.min_np)
        for each in considered
        if each.job.number in ends
    ]
    starts = expected_starts(holders, [job.request.min_np for job in left_out], capacity)
    # Who gets slots that others have to leave starts as soon as those have changed their size.
    longest_s = max((jobs[str(each.job.number)].rescale_s for each in running), default=0.0)
    soon = [each.job.number for each in waiting if plan.slots[each.job.number]]
    plan.etas.update({**ends, **dict.fromkeys(soon, now + longest_s)})
    plan.etas.update({job.number: at for job, at in zip(left_out, starts, strict=True)})
    return plan


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


def _as_policy_job(
    candidate: Candidate, per_host: Sequence[int], capacity: int, now: float
) -> policy.Job:
    job, measured = candidate.job, candidate.measured
    request = job.request
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
    if job.status is JobStatus.QUEUED:
        rescale_s = _START_S
    timed = 0 if measured is None else measured.slots
    takes, most = most, min(most, max(request.min_np, _GROWTH * timed, 1))
    turn_over = job.started_at is None or now - job.started_at >= _LEAST_TURN_S
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


def _why_not(job: Job, capacity: int) -> str:
    wanted = job.request.min_np
    if wanted > capacity:
        return f"waits: it needs {wanted} slots, the hosts that can be used have {capacity}"
    return "waits: jobs of higher priority, or that came earlier, are first"

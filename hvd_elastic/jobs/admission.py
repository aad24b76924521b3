"""Decide which jobs may hold slots within the limits of their users, and how many at most."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from hvd_elastic.formatting import count
from hvd_elastic.jobs.job import Job, JobRequest, JobStatus
from hvd_elastic.jobs.limits import Limit, Limits
from hvd_elastic.jobs.slot_plan import Candidate, in_turn
from hvd_elastic.policy.schedule.shares import Shares


@dataclass
class _Scope:
    """What those whom one limit is for are to have together.

    Attributes:
        whose: who they are, in words.
        least: their fewest slots.
    """

    whose: str
    limit: Limit
    jobs: int = 0
    least: int = 0

    def add(self, slots: int) -> None:
        """Count a job with its fewest slots."""
        self.jobs += 1
        self.least += slots

    def why_not(self, slots: int) -> str:
        """Return why a further job cannot start; empty: it can."""
        most_jobs, most_slots = self.limit.most_jobs, self.limit.most_slots
        if most_jobs is not None and self.jobs >= most_jobs:
            allowed = count(most_jobs, "job")
        elif most_slots is not None and self.least + slots > most_slots:
            allowed = count(most_slots, "slot")
        else:
            return ""
        return f"waits: {self.whose} may have {allowed} at a time; see: hvd-elastic limits"


def within_limits(
    candidates: Iterable[Candidate],
    bound: Iterable[Job],
    limits: Limits,
    shares: Shares | None = None,
) -> tuple[list[Candidate], dict[int, str]]:
    """Return the jobs that may hold slots, and why the others have to wait.

    No job may have more slots than let all fit together into each limit. Those that run already
    stay within it as soon as their fewest slots allow.

    Args:
        candidates: jobs that run, and jobs that wait for nothing but slots.
        bound: jobs that run and whose slots cannot be changed now.
        shares: the shares of the users; None: slots are not shared by weight.
    """
    scopes: dict[str, _Scope] = {}
    of_user: dict[int | None, list[_Scope]] = {}

    def scopes_of(job: Job) -> list[_Scope]:
        user = job.request.user
        if user not in of_user:
            applying = limits.applying(user).items()
            of_user[user] = [scopes.setdefault(who, _Scope(who, limit)) for who, limit in applying]
        return of_user[user]

    for job in bound:
        for scope in scopes_of(job):
            scope.add(job.slots)
    allowed: list[Candidate] = []
    held: dict[int, str] = {}
    order = sorted(candidates, key=_first)
    if shares is not None:
        running = [each for each in order if each.job.status is JobStatus.RUNNING]
        order = [*running, *in_turn(order[len(running) :], running, shares.weights)]
    for each in order:
        job, least = each.job, each.job.request.min_np
        why = [scope.why_not(least) for scope in scopes_of(job)]
        if job.status is not JobStatus.RUNNING and any(why):
            held[job.number] = next(filter(None, why))
            continue
        for scope in scopes_of(job):
            scope.add(least)
        allowed.append(each)
    return _capped(allowed, [scopes_of(each.job) for each in allowed]), held


def _first(each: Candidate) -> tuple[bool, float, int]:
    """Sort jobs that run before those that wait, and these as they are to start."""
    job = each.job
    return job.status is not JobStatus.RUNNING, -job.request.priority, job.number


def _capped(jobs: list[Candidate], scopes: list[list[_Scope]]) -> list[Candidate]:
    """Return jobs with what their limits leave beyond the fewest slots dealt out evenly."""
    left = {
        scope.whose: max(0, scope.limit.most_slots - scope.least)
        for each in scopes
        for scope in each
        if scope.limit.most_slots is not None
    }
    bounds = [[scope.whose for scope in each if scope.whose in left] for each in scopes]
    wishes = [_wish(each.job.request) for each in jobs]
    more = dict.fromkeys((number for number, those in enumerate(bounds) if those), 0)
    growing = [*more]

    def can_grow(number: int) -> bool:
        return more[number] < wishes[number] and all(left[bound] for bound in bounds[number])

    while growing := [*filter(can_grow, growing)]:
        sharing = Counter(bound for number in growing for bound in bounds[number])
        step = min(left[bound] // sharing[bound] for bound in sharing)
        step = int(min(step, *(wishes[number] - more[number] for number in growing)))
        for number in growing:
            # One each, to the first of them, if there are fewer than jobs.
            step_of = step or int(can_grow(number))
            more[number] += step_of
            for bound in bounds[number]:
                left[bound] -= step_of
    found = list(jobs)
    for number, slots in more.items():
        job = jobs[number].job
        request = replace(job.request, max_np=job.request.min_np + slots)
        found[number] = replace(jobs[number], job=replace(job, request=request))
    return found


def _wish(request: JobRequest) -> float:
    """Return how many slots a job can take beyond its fewest."""
    return math.inf if request.max_np is None else max(0, request.max_np - request.min_np)

"""The jobs of a cluster and the changes of their states; every change is stored before it acts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hvd_elastic.errors import RunError, UsageError
from hvd_elastic.formatting import count, duration_words
from hvd_elastic.hosts.hostfile import fold_hosts
from hvd_elastic.jobs.host_wish import HostWish
from hvd_elastic.jobs.job import (
    After,
    CancelCause,
    Cancelled,
    Job,
    JobKind,
    JobRequest,
    JobStatus,
    StopReason,
)
from hvd_elastic.jobs.store import JobStore

Emit = Callable[[str, Mapping[str, Any]], None]
"""Records an event of the cluster: kind and fields."""
TellUser = Callable[[Job, str, Mapping[str, Any], Mapping[str, str]], None]
"""Has the user of a job told of an event: kind and fields, and the environment of the job."""

_ETA_MOVED_S = 5.0
"""Change of an expected time that is stored [s]."""
_LAST_PART = 0.1
"""Part of a job's time limit before whose end it is told that it is near."""
_BEING_ENDED: Mapping[StopReason | None, str] = {
    StopReason.CANCEL: "cancelled",
    StopReason.TIME_LIMIT: "ended at its time limit",
}
"""How a job is being ended for good."""
OUTCOMES = {"ok": "to succeed", "fail": "to fail", "any": "to end"}


class JobQueue:
    """All jobs that wait or run, in memory and in the store.

    Args:
        emit: records an event.
        tell_user: tells the users of jobs with ``--notify``.
        notify_held_s: how long a job is held until that is told [s]; None: as the job says.

    Attributes:
        changed: whether a job was added, ended or changed since the flag was last cleared.
    """

    def __init__(
        self,
        store: JobStore,
        emit: Emit,
        tell_user: TellUser | None = None,
        notify_held_s: float | None = None,
    ) -> None:
        self.store = store
        self._emit = emit
        self._tell_user, self._notify_held_s = tell_user, notify_held_s
        self._last_environments: dict[int, Mapping[str, str]] = {}
        """Environments of jobs with ``--notify`` that are about to end."""
        self._held_long: set[tuple[int, float]] = set()
        """Jobs of which it was told that they are held for long, and since when they are."""
        self.active = {job.number: job for job in store.active()}
        self.changed = True
        self._held_back: set[int] = set()
        """Jobs that waited for others when it was last looked."""
        self._near_limit: set[int] = set()
        """Jobs of which it was told that their time limit is near."""

    def with_status(self, status: JobStatus) -> list[Job]:
        """Return the active jobs of a state, oldest first."""
        return [job for job in self.active.values() if job.status is status]

    # -- requests --------------------------------------------------------------------------

    def add_jobs(
        self,
        requests: Sequence[JobRequest],
        environment: Mapping[str, str],
        allowed: Callable[[HostWish], Collection[str] | None] = lambda _: None,
    ) -> list[Job]:
        """Add jobs at the end of the queue; return them, with those that were added before.

        Args:
            allowed: returns the hosts that jobs with a wish may have now; None: all.

        Raises:
            UsageError: they wait for a job that does not exist.
            StoreError: nothing was added.
        """
        wanted = {after.job for request in requests for after in request.after}
        known = self.store.statuses(wanted)
        for number in sorted(wanted - known.keys()):
            raise UsageError(
                f"--after names job {number}, and there is none; see: hvd-elastic queue --all"
            )
        before = self._added_before(requests)
        there = [before.get((each.name, each.token, each.user)) for each in requests]
        new = [each for each, job in zip(requests, there, strict=True) if job is None]
        added = self.store.add_jobs(new, environment, time.time()) if new else []
        self.active |= {job.number: job for job in added}
        hosts = {wish: allowed(wish) for wish in {request.wish for request in new}}
        for job in added:
            request = job.request
            self._emit(
                "job_submitted",
                {
                    "job": job.number,
                    "name": job.name,
                    "command": request.words,
                    "priority": request.priority,
                    "min_np": request.min_np,
                    "max_np": request.max_np,
                    "deadline": request.deadline,
                    "time_limit_s": request.time_limit_s,
                    "hosts": fold_hosts(sorted(hosts[request.wish] or ())) or None,
                },
            )
        self.changed = True
        rest = iter(added)
        return [next(rest) if job is None else job for job in there]

    def _added_before(
        self, requests: Iterable[JobRequest]
    ) -> dict[tuple[str, str, int | None], Job]:
        """Return the jobs that requests with tokens have added, by name, token and user."""
        named = {(each.name, each.user) for each in requests if each.token}
        same = (job for name, user in named for job in self.store.find(name, user))
        tokens = (job for job in same if job.request.token)
        return {(job.name, job.request.token, job.request.user): job for job in tokens}

    def cancel(
        self, numbers: Collection[int], by: str, cause: CancelCause = CancelCause.USER
    ) -> tuple[list[Job], list[Job], list[Job]]:
        """Cancel jobs.

        Returns:
            Those that have ended by it, those whose runs have to end first, and those that had
            ended before.

        Raises:
            RunError: a job does not exist, or all have ended already; nothing is cancelled.
        """
        jobs, over = self._active_of(numbers)
        now = time.time()
        message = Cancelled(by, cause)
        jobs = [
            replace(job, request=replace(job.request, cancelled=job.request.cancelled or message))
            for job in jobs
        ]
        waiting = [job for job in jobs if job.status is JobStatus.QUEUED]
        running = [job for job in jobs if job.status is JobStatus.RUNNING]
        stopping = [
            replace(
                job,
                stop=StopReason.CANCEL,
                reason=f"{message}: is being ended"
                if job.request.kind is JobKind.PLAIN
                else f"{message}: ends after a checkpoint",
            )
            for job in running
        ]
        ended = [_ended(job, cause.status, str(message), now) for job in waiting]
        self._save([*ended, *stopping])
        self._tell_ended(ended)
        return ended, stopping, over

    def requeue(
        self,
        numbers: Collection[int],
        environment: Mapping[str, str],
        after: Sequence[After] | None,
    ) -> list[Job]:
        """Put jobs back into the queue: those that have ended, and those that run.

        Raises:
            RunError: a job does not exist, or is being cancelled; nothing is changed.
            UsageError: jobs would wait for each other in a circle.
        """
        found = self.store.jobs(dict.fromkeys(numbers))
        for number in dict.fromkeys(numbers):
            job = found.get(number)
            if job is None:
                raise RunError(f"there is no job {number}; see: hvd-elastic queue --all")
            if (how := _BEING_ENDED.get(job.stop)) is not None:
                raise RunError(
                    f"job {number} ({job.run_id}) is being {how}. Queue it again when it has "
                    f"ended: hvd-elastic wait {number}"
                )
        if after is not None:
            found = {
                number: replace(job, request=replace(job.request, after=tuple(after)))
                for number, job in found.items()
            }
        found = {
            number: replace(job, request=replace(job.request, hold="", cancelled=None))
            for number, job in found.items()
        }
        waiting = {**self.active, **found}
        for number in found:
            self._refuse_circle(number, waiting)
        changed = []
        for job in found.values():
            if job.status is JobStatus.RUNNING:
                changed.append(replace(job, stop=StopReason.REQUEUE, reason="asked to by requeue"))
                continue
            if job.request.user is None:  # its user's keeper has that of another one
                job = self.store.renew_environment(job, environment)
            changed.append(
                replace(
                    job,
                    status=JobStatus.QUEUED,
                    reason="asked to by requeue",
                    message="",
                    queued_at=job.queued_at if job.status.active else time.time(),
                    ended_at=None,
                    eta=None,
                    failures=0,
                    stop=None,
                    held={},
                    ran_s=job.ran_s if job.status.active else 0.0,
                )
            )
        self._save(changed)
        for job in changed:
            if job.status is JobStatus.QUEUED:  # of one that runs it is told when its run has ended
                self._tell(job, "job_requeued", {"reason": "asked to by requeue"})
        return changed

    def hold(
        self, numbers: Collection[int], by: str
    ) -> tuple[list[Job], list[Job], list[Job], list[Job]]:
        """Hold jobs back until they are released.

        Returns:
            Those that waited, those whose runs have to end first, plain commands that run and
            cannot be held, and those that have ended before.

        Raises:
            RunError: a job does not exist, or none can be held; nothing is changed.
        """
        jobs, over = self._active_of(numbers)
        for job in jobs:
            if (how := _BEING_ENDED.get(job.stop)) is not None:
                raise RunError(f"job {job.number}: is being {how}, so nothing is held")
        plain = [
            job
            for job in jobs
            if job.status is JobStatus.RUNNING and job.request.kind is JobKind.PLAIN
        ]
        able = [job for job in jobs if job not in plain]
        if not able:
            raise RunError(
                f"{jobs_words(plain)}: a plain command has no checkpoint, so it cannot be held "
                "while it runs; cancel or requeue starts it from its beginning"
            )
        held = [
            replace(
                job,
                request=replace(job.request, hold=by, held_at=time.time()),
                reason=_held_words(by),
            )
            for job in able
        ]
        waiting = [job for job in held if job.status is JobStatus.QUEUED]
        running = [
            replace(job, stop=StopReason.REQUEUE) for job in held if job.status is JobStatus.RUNNING
        ]
        self._save([*waiting, *running])
        return waiting, running, plain, over

    def release(self, numbers: Collection[int]) -> tuple[list[Job], list[Job], list[Job]]:
        """Release held jobs.

        Returns:
            Those that were held back, those that were not, and those that have ended before.

        Raises:
            RunError: a job does not exist, or none is held back.
        """
        jobs, over = self._active_of(numbers)
        free = [job for job in jobs if not job.request.hold]
        released = [
            replace(job, request=replace(job.request, hold=""), reason="was released")
            for job in jobs
            if job.request.hold
        ]
        if not released:
            raise RunError(f"{jobs_words(free)}: not held, so there is nothing to release")
        self._save(released)
        return released, free, over

    def set_priority(
        self, numbers: Collection[int], priority: float
    ) -> tuple[list[Job], list[Job]]:
        """Change the priority of jobs; return them, and those that have ended already.

        Raises:
            RunError: a job does not exist, or all have ended already.
        """
        jobs, over = self._active_of(numbers)
        changed = [replace(job, request=replace(job.request, priority=priority)) for job in jobs]
        self._save(changed)
        return changed, over

    def _active_of(self, numbers: Collection[int]) -> tuple[list[Job], list[Job]]:
        """Return which jobs wait or run, and which have ended; not all of them may have."""
        wanted = dict.fromkeys(numbers)
        ended = self.store.jobs([number for number in wanted if number not in self.active])
        for number in wanted:
            if number not in self.active and number not in ended:
                raise RunError(f"there is no job {number}; see: hvd-elastic queue --all")
        active = [self.active[number] for number in wanted if number in self.active]
        if ended and not active:
            raise RunError(over_words(list(ended.values())))
        return active, list(ended.values())

    def _refuse_circle(self, number: int, waiting: Mapping[int, Job]) -> None:
        """Raise UsageError if a job would wait for jobs that wait for it themselves."""
        paths = [[each.job] for each in waiting[number].request.after]
        seen: set[int] = set()
        while paths:
            path = paths.pop()
            last = path[-1]
            if last == number:
                circle = ", which waits for job ".join(str(each) for each in [number, *path])
                raise UsageError(
                    f"--after makes a circle: job {circle}. Leave one of them out, or queue the "
                    "job again with another --after."
                )
            job = waiting.get(last)
            if job is not None and last not in seen:
                seen.add(last)
                paths += [[*path, each.job] for each in job.request.after]
            elif job is None and not self.store.jobs([last]):
                raise UsageError(f"--after names job {last}, and there is none")

    # -- what waits for other jobs -----------------------------------------------------------

    def ready(self) -> list[Job]:
        """Return the waiting jobs that wait for slots only; end those that wait in vain."""
        ready, hopeless, waits, freed = [], [], [], []
        queued = self.with_status(JobStatus.QUEUED)
        statuses = self.store.statuses({each.job for job in queued for each in job.request.after})
        for job in queued:
            met, why = _dependencies(job, statuses)
            if job.request.hold and met is not False:
                self._tell_held_long(job)
                met, why = None, _held_words(job.request.hold)
            if met and job.number in self._held_back:
                freed.append(replace(job, queued_at=time.time()))
            elif met:
                ready.append(job)
            elif met is None:
                self._held_back.add(job.number)
                eta = self._expected_end(job)
                if job.reason != why or eta_moved(job.eta, eta):
                    waits.append(replace(job, reason=why, eta=eta))
            else:
                hopeless.append(_ended(job, JobStatus.CANCELLED, why, time.time()))
        self._save([*waits, *freed, *hopeless])
        self._tell_ended(hopeless)
        self._held_back.difference_update(job.number for job in [*freed, *hopeless])
        return [*ready, *freed]

    def _expected_end(self, job: Job) -> float | None:
        """Return when the last of the jobs that a job waits for is expected to end [Unix s]."""
        awaited = [self.active.get(each.job) for each in job.request.after]
        ends = [
            other.eta if other.status is JobStatus.RUNNING else None for other in awaited if other
        ]
        known = [end for end in ends if end is not None]
        return max(known) if known and len(known) == len(ends) else None

    def tell_waiting(self, jobs: Iterable[Job], reason: str) -> None:
        """Tell why jobs wait that wait for nothing of their own."""
        self.update(replace(job, reason=reason, eta=None) for job in jobs if job.reason != reason)

    def rest(self, reason: str) -> None:
        """Tell why jobs wait while no daemon decides about them, until the next ``up``."""
        self.ready()
        waiting = self.with_status(JobStatus.QUEUED)
        self.update(
            replace(job, reason=reason, eta=None)
            for job in waiting
            if not any(each.job in self.active for each in job.request.after)
            and not job.request.hold
        )

    # -- changes by the daemon ---------------------------------------------------------------

    def started(self, job: Job, held: Mapping[str, int], ran_until: float | None = None) -> Job:
        """Record that the run of a job is about to be started or led on; return the job.

        Args:
            ran_until: when its last leader died [Unix s]; None: now, or it had none.
        """
        now = time.time()
        started = replace(
            job,
            status=JobStatus.RUNNING,
            started_at=now,
            ran_s=job.run_s(now if ran_until is None else ran_until),
            held=dict(held),
            attempts=job.attempts + 1,
        )
        self._save([started])
        self._emit("job_started", {"job": job.number, "run_id": job.run_id})
        return started

    def ended(self, job: Job, status: JobStatus, message: str, at: float | None = None) -> Job:
        """Record the end of a job; return the job.

        Args:
            at: when its run ended [Unix s]; None: now.
        """
        failures = job.failures + (status is JobStatus.FAILED)
        at = time.time() if at is None else at
        ended = replace(_ended(job, status, message, at), failures=failures)
        self._save([ended])
        self._tell_ended([ended])
        return ended

    def limit_time(
        self, job: Job, limit_s: float, whose: str = "", ended_at: float | None = None
    ) -> Job:
        """Begin to end a job that has run as long as it may, and tell once that it soon has.

        Args:
            limit_s: how long it may run [s].
            whose: by whose limit, in words; empty: its own.
            ended_at: when its run ended [Unix s]; None: it has not.

        Returns:
            The job, which has :attr:`StopReason.TIME_LIMIT` then.
        """
        if math.isinf(limit_s) or job.stop is not None:
            return job
        left_s = limit_s - job.run_s(time.time() if ended_at is None else ended_at)
        if left_s > limit_s * _LAST_PART:
            return job
        if ended_at is None and job.number not in self._near_limit:
            self._near_limit.add(job.number)
            self._tell(job, "time_limit_near", {"left_s": max(0.0, left_s)})
        if left_s > 0:
            return job
        goes_on = "starts it from its beginning"
        if job.request.kind is not JobKind.PLAIN:
            goes_on = "resumes it from its checkpoint"
        job = replace(
            job,
            stop=StopReason.TIME_LIMIT,
            reason=f"time limit of {duration_words(limit_s)}{whose and f' of {whose}'}: "
            f"hvd-elastic requeue {job.number} {goes_on}",
        )
        self._save([job])
        return job

    def put_back(
        self, job: Job, reason: str, *, failed: bool = False, at: float | None = None
    ) -> Job:
        """Record that a job whose run has ended waits again; return the job.

        Args:
            at: when its run ended [Unix s]; None: now.
        """
        now = time.time()
        at = now if at is None else at
        waiting = replace(
            job,
            status=JobStatus.QUEUED,
            reason=reason,
            queued_at=now,
            ran_s=job.run_s(at),
            eta=None,
            held={},
            stop=None,
            failures=job.failures + failed,
        )
        self._save([waiting])
        self._tell(waiting, "job_requeued", {"reason": reason, "ended": at})
        return waiting

    def update(self, jobs: Iterable[Job]) -> None:
        """Store slots, reasons and expectations of jobs; nothing else may have changed."""
        self._save(list(jobs), news=False)

    def _save(self, jobs: Sequence[Job], *, news: bool = True) -> None:
        if not jobs:
            return
        for job in jobs:
            if job.request.notify and not job.status.active:
                self._last_environments[job.number] = self.store.environment(job)
        self.store.save(jobs)
        for job in jobs:
            if job.status.active:
                self.active[job.number] = job
            else:
                self.active.pop(job.number, None)
        self.changed |= news

    def _tell_ended(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            self._near_limit.discard(job.number)
            told = {"status": job.status.value, "message": job.message, "ended": job.ended_at}
            self._tell(job, "job_finished", told)

    def _tell_held_long(self, job: Job) -> None:
        since = job.request.held_at or job.submitted_at
        limits = [each for each in (job.request.notify_held_s, self._notify_held_s) if each]
        held_s = time.time() - since
        if limits and held_s >= min(limits) and (job.number, since) not in self._held_long:
            self._held_long.add((job.number, since))
            self._tell(job, "job_held_long", {"held_s": held_s, "by": job.request.hold})

    def tell_lost(self, host: str, cause: str) -> None:
        """Tell the users of the jobs on a host that it is lost."""
        for job in self.with_status(JobStatus.RUNNING):
            if host in job.held:
                self._to_user(job, "host_lost", {**_named(job), "host": host, "cause": cause})

    def _tell(self, job: Job, kind: str, fields: Mapping[str, Any]) -> None:
        """Record an event of a job, and tell it to its user."""
        fields = {**_named(job), **fields}
        self._emit(kind, fields)
        self._to_user(job, kind, fields)

    def _to_user(self, job: Job, kind: str, fields: Mapping[str, Any]) -> None:
        if job.request.notify and self._tell_user is not None:
            known = self._last_environments.pop(job.number, None)
            self._tell_user(job, kind, fields, known or self.store.environment(job))


def _dependencies(job: Job, statuses: Mapping[int, JobStatus]) -> tuple[bool | None, str]:
    """Return whether the jobs that a job waits for have ended as they should, and why not yet.

    The first is None while it has to wait, and False if it would wait for ever.
    """
    waits = ""
    for each in job.request.after:
        status = statuses.get(each.job)
        met = False if status is None else each.met(status)
        if met is False:
            ended = "is gone" if status is None else _ended_words(status)
            return False, f"it waited for job {each.job} {OUTCOMES[each.outcome]}, which {ended}"
        if met is None and status is not None:
            waits = f"waits for job {each.job} {OUTCOMES[each.outcome]}; it is {status.value}"
    return (None, waits) if waits else (True, "")


def _named(job: Job) -> dict[str, Any]:
    return {"job": job.number, "name": job.name, "run_id": job.run_id}


def _held_words(by: str) -> str:
    return f"held by {by}: hvd-elastic release ends the hold"


def _ended(job: Job, status: JobStatus, message: str, now: float) -> Job:
    return replace(
        job, status=status, message=message, reason="", ended_at=now, eta=None, stop=None, held={}
    )


def eta_moved(one: float | None, other: float | None) -> bool:
    """Return whether an expected time has changed enough to be stored."""
    if one is None or other is None:
        return one is not other
    return abs(one - other) > _ETA_MOVED_S


def _ended_words(status: JobStatus) -> str:
    return "was cancelled" if status is JobStatus.CANCELLED else f"has {status.value}"


def over_words(jobs: Sequence[Job]) -> str:
    """Return how jobs that nothing can be done about have ended.

    >>> job = Job(3, JobRequest("a", {}), "a-3-01ab", JobStatus.SUCCEEDED)
    >>> over_words([job]), over_words([job, job])
    ('job 3 (a-3-01ab) has succeeded already', 'jobs 3, 3 have ended already')
    """
    if len(jobs) != 1:
        return f"{jobs_words(jobs)} have ended already" if jobs else ""
    return f"{jobs_words(jobs)} ({jobs[0].run_id}) {_ended_words(jobs[0].status)} already"


def ending_words(jobs: Iterable[Job]) -> str:
    """Return how jobs that run are ended, in words: a plain command writes no checkpoint."""
    training: list[Job] = []
    plain: list[Job] = []
    for job in jobs:
        (plain if job.request.kind is JobKind.PLAIN else training).append(job)
    parts = [f"ending {jobs_words(training)} after a checkpoint"] if training else []
    return "; ".join([*parts, *([f"ending {jobs_words(plain)}"] if plain else [])])


def jobs_words(jobs: Sequence[Job]) -> str:
    """Return the jobs in words.

    >>> jobs_words([Job(3, JobRequest("a", {}), "a-3"), Job(4, JobRequest("a", {}), "a-4")])
    'jobs 3, 4'
    """
    if len(jobs) > 8:
        return f"{count(len(jobs), 'job')} ({jobs[0].number} to {jobs[-1].number})"
    noun = "job" if len(jobs) == 1 else "jobs"
    return f"{noun} {', '.join(str(job.number) for job in jobs)}"

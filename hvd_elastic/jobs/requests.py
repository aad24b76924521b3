"""Answers what users ask of the daemon of a cluster: changes of the queue, its hosts, its end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from typing import Any

from hvd_elastic.errors import RunError, UsageError
from hvd_elastic.formatting import count, date_words, duration_words, hosts_named
from hvd_elastic.hosts.hostfile import name_as_listed
from hvd_elastic.jobs.gpus import HostGpus
from hvd_elastic.jobs.health import HardwareHealth, HostHealth
from hvd_elastic.jobs.host_wish import HostWish
from hvd_elastic.jobs.hosts import ClusterHosts
from hvd_elastic.jobs.job import (
    Answer,
    Cancel,
    Down,
    DrainHost,
    Hold,
    Hosts,
    JobKind,
    JobStatus,
    Look,
    Pause,
    Release,
    Request,
    Requeue,
    SetPriority,
    ShowLimits,
    Submit,
    UndrainHost,
)
from hvd_elastic.jobs.notify import ClusterRecord
from hvd_elastic.jobs.operator_state import Drained, OperatorState
from hvd_elastic.jobs.place import ClusterFolder
from hvd_elastic.jobs.queue import JobQueue, ending_words, jobs_words, over_words
from hvd_elastic.jobs.rights import numbers_of, of_user, read_for, user_name
from hvd_elastic.jobs.store import JobStore

_MOST_JOBS_OF_OTHERS = 20_000
"""Jobs of another user that wait or run: the daemon goes through all of them at each look."""
_MOST_CHANGES, _CHANGES_S = 40_000.0, 10.0
"""Jobs that another user may change at once, and per second in the long run: each change is kept
in the database and the events."""


class QueueRequests:
    """Answers requests, as far as the user who asks may do what is asked for.

    Args:
        operators: ids of users who may change the jobs of others.
        queue: the queue, and its store.
        hosts: the hosts, which of them are lost, the faults of their hardware, what operators have
            set, and their GPUs.
        record: records events.
        host_rows: returns what there is to say of each host.
        limit_rows: returns what there is to say of limits and shares.
        has_keeper: returns whether the keeper of a user is there.

    Attributes:
        down: the request that ends the daemon; None: it goes on.
    """

    def __init__(
        self,
        place: ClusterFolder,
        operators: Collection[int],
        queue: tuple[JobQueue, JobStore],
        hosts: tuple[ClusterHosts, HostHealth, HardwareHealth, OperatorState, HostGpus],
        record: ClusterRecord,
        *,
        host_rows: Callable[[], list[dict[str, Any]]],
        limit_rows: Callable[[], dict[str, Any]],
        has_keeper: Callable[[int | None], bool],
    ) -> None:
        self._name = place.name
        self._operators = operators
        self._queue, self._store = queue
        self._hosts, self._health, self._hardware, self._operator_state, self._gpus = hosts
        self._record = record
        self._host_rows = host_rows
        self._limit_rows = limit_rows
        self._has_keeper = has_keeper
        self._changes_left: dict[int, tuple[float, float]] = {}
        """Jobs that other users may still change now, and since when [s, monotonic]."""
        self.down: Down | None = None

    def answer(self, request: Request, user: int) -> Answer:
        """Do what a user asks for; return the answer.

        Raises:
            HvdElasticError: it cannot be done, or the user may not.
        """
        if user == os.getuid():
            return self._act(request)
        named = self._store.jobs(numbers_of(request))
        request = of_user(request, user, self._operators, named)
        if isinstance(request, Submit):
            self._refuse_too_many(user, len(request.jobs))
        if not isinstance(request, (Look, Hosts)):
            self._refuse_too_often(user, len(getattr(request, "jobs", ())))
        if isinstance(request, Look):
            answer = Answer("", data=read_for(self._store, request, user))
        else:
            answer = self._act(request)
        answer.needs_keeper = not self._has_keeper(user) and any(
            job.request.user == user for job in self._queue.active.values()
        )
        return answer

    def _act(self, request: Request) -> Answer:
        queue = self._queue
        match request:
            case Submit(jobs, environment):
                unknown = self._unknown_gpus(request)
                if unknown and self._gpus.ask({*unknown} - self._health.lost.keys()):
                    return Answer("", ask_again=True)
                self._refuse_impossible(request)
                added = queue.add_jobs(jobs, environment, self._allowed)
                words = f"submitted {jobs_words(added)}"
                if unknown:
                    words += f"; {hosts_named(unknown)} did not say which GPUs they have"
                return Answer(
                    words,
                    jobs=[j.number for j in added],
                    data=[job.run_id for job in added],
                )
            case Cancel(jobs, by, cause):
                ended, stopping, over = queue.cancel(jobs, by, cause)
                parts = [f"cancelled {jobs_words(ended)}"] if ended else []
                parts += [ending_words(stopping)] if stopping else []
                users = {job.request.user for job in stopping}
                parts += [
                    f"the keeper of user {user_name(each)} is away, so theirs end when it is back"
                    for each in users
                    if not self._has_keeper(each)
                ]
                parts += [over_words(over)] if over else []
                return Answer("; ".join(parts), jobs=[j.number for j in [*ended, *stopping]])
            case Requeue(jobs, environment, after):
                changed = queue.requeue(jobs, environment, after)
                return Answer(
                    f"queued {jobs_words(changed)} again", jobs=[j.number for j in changed]
                )
            case Hold(jobs, by):
                waiting, stopping, plain, over = queue.hold(jobs, by)
                parts = [f"held {jobs_words(waiting)}"] if waiting else []
                parts += [ending_words(stopping), "held then"] if stopping else []
                parts += [f"{jobs_words(plain)} not held: a plain command runs"] if plain else []
                parts += [over_words(over)] if over else []
                return Answer("; ".join(parts), jobs=[j.number for j in [*waiting, *stopping]])
            case Release(jobs):
                released, free, over = queue.release(jobs)
                parts = [f"released {jobs_words(released)}"]
                parts += [f"{jobs_words(free)} not held"] if free else []
                parts += [over_words(over)] if over else []
                return Answer("; ".join(parts), jobs=[job.number for job in released])
            case SetPriority(jobs, priority):
                changed, over = queue.set_priority(jobs, priority)
                words = f"{jobs_words(changed)}: priority {priority:g}"
                words += f"; {over_words(over)}" if over else ""
                return Answer(words, jobs=[job.number for job in changed])
            case DrainHost(host, reason, by, at):
                return self._drain(host, Drained(reason, by, at))
            case UndrainHost(host, by):
                return self._undrain(host, by)
            case Pause(by):
                return self._pause(by)
            case Down():
                return self._end(request)
            case Hosts():
                return Answer(self._operator_state.paused_by, data=self._host_rows())
            case ShowLimits():
                return Answer("", data=self._limit_rows())
            case Look():
                raise UsageError("the queue of this user's own daemon is read from its database")

    def _drain(self, host: str, drained: Drained) -> Answer:
        listed, now = self._hosts.listed, time.time()
        host = name_as_listed(host, listed)
        if host not in listed:
            raise RunError(f"cluster {self._name} has no host {host!r}; it has {', '.join(listed)}")
        before = self._operator_state.drained.get(host)
        self._operator_state.drain(host, drained, now)
        self._record.drained(host, drained)
        when = ""
        if drained.at > now:
            when = f" from {date_words(drained.at)} on"
        elif self._operator_state.closed >= listed.keys() - {host}:
            when = "; it is the last host, so jobs wait until one is given back"
        words = f"host {host} is drained{when}: {drained.reason}"
        if before is not None and before != self._operator_state.drained[host]:
            words += f"; this replaces: {before.words(now)}"
        return Answer(words, data=host)

    def _undrain(self, host: str, by: str) -> Answer:
        host, now = name_as_listed(host, self._operator_state.drained), time.time()
        told = self._hardware.faults.get(host)
        planned = self._operator_state.undrain(host, () if told is None else told.faults, now)
        self._record.emit("host_undrained", {"host": host, "by": by})
        away = "" if host in self._hosts.listed else "; it is not in the hostfile"
        if (cause := self._health.lost.get(host)) is not None:
            away = f"; it is lost ({cause}), and used when it answers"
        if planned is not None:
            away += f"; it {planned.words(now)}"
        return Answer(f"host {host} is given back to the jobs{away}")

    def _pause(self, by: str) -> Answer:
        self._operator_state.pause(by)
        self._queue.changed = True
        if by:
            return Answer(f"cluster {self._name} is paused: running jobs continue, none is started")
        return Answer(f"cluster {self._name} starts jobs again")

    def _end(self, request: Down) -> Answer:
        self.down = request
        self._queue.changed = True
        running = self._queue.with_status(JobStatus.RUNNING)
        told = ""
        if running and request.leave_jobs:
            told = f"; {jobs_words(running)} {'goes' if len(running) == 1 else 'go'} on"
        elif running:
            told = f"; {ending_words(running)}; queued again for the next up"
            if any(job.request.kind is JobKind.PLAIN for job in running):
                told += ", plain commands from their beginning"
        return Answer(f"the daemon ends{told}", jobs=[job.number for job in running])

    def _refuse_too_many(self, user: int, more: int) -> None:
        own = sum(job.request.user == user for job in self._queue.active.values())
        if own + more > _MOST_JOBS_OF_OTHERS:
            raise RunError(
                f"user {user_name(user)} has {count(own, 'job')} that wait or run, and may have "
                f"{_MOST_JOBS_OF_OTHERS:,} on a cluster of several users; submit the others later"
            )

    def _refuse_too_often(self, user: int, jobs: int) -> None:
        """Raise RunError if a user changes jobs so often that the records would fill the disk."""
        now = time.monotonic()
        left, at = self._changes_left.get(user, (_MOST_CHANGES, now))
        left = min(_MOST_CHANGES, left + (now - at) * _CHANGES_S) - max(1, jobs)
        if left < 0:
            raise RunError(
                f"user {user_name(user)} has changed {_MOST_CHANGES:,.0f} jobs in a short time, "
                f"and may go on with {_CHANGES_S:g} a second; try again in "
                f"{duration_words(-left / _CHANGES_S)}"
            )
        self._changes_left[user] = left, now

    def _allowed(self, wish: HostWish) -> frozenset[str] | None:
        return wish.allowed(self._hosts.listed, self._gpus.known)

    def _unknown_gpus(self, request: Submit) -> list[str]:
        """Return the hosts that have not said which GPUs they have, if a job asks for some."""
        hosts = self._hosts.listed
        if not any(wish.asks_gpus(hosts) for wish in {job.wish for job in request.jobs}):
            return []
        return [host for host in hosts if host not in self._gpus.known]

    def _refuse_impossible(self, request: Submit) -> None:
        hosts = self._hosts.listed
        checked = set()
        for job in request.jobs:
            if (asked := (job.wish, job.min_np)) not in checked:
                whose = f"job {job.name}", f"cluster {self._name}"
                job.wish.refuse_impossible(hosts, self._gpus.known, job.min_np, whose)
                checked.add(asked)
            for name in job.spec.get("input_hosts", ()):
                if name_as_listed(name, hosts) in hosts:
                    raise RunError(
                        f"job {job.name} cannot have {name} read its data, since jobs train there. "
                        f"Write slots=0 in its line of the hostfile of cluster {self._name}, "
                        "or leave it out of --input-hosts."
                    )

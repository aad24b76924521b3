"""Answers what users ask of the daemon of a cluster: changes of the queue, its hosts, its end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from hvd_elastic.errors import RunError, UsageError
from hvd_elastic.formatting import count, date_words, duration_words, hosts_named
from hvd_elastic.hosts.hostfile import name_as_listed
from hvd_elastic.jobs import job as ask
from hvd_elastic.jobs.gpus import HostGpus
from hvd_elastic.jobs.health import HardwareHealth, HostHealth
from hvd_elastic.jobs.host_wish import HostWish
from hvd_elastic.jobs.hosts import ClusterHosts, Expansion
from hvd_elastic.jobs.job import Answer, Job, JobKind, JobRequest, JobStatus, Request
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


def _of(words: str, jobs: Sequence[Job]) -> str:
    """Return words about jobs, which are named in place of {}; empty: there are none."""
    return words.format(jobs_words(jobs)) if jobs else ""


def _changed(jobs: Sequence[Job], *parts: str) -> Answer:
    """Return the answer to a change of jobs in words, of which empty parts are left out."""
    return Answer("; ".join(filter(None, parts)), jobs=[job.number for job in jobs])


class QueueRequests:
    """Answers requests, as far as the user who asks may do what is asked for.

    Args:
        operators: ids of users who may change the jobs of others.
        queue: the queue, and its store.
        hosts: the hosts, which of them are lost, the faults of their hardware, what operators have
            set, and their GPUs.
        record: records events.
        host_rows: returns what there is to say of each host.
        show_limits: returns the answer about limits and shares.
        has_keeper: returns whether the keeper of a user is there.

    Attributes:
        down: the request that ends the daemon; None: it continues.
    """

    def __init__(
        self,
        place: ClusterFolder,
        operators: Collection[int],
        queue: tuple[JobQueue, JobStore],
        hosts: tuple[ClusterHosts, HostHealth, HardwareHealth, OperatorState, HostGpus],
        record: ClusterRecord,
        expansion: Expansion = Expansion(),  # noqa: B008  (it is frozen)
        *,
        host_rows: Callable[[], list[dict[str, Any]]],
        show_limits: Callable[[], Answer],
        has_keeper: Callable[[int | None], bool],
    ) -> None:
        self._name = place.name
        self._operators = operators
        self._queue, self._store = queue
        self._hosts, self._health, self._hardware, self._operator_state, self._gpus = hosts
        self._record, self._expansion = record, expansion
        self._host_rows = host_rows
        self._show_limits = show_limits
        self._has_keeper = has_keeper
        self._changes_left: dict[int, tuple[float, float]] = {}
        """Jobs that other users may still change now, and since when [s, monotonic]."""
        self.down: ask.Down | None = None

    def answer(self, request: Request, user: int) -> Answer:
        """Do what a user asks for; return the answer.

        Raises:
            HvdElasticError: it cannot be done, or the user may not.
        """
        if user == os.getuid():
            return self._act(request)
        named = self._store.jobs(numbers_of(request))
        request = of_user(request, user, self._operators, named)
        changes = len(named)
        if isinstance(request, ask.Submit):
            changes = len(request.jobs)
            self._refuse_too_many(user, changes)
        if not isinstance(request, (ask.Look, ask.Hosts)):
            self._refuse_too_often(user, changes)
        if isinstance(request, ask.Look):
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
            case ask.Submit(jobs, environment):
                unknown = self._unknown_gpus(request)
                if unknown and self._gpus.ask({*unknown} - self._health.lost.keys()):
                    return Answer("", ask_again=True)
                self._refuse_impossible(request)
                requests = [self._with_preemption(job) for job in jobs]
                added = queue.add_jobs(requests, environment, self._allowed)
                silent = f"{hosts_named(unknown)} did not say which GPUs they have"
                answer = _changed(added, _of("submitted {}", added), silent if unknown else "")
                answer.data = [job.run_id for job in added]
                return answer
            case ask.Cancel(jobs, by, cause):
                ended, stopping, over = queue.cancel(jobs, by, cause)
                away = [
                    f"the keeper of user {user_name(each)} is away, so theirs end when it is back"
                    for each in {job.request.user for job in stopping}
                    if not self._has_keeper(each)
                ]
                parts = (_of("cancelled {}", ended), ending_words(stopping), *away)
                return _changed([*ended, *stopping], *parts, over_words(over))
            case ask.Requeue(jobs, environment, after):
                changed = queue.requeue(jobs, environment, after)
                return _changed(changed, _of("queued {} again", changed))
            case ask.Hold(jobs, by):
                waiting, stopping, plain, over = queue.hold(jobs, by)
                ending = f"{ending_words(stopping)}; held then" if stopping else ""
                kept = _of("{} not held: a plain command runs", plain)
                parts = (_of("held {}", waiting), ending, kept, over_words(over))
                return _changed([*waiting, *stopping], *parts)
            case ask.Release(jobs):
                released, free, over = queue.release(jobs)
                parts = (_of("released {}", released), _of("{} not held", free), over_words(over))
                return _changed(released, *parts)
            case ask.SetPriority(jobs, priority):
                changed, over = queue.set_priority(jobs, priority)
                words = _of(f"{{}}: priority {priority:g}", changed)
                return _changed(changed, words, over_words(over))
            case ask.DrainHost(host, reason, by, at):
                return self._drain(host, Drained(reason, by, at))
            case ask.UndrainHost(host, by):
                return self._undrain(host, by)
            case ask.Pause(by):
                return self._pause(by)
            case ask.Down():
                return self._end(request)
            case ask.Hosts():
                return Answer(self._operator_state.paused_by, data=self._host_rows())
            case ask.ShowLimits():
                return self._show_limits()
            case ask.Look():
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

    def _end(self, request: ask.Down) -> Answer:
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
        left = min(_MOST_CHANGES, left + (now - at) * _CHANGES_S)
        left -= min(max(1, jobs), _MOST_CHANGES)  # else more than that could never be changed
        if left < 0:
            raise RunError(
                f"user {user_name(user)} has changed {_MOST_CHANGES:,.0f} jobs in a short time, "
                f"and may go on with {_CHANGES_S:g} a second; try again in "
                f"{duration_words(-left / _CHANGES_S)}"
            )
        self._changes_left[user] = left, now

    def _allowed(self, wish: HostWish) -> frozenset[str] | None:
        return wish.allowed(self._hosts.listed, self._gpus.known)

    def _unknown_gpus(self, request: ask.Submit) -> list[str]:
        """Return the hosts that have not said which GPUs they have, if a job asks for some."""
        hosts = self._hosts.listed
        if not any(wish.asks_gpus(hosts) for wish in {job.wish for job in request.jobs}):
            return []
        return [host for host in hosts if host not in self._gpus.known]

    def _with_preemption(self, job: JobRequest) -> JobRequest:
        """Return a job with the notices of the hosts that the cluster asks for."""
        given = job.spec.get("preemption") or job.spec.get("preemption_command")
        if self._expansion.preemption is None or given or job.kind is JobKind.PLAIN:
            return job
        return replace(job, spec={**job.spec, "preemption": self._expansion.preemption})

    def _refuse_impossible(self, request: ask.Submit) -> None:
        hosts = self._hosts.listed
        coming = {host.name: host for host in self._expansion.hosts[len(hosts) :]}
        checked = set()
        for job in request.jobs:
            if (asked := (job.wish, job.min_np)) not in checked:
                whose = f"job {job.name}", f"cluster {self._name}"
                job.wish.refuse_impossible({**hosts, **coming}, self._gpus.known, job.min_np, whose)
                checked.add(asked)
            for name in job.spec.get("input_hosts", ()):
                if name_as_listed(name, hosts) in hosts:
                    raise RunError(
                        f"job {job.name} cannot have {name} read its data, since jobs train there. "
                        f"Write slots=0 in its line of the hostfile of cluster {self._name}, "
                        "or leave it out of --input-hosts."
                    )

"""Run many jobs on a simulated cluster in virtual time, under a policy."""

from __future__ import annotations

import statistics
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeVar

import numpy as np

from hvd_elastic.policy.schedule.jobs import Assignment, Job
from hvd_elastic.policy.snapshot import HostOffer


class JobInTime(ABC):
    """A job in virtual time, and what a policy may read of it.

    Args:
        submitted_s: when it is submitted [s].

    Attributes:
        left: slots that it does not hold any more, as (host, slots, time until which its processes
            live there [s]).
        noise: relative error of the goodput that a policy reads.
        hosts: hosts that it may have; None: all.
        finished_s: when it finished [s]; None: it has not.
        rescales: number of changes of its slots after the first.
        user: whose it is, where slots are shared by weight.
    """

    def __init__(self, name: str, submitted_s: float) -> None:
        self.name, self.submitted_s = name, submitted_s
        self.held: dict[str, int] = {}
        self.left: list[tuple[str, int, float]] = []
        self._takes_time = False
        self.noise = 0.0
        self._rng = np.random.default_rng(zlib.crc32(name.encode()))
        self.finished_s: float | None = None
        self.attained_slot_s = 0.0
        self.rescales = -1
        self.priority, self.min_slots = 1.0, 1
        self.user = ""
        self.hosts: Collection[str] | None = None
        self._pause_s = 0.0

    @property
    @abstractmethod
    def max_slots(self) -> int:
        """Most slots of the job for now: twice as many as were measured (Pollux, section 4.1)."""

    @property
    def most_slots(self) -> int:
        """Most slots that it takes once it has been measured."""
        return self.max_slots

    @property
    @abstractmethod
    def remaining_examples(self) -> float:
        """Useful examples that are left, of the number that the job has declared."""

    @abstractmethod
    def goodput(self) -> np.ndarray | None:
        """Return the predicted useful examples per second by number of slots; None: unknown."""

    def measured_goodput(self) -> np.ndarray | None:
        """Return :meth:`goodput` with the error of a measurement."""
        found = self.goodput()
        if found is None or not self.noise:
            return found
        return found * np.exp(self.noise * self._rng.standard_normal(found.shape))

    @property
    def occupied(self) -> dict[str, int]:
        """Slots of each host in which its processes live; empty if they leave slots at once."""
        if not self._takes_time:
            return {}
        found = dict(self.held)
        for host, slots, _ in self.left:
            found[host] = found.get(host, 0) + slots
        return found

    def leave(self, hosts: Mapping[str, int], now: float, leave_s: float) -> None:
        """Note the slots that it gives up for others; its processes take some time [s] to go."""
        self.left = [each for each in self.left if each[2] > now]
        self._takes_time = leave_s > 0
        if self._takes_time:
            self.left += [
                (host, slots - hosts.get(host, 0), now + leave_s)
                for host, slots in self.held.items()
                if slots > hosts.get(host, 0)
            ]

    def hold(self, hosts: Mapping[str, int], pause_s: float) -> None:
        """Change its slots; it trains on after a pause [s]."""
        if dict(hosts) == self.held:
            return
        self.held = dict(hosts)
        if self.held:
            self._rescaled()
            self._pause_s = pause_s
            self.rescales += 1

    def train(self, now: float, seconds: float) -> None:
        """Train from ``now`` [s] for so many seconds."""
        if not self.held or self.finished_s is not None:
            return
        pause = min(self._pause_s, seconds)
        self._pause_s -= pause
        self.attained_slot_s += pause * sum(self.held.values())
        self._train(now + pause, seconds - pause)

    @abstractmethod
    def _train(self, now: float, seconds: float) -> None:
        """Train without a pause."""

    def _rescaled(self) -> None:  # noqa: B027  (not every job adapts)
        """Adapt to other slots."""


def as_jobs(jobs: Sequence[JobInTime], rescale_s: float, *, tells_length: bool) -> list[Job]:
    """Return what the scheduler sees of simulated jobs."""
    return [
        Job(
            job.name,
            job.submitted_s,
            job.measured_goodput(),
            job.remaining_examples if tells_length else None,
            job.held,
            job.attained_slot_s,
            rescale_s,
            job.min_slots,
            job.max_slots,
            job.priority,
            rescales=max(job.rescales, 0),
            occupied=job.occupied,
            noise=job.noise,
            is_held_back=job.max_slots < job.most_slots,
            user=job.user,
            hosts=job.hosts,
        )
        for job in jobs
    ]


_LONGEST_S = 30 * 86400.0
"""A workload that takes longer than a month has a job that never gets slots."""


@dataclass(frozen=True)
class Change:
    """A change of the slots of a job.

    Attributes:
        at_s: when [s].
        hosts: its slots on each host afterwards.
        reason: the policy's reason.
    """

    at_s: float
    job: str
    hosts: Mapping[str, int]
    reason: str

    @property
    def slots(self) -> int:
        """Number of its slots afterwards."""
        return sum(self.hosts.values())


@dataclass
class Outcome:
    """Result of a workload.

    Attributes:
        completion_s: time from submission to the end of each job [s].
        submitted_s: when each job was submitted [s].
        changes: all changes of slots, in order.
        decision_s: processor time of each decision [s].
        rescales: number of changes of running jobs.
        slot_s: slots times seconds in use.
        waited_s: time for which jobs waited for processes of others to leave their slots [s].
        span_s: time from the first submission to the last end [s].
    """

    completion_s: dict[str, float] = field(default_factory=dict)
    submitted_s: dict[str, float] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    decision_s: list[float] = field(default_factory=list)
    rescales: int = 0
    slot_s: float = 0.0
    waited_s: float = 0.0
    span_s: float = 0.0

    @property
    def mean_completion_s(self) -> float:
        return float(np.mean(list(self.completion_s.values())))

    def percentile_completion_s(self, percent: float) -> float:
        """Return a percentile of the completion times [s]."""
        return float(np.percentile(list(self.completion_s.values()), percent))

    def figures(self) -> dict[str, Any]:
        """Return what sums it up, for JSON."""
        return {
            "mean_completion_s": self.mean_completion_s,
            "p99_completion_s": self.percentile_completion_s(99),
            "rescales": self.rescales,
            "slot_s": self.slot_s,
            "span_s": self.span_s,
            "mean_decision_s": statistics.fmean(self.decision_s),
            "max_decision_s": max(self.decision_s),
        }


J = TypeVar("J", bound=JobInTime)
"""A kind of job."""


def run_jobs(
    jobs: Sequence[J],
    decide: Callable[[Sequence[J], float], Mapping[str, Assignment]],
    interval_s: float,
    rescale_s: float,
    sizes: Mapping[str, int],
    leave_s: float = 0.0,
) -> Outcome:
    """Return what happens to jobs.

    Args:
        decide: slots of the jobs that are submitted and not finished, at a time [s].
        interval_s: time between decisions [s].
        rescale_s: pause of a job when its slots change [s].
        sizes: slots of each host.
        leave_s: time until the processes of a job have left the slots that it gives up [s].

    Raises:
        ValueError: some job never gets slots.
    """
    outcome = Outcome()
    pending = sorted(jobs, key=lambda job: job.submitted_s)
    outcome.submitted_s = {job.name: job.submitted_s for job in pending}
    now = pending[0].submitted_s // interval_s * interval_s
    active: list[J] = []
    while pending or active:
        for job in active:
            job.train(now, interval_s)
        now += interval_s
        for job in active:
            if job.finished_s is not None:
                outcome.completion_s[job.name] = job.finished_s - job.submitted_s
        active = [job for job in active if job.finished_s is None]
        while pending and pending[0].submitted_s <= now:
            active.append(pending.pop(0))
        if not active:
            continue
        began = time.process_time()
        decided = decide(active, now)
        outcome.decision_s.append(time.process_time() - began)
        for job in active:
            job.leave(decided[job.name].hosts, now, leave_s)
        for job in active:
            assignment = decided[job.name]
            if dict(assignment.hosts) != job.held:
                held = dict(assignment.hosts)
                outcome.changes.append(Change(now, job.name, held, assignment.reason))
            wait_s = _wait_s(job, assignment.hosts, active, decided, sizes, now)
            outcome.waited_s += wait_s
            job.hold(assignment.hosts, rescale_s + wait_s)
        if now - outcome.submitted_s[active[0].name] > _LONGEST_S:
            names = ", ".join(job.name for job in active if not job.held)
            raise ValueError(f"after a month of virtual time these jobs still wait: {names}")
    outcome.rescales = sum(max(0, job.rescales) for job in jobs)
    outcome.slot_s = sum(job.attained_slot_s for job in jobs)
    outcome.span_s = now - min(outcome.submitted_s.values())
    return outcome


def _wait_s(
    job: JobInTime,
    hosts: Mapping[str, int],
    active: Sequence[JobInTime],
    decided: Mapping[str, Assignment],
    sizes: Mapping[str, int],
    now: float,
) -> float:
    """Return how long a job has to wait until others have left its further slots [s]."""
    longest = 0.0
    for host, slots in hosts.items():
        if slots <= job.held.get(host, 0):
            continue
        free = sizes[host] - sum(each.hosts.get(host, 0) for each in decided.values())
        others = [left for other in active if other is not job for left in other.left]
        for _, leaving, until in sorted(
            (each for each in others if each[0] == host), key=lambda each: -each[2]
        ):
            free -= leaving
            if free < 0:
                longest = max(longest, until - now)
    return longest


def queue_events(outcome: Outcome, hosts: Sequence[HostOffer]) -> Iterator[dict[str, Any]]:
    """Yield what happened as the events that a real queue writes, in their order."""
    yield {"t": 0.0, "kind": "cluster_hosts", "hosts": {host.name: host.slots for host in hosts}}
    ends = {job: outcome.submitted_s[job] + took_s for job, took_s in outcome.completion_s.items()}
    moments: list[tuple[float, int, dict[str, Any]]] = []
    for job, at_s in outcome.submitted_s.items():
        moments.append((at_s, 0, {"kind": "job_submitted", "job": job, "name": job}))
    for job, at_s in ends.items():
        ended = {"kind": "job_finished", "job": job, "status": "succeeded", "message": ""}
        moments.append((at_s, 1, ended))
    held: dict[str, Mapping[str, int]] = {}
    for at_s, changes in groupby(outcome.changes, key=lambda change: change.at_s):
        reasons = {}
        held = {job: hosts_of for job, hosts_of in held.items() if ends[job] > at_s}
        for change in changes:
            if not held.get(change.job) and change.hosts:
                moments.append((at_s, 2, {"kind": "job_started", "job": change.job}))
            held[change.job], reasons[change.job] = change.hosts, change.reason
        decided = {"kind": "jobs_decided", "allocations": dict(held), "reasons": reasons}
        moments.append((at_s, 3, decided))
        moments += [
            (at_s, 4, {"kind": "job_requeued", "job": job, "reason": reasons[job]})
            for job in reasons
            if not held[job]
        ]
    for at_s, _, record in sorted(moments, key=lambda moment: moment[:2]):
        yield {"t": at_s, **record}

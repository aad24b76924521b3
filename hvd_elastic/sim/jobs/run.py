"""Run many jobs on a simulated cluster in virtual time, under a policy."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hvd_elastic.policy.schedule.jobs import HostSlots
from hvd_elastic.sim.jobs.job import SimulatedJob
from hvd_elastic.sim.jobs.policies import PolicyEntry
from hvd_elastic.sim.jobs.profiles import SubmittedJob

_LONGEST_S = 30 * 86400.0
"""A workload that takes longer than a month has a job that never gets slots."""


@dataclass(frozen=True)
class Change:
    """A change of the slots of a job.

    Attributes:
        at_s: when [s].
        job: its name.
        slots: its slots afterwards.
        hosts: number of hosts they are on.
        reason: the policy's reason.
    """

    at_s: float
    job: str
    slots: int
    hosts: int
    reason: str


@dataclass
class Outcome:
    """What happened to a workload.

    Attributes:
        completion_s: time from submission to the end of each job [s].
        changes: all changes of slots, in order.
        decision_s: processor time of each decision [s].
        rescales: number of changes of running jobs.
        slot_s: slots times seconds in use.
        span_s: time from the first submission to the last end [s].
    """

    completion_s: dict[str, float] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    decision_s: list[float] = field(default_factory=list)
    rescales: int = 0
    slot_s: float = 0.0
    span_s: float = 0.0

    @property
    def mean_completion_s(self) -> float:
        """Mean completion time [s]."""
        return float(np.mean(list(self.completion_s.values())))

    def percentile_completion_s(self, percent: float) -> float:
        """Return a percentile of the completion times [s]."""
        return float(np.percentile(list(self.completion_s.values()), percent))


def simulate_jobs(
    workload: Sequence[SubmittedJob],
    hosts: Sequence[HostSlots],
    policy: PolicyEntry,
    interval_s: float = 60.0,
    rescale_s: float = 30.0,
) -> Outcome:
    """Return what happens to a workload under a policy.

    Args:
        workload: its jobs.
        hosts: hosts of the cluster, all with as many slots.
        policy: the policy.
        interval_s: time between decisions [s].
        rescale_s: pause of a job when its slots change [s].

    Raises:
        ValueError: some job never gets slots.
    """
    jobs = [SimulatedJob(each, policy.adapts, hosts[0].slots) for each in workload]
    outcome = Outcome()
    now = 0.0
    pending = sorted(jobs, key=lambda job: job.submitted.submitted_s)
    active: list[SimulatedJob] = []
    while pending or active:
        for job in active:
            job.train(now, interval_s)
        now += interval_s
        for job in active:
            if job.finished_s is not None:
                outcome.completion_s[job.name] = job.finished_s - job.submitted.submitted_s
        active = [job for job in active if job.finished_s is None]
        while pending and pending[0].submitted.submitted_s <= now:
            active.append(pending.pop(0))
        if not active:
            continue
        began = time.process_time()
        decided = policy.run(active, hosts, now, rescale_s)
        outcome.decision_s.append(time.process_time() - began)
        for job in active:
            assignment = decided[job.name]
            if dict(assignment.hosts) != job.held:
                slots = sum(assignment.hosts.values())
                change = Change(now, job.name, slots, len(assignment.hosts), assignment.reason)
                outcome.changes.append(change)
            job.hold(assignment.hosts, rescale_s)
        if now > _LONGEST_S:
            names = ", ".join(job.name for job in active if not job.held)
            raise ValueError(f"after a month of virtual time these jobs still wait: {names}")
    outcome.rescales = sum(max(0, job.rescales) for job in jobs)
    outcome.slot_s = sum(job.attained_slot_s for job in jobs)
    outcome.span_s = now - min(job.submitted.submitted_s for job in jobs)
    return outcome

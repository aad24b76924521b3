"""Simulate the jobs of a published workload under a policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.published.fairness import EqualShares
from benchmarks.published.job import SimulatedJob
from benchmarks.published.policies import PolicyEntry
from benchmarks.published.profiles import SubmittedJob
from hvd_elastic.policy.schedule.jobs import Assignment
from hvd_elastic.policy.snapshot import HostOffer
from hvd_elastic.sim.jobs.run import Outcome, run_jobs


@dataclass
class FairOutcome(Outcome):
    """What happened to a workload, with its finish-time fairness.

    Attributes:
        fairness: finish-time fairness of each job: its completion time relative to that with an
            equal share of its own.
    """

    fairness: dict[str, float] = field(default_factory=dict)

    @property
    def mean_fairness(self) -> float:
        """Mean finish-time fairness."""
        return float(np.mean(list(self.fairness.values())))

    @property
    def worst_fairness(self) -> float:
        """Largest finish-time fairness: of the job that sharing has delayed most."""
        return max(self.fairness.values())


def simulate_jobs(
    workload: Sequence[SubmittedJob],
    hosts: Sequence[HostOffer],
    policy: PolicyEntry,
    interval_s: float = 60.0,
    rescale_s: float = 30.0,
    noise: float = 0.0,
    leave_s: float = 0.0,
    kind: type[SimulatedJob] = SimulatedJob,
) -> FairOutcome:
    """Return what happens to a published workload under a policy.

    Args:
        workload: its jobs.
        hosts: hosts of the cluster, all with as many slots.
        policy: the policy.
        interval_s: time between decisions [s].
        rescale_s: pause of a job when its slots change [s].
        noise: relative error of the goodput that the policy reads.
        leave_s: time until the processes of a job have left the slots that it gives up [s].
        kind: what the jobs are.

    Raises:
        ValueError: some job never gets slots.
    """
    shares = EqualShares(sum(host.slots for host in hosts), hosts[0].slots, rescale_s)
    jobs = [kind(each, policy.adapts, hosts[0].slots) for each in workload]
    for job in jobs:
        job.noise = noise

    def decide(active: Sequence[SimulatedJob], now: float) -> Mapping[str, Assignment]:
        for job in active:
            job.note_competitors(len(active))
        return policy.run(active, hosts, now, rescale_s)

    found = run_jobs(
        jobs,
        decide,
        interval_s,
        rescale_s,
        {host.name: host.slots for host in hosts},
        leave_s,
    )
    outcome = FairOutcome(**vars(found))
    for job in jobs:
        fair_s = shares.completion_s(job.application, job.competitors or 1.0)
        outcome.fairness[job.name] = outcome.completion_s[job.name] / fair_s
    return outcome

"""Simulate what a cluster's past jobs would have taken on other hosts.

The jobs, when they were submitted and their limits come from the events of the queue; how fast they
are on how many slots comes from the step times and the gradient noise measured in their runs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hvd_elastic.errors import RunError
from hvd_elastic.hosts.hostfile import expand_hosts
from hvd_elastic.model.goodput import goodput_curve
from hvd_elastic.policy.evidence import Evidence, replay
from hvd_elastic.policy.schedule.decide import decide
from hvd_elastic.policy.schedule.policies import Policy
from hvd_elastic.policy.snapshot import HostOffer
from hvd_elastic.records.cluster import ClusterSummary, JobRecord
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.records.summary import summarize
from hvd_elastic.run_events import Metrics, WorkerStandby
from hvd_elastic.sim.jobs.run import JobInTime, Outcome, as_jobs, run_jobs

_DECISIONS = 20_000
"""Decisions that are simulated, if they are not more than 10 s apart."""
_MEASURING_S = 2.5
"""Training with a number of slots until its step time is known [s]: two windows of a second, of
which the first is not used, between reports that come every half a second or so."""


@dataclass(frozen=True)
class PastJob:
    """A job that has succeeded, and how fast it is.

    Attributes:
        submitted_s: when it was submitted [s].
        took_s: time from then to its end [s].
        speed: what is measured of its run; None: too little, so more slots do not make it faster.
        batch: mean number of examples in a step.
        run_s: time that it held slots [s].
        min_slots, max_slots: fewest and most slots; ``max_slots`` None: no limit.
        rescale_s: pause of a rescale, as measured [s].
        start_s: time that it held slots before its first step and after its last [s].
        warm_s: time from the start of a further process until it can train [s].
        hosts: hosts that it might have; None: all.
    """

    name: str
    submitted_s: float
    took_s: float
    examples: float
    speed: Evidence | None
    batch: float
    run_s: float
    priority: float
    min_slots: int
    max_slots: int | None
    rescale_s: float
    start_s: float
    warm_s: float
    hosts: Collection[str] | None = None


@dataclass(frozen=True)
class History:
    """The past of a cluster.

    Attributes:
        left_out: number of other jobs, whose length is not known.
    """

    jobs: list[PastJob]
    hosts: list[HostOffer]
    left_out: int

    @property
    def span_s(self) -> float:
        """Return the time from the first submission to the last end [s]."""
        ends = [job.submitted_s + job.took_s for job in self.jobs]
        return max(ends) - min(job.submitted_s for job in self.jobs)

    def hosts_with(self, added: int) -> list[HostOffer]:
        """Return the hosts and some more, each like the commonest of them."""
        common = statistics.mode(host.slots for host in self.hosts)
        more = [HostOffer(f"added{number + 1}", common) for number in range(added)]
        return [*self.hosts, *more]


def read_history(cluster: ClusterSummary) -> History:
    """Return the past of a cluster, with the measurements of its runs' folders.

    Raises:
        RunError: no job has succeeded yet.
    """
    past = [
        _past_job(job, cluster.started or 0.0)
        for job in cluster.jobs.values()
        if job.status == "succeeded" and job.ended_s is not None and job.run_s > 0
    ]
    if not past:
        raise RunError(
            f"no job of cluster {cluster.name} has succeeded yet, so there is no history to "
            "simulate; see: hvd-elastic queue --all"
        )
    hosts = [HostOffer(name, slots) for name, slots in cluster.hosts.items()]
    return History(past, hosts, len(cluster.jobs) - len(past))


def simulate_history(
    history: History,
    hosts: Sequence[HostOffer],
    interval_s: float | None = None,
    rescale_s: float | None = None,
    policy: Policy = decide,
) -> Outcome:
    """Return what would have happened to the past jobs on some hosts.

    Args:
        interval_s: time between decisions [s]; None: 1 to 10 s, less for a shorter past. A real
            queue decides when a job comes or ends.
        rescale_s: pause of a rescale [s]; None: the median of those measured.
        policy: decides which job has how many slots.

    Raises:
        ValueError: some job never gets slots.
    """
    measured = [job.rescale_s for job in history.jobs if job.speed is not None]
    pause_s = rescale_s if rescale_s is not None else statistics.median(measured or [1.0])
    if interval_s is None:
        interval_s = min(max(1.0, history.span_s / _DECISIONS), 10.0)
    jobs = [_RepeatedJob(job, hosts) for job in history.jobs]
    return run_jobs(
        jobs,
        lambda active, now: policy(as_jobs(active, pause_s, tells_length=True), hosts, now),
        interval_s,
        pause_s,
        {host.name: host.slots for host in hosts},
        leave_s=pause_s,  # the processes that are left continue until the rescale is done
    )


class _RepeatedJob(JobInTime):
    """A past job that runs again, on hosts that it asked for; on any if they are not there."""

    def __init__(self, past: PastJob, hosts: Sequence[HostOffer]) -> None:
        super().__init__(past.name, past.submitted_s)
        self.priority, self._start_s, self._warm_s = past.priority, past.start_s, past.warm_s
        own = [host for host in hosts if past.hosts is not None and host.name in past.hosts]
        if own and sum(host.slots for host in own) >= past.min_slots:
            self.hosts = [host.name for host in own]
        sizes = sorted((host.slots for host in (own if self.hosts else hosts)), reverse=True)
        capacity = sum(sizes)
        self.min_slots = min(past.min_slots, capacity)
        self._most = max(self.min_slots, min(past.max_slots or capacity, capacity))
        self._curve, self._left = _speeds(past, sizes)
        self._trained_s: dict[int, float] = {}
        """How long it has trained, by number of slots [s]."""
        self._warming_s, self._ready_slots = 0.0, 0
        """Time until further processes are ready [s], and slots that train meanwhile."""

    @property
    def max_slots(self) -> int:
        """Most slots of the job for now; see :class:`JobInTime`."""
        return min(max(2 * self._measured_slots, self.min_slots), self.most_slots)

    @property
    def most_slots(self) -> int:
        """Most slots that it takes; see :class:`JobInTime`."""
        return self._most

    @property
    def _measured_slots(self) -> int:
        timed = (slots for slots, seconds in self._trained_s.items() if seconds >= _MEASURING_S)
        return max(timed, default=0)

    @property
    def remaining_examples(self) -> float:
        """Useful examples that are left."""
        return self._left

    def hold(self, hosts: Mapping[str, int], pause_s: float) -> None:
        """Change its slots; it trains on after a pause [s], or after its processes have started.

        While further processes start, it trains with those that it has.
        """
        if dict(hosts) == self.held:
            return
        before, after = sum(self.held.values()), sum(hosts.values())
        trains = self._ready_slots if self._warming_s else before
        super().hold(hosts, pause_s if before else self._start_s)
        self._ready_slots = trains
        self._warming_s = self._warm_s if before and after > trains else 0.0

    def goodput(self) -> np.ndarray | None:
        """Return the useful examples per second by number of slots; None before the first."""
        return self._curve if self._measured_slots else None

    def _train(self, now: float, seconds: float) -> None:
        if seconds <= 0:
            return  # it still pauses
        warming = min(self._warming_s, seconds)
        if warming:
            self._warming_s -= warming
            self._advance(now, warming, self._ready_slots)
        if seconds > warming and self.finished_s is None:
            self._advance(now + warming, seconds - warming, sum(self.held.values()))

    def _advance(self, now: float, seconds: float, slots: int) -> None:
        self._trained_s[slots] = self._trained_s.get(slots, 0.0) + seconds
        rate = float(self._curve[slots])
        spent = seconds
        if rate * seconds >= self._left:
            spent = self._left / rate
            self.finished_s = now + spent
        self._left = max(self._left - rate * spent, 0.0)
        self.attained_slot_s += spent * slots


def _past_job(job: JobRecord, cluster_began: float) -> PastJob:
    """Return a job with what its runs have measured.

    Args:
        cluster_began: time from which those of the job count [Unix s].
    """
    speed: Evidence | None = None
    examples, batch, rescale_s, start_s, warm_s = 0.0, 1.0, 1.0, 0.0, 0.0
    for run_id in job.run_ids:
        try:
            folder = RunFolder.open(run_id)
        except RunError:
            continue
        events = folder.read_events()
        evidence, summary = replay(events), summarize(events)
        examples = evidence.done
        batch = summary.examples / max(summary.steps, 1)
        began = cluster_began + (job.started_s or 0.0)
        if not start_s and summary.started is not None and summary.first_step_s is not None:
            start_s = max(0.0, summary.started + summary.first_step_s - began)
        steps_at = [event.t for event in events if isinstance(event, Metrics)]
        if steps_at and job.ended_s is not None:
            start_s += max(0.0, cluster_began + job.ended_s - steps_at[-1])
        warm = [event.warm_s for event in events if isinstance(event, WorkerStandby)]
        warm_s = statistics.median(warm or [0.0])
        rescale_s = evidence.pause_s
        known = evidence.model() is not None and not math.isnan(evidence.noise)
        if known and examples > 0 and batch > 0:
            speed = evidence
    return PastJob(
        f"{job.job} {job.name}",
        job.submitted_s,
        (job.ended_s or 0.0) - job.submitted_s,
        examples,
        speed,
        batch,
        job.run_s,
        job.priority,
        job.min_np,
        job.max_np,
        rescale_s,
        start_s,
        warm_s,
        expand_hosts(job.hosts) if job.hosts else None,
    )


def _speeds(past: PastJob, sizes: Sequence[int]) -> tuple[np.ndarray, float]:
    """Return the goodput by number of slots, and the length of the job in the same unit.

    Args:
        sizes: slots of the hosts, the largest first.
    """
    capacity = sum(sizes)
    slots = np.arange(1, capacity + 1)
    if past.speed is None:
        return np.append(0.0, np.ones(capacity)), max(past.run_s - past.start_s, 1e-3)
    model, limits = past.speed.model(), past.speed.limits
    assert model is not None, "else the speed is not known"
    hosts = np.searchsorted(np.cumsum(sizes), slots) + 1
    if limits is None:  # a fixed batch, of which every example counts
        found = past.batch / model.step_s(hosts, slots, past.batch / slots, 0)
    else:
        found = goodput_curve(model, past.speed.noise, limits, hosts, slots).goodput
    # More slots than the batch can be divided by are of no use, but no harm either.
    return np.append(0.0, np.maximum.accumulate(found)), past.examples

"""The policies that are compared on published workloads."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.published.job import SimulatedJob
from hvd_elastic.policy.schedule.decide import choose_options, decide
from hvd_elastic.policy.schedule.jobs import Assignment, Job
from hvd_elastic.policy.schedule.policies import (
    equal_shares,
    first_come_first_served,
    place,
)
from hvd_elastic.policy.snapshot import HostOffer
from hvd_elastic.sim.jobs.run import as_jobs

Policy = Callable[
    [Sequence[SimulatedJob], Sequence[HostOffer], float, float], Mapping[str, Assignment]
]
"""Jobs, hosts, time [s] and pause of a rescale [s] to the slots of each job."""


@dataclass(frozen=True)
class PolicyEntry:
    """A policy.

    Attributes:
        run: the policy.
        adapts: whether jobs adapt their batch; else they train as was asked.
        knows: what it knows of a job.
    """

    run: Policy
    adapts: bool
    knows: str


def _goodput(tells_length: bool) -> Policy:
    def run(
        jobs: Sequence[SimulatedJob], hosts: Sequence[HostOffer], now: float, rescale_s: float
    ) -> Mapping[str, Assignment]:
        return decide(as_jobs(jobs, rescale_s, tells_length=tells_length), hosts, now)

    return run


def _fifo(
    jobs: Sequence[SimulatedJob], hosts: Sequence[HostOffer], now: float, _rescale_s: float
) -> Mapping[str, Assignment]:
    """First come, first served, with the slots that were asked; the first that waits blocks."""
    asking = [_sized(job, job.submitted.asked_slots, job.submitted.asked_slots) for job in jobs]
    return first_come_first_served(asking, hosts, now)


def _tiresias(
    jobs: Sequence[SimulatedJob], hosts: Sequence[HostOffer], _now: float, _rescale_s: float
) -> Mapping[str, Assignment]:
    """Two queues by attained service, each first come, first served (Tiresias, NSDI 2019)."""
    left = sum(host.slots for host in hosts)
    wanted: dict[str, int] = {}
    for job in sorted(
        jobs, key=lambda each: (each.attained_slot_s >= _TIRESIAS_S, each.submitted_s)
    ):
        asked = job.submitted.asked_slots
        if asked <= left:
            wanted[job.name] = asked
            left -= asked
    return _place(jobs, hosts, wanted, "least attained service")


_TIRESIAS_S = 3600.0 * 16
"""Attained service after which a job is in the second queue [slot seconds], as in the artifact."""


def _equal(
    jobs: Sequence[SimulatedJob], hosts: Sequence[HostOffer], now: float, _rescale_s: float
) -> Mapping[str, Assignment]:
    """Equal shares: slots one by one to the job with the fewest that can use another."""
    return equal_shares([_sized(job, job.min_slots, job.max_slots) for job in jobs], hosts, now)


def _sized(job: SimulatedJob, least: int, most: int) -> Job:
    """Return what a policy sees that only looks at sizes."""
    return Job(
        job.name,
        job.submitted_s,
        held=job.held,
        min_slots=least,
        max_slots=most,
        occupied=job.occupied,
    )


def _place(
    jobs: Sequence[SimulatedJob],
    hosts: Sequence[HostOffer],
    wanted: Mapping[str, int],
    reason: str,
) -> Mapping[str, Assignment]:
    return place([_sized(job, 1, 1) for job in jobs], hosts, wanted, reason)


_SIA_POWER, _SIA_WAITING = -0.5, 1.1
"""Exponent and price of a job that waits, as in Sia's artifact."""


def _sia(
    jobs: Sequence[SimulatedJob], hosts: Sequence[HostOffer], now: float, rescale_s: float
) -> Mapping[str, Assignment]:
    """Sia's integer program for equal hosts (SOSP 2023, section 3), solved exactly."""

    def value(job: SimulatedJob, options: np.ndarray) -> np.ndarray:
        worth = np.maximum(_discounted(job, options, options, now, rescale_s), 1e-4)
        found = _SIA_WAITING - worth**_SIA_POWER
        return np.where(options == 0, -1 / 1e-4**0.5, found)

    return _most_valuable(jobs, hosts, value, "Sia's integer program")


def _pollux(
    jobs: Sequence[SimulatedJob], hosts: Sequence[HostOffer], now: float, rescale_s: float
) -> Mapping[str, Assignment]:
    """Pollux's objective (OSDI 2021, section 4.2.1), solved exactly where Pollux searches.

    It is the harmonic mean of the speedups over an equal share; the constants are the artifact's.
    """
    capacity = sum(host.slots for host in hosts)
    share = -(-capacity // len(jobs))

    def value(job: SimulatedJob, options: np.ndarray) -> np.ndarray:
        goodput = job.goodput()
        fair = 1.0 if goodput is None else goodput[min(share, len(goodput) - 1)] / goodput[1]
        linear = options / share if goodput is None else options
        speed = _discounted(job, options, linear, now, rescale_s) / fair
        return np.asarray(-1 / (speed / hosts[0].slots + 1e-3))

    return _most_valuable(jobs, hosts, value, "Pollux's objective")


def _discounted(
    job: SimulatedJob, options: np.ndarray, unknown: np.ndarray, now: float, rescale_s: float
) -> np.ndarray:
    """Return the speedups of a job, less the restarts that it has had, as Pollux and Sia do."""
    goodput = job.goodput()
    speed = unknown.astype(float) if goodput is None else goodput[options] / goodput[1]
    age = max(now - job.submitted_s, 1.0)
    factor = max(0.0, age - max(job.rescales, 0) * rescale_s) / (age + rescale_s)
    return np.asarray(speed * np.where(options == sum(job.held.values()), 1.0, factor))


def _most_valuable(
    jobs: Sequence[SimulatedJob],
    hosts: Sequence[HostOffer],
    value: Callable[[SimulatedJob, np.ndarray], np.ndarray],
    reason: str,
) -> Mapping[str, Assignment]:
    """Return the slots with the largest sum of values, from a few numbers of slots for each job."""
    capacity, per_host = sum(host.slots for host in hosts), hosts[0].slots
    every = np.asarray([0, 1, 2, *range(per_host, capacity + 1, per_host)])
    sizes = [every[every <= job.max_slots] for job in jobs]
    values = [value(job, options) for job, options in zip(jobs, sizes, strict=True)]
    chosen = choose_options(sizes, values, capacity)
    wanted = {
        job.name: int(options[index])
        for job, options, index in zip(jobs, sizes, chosen, strict=True)
    }
    return _place(jobs, hosts, wanted, reason)


def _optimus(
    jobs: Sequence[SimulatedJob], hosts: Sequence[HostOffer], _now: float, _rescale_s: float
) -> Mapping[str, Assignment]:
    """Slots one by one to the job whose remaining time shrinks most (Optimus, EuroSys 2018).

    As in the artifact of Pollux it knows the true step times and the steps that are left.
    """
    left = sum(host.slots for host in hosts)
    wanted: dict[str, int] = {}
    gains: list[tuple[float, int]] = []
    order = sorted(jobs, key=lambda each: each.submitted_s)

    def gain(job: SimulatedJob) -> float:
        slots = wanted[job.name]
        if slots >= job.most_asked_slots:
            return 0.0
        return job.asked_time_left(slots) - job.asked_time_left(slots + 1)

    for number, job in enumerate(order):
        wanted[job.name] = int(left > 0)
        left -= wanted[job.name]
        if wanted[job.name]:
            heapq.heappush(gains, (-gain(job), number))
    while left and gains and gains[0][0] < 0:
        number = heapq.heappop(gains)[1]
        wanted[order[number].name] += 1
        left -= 1
        heapq.heappush(gains, (-gain(order[number]), number))
    return _place(jobs, hosts, wanted, "largest marginal gain")


POLICIES: dict[str, PolicyEntry] = {
    "goodput": PolicyEntry(
        _goodput(True), True, "measurements, and the length that a job declares"
    ),
    "goodput-unknown": PolicyEntry(_goodput(False), True, "measurements"),
    "sia": PolicyEntry(_sia, True, "measurements"),
    "pollux": PolicyEntry(_pollux, True, "measurements"),
    "equal": PolicyEntry(_equal, True, "largest number of slots measured"),
    "optimus": PolicyEntry(
        _optimus, False, "batch that the user asks for, true step times, steps that are left"
    ),
    "tiresias": PolicyEntry(_tiresias, False, "slots and batch that the user asks for"),
    "fifo": PolicyEntry(_fifo, False, "slots and batch that the user asks for"),
}
"""The policies by name."""

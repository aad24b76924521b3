"""The policies that the simulator of many jobs compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hvd_elastic.policy.schedule.decide import decide
from hvd_elastic.policy.schedule.jobs import Assignment, HostSlots, Job
from hvd_elastic.policy.schedule.knapsack import choose_options
from hvd_elastic.policy.schedule.placement import place_jobs
from hvd_elastic.sim.jobs.job import SimulatedJob

Policy = Callable[
    [Sequence[SimulatedJob], Sequence[HostSlots], float, float], Mapping[str, Assignment]
]
"""Jobs, hosts, time [s] and pause of a rescale [s] to the slots of each job."""


@dataclass(frozen=True)
class PolicyEntry:
    """A policy of the simulator.

    Attributes:
        run: the policy.
        adapts: whether jobs adapt their batch; else they train as was asked.
        knows: what it knows of a job.
    """

    run: Policy
    adapts: bool
    knows: str


def as_jobs(jobs: Sequence[SimulatedJob], rescale_s: float, *, tells_length: bool) -> list[Job]:
    """Return what the scheduler sees of simulated jobs."""
    return [
        Job(
            job.name,
            job.submitted.submitted_s,
            job.goodput(),
            job.remaining_examples if tells_length else None,
            job.held,
            job.attained_slot_s,
            rescale_s,
            max_slots=growth_limit(job),
        )
        for job in jobs
    ]


def growth_limit(job: SimulatedJob) -> int:
    """Return the most slots of a job: twice as many as were measured (Pollux, section 4.1)."""
    return min(max(2 * job.profiled_slots, 1), job.application.most_slots)


def _goodput(tells_length: bool) -> Policy:
    def run(
        jobs: Sequence[SimulatedJob], hosts: Sequence[HostSlots], now: float, rescale_s: float
    ) -> Mapping[str, Assignment]:
        return decide(as_jobs(jobs, rescale_s, tells_length=tells_length), hosts, now)

    return run


def _fifo(
    jobs: Sequence[SimulatedJob], hosts: Sequence[HostSlots], _now: float, _rescale_s: float
) -> Mapping[str, Assignment]:
    """First come, first served, with the slots that were asked; the first that waits blocks."""
    left = sum(host.slots for host in hosts)
    wanted: dict[str, int] = {}
    for job in sorted(jobs, key=lambda each: each.submitted.submitted_s):
        asked = job.submitted.asked_slots
        if asked > left:
            break
        wanted[job.name] = asked
        left -= asked
    return _placed(jobs, hosts, wanted, "first come, first served")


def _tiresias(
    jobs: Sequence[SimulatedJob], hosts: Sequence[HostSlots], _now: float, _rescale_s: float
) -> Mapping[str, Assignment]:
    """Two queues by attained service, each first come, first served (Tiresias, NSDI 2019)."""
    left = sum(host.slots for host in hosts)
    wanted: dict[str, int] = {}
    for job in sorted(
        jobs, key=lambda each: (each.attained_slot_s >= _TIRESIAS_S, each.submitted.submitted_s)
    ):
        asked = job.submitted.asked_slots
        if asked <= left:
            wanted[job.name] = asked
            left -= asked
    return _placed(jobs, hosts, wanted, "least attained service")


_TIRESIAS_S = 3600.0 * 16
"""Attained service after which a job is in the second queue [slot seconds], as in the artifact."""


def _equal(
    jobs: Sequence[SimulatedJob], hosts: Sequence[HostSlots], _now: float, _rescale_s: float
) -> Mapping[str, Assignment]:
    """Equal shares, as far as each job can use them."""
    left = sum(host.slots for host in hosts)
    wanted = dict.fromkeys((job.name for job in jobs), 0)
    limits = {job.name: growth_limit(job) for job in jobs}
    sizes = [0, 1, 2, *range(4, left + 1, 4)]
    # Raise the least share that can still be raised, in steps that fill hosts.
    while True:
        for name in sorted(wanted, key=wanted.__getitem__):
            larger = sizes[sizes.index(wanted[name]) + 1 :]
            if larger and larger[0] <= limits[name] and larger[0] - wanted[name] <= left:
                left -= larger[0] - wanted[name]
                wanted[name] = larger[0]
                break
        else:
            return _placed(jobs, hosts, wanted, "equal shares")


_SIA_POWER, _SIA_WAITING = -0.5, 1.1
"""Exponent and price of a job that waits, as in Sia's artifact."""


def _sia(
    jobs: Sequence[SimulatedJob], hosts: Sequence[HostSlots], now: float, rescale_s: float
) -> Mapping[str, Assignment]:
    """Sia's integer program for equal hosts (SOSP 2023, section 3), solved exactly."""
    capacity = sum(host.slots for host in hosts)
    per_host = hosts[0].slots
    every = np.asarray([0, 1, 2, *range(per_host, capacity + 1, per_host)])
    sizes, values = [], []
    for job in jobs:
        options = every[every <= growth_limit(job)]
        goodput = job.goodput()
        speed = options.astype(float) if goodput is None else goodput[options] / goodput[1]
        age = max(now - job.submitted.submitted_s, 1.0)
        rescales = max(job.rescales, 0)
        factor = max(0.0, age - rescales * rescale_s) / (age + rescale_s)
        worth = speed * np.where(options == sum(job.held.values()), 1.0, factor)
        with np.errstate(divide="ignore"):
            value = _SIA_WAITING - np.maximum(worth, 1e-4) ** _SIA_POWER
        sizes.append(options)
        values.append(np.where(options == 0, -1 / 1e-4**0.5, value))
    chosen = choose_options(sizes, values, capacity)
    wanted = {
        job.name: int(options[index])
        for job, options, index in zip(jobs, sizes, chosen, strict=True)
    }
    return _placed(jobs, hosts, wanted, "Sia's integer program")


def _placed(
    jobs: Sequence[SimulatedJob],
    hosts: Sequence[HostSlots],
    wanted: Mapping[str, int],
    reason: str,
) -> Mapping[str, Assignment]:
    every = {job.name: wanted.get(job.name, 0) for job in jobs}
    held = {job.name: job.held for job in jobs}
    placed = place_jobs(every, held, hosts)
    return {name: Assignment(placed[name], reason) for name in every}


POLICIES: dict[str, PolicyEntry] = {
    "goodput": PolicyEntry(
        _goodput(True), True, "measurements, and the length that a job declares"
    ),
    "goodput-unknown": PolicyEntry(_goodput(False), True, "measurements"),
    "sia": PolicyEntry(_sia, True, "measurements"),
    "equal": PolicyEntry(_equal, True, "largest number of slots measured"),
    "tiresias": PolicyEntry(_tiresias, False, "slots and batch that the user asks for"),
    "fifo": PolicyEntry(_fifo, False, "slots and batch that the user asks for"),
}
"""The policies by name."""

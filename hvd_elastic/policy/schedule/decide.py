"""Decide which job holds which slots: an integer program over the jobs' goodput."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvd_elastic.formatting import count, duration_words
from hvd_elastic.policy.schedule.jobs import Allocation, Assignment, HostSlots, Job
from hvd_elastic.policy.schedule.knapsack import choose_options
from hvd_elastic.policy.schedule.placement import place_jobs

_WAITING_LOSS = 0.35
"""Worth of the first slot of a job beyond its speedup: shrink others before one waits."""
_LATE = 4.0
"""Weight of a job that would miss its deadline with its present slots."""


@dataclass(frozen=True)
class Weights:
    """Weights of the objective.

    Attributes:
        shortness: exponent of the remaining time on one slot: 0 treats all jobs alike, larger
            values finish short jobs first.
        service: exponent of the attained service, for jobs that have not said how long they train.
        horizon_s: time over which a rescale has to pay off [s]; less if the job ends earlier.
    """

    shortness: float = 0.5
    service: float = 0.25
    horizon_s: float = 600.0


def decide(
    jobs: Sequence[Job], hosts: Sequence[HostSlots], now: float, weights: Weights | None = None
) -> dict[str, Assignment]:
    """Return the slots of every job, with reasons.

    Maximises the sum over jobs of weight times speedup, less what a rescale costs. The weight
    combines priority, remaining time (or attained service) and deadline. No job waits while there
    are slots for the minimum of all.

    Args:
        jobs: jobs that run or wait.
        hosts: hosts that may be used, in the order of the hostfile.
        now: current time [s].
        weights: weights of the objective.

    Source: Sia, SOSP 2023 (integer program, discount of a restart); Tiresias, NSDI 2019 (attained
    service); Berg et al., SIGMETRICS 2020 (heSRPT: short jobs first, but not alone).
    """
    weights = weights or Weights()
    capacity = sum(host.slots for host in hosts)
    names = {host.name for host in hosts}
    per_host = max((host.slots for host in hosts), default=1)
    order = sorted(jobs, key=lambda job: (job.submitted_s, job.name))
    sizes, values = [], []
    room_for_all = sum(job.min_slots for job in order) <= capacity
    kept = [job for job in order if not job.preemptible]
    room_for_kept = sum(job.min_slots for job in kept) <= capacity
    for job in order:
        options = np.append(0, _sizes(job, per_host, capacity))
        worth = _values(job, options, now, weights, names)
        if room_for_all or (room_for_kept and not job.preemptible):
            worth[0] = -np.inf
        sizes.append(options)
        values.append(worth)
    chosen = choose_options(sizes, values, capacity)
    wanted = {
        job.name: int(options[index])
        for job, options, index in zip(order, sizes, chosen, strict=True)
    }
    held = {job.name: job.held for job in order}
    placed = place_jobs(wanted, held, hosts)
    return {
        job.name: Assignment(placed[job.name], _reason(job, placed[job.name], capacity, len(order)))
        for job in order
    }


def _sizes(job: Job, per_host: int, capacity: int) -> np.ndarray:
    """Return the numbers of slots to try: those that fill hosts without remainders, and its own."""
    within = [2**power for power in range(per_host.bit_length()) if 2**power < per_host]
    whole = range(per_host, capacity + 1, per_host)
    found = {*within, *whole, job.min_slots, min(job.max_slots, capacity)}
    if job.max_slots > per_host:
        found.discard(job.max_slots)
        found.add(job.max_slots // per_host * per_host)
    most = min(job.max_slots, capacity)
    return np.asarray(sorted(size for size in found if job.min_slots <= size <= most), np.int64)


def speedups(job: Job, sizes: np.ndarray) -> np.ndarray:
    """Return the goodput of numbers of slots relative to one slot; linear where it is unknown."""
    if job.goodput is None:
        return sizes.astype(np.float64)
    known = np.asarray(job.goodput, np.float64)
    found = known[np.minimum(sizes, len(known) - 1)]
    first = known[known > 0]
    return np.asarray(found / (first[0] if first.size else 1.0))


def _weight(job: Job, now: float, weights: Weights) -> float:
    weight = job.priority
    alone_s = _alone_s(job)
    if alone_s is not None:
        weight *= (max(alone_s, 60.0) / 3600) ** -weights.shortness
    else:
        weight *= (max(job.attained_slot_s, 600.0) / 3600) ** -weights.service
    if job.deadline_s is not None and alone_s is not None:
        rate = float(speedups(job, np.asarray([max(job.slots, job.min_slots)]))[0])
        if now + alone_s / max(rate, 1e-9) > job.deadline_s:
            weight *= _LATE
    return weight


def _alone_s(job: Job) -> float | None:
    """Return the remaining time on one slot [s]; None if it is unknown."""
    if job.remaining is None or job.goodput is None:
        return None
    first = job.goodput[job.goodput > 0]
    return job.remaining / float(first[0]) if first.size else None


def _values(
    job: Job, options: np.ndarray, now: float, weights: Weights, names: set[str]
) -> np.ndarray:
    weight, speedup = _weight(job, now, weights), speedups(job, options)
    alone_s = _alone_s(job)
    horizon = np.full(options.shape, weights.horizon_s)
    if alone_s is not None:
        horizon = np.minimum(horizon, alone_s / np.maximum(speedup, 1e-9))
    lost = np.minimum(1.0, job.rescale_s / np.maximum(horizon, 1.0))
    keeps = (options == job.slots) & (job.held.keys() <= names)
    worth = speedup * np.where(keeps, 1.0, 1 - lost)
    worth = weight * (worth + _WAITING_LOSS * (options > 0))
    return np.where(options == 0, 0.0, np.maximum(worth, 1e-9))


def _reason(job: Job, placed: Allocation, capacity: int, jobs: int) -> str:
    slots = sum(placed.values())
    alone_s = _alone_s(job)
    left = ""
    rate = float(speedups(job, np.asarray([slots]))[0])
    if alone_s is not None and slots:
        left = f", about {duration_words(alone_s / max(rate, 1e-9))} left"
    if not slots:
        others = f"all {capacity} slots are worth more to the {jobs - 1} other jobs"
        if job.min_slots > capacity:
            others = f"it needs {job.min_slots} slots, the cluster has {capacity}"
        return f"waits: {others}"
    now_has = f"{count(slots, 'slot')} on {count(len(placed), 'host')}"
    if job.goodput is None:
        return f"{now_has}: nothing is measured yet, so it starts small"
    if slots == job.slots:
        kept = "keeps" if dict(placed) == dict(job.held) else "moves to"
        return f"{kept} {now_has}: {rate:.1f} times the speed of one{left}"
    verb = "grows" if slots > job.slots else "shrinks"
    if not job.slots:
        verb = "starts"
    reason = f"{verb} from {job.slots} to {now_has}: {rate:.1f} times the speed of one{left}"
    if slots == job.max_slots:
        reason += f"; at most {job.max_slots} for now"
    return reason

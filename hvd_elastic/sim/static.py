"""Find the best fixed number of slots and batch plan by exhaustive search."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvd_elastic.model.goodput import BatchLimits, statistical_efficiency
from hvd_elastic.model.shares import LEAST_SHARE
from hvd_elastic.policy.scoring import pace
from hvd_elastic.policy.snapshot import HostOffer
from hvd_elastic.sim.trace import Cluster, Trace, Workload

_SIZES = 96
"""Global batch sizes that are tried, on a geometric grid."""
_MOMENTS = 200
"""Time steps of a training in :func:`best_static`."""


@dataclass(frozen=True)
class StaticChoice:
    """A number of slots and a batch plan.

    Attributes:
        goodput: mean goodput [useful examples/s].
        rate: price of the hosts in use [currency per hour].
    """

    slots: int
    batch: int
    accumulation_steps: int
    goodput: float
    rate: float


def best_at(
    workload: Workload,
    hosts: Sequence[HostOffer],
    link: float,
    noise: float,
    most: int | None = None,
    budget: float | None = None,
    *,
    unequal_shares: bool = True,
) -> StaticChoice:
    """Return the choice with the most goodput on these hosts at one noise scale.

    The search covers all numbers of slots, on the fewest hosts of each speed, and all batch plans
    of a fine grid. The true step time depends only on the numbers of hosts and slots and on the
    slowness. With equal shares that is the slowness of the slowest host, so no other choice of
    hosts can be better. With unequal shares the fastest, the largest and the cheapest hosts are
    tried first.

    Raises:
        ValueError: no choice keeps to the limits.
    """
    size, extra = _plans(workload.limits)
    found = None
    for slots, on, speeds, rate in _shapes(hosts, most):
        if budget is not None and rate > budget:
            continue
        made = _throughput(workload, size, extra, slots, on, speeds, link, unequal_shares)
        goodput = made * statistical_efficiency(noise, workload.limits.initial_batch_size, size)
        best = int(np.argmax(goodput))
        if found is None or goodput[best] > found.goodput:
            found = StaticChoice(
                slots, int(size[best]), int(extra[best]), float(goodput[best]), rate
            )
    if found is None or found.goodput <= 0:
        raise ValueError("no number of slots keeps to the limits of budget and batch")
    return found


def best_static(trace: Trace) -> StaticChoice:
    """Return the fixed slots and batch plan that reach the target first, or come nearest to it.

    While hosts are missing, the choice uses fewer slots. It always uses the best hosts and changes
    between them without a pause.
    """
    workload = trace.workload
    size, extra = _plans(workload.limits)
    cluster = Cluster(trace)
    most = max(sum(host.slots for host in hosts) for hosts in _hosts_over_time(trace))
    most = min(most, trace.max_np or most)
    choices = np.arange(min(trace.min_np, most), most + 1)
    done = np.zeros((len(choices), len(size)))
    reached_s = np.full(done.shape, np.inf)
    first, last = workload.noise_scale
    initial = workload.limits.initial_batch_size
    now, made, key = 0.0, done, None
    while now < trace.duration_s and not np.isfinite(reached_s).any():
        cluster.advance(now)
        if (cluster.link, cluster.hosts) != key:
            key = (cluster.link, cluster.hosts)
            made = _throughputs(trace, key[1], key[0], choices, size, extra)
        noise = first * (last / first) ** np.minimum(done / workload.examples, 1.0)
        goodput = made * statistical_efficiency(noise, initial, size)
        end = min(now + workload.examples / _MOMENTS / goodput.max(), trace.duration_s)
        end = min(end, cluster.next_change_at() or end)
        after = done + goodput * (end - now)
        there = after >= workload.examples
        left_s = (workload.examples - done) / np.maximum(goodput, 1e-9)
        reached_s = np.where(there, now + left_s, reached_s)
        done, now = after, end
    finished = np.isfinite(reached_s).any()
    best = int(np.argmin(reached_s)) if finished else int(np.argmax(done))
    row, column = np.unravel_index(best, done.shape)
    took_s = float(reached_s[row, column]) if finished else trace.duration_s
    total = workload.examples if finished else float(done[row, column])
    return StaticChoice(
        int(choices[row]), int(size[column]), int(extra[column]), total / took_s, 0.0
    )


def _hosts_over_time(trace: Trace) -> list[tuple[HostOffer, ...]]:
    cluster = Cluster(trace)
    found = [cluster.hosts]
    for change in trace.changes:
        cluster.advance(change.at_s)
        found.append(cluster.hosts)
    return found


def _plans(limits: BatchLimits) -> tuple[np.ndarray, np.ndarray]:
    grid = np.geomspace(limits.initial_batch_size, limits.max_batch_size, _SIZES)
    sizes = np.unique(np.rint(grid).astype(np.int64))
    extras = np.arange(limits.max_accumulation_steps + 1)
    size, extra = (part.ravel() for part in np.meshgrid(sizes, extras))
    return size.astype(np.float64), extra.astype(np.float64)


_Speeds = tuple[tuple[float, int], ...]
"""(slowness, ranks) of each host in use."""


def _shapes(
    hosts: Sequence[HostOffer], most: int | None
) -> Iterator[tuple[int, int, _Speeds, float]]:
    """Yield (slots, hosts, speeds, price per hour) of all numbers of slots on the fewest hosts."""
    orders: tuple[Callable[[HostOffer], Any], ...] = (
        lambda host: (host.slowness, -host.slots, host.price or 0.0),
        lambda host: (-host.slots, host.slowness, host.price or 0.0),
        lambda host: ((host.price or 0.0) / host.slots, host.slowness),
    )
    seen = set()
    for slowest, order in itertools.product(sorted({host.slowness for host in hosts}), orders):
        used: list[HostOffer] = []
        for host in sorted((h for h in hosts if h.slowness <= slowest), key=order):
            before = sum(other.slots for other in used)
            used.append(host)
            rate = sum(other.price or 0.0 for other in used)
            for more in range(1, host.slots + 1):
                if most is not None and before + more > most:
                    break
                speeds = Counter({host.slowness: more})
                for other in used[:-1]:
                    speeds[other.slowness] += other.slots
                shape = (before + more, len(used), tuple(sorted(speeds.items())), rate)
                if shape not in seen:
                    seen.add(shape)
                    yield shape


def _throughputs(
    trace: Trace,
    hosts: Sequence[HostOffer],
    link: float,
    choices: np.ndarray,
    size: np.ndarray,
    extra: np.ndarray,
) -> np.ndarray:
    offered = sum(host.slots for host in hosts)
    best = np.zeros((len(choices), len(size)))
    for slots, on, speeds, _ in _shapes(hosts, None):
        unequal = trace.unequal_shares
        made = _throughput(trace.workload, size, extra, slots, on, speeds, link, unequal)
        for row in np.flatnonzero(np.minimum(choices, offered) == slots):
            best[row] = np.maximum(best[row], made)
    return best


def _throughput(
    workload: Workload,
    size: np.ndarray,
    extra: np.ndarray,
    slots: int,
    on: int,
    speeds: _Speeds,
    link: float,
    unequal_shares: bool,
) -> np.ndarray:
    atomic = size / slots / (extra + 1)
    constant = workload.alpha_c / (workload.alpha_c + workload.beta_c * atomic)
    slow = pace(speeds, unequal_shares, constant, np.minimum(LEAST_SHARE * slots / size, 1.0))
    made = size / workload.model(link).step_s(on, slots, atomic, extra, slow)
    return np.where(workload.limits.allow_passes(atomic), made, 0.0)

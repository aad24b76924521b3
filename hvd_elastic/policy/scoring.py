"""Find allocations to choose from, and score them: goodput at the best batch plan of each."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from hvd_elastic.model.goodput import statistical_efficiency
from hvd_elastic.model.shares import LEAST_SHARE, balanced_slowness
from hvd_elastic.policy.snapshot import Allocation, HostOffer, Snapshot

_CLASSES = 6
"""Most classes of speed."""
_CLASS_STEP = 0.1
"""Relative range of slowness within a class."""
_DENSE = 12
"""Every number of slots up to this is tried."""
_GROWTH = 1.12
"""Ratio of consecutive numbers of slots beyond that."""
_WHOLE_HOSTS = 16
"""Every number of whole hosts up to this is tried, since a host is paid as a whole; beyond it,
powers of two."""


def sizes_to_try(least: int, most: int, current: int, host_slots: Sequence[int]) -> list[int]:
    """Return the numbers of slots to score: all small ones, a geometric grid, and whole hosts.

    >>> sizes_to_try(1, 5, 3, [4])
    [1, 2, 3, 4, 5]
    """
    found = {least, most, current, current - 1, current + 1}
    found.update(range(least, min(most, _DENSE) + 1))
    size = float(_DENSE)
    while size < most:
        size *= _GROWTH
        found.add(math.floor(size))
    total = 0
    for number, slots in enumerate(sorted(host_slots, reverse=True), 1):
        total += slots
        near = total - slots <= current <= total + slots
        if number <= _WHOLE_HOSTS or number & (number - 1) == 0 or near:
            found.add(total)
    return sorted(size for size in found if least <= size <= most)


@functools.lru_cache(maxsize=16)
def placements(
    hosts: tuple[HostOffer, ...], sizes: tuple[int, ...], current: Allocation
) -> tuple[Allocation, ...]:
    """Return candidate allocations of each size.

    For each class of speed, only hosts that are at least as fast are used, since the slowest host
    determines the time of a synchronous step. Of these the fewest hosts are taken, with preference
    for hosts in use, then cheap, then fast ones; if prices differ, also the cheapest slots. All
    slots of pinned hosts are part of every allocation.

    Args:
        sizes: numbers of slots.
        current: slots in use.

    Returns:
        Distinct allocations; sizes that do not fit are left out.
    """
    used = {host for host, _ in current.counts}
    pinned = [i for i, host in enumerate(hosts) if host.pinned]
    kept = sum(hosts[i].slots for i in pinned)
    limits = _speed_classes(hosts)
    by_hosts = sorted(
        range(len(hosts)),
        key=lambda i: (
            -hosts[i].slots,
            hosts[i].name not in used,
            hosts[i].price or 0.0,
            hosts[i].slowness,
            i,
        ),
    )
    orders = [by_hosts]
    if len({(host.price or 0.0) / host.slots for host in hosts if host.slots}) > 1:
        orders.append(
            sorted(by_hosts, key=lambda i: (hosts[i].price or 0.0) / max(hosts[i].slots, 1))
        )
    found: dict[Allocation, None] = {}
    for limit in limits:
        for order in orders:
            fast = [i for i in order if hosts[i].slowness <= limit and not hosts[i].pinned]
            for size in sizes:
                counts = _fill(hosts, fast, size - kept)
                if counts is not None:
                    counts |= {i: hosts[i].slots for i in pinned}
                    taken = [(hosts[i].name, counts[i]) for i in sorted(counts)]
                    found[Allocation.of(taken)] = None
    return tuple(found)


def _speed_classes(hosts: Sequence[HostOffer]) -> list[float]:
    """Return the upper limit of slowness of each class of speed, the fastest class first."""
    limits: list[float] = []
    for slowness in sorted({host.slowness for host in hosts}):
        if limits and slowness <= limits[-1]:
            continue
        limits.append(slowness * (1 + _CLASS_STEP))
    if len(limits) > _CLASSES:
        limits = [*limits[: _CLASSES - 1], limits[-1]]
    return limits


def _fill(hosts: Sequence[HostOffer], order: Sequence[int], size: int) -> dict[int, int] | None:
    """Return slots by index of the host; None if the hosts have fewer slots."""
    if size <= 0:
        return {} if size == 0 else None
    left, counts = size, dict[int, int]()
    for place, index in enumerate(order):
        slots = hosts[index].slots
        if slots >= left:
            # For the last host take the smallest of those that are large enough.
            enough = [i for i in order[place:] if hosts[i].slots >= left]
            last = index
            for i in enough:
                cheaper = (hosts[i].price or 0.0) <= (hosts[index].price or 0.0)
                if hosts[i].slots < hosts[last].slots and cheaper:
                    last = i
            counts[last], left = left, 0
            break
        counts[index] = slots
        left -= slots
    return None if left > 0 else counts


def pace(
    ranks: Sequence[tuple[float, int]],
    unequal_shares: bool,
    constant: ArrayLike = 0.0,
    least: ArrayLike = 0.0,
) -> np.ndarray:
    """Return the slowness of steps of ranks that train together; 1 without any rank.

    Args:
        ranks: pairs of slowness and number of ranks, for each host.
        unequal_shares: whether slow ranks get fewer examples; else all wait for the slowest.
        constant: part of a pass that does not depend on its examples; any shape S.
        least: smallest share of a rank, relative to an equal one; shape S.

    Returns:
        The slowness; shape S.

    >>> float(pace([(1.0, 3), (2.0, 1)], unequal_shares=False))
    2.0
    >>> pace([(1.0, 3), (2.0, 1)], unequal_shares=True, constant=[0.0, 0.8]).round(2).tolist()
    [1.14, 1.6]
    """
    if unequal_shares and ranks:
        slowness, numbers = zip(*ranks, strict=True)
        return balanced_slowness(slowness, numbers, constant, least)
    return np.full(np.shape(constant), max((slow for slow, _ in ranks), default=1.0))


_SIZES = 32
"""Global batch sizes that are tried, on a geometric grid."""


@dataclass(frozen=True)
class Scores:
    """Scores of several allocations; each array has one entry for each of them.

    Attributes:
        goodput: goodput at the best batch plan [useful examples/s]; 0 where no plan keeps to the
            limits.
        uncertainty: standard deviation of the logarithm of the goodput's ratio to the first one.
        batch: global batch size of the best batch plan.
        starved: part of the throughput that is lost by waiting for data, in [0, 1).
        rate: price of the hosts in use [currency per hour]; 0 where prices are not known.
    """

    goodput: np.ndarray
    uncertainty: np.ndarray
    batch: np.ndarray
    slots: np.ndarray
    starved: np.ndarray
    rate: np.ndarray


def score_allocations(snapshot: Snapshot, allocations: Sequence[Allocation]) -> Scores:
    """Return the scores of allocations.

    All are computed at once, over a geometric grid of global batch sizes and several numbers of
    extra passes.

    Raises:
        ValueError: the snapshot has no fitted model.

    Source: Pollux, OSDI 2021, sections 3.2 and 3.3.
    """
    model, limits = snapshot.model, snapshot.limits
    if model is None:
        raise ValueError("there is no step time model to score with")
    offers = {host.name: host for host in snapshot.hosts}
    slots = np.asarray([a.slots for a in allocations], np.float64)
    # Predictions depend only on the number of hosts and slots and the speeds, so distinct shapes
    # are few.
    supply = snapshot.supply
    shapes = [
        (
            a.hosts,
            a.slots,
            _speeds(a, offers),
            math.inf if supply is None else supply.most(a.counts),
        )
        for a in allocations
    ]
    places = {shape: place for place, shape in enumerate(dict.fromkeys(shapes))}
    which = np.asarray([places[shape] for shape in shapes])
    rate = np.asarray(
        [sum(offers[h].price or 0.0 for h, _ in a.counts if h in offers) for a in allocations]
    )

    first, last = limits.initial_batch_size, max(limits.initial_batch_size, limits.max_batch_size)
    sizes = np.unique(np.rint(np.geomspace(first, last, _SIZES)).astype(np.int64))
    grids = np.meshgrid(sizes, limits.accumulation_choices)
    size, extra = (grid.ravel().astype(np.float64) for grid in grids)
    on = np.asarray([[number] for number, *_ in places], np.float64)
    ranks = np.asarray([[number] for _, number, *_ in places], np.float64)
    atomic = size / ranks / (extra + 1)
    constant = snapshot.constant_examples / (snapshot.constant_examples + atomic)
    least = np.minimum(max(LEAST_SHARE, limits.min_atomic_batch_size) * ranks / size, 1.0)
    slow = np.stack(
        [
            pace(speeds, snapshot.unequal_shares, *parts)
            for (_, _, speeds, _), *parts in zip(places, constant, least, strict=True)
        ]
    )
    useful = size * statistical_efficiency(snapshot.noise_scale, first, size)
    # A step is not shorter than its examples take to be read.
    reads_s = size / np.asarray([[most] for *_, most in places])
    step_s = model.step_s(on, ranks, atomic, extra, slow)
    waits = np.maximum(step_s, reads_s)
    goodput = np.where(limits.allow_passes(atomic), useful / waits, 0.0)
    best = np.argmax(goodput, axis=1)
    rows = np.arange(len(best))
    at = (on[:, 0], ranks[:, 0], atomic[rows, best], extra[best], slow[rows, best])
    unsure = model.predict(*at, relative_to=int(which[0])).uncertainty
    starved = (1 - step_s / waits)[rows, best]
    return Scores(
        goodput[rows, best][which],
        unsure[which],
        size[best][which],
        slots,
        starved[which],
        rate,
    )


def _speeds(
    allocation: Allocation, offers: Mapping[str, HostOffer]
) -> tuple[tuple[float, int], ...]:
    """Return (slowness, number of ranks) of the speeds in use, the fastest first."""
    found: Counter[float] = Counter()
    for host, number in allocation.counts:
        if host in offers:
            found[offers[host].slowness] += number
    return tuple(sorted(found.items()))


def expected_gain_and_loss(
    value: np.ndarray, uncertainty: np.ndarray, now: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the expected gain and loss of changing to an uncertain value, and P(loss).

    Args:
        value: means of log-normal quantities X; any shape S.
        uncertainty: standard deviations of the logarithms of X; shape S.
        now: present value, which is certain.

    Returns:
        ``E[max(X - now, 0)]``, ``E[max(now - X, 0)]`` and ``P(X < now)``; shape S each.

    Source: expected improvement (Mockus 1975; Jones, Schonlau and Welch 1998, section 4.1), for a
    log-normal quantity; the integral is that of Black and Scholes 1973, equation 13.

    >>> gain, loss, bad = expected_gain_and_loss(np.array([3.0]), np.array([0.0]), 2.0)
    >>> gain.tolist(), loss.tolist(), bad.tolist()
    ([1.0], [0.0], [0.0])
    """
    sigma = np.maximum(uncertainty, 1e-9)
    logs = np.log(np.maximum(value, 1e-300) / now)
    d2 = logs / sigma - sigma / 2
    above, weighted = _normal_cdf(d2), _normal_cdf(d2 + sigma)
    gain = np.maximum(value * weighted - now * above, 0.0)
    loss = np.maximum(gain - (value - now), 0.0)
    return gain, loss, 1 - above


def _normal_cdf(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.vectorize(math.erf, otypes=[np.float64])(x / math.sqrt(2)))

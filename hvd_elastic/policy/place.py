"""Propose the hosts on which to place a number of processes."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from hvd_elastic.model.shares import balanced_slowness
from hvd_elastic.policy.snapshot import Allocation, HostOffer

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

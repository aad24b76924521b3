"""Where a given number of processes would best go."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from hvd_elastic.model.shares import balanced_slowness
from hvd_elastic.policy.snapshot import Allocation, HostOffer

__all__ = ["pace", "placements", "sizes_to_try"]

_CLASSES = 6
_CLASS_STEP = 0.1
_DENSE = 12
_GROWTH = 1.12
_WHOLE_HOSTS = 16
"""Every number of whole hosts up to this is tried, since hosts are paid as a whole; then powers of
two."""


def sizes_to_try(least: int, most: int, current: int, host_slots: Sequence[int]) -> list[int]:
    """Return numbers of slots to score: all small ones, then ever coarser, and whole hosts.

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
    """Return allocations worth comparing, of each size.

    For each class of speed, only hosts that are at least as fast are used, since the slowest sets
    the pace of a synchronous step. Among those the fewest hosts are taken, and for equal numbers
    those in use now, then cheap, then fast ones; once more with the cheapest slots first, where
    prices differ. Pinned hosts are part of all, as a whole.

    Args:
        hosts: on offer.
        sizes: numbers of slots.
        current: slots in use.

    Returns:
        Each once; sizes that do not fit are left out.
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
    """Return upper limits of slowness, the fastest class first; hosts of one class are alike."""
    limits: list[float] = []
    for slowness in sorted({host.slowness for host in hosts}):
        if limits and slowness <= limits[-1]:
            continue
        limits.append(slowness * (1 + _CLASS_STEP))
    if len(limits) > _CLASSES:
        limits = [*limits[: _CLASSES - 1], limits[-1]]
    return limits


def _fill(hosts: Sequence[HostOffer], order: Sequence[int], size: int) -> dict[int, int] | None:
    """Return slots by host; None where they do not hold so many."""
    if size <= 0:
        return {} if size == 0 else None
    left, counts = size, dict[int, int]()
    for place, index in enumerate(order):
        slots = hosts[index].slots
        if slots >= left:
            # The last host: of those that are large enough, the smallest, the first of equals.
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
    """Return the slowness of steps where ranks on hosts train together; 1 without any.

    Args:
        ranks: (slowness, ranks) of each host.
        unequal_shares: whether slow ranks get fewer examples; else all wait for the slowest.
        constant: part of a pass that does not depend on its examples; any shape.
        least: smallest share of a rank, relative to an equal one; the same shape.

    Returns:
        Shape of ``constant``.

    >>> float(pace([(1.0, 3), (2.0, 1)], unequal_shares=False))
    2.0
    >>> pace([(1.0, 3), (2.0, 1)], unequal_shares=True, constant=[0.0, 0.8]).round(2).tolist()
    [1.14, 1.6]
    """
    if unequal_shares and ranks:
        slowness, numbers = zip(*ranks, strict=True)
        return balanced_slowness(slowness, numbers, constant, least)
    return np.full(np.shape(constant), max((slow for slow, _ in ranks), default=1.0))

"""Find the cheapest hosts that have enough slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np


class PricedHost(Protocol):
    """A host of a hostfile, or of a trace."""

    @property
    def name(self) -> str: ...

    @property
    def slots(self) -> int: ...

    @property
    def price(self) -> float | None: ...


_Host = TypeVar("_Host", bound=PricedHost)


def hourly_price(hosts: Sequence[PricedHost]) -> float:
    """Return the total price of hosts [currency per hour]; an unknown price counts as 0."""
    return sum(host.price or 0.0 for host in hosts)


def cheapest_hosts(hosts: Sequence[_Host], slots: int) -> tuple[_Host, ...] | None:
    """Return the cheapest hosts with at least so many slots together; None if all have fewer."""
    # A knapsack: the least price of each number of slots with the hosts so far, and whether each
    # host is part of it.
    prices = np.full(slots + 1, np.inf)
    prices[0] = 0.0
    taken = np.zeros((len(hosts), slots + 1), bool)
    wanted = np.arange(slots + 1)
    for number, host in enumerate(hosts):
        with_it = prices[np.maximum(0, wanted - host.slots)] + hourly_price([host])
        taken[number] = with_it < prices
        prices = np.minimum(prices, with_it)
    if np.isinf(prices[slots]):
        return None
    chosen, missing = [], slots
    for host, took in zip(reversed(hosts), taken[::-1], strict=True):
        if took[missing]:
            chosen.append(host)
            missing = max(0, missing - host.slots)
    return tuple(reversed(chosen))

"""Which hosts have enough slots and cost least together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np

__all__ = ["PricedHost", "cheapest_hosts", "hourly_price"]


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
    """What hosts cost together [currency per hour]; one without a price costs nothing."""
    return sum(host.price or 0.0 for host in hosts)


def cheapest_hosts(hosts: Sequence[_Host], slots: int) -> tuple[_Host, ...] | None:
    """The hosts with so many slots that cost least together; None where all have fewer."""
    # The least that so many slots cost with the hosts so far, and which hosts made it so.
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

"""Which hosts have enough slots and cost least together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

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
    chosen: list[tuple[_Host, ...] | None] = [()] + [None] * slots
    for host in hosts:
        for wanted in range(slots, 0, -1):
            rest = chosen[max(0, wanted - host.slots)]
            if rest is None:
                continue
            found, with_it = chosen[wanted], (*rest, host)
            if found is None or hourly_price(with_it) < hourly_price(found):
                chosen[wanted] = with_it
    return chosen[slots]

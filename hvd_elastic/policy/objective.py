"""Define the objective of a run and the parameters of the policy; find the cheapest hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

OBJECTIVES = ("goodput", "efficiency", "cost")


@dataclass(frozen=True)
class Objective:
    """Objective of a run.

    ``goodput``: the most goodput. ``efficiency``: the most goodput with a least speedup per slot.
    ``cost``: the most goodput within a budget, or the least cost that meets a deadline.

    Attributes:
        kind: ``goodput``, ``efficiency`` or ``cost``.
        min_speedup_per_slot: for ``efficiency``: least speedup over one slot, divided by the
            number of slots, in (0, 1]. Source: Pollux, OSDI 2021, section 4.2 (the speedup).
        budget: for ``cost``: largest price of the hosts in use [currency per hour].
        deadline_s: for ``cost``: time from the start until the target is reached [s].
        target: for ``deadline_s``: number of useful examples.

    The command line checks that the values fit together.
    """

    kind: str = "goodput"
    min_speedup_per_slot: float = 0.5
    budget: float | None = None
    deadline_s: float | None = None
    target: float | None = None


@dataclass(frozen=True)
class Parameters:
    """Parameters of the policy.

    Attributes:
        horizon_s: time within which a change has to pay off [s], above 0.
        min_gain: least net gain of a change over the horizon, relative to staying.
        cooldown_s: least time between two changes by the policy [s].
        cooldown_pauses: the same in pauses of a rescale; the longer time holds. Each change after
            the second doubles it, until hosts or step times change.
        max_cooldown_s: upper limit of the cool-down [s].
        confirmations: number of consecutive decisions, above 0, that must agree on the direction.
        evidence: number of windows, above 0, timed in the current allocation before a decision.
        trial_s: duration of a try that turns out badly [s].
        slot_worth: part of the mean goodput of the slots in use that a further slot must bring.
        max_uncertainty: upper limit of the standard deviation of the logarithm of a goodput; with
            the wide priors almost any gain would otherwise seem possible.
        silence_s: time without a measurement after which nothing is decided [s].
        deadline_margin: part of the time left that is kept in reserve.
    """

    horizon_s: float = 600.0
    min_gain: float = 0.02
    cooldown_s: float = 5.0
    cooldown_pauses: float = 10.0
    max_cooldown_s: float = 600.0
    confirmations: int = 3
    evidence: int = 5
    trial_s: float = 15.0
    slot_worth: float = 0.03
    max_uncertainty: float = 0.5
    silence_s: float = 30.0
    deadline_margin: float = 0.03


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
    import numpy as np

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

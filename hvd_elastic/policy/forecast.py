"""Predict throughput, goodput, time and cost for other numbers of hosts, with uncertainty."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from hvd_elastic.model.goodput import best_batch_plan
from hvd_elastic.model.shares import LEAST_SHARE
from hvd_elastic.policy.evidence import Evidence
from hvd_elastic.policy.scoring import pace
from hvd_elastic.policy.snapshot import HostOffer

_SPREAD = 1.2816
"""Standard deviations either way that hold 80 % of a normal distribution."""

_EVERY_SIZE = 16
"""Most slots for which every number of slots has a row of its own."""


@dataclass(frozen=True)
class Forecast:
    """Predicted performance on a number of hosts, at the best batch plan.

    Attributes:
        rate: price of the hosts [currency per hour]; None: not known.
        unknown: reason why nothing is predicted, if so; the fields below then have their defaults.
        seen: whether this number of slots on this number of hosts was timed.
        throughput: predicted throughput [examples/s].
        efficiency: statistical efficiency, in (0, 1].
        goodput: product of the two [useful examples/s].
        low, high: range of the goodput that has a probability of 80 % by the model.
        speedup: ratio of the goodput to that of the first entry.
        time_s: time until the target is reached [s]; None: there is no target.
        cost: cost of that time; None: there is no target or no price.
    """

    hosts: int
    slots: int
    rate: float | None
    unknown: str = ""
    seen: bool = False
    global_batch_size: int = 0
    accumulation_steps: int = 0
    throughput: float = math.nan
    efficiency: float = math.nan
    goodput: float = math.nan
    low: float = math.nan
    high: float = math.nan
    speedup: float = math.nan
    time_s: float | None = None
    cost: float | None = None


def forecast(
    evidence: Evidence,
    hosts: Sequence[HostOffer],
    most_hosts: int | None = None,
    slots: int | None = None,
    price: float | None = None,
    target: float | None = None,
) -> list[Forecast]:
    """Return a forecast for each size that has a batch plan, the smallest first.

    The noise scale is assumed to stay the same. Nothing is predicted for sizes at which more ranks
    share a core than in any timed step, since timed steps do not tell what sharing costs.

    Args:
        hosts: hosts of the run. If more are needed, hosts like the commonest of them are assumed.
        most_hosts: largest number of hosts, for a forecast of each number of whole hosts; None:
            the sizes that ``hosts`` allow, by slots for few slots and by whole hosts for many.
        slots: slots of each host; None: as in ``hosts``.
        price: price of each host [currency per hour]; None: as in ``hosts``.
        target: number of useful examples still to be processed; None: no target.

    Raises:
        ValueError: too little was measured; says what is missing.
    """
    model, limits = evidence.model(), evidence.limits
    if model is None or limits is None:
        raise ValueError(
            "no step was timed for long enough to predict anything: a run has to train for some "
            "ten seconds on each size that it tries"
        )
    noise = evidence.noise
    if math.isnan(noise):
        raise ValueError(
            "the gradient noise scale of this run is not known yet, so the gain of larger batches "
            "cannot be predicted; let the run train for another minute"
        )
    offers = _offers(evidence, hosts, most_hosts, slots, price)
    found: list[Forecast] = []
    alone = math.nan
    for used in _sizes(offers, by_slots=most_hosts is None):
        number, ranks = len(used), sum(host.slots for host in used)
        slow = partial(_pace, evidence, [(host.slowness, host.slots) for host in used])
        best = best_batch_plan(model, noise, limits, number, ranks, slow)
        if best is None:
            continue
        rates = [host.price for host in used]
        rate = None if None in rates else sum(p for p in rates if p is not None)
        unknown = evidence.cores.why_unknown((host.name, host.slots) for host in used)
        if unknown:
            found.append(Forecast(number, ranks, rate, unknown))
            continue
        alone = best.goodput if math.isnan(alone) else alone
        spread = math.exp(_SPREAD * math.hypot(best.uncertainty, model.noise))
        time_s = None if target is None else target / best.goodput
        found.append(
            Forecast(
                hosts=number,
                slots=ranks,
                seen=(number, ranks) in evidence.timings.worlds,
                global_batch_size=best.plan.global_batch_size,
                accumulation_steps=best.plan.accumulation_steps,
                throughput=best.throughput,
                efficiency=best.efficiency,
                goodput=best.goodput,
                low=best.goodput / spread,
                high=best.goodput * spread,
                speedup=best.goodput / alone,
                rate=rate,
                time_s=time_s,
                cost=None if time_s is None or rate is None else rate * time_s / 3600,
            )
        )
    if not found:
        raise ValueError(
            "no batch plan keeps to the limits of the batch size on any number of hosts"
        )
    return found


def _pace(
    evidence: Evidence,
    speeds: Sequence[tuple[float, int]],
    atomic: np.ndarray,
    extra: np.ndarray,
) -> np.ndarray:
    constant = evidence.speeds.fixed.examples / (evidence.speeds.fixed.examples + atomic)
    least = np.minimum(LEAST_SHARE / (atomic * (extra + 1)), 1.0)
    return pace(speeds, evidence.speeds.unequal, constant, least)


def _offers(
    evidence: Evidence,
    hosts: Sequence[HostOffer],
    most_hosts: int | None,
    slots: int | None,
    price: float | None,
) -> list[HostOffer]:
    """Return the hosts in the order of use: fast and large hosts first, then assumed, then slow."""
    known = [
        HostOffer(
            host.name,
            host.slots if slots is None else slots,
            host.price if price is None else price,
            evidence.speeds.slowness(host.name),
        )
        for host in hosts
    ]
    known.sort(key=lambda host: (host.slowness, -host.slots))
    kinds = [(host.slots, host.price) for host in known] or [(slots or 1, price)]
    common = max(kinds, key=kinds.count)
    wanted = max(1, len(known)) if most_hosts is None else most_hosts
    more = [HostOffer("", *common) for _ in range(wanted - len(known))]
    fast = [host for host in known if host.slowness == 1]
    return [*fast, *more, *known[len(fast) :]][:wanted]


def _sizes(offers: Sequence[HostOffer], *, by_slots: bool) -> list[list[HostOffer]]:
    """Return the hosts of each size, with the slots used on them."""
    whole = [list(offers[:number]) for number in range(1, len(offers) + 1)]
    if not by_slots or sum(host.slots for host in offers) > _EVERY_SIZE:
        return whole
    return [
        [*hosts[:-1], replace(hosts[-1], slots=slots)]
        for hosts in whole
        for slots in range(1, hosts[-1].slots + 1)
    ]

"""Decide how many spot and on-demand machines a run should have, and where to ask for them.

Every spot machine that its price allows is taken. Machines on demand fill up only when the deadline
forces it. There are no bids: a low maximum price leads to more interruptions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from hvd_elastic.formatting import count, duration_words

_SIMILAR = 1.25
"""Spot pools up to this many times as dear as the cheapest are used alike: machines in several
pools are rarely interrupted together, which is worth more than a small difference in price."""
_FORCED_STARTS = 2.0
"""Start-up times that are kept in reserve before the deadline: one for the machines on demand and
one for a spot machine that is interrupted in the meantime."""


class MachinePool(Protocol):
    """Machines of one type in one zone, spot or on demand."""

    @property
    def spot(self) -> bool: ...

    @property
    def price(self) -> float | None: ...

    @property
    def slots(self) -> int: ...


_Pool = TypeVar("_Pool", bound=MachinePool)


@dataclass(frozen=True)
class MachineNeed:
    """What a run has and needs.

    Attributes:
        most: most machines of the run.
        spot: number of its spot machines, starting ones included.
        on_demand: number of its machines on demand, starting ones included.
        at_risk: number of its spot machines that the cloud may end soon; each of them gets a
            replacement.
        left_s: time until the deadline [s]; infinite: there is none.
        work_s: time that the rest of the work takes on ``most`` machines [s]; None: unknown.
        start_s: time from the request for a machine until it trains [s].
        budget: largest price of all machines together [currency per hour]; None: no limit.
    """

    most: int
    spot: int = 0
    on_demand: int = 0
    at_risk: int = 0
    left_s: float = math.inf
    work_s: float | None = None
    start_s: float = 300.0
    budget: float | None = None


@dataclass(frozen=True)
class MachinePlan:
    """Numbers of machines to have.

    Attributes:
        spot: number of spot machines, as far as the cloud has them.
        on_demand: number of machines on demand. Those that run stay to the end: spot machines in
            their place could be interrupted, and there is no time for another start.
        reason: why, in words.
    """

    spot: int
    on_demand: int
    reason: str


def plan_machines(need: MachineNeed, pools: Sequence[MachinePool]) -> MachinePlan:
    """Decide how many machines of each kind to have.

    Args:
        pools: pools that may be asked for, without those that had no capacity lately. Without a
            spot pool among them, all machines are on demand unless spot machines are held.

    Example: with 8 hours left for 4 hours of work, no machine on demand is needed.

    >>> from collections import namedtuple
    >>> pool = namedtuple("pool", "spot price slots")
    >>> pools = [pool(True, 1.0, 4), pool(False, 3.0, 4)]
    >>> plan = plan_machines(MachineNeed(16, 5, left_s=28800.0, work_s=14400.0), pools)
    >>> plan.spot, plan.on_demand
    (16, 0)
    >>> late = plan_machines(MachineNeed(16, 5, left_s=14900.0, work_s=14400.0), pools)
    >>> late.spot, late.on_demand
    (5, 11)
    """
    demand = cheapest_pool([pool for pool in pools if not pool.spot])
    spot = cheapest_pool(useful_pools(pools, spot=True))
    if spot is None and not need.spot and not any(pool.spot for pool in pools):
        return _within_budget(
            need, MachinePlan(0, need.most, "no spot pools are used"), None, demand
        )
    safe = max(0, need.spot - need.at_risk)
    replaced = (
        f", {count(need.at_risk, 'replacement')} for machines at risk" if need.at_risk else ""
    )
    wanted = need.most + need.at_risk
    if math.isinf(need.left_s):
        plan = MachinePlan(wanted, 0, f"all on spot machines{replaced}: there is no deadline")
        return _within_budget(need, plan, spot, demand)
    left = f"{duration_words(max(0.0, need.left_s))} are left until the deadline"
    if need.work_s is None:
        # A deadline must not pass because there was nothing to measure the work on.
        measuring = int(safe + need.on_demand == 0)
        why = f"{left}, and how long the work takes is not known yet"
        by = "spot machines and one on demand" if measuring else "spot machines"
        plan = MachinePlan(wanted, measuring, f"{by}{replaced}: {why}")
        return _within_budget(need, plan, spot, demand)
    times = f"{left} for {duration_words(need.work_s)} of work on {count(need.most, 'machine')}"
    if need.left_s - need.work_s > _FORCED_STARTS * need.start_s:
        plan = MachinePlan(wanted, 0, f"all on spot machines{replaced}: {times}")
    else:
        filled = min(need.most, max(need.on_demand, need.most - safe))
        kept = need.most - filled + need.at_risk
        on_demand = f"{filled} on demand up to the end" if filled else "all on spot machines"
        plan = MachinePlan(kept, filled, f"{on_demand}{replaced}: {times}")
    return _within_budget(need, plan, spot, demand)


def next_order(
    plan: MachinePlan,
    pools: Sequence[_Pool],
    held: Mapping[_Pool, int],
    number: int,
    budget: float | None = None,
) -> tuple[_Pool, int] | None:
    """Return the pool to ask for machines now, and how many to ask for; None: no pool is of use.

    After the answer, add what was started to ``held``, leave out a pool that had fewer, and call
    this again. Spot pools that are not cheaper than on demand are of no use. The others come first.
    The cheapest for a slot and those about as cheap share the machines evenly; dearer pools come
    after them, in the order of their prices.

    Args:
        plan: numbers of machines to have.
        pools: pools that may be asked.
        held: number of the run's machines in each pool, in those that may not be asked as well.
        number: number of machines that are missing.
        budget: what further machines may cost [currency per hour]; None: no limit.
    """
    for spot, wanted in ((True, plan.spot), (False, plan.on_demand)):
        missing = wanted - sum(there for pool, there in held.items() if pool.spot == spot)
        useful = useful_pools(pools, spot=spot)
        share: Counter[_Pool] = Counter()
        left = math.inf if budget is None else budget + 1e-9
        for _ in range(min(number, missing)):
            affordable = [
                pool
                for pool in useful
                if budget is None or (pool.price is not None and pool.price <= left)
            ]
            if not affordable:
                break
            ranks = _ranks(affordable, Counter(held) + share)
            chosen = min(affordable, key=ranks.__getitem__)
            share[chosen] += 1
            left -= chosen.price or 0.0
        if share:
            return next(iter(share.items()))
    return None


def _ranks(
    pools: Sequence[_Pool], there: Mapping[_Pool, int]
) -> dict[_Pool, tuple[bool, int, float]]:
    """Return by pool what orders pools of one kind; the least is asked for the next machine."""
    limit = _SIMILAR * min(map(slot_price, pools))
    similar = {pool: pool.spot and slot_price(pool) <= limit for pool in pools}
    return {
        pool: (not similar[pool], there.get(pool, 0) * similar[pool], slot_price(pool))
        for pool in pools
    }


def useful_pools(pools: Sequence[_Pool], *, spot: bool) -> list[_Pool]:
    """Return the pools of one kind, without spot pools that are not cheaper than on demand."""
    demand = min((slot_price(pool) for pool in pools if not pool.spot), default=math.inf)
    return [
        pool
        for pool in pools
        if pool.spot == spot and not (spot and demand <= slot_price(pool) < math.inf)
    ]


def cheapest_pool(pools: Sequence[_Pool]) -> _Pool | None:
    """Return the pool with the lowest price for a slot; None: there is no pool."""
    return min(pools, key=slot_price, default=None)


def slot_price(pool: MachinePool) -> float:
    """Return the price of a slot of a pool [currency per hour]; infinite: not known."""
    return math.inf if pool.price is None else pool.price / max(1, pool.slots)


def _within_budget(
    need: MachineNeed, plan: MachinePlan, spot: MachinePool | None, demand: MachinePool | None
) -> MachinePlan:
    """Return the plan with as many machines as the budget pays for, those on demand first."""
    if need.budget is None:
        return plan
    left, counts = need.budget, {}
    for kind, wanted, pool in (("demand", plan.on_demand, demand), ("spot", plan.spot, spot)):
        price = pool.price if pool is not None and pool.price is not None else 0.0
        counts[kind] = wanted if price == 0 else min(wanted, int(left / price + 1e-9))
        left -= counts[kind] * price
    if (counts["spot"], counts["demand"]) == (plan.spot, plan.on_demand):
        return plan
    return MachinePlan(
        counts["spot"], counts["demand"], f"{plan.reason}; no more within {need.budget:g} an hour"
    )

"""How many machines of each kind, and from which pools."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_elastic.policy.spot import (
    MachineNeed,
    MachinePlan,
    next_order,
    plan_machines,
    useful_pools,
)

HOUR = 3600.0


@dataclass(frozen=True)
class Pool:
    name: str
    spot: bool
    price: float | None = None
    slots: int = 1


CHEAP, SIMILAR, DEAR = (Pool(n, True, p) for n, p in (("a", 1.0), ("b", 1.2), ("c", 2.0)))
DEMAND = Pool("a", False, 3.0)
POOLS = [CHEAP, SIMILAR, DEAR, DEMAND]


def need(**given) -> MachineNeed:
    return MachineNeed(**{"most": 8, "start_s": 300.0, **given})


def test_every_spot_machine_is_wanted_and_none_on_demand_while_there_is_time():
    plan = plan_machines(need(spot=3, left_s=10 * HOUR, work_s=6 * HOUR), POOLS)
    assert (plan.spot, plan.on_demand) == (8, 0)
    assert "10 h" in plan.reason
    assert "6 h" in plan.reason


def test_without_a_deadline_nothing_on_demand_is_asked_for():
    plan = plan_machines(need(spot=0, work_s=6 * HOUR), POOLS)
    assert (plan.spot, plan.on_demand) == (8, 0)
    assert "no deadline" in plan.reason


def test_work_that_is_not_known_is_measured_on_demand_if_there_is_no_spot_machine():
    plan = plan_machines(need(left_s=HOUR), POOLS)
    assert (plan.spot, plan.on_demand) == (8, 1)
    assert "not known yet" in plan.reason
    assert plan_machines(need(spot=1, left_s=HOUR), POOLS).on_demand == 0


@pytest.mark.parametrize(("left_s", "on_demand"), [(6 * HOUR + 601, 0), (6 * HOUR + 599, 5)])
def test_the_deadline_forces_machines_on_demand_two_starts_before_it_is_too_late(left_s, on_demand):
    plan = plan_machines(need(spot=3, left_s=left_s, work_s=6 * HOUR), POOLS)
    assert (plan.spot, plan.on_demand) == (8 - on_demand, on_demand)


def test_machines_on_demand_stay_to_the_end():
    plan = plan_machines(need(spot=8, on_demand=5, left_s=HOUR + 299, work_s=HOUR), POOLS)
    assert (plan.spot, plan.on_demand) == (3, 5)
    assert "up to the end" in plan.reason


def test_a_machine_at_risk_gets_a_replacement():
    plan = plan_machines(need(spot=8, at_risk=2), POOLS)
    assert (plan.spot, plan.on_demand) == (10, 0)
    assert "2 replacements" in plan.reason


def test_a_budget_bounds_both_kinds():
    plan = plan_machines(need(spot=0, budget=5.0), POOLS)
    assert (plan.spot, plan.on_demand) == (5, 0)
    forced = plan_machines(need(spot=0, left_s=HOUR, work_s=HOUR, budget=10.0), POOLS)
    assert forced.on_demand == 3
    assert "no more within 10 an hour" in forced.reason


def test_without_spot_pools_all_are_on_demand():
    plan = plan_machines(need(), [DEMAND])
    assert (plan.spot, plan.on_demand) == (0, 8)


def test_spot_that_is_not_cheaper_is_of_no_use():
    dear = Pool("d", True, 3.0)
    assert useful_pools([*POOLS, dear], spot=True) == [CHEAP, SIMILAR, DEAR]
    unknown = Pool("e", True, None)
    assert unknown in useful_pools([*POOLS, unknown], spot=True)


def ordered(plan, pools, number, held=None, budget=None, has=None):
    """Return the orders up to the end, as (name, number), if pools have so many machines."""
    there, usable, orders = dict(held or {}), [*pools], []
    while order := next_order(plan, usable, there, number, budget):
        pool, asked = order
        had = min(asked, (has or {}).get(pool, asked))
        orders.append((pool.name, asked))
        there[pool] = there.get(pool, 0) + had
        number -= had
        if budget is not None:
            budget -= had * pool.price
        if had < asked:
            usable.remove(pool)
    return orders


def test_machines_are_spread_over_pools_of_similar_price():
    dear_first = [DEAR, SIMILAR, CHEAP, DEMAND]
    assert ordered(MachinePlan(8, 0, ""), dear_first, 6) == [("a", 3), ("b", 3)]
    assert ordered(MachinePlan(8, 0, ""), dear_first, 3, {CHEAP: 4, SIMILAR: 1}) == [("b", 3)]


def test_dearer_spot_pools_and_then_those_on_demand_are_asked_for_what_is_missing():
    has = {CHEAP: 1, SIMILAR: 2, DEAR: 1}
    orders = ordered(MachinePlan(8, 8, ""), POOLS, 8, has=has)
    assert orders == [("a", 4), ("b", 7), ("c", 5), ("a", 4)]
    assert ordered(MachinePlan(8, 0, ""), POOLS, 8, has=has) == orders[:3]


def test_orders_stay_within_the_plan_and_the_budget():
    assert ordered(MachinePlan(5, 2, ""), POOLS, 8, {CHEAP: 4}) == [("b", 1), ("a", 2)]
    assert ordered(MachinePlan(8, 8, ""), POOLS, 8, budget=3.3) == [("a", 2), ("b", 1)]
    unknown = Pool("e", True, None)
    assert ordered(MachinePlan(8, 0, ""), [unknown, CHEAP], 2, budget=9.0) == [("a", 2)]


def test_prices_are_compared_by_slot():
    large = Pool("large", False, 8.0, slots=4)
    assert ordered(MachinePlan(0, 1, ""), [DEMAND, large], 1) == [("large", 1)]


@given(
    most=st.integers(1, 64),
    spot=st.integers(0, 80),
    on_demand=st.integers(0, 64),
    at_risk=st.integers(0, 8),
    left_s=st.floats(0, 1e6),
    work_s=st.floats(0, 1e6),
)
def test_together_there_are_always_enough_machines_wanted(
    most, spot, on_demand, at_risk, left_s, work_s
):
    given = MachineNeed(most, spot, on_demand, min(at_risk, spot), left_s, work_s)
    plan = plan_machines(given, POOLS)
    assert plan.spot + plan.on_demand >= most
    assert 0 <= plan.on_demand <= most
    assert 0 <= plan.spot <= most + given.at_risk

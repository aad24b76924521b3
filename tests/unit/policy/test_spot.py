"""How many machines of each kind, and from which pools."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_elastic.policy.spot import (
    MachineNeed,
    order_pools,
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


def test_machines_are_spread_over_pools_of_similar_price():
    held = {CHEAP: 0, SIMILAR: 0, DEAR: 0}
    for _ in range(6):
        held[order_pools([DEAR, SIMILAR, CHEAP], held)[0]] += 1
    assert held == {CHEAP: 3, SIMILAR: 3, DEAR: 0}
    assert order_pools([DEAR, SIMILAR, CHEAP], held)[-1] == DEAR


def test_prices_are_compared_by_slot():
    large = Pool("large", False, 8.0, slots=4)
    assert order_pools([DEMAND, large], {})[0] == large


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

"""A day on spot machines: its trace, and what an instance costs in it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.spot_day import Day, make_trace, undisturbed
from hvd_elastic.sim.spot import SpotPool, SpotTrace


def test_an_undisturbed_day_has_all_machines_at_the_same_prices():
    trace = make_trace(1, 12, 2, 3)
    calm = undisturbed(trace)
    assert {count for pool in calm.pools for count in pool.counts} == {3}
    assert [pool.prices for pool in calm.pools] == [pool.prices for pool in trace.pools]
    assert any(pool.counts[0] for pool in trace.pools)


def test_an_instance_costs_what_the_trace_says_while_it_runs():
    """A tick is half an hour; an hour of the trace takes 20 s."""
    trace = SpotTrace(1800.0, (SpotPool("a", (1, 1, 1, 1), (0.1, 0.2, 0.3, 0.4)),))
    cluster = SimpleNamespace(folder=Path("/home/virtual/vc1"))
    cloud: Any = SimpleNamespace(
        bodies=SimpleNamespace(cluster=cluster), instances=[], prices={"g5.xlarge": 2.0}
    )
    day = Day("day", cloud, trace, 20.0, 2.0, 1)
    day.began = 1000.0
    pool = ("g5.xlarge", "us-east-1a", True)
    instance: Any = SimpleNamespace(pool=pool, began=1005.0, ended=1025.0)
    # From 0.25 h to 1.25 h: a quarter at 0.1, a half at 0.2 and a quarter at 0.3, of 2.0 an hour.
    assert day._cost(instance) == pytest.approx(2.0 * (0.025 + 0.1 + 0.075))

"""Runs in virtual time, and traces as users write them."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.controller.adaptdl import AdaptDLRule
from hvd_elastic.control.scaling import ScalingConfig
from hvd_elastic.errors import UsageError
from hvd_elastic.model.goodput import BatchLimits
from hvd_elastic.policy.objective import Objective
from hvd_elastic.policy.snapshot import HostOffer
from hvd_elastic.sim.run import simulate
from hvd_elastic.sim.static import best_at, best_static
from hvd_elastic.sim.trace import Change, Trace, Workload, read_trace

WORK = Workload(
    *(0.01, 0.002, 0.002, 1e-4, 0.005, 2e-4, 1.5),
    limits=BatchLimits(64, 1024),
    noise_scale=(500.0, 500.0),
    examples=1e12,
)
HOSTS = tuple(HostOffer(f"n{number}", 2, 1.0) for number in range(3))
TRACE = Trace(HOSTS, WORK, 600.0)

FILE: dict[str, Any] = {
    "duration_s": 600,
    "hosts": [{"name": "n[0-2]", "slots": 2, "price": 1.0}],
    "workload": {
        "alpha_c": 0.01,
        "beta_c": 0.002,
        "alpha_r": 0.002,
        "beta_r": 1e-4,
        "alpha_n": 0.005,
        "beta_n": 2e-4,
        "initial_batch_size": 64,
        "max_batch_size": 1024,
        "noise_scale": 500,
        "examples": 1e12,
    },
    "changes": [{"at_s": 300, "remove": ["n2"]}],
}


def written(folder: Path, data: Any) -> Path:
    path = folder / "trace.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    return path


def test_the_policy_finds_most_of_the_best():
    result = simulate(TRACE, ScalingConfig(), with_best=True)
    late = [s for s in result.samples if s.at_s > 60 and s.goodput > 0]
    assert sum(s.goodput / s.best for s in late) / len(late) > 0.9
    assert result.decisions[0].action == "grow"
    assert "useful examples/s" in result.decisions[0].reason


def test_a_fixed_policy_changes_nothing():
    result = simulate(dataclasses.replace(TRACE, np=2), None)
    assert result.decisions == []
    assert {sample.slots for sample in result.samples} == {2}


def test_the_same_seed_gives_the_same_run():
    first, again = (simulate(TRACE, ScalingConfig(), seed=4) for _ in range(2))
    assert first.done == again.done
    assert first.decisions == again.decisions


def test_hosts_that_go_are_not_used_any_more():
    trace = dataclasses.replace(TRACE, changes=(Change(300.0, remove=("n1", "n2")),))
    result = simulate(trace, ScalingConfig())
    assert max(s.slots for s in result.samples if s.at_s < 300) > 2
    assert all(sample.slots <= 2 for sample in result.samples if sample.at_s > 310)


LATER = dataclasses.replace(TRACE, duration_s=1500.0)
LARGE = tuple(HostOffer(f"n{number}", 4, 1.0) for number in range(4))


@pytest.mark.parametrize(
    "change",
    [
        Change(900.0, link=10.0),
        Change(900.0, slow={"n1": 3.0}),
        Change(900.0, add=(HostOffer("m0", 2, 1.0), HostOffer("m1", 2, 1.0))),
        Change(900.0, remove=("n2",)),
    ],
)
def test_after_a_change_it_is_near_the_new_best_within_a_minute(change):
    trace = dataclasses.replace(LATER, changes=(change,))
    result = simulate(trace, ScalingConfig(), with_best=True)
    late = [s for s in result.samples if s.at_s > 960 and s.goodput > 0]
    assert min(s.goodput / s.best for s in late) > 0.9
    assert len([d for d in result.decisions if d.at_s >= 900]) <= 3


SLOW = (*HOSTS[:2], HostOffer("n2", 2, 1.0, slowness=3.0))


def test_slow_ranks_get_smaller_shares_as_in_a_real_job():
    trace = dataclasses.replace(TRACE, hosts=SLOW, np=6)
    shared, equal = (
        simulate(dataclasses.replace(trace, unequal_shares=unequal), None, with_best=True)
        for unequal in (True, False)
    )
    assert shared.done > 1.3 * equal.done
    last = shared.samples[-1]
    assert last.goodput > 0.85 * last.best, "with all six slots, which are not the best choice"


@pytest.mark.parametrize("seed", [1, 4])
def test_with_many_slow_ranks_it_is_near_the_best_whatever_chance_does(seed: int) -> None:
    """Whole examples of slow ranks weigh much, and three reviews say little about each rank."""
    hosts = tuple(HostOffer(f"n{n}", 4, 1.0, slowness=1.0 if n < 3 else 3.0) for n in range(5))
    result = simulate(
        dataclasses.replace(TRACE, hosts=hosts), ScalingConfig(), seed, with_best=True
    )
    assert result.samples[-1].goodput > 0.95 * result.samples[-1].best


def test_a_slow_host_is_kept_or_dropped_by_what_it_brings():
    best = best_at(WORK, SLOW, 1.0, 500.0)
    assert best.goodput > best_at(WORK, SLOW, 1.0, 500.0, unequal_shares=False).goodput
    constant = dataclasses.replace(WORK, alpha_c=0.2)
    assert best_at(constant, SLOW, 1.0, 500.0).slots == 4, "all would wait for its constant part"
    for work in (WORK, constant):
        trace = dataclasses.replace(TRACE, hosts=SLOW, workload=work, duration_s=1200.0)
        result = simulate(trace, ScalingConfig(), with_best=True)
        late = [s for s in result.samples if s.at_s > 120 and s.goodput > 0]
        assert sum(s.goodput / s.best for s in late) / len(late) > 0.9


def test_no_shares_are_better_than_those_of_the_best_choice():
    """Beside random shares on all six slots."""
    rng = np.random.default_rng(0)
    size, slowness = 256, np.asarray([1.0, 1.0, 1.0, 1.0, 3.0, 3.0])
    best = best_at(WORK, SLOW, 1.0, 500.0)
    for shares in rng.dirichlet(8 / slowness, size=200) * size:
        own_s = slowness * (WORK.alpha_c + WORK.beta_c * shares)
        equal_s = WORK.alpha_c + WORK.beta_c * size / 6
        step_s = float(WORK.model().step_s(3, 6, size / 6, 0, max(own_s) / equal_s))
        assert size / step_s * (500 + 64) / (500 + size) <= best.goodput * 1.01


def test_adaptdl_doubles_what_it_has_profiled_once_a_minute():
    work = dataclasses.replace(WORK, beta_c=0.02)
    trace = dataclasses.replace(TRACE, hosts=LARGE, workload=work, unequal_shares=False)
    result = simulate(trace, ScalingConfig(), rule=AdaptDLRule)
    assert [d.slots for d in result.decisions[:4]] == [2, 4, 8, 16]
    times = [d.at_s for d in result.decisions[:4]]
    assert all(60 <= after - before < 70 for before, after in itertools.pairwise(times))


def test_adaptdl_stays_small_where_slots_bring_little():
    work = dataclasses.replace(WORK, alpha_n=2.0, noise_scale=(10.0, 10.0))
    trace = dataclasses.replace(TRACE, hosts=LARGE, workload=work, unequal_shares=False)
    result = simulate(trace, ScalingConfig(), rule=AdaptDLRule)
    assert result.samples[-1].slots <= 4, "one host"


def test_the_noise_scale_goes_from_its_first_to_its_last_value():
    work = dataclasses.replace(WORK, noise_scale=(100.0, 10_000.0), examples=1000.0)
    assert [work.noise_at(done) for done in (0, 500, 1000, 1500)] == pytest.approx(
        [100.0, 1000.0, 10_000.0, 10_000.0]
    )


def test_a_budget_is_never_exceeded():
    result = simulate(TRACE, ScalingConfig(objective=Objective("cost", budget=2.0)))
    assert max(sample.rate for sample in result.samples) <= 2.0
    assert result.decisions, "within it, it grows"


def test_best_static_is_at_least_every_choice_that_is_tried():
    best = best_at(WORK, HOSTS, 1.0, 500.0)
    for hosts in range(1, 4):
        for ranks in range(hosts, 2 * hosts + 1):
            for size in (64, 100, 200, 400, 800, 1024):
                step_s = float(WORK.model().step_s(hosts, ranks, size / ranks, 0))
                goodput = size / step_s * (500 + 64) / (500 + size)
                assert goodput <= best.goodput * 1.01
    static = best_static(TRACE)
    assert static.goodput == pytest.approx(best.goodput, rel=0.01)
    assert (static.slots, static.batch) == (best.slots, best.batch)


def test_a_trace_is_read(tmp_path):
    trace = read_trace(written(tmp_path, FILE))
    assert [host.name for host in trace.hosts] == ["n0", "n1", "n2"]
    assert trace.changes == (Change(300.0, remove=("n2",)),)
    assert trace.workload.noise_scale == (500.0, 500.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"duration_s": -1}, "Expected `float` > 0.0 - at `$.duration_s`"),
        ({"durations": 1}, "unknown field `durations`"),
        ({"hosts": []}, "hosts is empty"),
        ({"hosts": [{"name": "n[3-1]"}]}, "is not a range"),
        ({"hosts": [{"name": "a"}, {"name": "a"}]}, "host a is there twice"),
        ({"workload": 3}, "Expected `object`, got `int` - at `$.workload`"),
        (
            {"workload": {**FILE["workload"], "alpha_c": "x"}},
            "Expected `float`, got `str` - at `$.workload.alpha_c`",
        ),
        ({"min_np": 5, "max_np": 2}, "min_np 5 is above max_np 2"),
        ({"unequal_shares": "yes"}, "Expected `bool`, got `str` - at `$.unequal_shares`"),
        ({"changes": [{"at_s": 1, "slow": {"zz": 2}}]}, "names no host: 'zz'"),
        ({"changes": [{"at_s": 9, "remove": ["n0", "n1", "n2"]}]}, "leaves no host to train on"),
        ({"duration_s": 10**400}, "Number out of range - at `$.duration_s`"),
        ({"np": 99}, "np 99 is above the"),
        ({"min_np": 99}, "min_np 99 is above the"),
        ({"np": 2, "max_np": 1}, "np 2 is above max_np 1"),
        ({"max_np": 2.5}, "got `float` - at `$.max_np`"),
        ({"hosts": [{"name": "n[0-99999999]"}]}, "is more than 65536 hosts"),
        ({"hosts": [{"name": "a", "slots": 10**12}]}, "have more than 65536 slots together"),
    ],
)
def test_mistakes_in_a_trace_are_named(tmp_path, change, words):
    with pytest.raises(UsageError, match=r"trace\.json") as caught:
        read_trace(written(tmp_path, {**FILE, **change}))
    assert words in str(caught.value)


def test_zeros_in_a_range_of_a_trace_are_kept(tmp_path):
    hosts = [{"name": "n[08-10]"}]
    trace = read_trace(written(tmp_path, {**FILE, "hosts": hosts, "changes": [], "max_np": None}))
    assert [host.name for host in trace.hosts] == ["n08", "n09", "n10"]


def test_a_trace_that_is_no_json_or_not_there(tmp_path):
    with pytest.raises(UsageError, match="is not JSON"):
        read_trace(written(tmp_path, "{"))
    with pytest.raises(UsageError, match="cannot be read"):
        read_trace(tmp_path / "nothing")

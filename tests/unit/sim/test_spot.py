"""Spot machines in virtual time."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hvd_elastic.cli.planning.simulate import simulate_spot_machines
from hvd_elastic.errors import UsageError
from hvd_elastic.sim.spot import (
    RULES,
    SpotJob,
    SpotPool,
    SpotTrace,
    generate_trace,
    read_traces,
    simulate_spot,
    windows,
)

JOB = SpotJob(machines=4, work_h=6.0, deadline_h=9.0, start_s=360.0)


def trace(*counts: list[int], price: float = 0.25) -> SpotTrace:
    """Pools with the same price at all times; a tick is six minutes."""
    pools = (
        SpotPool(f"zone {number}", tuple(each), (price,) * len(each))
        for number, each in enumerate(counts)
    )
    return SpotTrace(360.0, tuple(pools))


def outcome(rule, of: SpotTrace, job: SpotJob = JOB):
    return simulate_spot(of, job, RULES[rule](of, job))


@pytest.mark.parametrize("rule", [*RULES])
def test_machines_that_stay_cost_their_time_and_one_start(rule):
    found = outcome(rule, trace([4] * 100))
    started_h = 0.1 if rule == "elastic" else (360 + JOB.lost_s) / 3600
    assert found.finished_h == pytest.approx(6 + started_h)
    assert found.cost == pytest.approx(4 * 0.25 * found.finished_h)
    assert (found.interruptions, found.on_demand_h, found.late) == (0, 0.0, False)


@pytest.mark.parametrize("rule", [*RULES])
def test_without_spot_machines_the_deadline_is_met_on_demand(rule):
    found = outcome(rule, trace([0] * 100))
    assert not found.late
    assert found.spot_h == 0.0
    assert found.relative_cost == pytest.approx(1.0, abs=0.05)


def test_part_of_the_machines_is_of_use_to_elastic_training_alone():
    half = trace([2] * 200)
    elastic, gang = outcome("elastic", half), outcome("gang", half)
    assert gang.spot_h == 0.0
    assert elastic.spot_h > 10
    assert elastic.cost < 0.85 * gang.cost
    assert not elastic.late


def test_machines_of_several_zones_train_together():
    found = outcome("elastic", trace([2] * 100, [2] * 100))
    assert found.on_demand_h == 0.0
    assert found.finished_h == pytest.approx(6.1)


def test_an_interruption_costs_a_gang_a_restart_and_the_others_go_on():
    counts = [4] * 20 + [3] + [4] * 100
    elastic, gang = outcome("elastic", trace(counts)), outcome("gang", trace(counts))
    assert (elastic.interruptions, gang.interruptions) == (1, 1)
    assert elastic.finished_h < 6.3
    assert gang.finished_h > 6.4


def test_a_trace_that_is_too_short_is_late():
    found = outcome("elastic", trace([4] * 10))
    assert found.finished_h is None
    assert found.late


def test_a_long_trace_is_one_for_each_eighth_hour():
    found = windows(trace([hour for hour in range(30) for _ in range(10)]), 12.0)
    assert [part.pools[0].counts[::10] for part in found] == [
        tuple(range(first, first + 12)) for first in (0, 8, 16)
    ]
    assert {len(part.pools[0].prices) for part in found} == {120}


def test_generated_availability_has_the_published_figures():
    rng = np.random.default_rng(0)
    counts = np.concatenate([pool.counts for pool in generate_trace(rng, 24 * 365.0, 3, 16).pools])
    assert 0.38 <= (counts > 0).mean() <= 0.52
    assert 0.02 <= ((counts > 0) & (counts < 16)).mean() <= 0.08
    up = np.diff(np.flatnonzero(np.diff(np.concatenate([[0], counts > 0, [0]]).astype(int))))[::2]
    assert up.mean() / 12 == pytest.approx(1.9, rel=0.2)


def test_elastic_training_is_cheaper_than_a_gang_on_generated_days():
    job = SpotJob()
    traces = [generate_trace(np.random.default_rng(seed), 40.0) for seed in range(8)]
    cost = {
        rule: float(np.mean([outcome(rule, each, job).relative_cost for each in traces]))
        for rule in RULES
    }
    assert cost["elastic"] < 0.95 * cost["gang"]
    assert not any(outcome("elastic", each, job).late for each in traces)


def test_published_traces_are_read(tmp_path):
    path = tmp_path / "us-east-2b.json"
    path.write_text(json.dumps({"metadata": {"gap_seconds": 300}, "data": [16.0, 3, 0]}))
    found = read_traces([path], 0.3)
    assert (found.gap_s, found.pools[0].name, found.pools[0].counts) == (
        300.0,
        "us-east-2b",
        (16, 3, 0),
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", "is not of the form"),
        ('{"metadata": {"gap_seconds": 0}, "data": [1]}', "gap_seconds"),
        ('{"metadata": {"gap_seconds": 300}, "data": []}', "data"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_trace_that_is_none_is_refused(tmp_path, text, words):
    path = tmp_path / "trace.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=r"trace\.json") as caught:
        read_traces([path], 0.3)
    assert words in str(caught.value)


def test_traces_with_other_ticks_do_not_go_together(tmp_path):
    paths = [tmp_path / f"{gap}.json" for gap in (300, 60)]
    for path in paths:
        path.write_text(f'{{"metadata": {{"gap_seconds": {path.stem}}}, "data": [1]}}')
    with pytest.raises(UsageError, match=r"300 s in .*60 s in"):
        read_traces(paths, 0.3)


def test_the_command_prints_a_row_for_each_rule(capsys):
    simulate_spot_machines([], 4, "6h", "9h", 0, as_json=True)
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["policy"] for row in rows] == ["elastic", "gang"]
    assert rows[0]["relative_cost"] < rows[1]["relative_cost"] < 1
    simulate_spot_machines([], 4, "6h", "9h", 0, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:2] == ["elastic", f"{rows[0]['relative_cost']:.2f}"]


@pytest.mark.parametrize(
    ("work", "deadline", "words"),
    [("6h", "6h", "Give at least 382m"), ("200h", None, "give longer ones"), ("x", None, "--work")],
)
def test_the_command_refuses_what_cannot_be(tmp_path, work, deadline, words):
    path = tmp_path / "zone.json"
    path.write_text(json.dumps({"metadata": {"gap_seconds": 300}, "data": [16] * 300}))
    with pytest.raises(UsageError, match=words):
        simulate_spot_machines([path], 16, work, deadline, 0, as_json=True)

"""Forecasts against runs whose step times are known: two hosts are seen, up to eight are told."""

from __future__ import annotations

import math

import pytest

from hvd_elastic.policy.evidence import replay
from hvd_elastic.policy.forecast import forecast
from hvd_elastic.policy.snapshot import HostOffer
from tests.unit.policy.known_runs import run_events, true_model
from tests.unit.records.made_events import noted

HOSTS = [HostOffer("n0", 4, 2.0), HostOffer("n1", 4, 2.0)]
SEEN = [[1], [2], [4], [4, 1], [4, 4]]
MODELS = {
    "compute-bound": true_model(0.01, 0.005, 0.002, 1e-4, 0.006, 2e-4),
    "balanced": true_model(0.01, 0.001, 0.002, 1e-4, 0.006, 2e-4),
    "slow link": true_model(0.01, 0.001, 0.004, 1e-4, 0.05, 1e-3),
    "communication-bound": true_model(0.01, 0.001, 0.002, 1e-4, 0.15, 0.01),
}
LIMITS = {"initial_batch_size": 128, "max_batch_size": 4096}


def check_against_truth(model, found, share=0.15):
    for entry in (found[3], found[7]):
        passes = entry.accumulation_steps + 1
        atomic = entry.global_batch_size / entry.slots / passes
        step_s = float(model.step_s(entry.hosts, entry.slots, atomic, passes - 1))
        true = entry.global_batch_size / step_s
        assert entry.throughput == pytest.approx(true, rel=share), entry
        assert entry.low <= true * entry.efficiency <= entry.high, entry


@pytest.mark.parametrize("name", MODELS)
def test_four_and_eight_hosts_of_an_adaptive_batch(name):
    events = run_events(
        MODELS[name], SEEN, (128, 256, 512), limits=LIMITS, noise_scale=2000.0, jitter=0.02
    )
    found = forecast(replay(events), HOSTS, 8)
    check_against_truth(MODELS[name], found)
    assert found[7].efficiency == pytest.approx(2128 / (2000 + found[7].global_batch_size))


@pytest.mark.parametrize("name", ["compute-bound", "balanced"])
def test_four_and_eight_hosts_of_a_fixed_batch(name):
    found = forecast(replay(run_events(MODELS[name], SEEN)), HOSTS, 8)
    check_against_truth(MODELS[name], found)
    assert {entry.efficiency for entry in found} == {1.0}


def test_what_was_never_seen_is_less_sure():
    found = forecast(replay(run_events(MODELS["balanced"], SEEN)), HOSTS, 16)
    spread = [entry.high / entry.low for entry in found]
    assert spread[1] < spread[7] < spread[15]
    assert [entry.hosts for entry in found if entry.seen] == [1, 2]


def unknown_from(found) -> int | None:
    """The fewest hosts that nothing is predicted for."""
    assert all(math.isnan(entry.goodput) == bool(entry.unknown) for entry in found)
    return next((entry.hosts for entry in found if entry.unknown), None)


def test_more_ranks_for_a_core_than_were_timed_are_not_known():
    single = [HostOffer(f"n{number}", 1) for number in range(8)]
    events = run_events(MODELS["balanced"], [[1], [1, 1]], cores=2, machine="one")
    found = forecast(replay(events), single, 8)
    assert unknown_from(found) == 3
    assert found[7].unknown == (
        "8 ranks would share 2 cores of one machine, and at most 2 ranks on 2 cores were timed"
    )
    assert found[7].slots == 8
    # Each a machine of its own: eight ranks have sixteen cores.
    events = run_events(MODELS["balanced"], [[1], [1, 1]], cores=2)
    assert unknown_from(forecast(replay(events), single, 8)) is None


def test_ranks_that_shared_cores_when_they_were_timed_are_predicted_as_before():
    events = run_events(MODELS["balanced"], SEEN, cores=2, machine="one")
    eight = [HostOffer("n0", 4), HostOffer("n1", 4)]
    found = forecast(replay(events), eight, 3)
    assert [entry.unknown == "" for entry in found] == [True, True, False]


def test_more_slots_for_a_host_than_it_has_cores_are_not_known():
    events = run_events(MODELS["balanced"], [[1], [2], [4], [4, 4]], cores=4)
    assert unknown_from(forecast(replay(events), HOSTS, 4)) is None
    found = forecast(replay(events), HOSTS, 4, slots=8)
    assert unknown_from(found) == 1
    assert found[3].unknown.startswith("8 ranks would share 4 cores of one machine")


def test_time_and_cost_follow_from_goodput_and_price():
    evidence = replay(run_events(MODELS["balanced"], SEEN))
    found = forecast(evidence, HOSTS, 3, target=3.6e6)
    for entry in found:
        assert entry.time_s is not None
        assert entry.time_s == pytest.approx(3.6e6 / entry.goodput)
        assert entry.rate == 2.0 * entry.hosts
        assert entry.cost == pytest.approx(2.0 * entry.hosts * entry.time_s / 3600)
    dear = forecast(evidence, HOSTS, 3, slots=8, price=5.0)
    assert [(entry.slots, entry.rate) for entry in dear] == [(8, 5.0), (16, 10.0), (24, 15.0)]
    assert dear[0].time_s is None
    unpriced = [HostOffer("n0", 4), HostOffer("n1", 4)]
    assert forecast(evidence, unpriced, 1, target=1.0)[0].cost is None


def test_slow_hosts_are_thought_of_last():
    evidence = replay(run_events(MODELS["balanced"], SEEN))
    for _ in range(6):
        evidence.formed(["n0", "n1"])
        noted(evidence, "metrics", {"step": 1, "examples": 1, "rank_s": [0.1, 0.3]}, 1.0)
        noted(evidence, "metrics", {"step": 1, "examples": 1, "rank_s": [0.1, 0.3001]}, 1.0)
    assert evidence.speeds.slowness("n1") == pytest.approx(3.0, rel=0.01)
    ours = [HostOffer("n1", 4), HostOffer("n0", 2), HostOffer("n2", 2)]
    slots = [entry.slots for entry in forecast(evidence, ours, 3)]
    assert slots == [2, 4, 8]


def test_a_run_that_measured_nothing_says_so():
    with pytest.raises(ValueError, match="no step was timed for long enough"):
        forecast(replay([]), HOSTS, 2)
    waiting = run_events(MODELS["balanced"], [[1]], limits=LIMITS, windows=6)
    with pytest.raises(ValueError, match="noise scale of this run is not known yet"):
        forecast(replay(waiting), HOSTS, 2)

"""What a resumed run knows from its events."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hvd_elastic.control.scaling import ScalingConfig, ScalingController
from hvd_elastic.policy.evidence import Evidence, replay
from hvd_elastic.policy.objective import Objective
from hvd_elastic.policy.snapshot import Decision, HostOffer
from hvd_elastic.records.events import event_of
from hvd_elastic.run_events import Metrics
from tests.unit.policy.known_runs import run_events, true_model

HOSTS = [HostOffer(f"n{number}", 2) for number in range(4)]
SLOW_LINK = true_model(0.01, 0.001, 0.002, 1e-4, 0.3, 0.02)
ALL = [[1], [2], [2, 1], [2, 2], [2, 2, 2, 2]]


def first_decision(evidence: Evidence | None) -> Decision:
    """Of a leader that takes a run over on the two slots of the first host."""
    controller = ScalingController(ScalingConfig(), 0.0, evidence)
    controller.hosts_are(HOSTS, 0.0)
    controller.formed(["n0", "n0"], 0.0)
    for event in run_events(SLOW_LINK, [[2]], windows=7):
        if isinstance(event, Metrics):
            controller.note_event(event)
    found = controller.decide_if_due(event.mono)
    assert found is not None
    assert found[0].known
    return found[0]


def test_what_was_tried_is_not_tried_again():
    events = run_events(SLOW_LINK, ALL)
    fresh, resumed = first_decision(None), first_decision(replay(events))
    assert fresh.wish is not None, "more slots look worth a try"
    assert resumed.action == "stay"
    assert resumed.wish is None, resumed.reason


def test_times_noise_pauses_and_progress_are_those_of_the_run():
    limits = {"initial_batch_size": 128, "max_batch_size": 1024}
    events = run_events(SLOW_LINK, ALL, (128, 256), limits=limits, noise_scale=900.0, jitter=0.0)
    evidence = replay(events)
    assert evidence.timings.worlds == {(1, 1), (1, 2), (2, 3), (2, 4), (4, 8)}
    model = evidence.model()
    assert model is not None
    for hosts, slots in evidence.timings.worlds:
        true = float(SLOW_LINK.step_s(hosts, slots, 256 / slots, 0))
        assert float(model.step_s(hosts, slots, 256 / slots, 0)) == pytest.approx(true, rel=0.1)
    assert (evidence.noise, evidence.pause_s) == (900.0, 0.3)
    assert 0 < evidence.done < events[-1].examples
    assert evidence.measured == 0, "nothing trains until a generation is formed"
    assert not evidence.news


@pytest.mark.parametrize(("deadline_s", "late"), [(600.0, True), (60_000.0, False)])
def test_a_deadline_out_of_reach_is_known_before_a_resumed_run_trains(
    deadline_s: float, late: bool
) -> None:
    goal = Objective("cost", deadline_s=deadline_s, target=1e7)
    hosts = [dataclasses.replace(host, price=1.0) for host in HOSTS]
    told = []
    for past in (None, replay(run_events(SLOW_LINK, ALL))):
        controller = ScalingController(ScalingConfig(objective=goal), 0.0, past)
        controller.hosts_are(hosts, 0.0)
        told.append(controller.out_of_reach(0.0))
    assert not told[0], "nothing was measured"
    assert bool(told[1]) is late
    if late:
        assert "10 m 00 s are left" in told[1]
        assert "useful examples/s expected" in told[1], "with the best that can be done"


def test_broken_and_foreign_events_are_left_out():
    events = run_events(SLOW_LINK, [[2], [2, 2]])
    odd: list[dict[str, Any]] = [
        {"kind": "rescale_started"},
        {"kind": "rescale_finished", "generation": 7, "mono": 0.0},
        {"kind": "metrics", "step": "x", "mono": 1.0},
        {"kind": "metrics"},
        {"kind": "rescale_started", "generation": 1, "hosts": ["a"], "slots": "2"},
    ]
    assert replay([*map(event_of, odd), *events]).timings.worlds == {(1, 2), (2, 4)}

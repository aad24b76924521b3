"""When the scaling controller decides anew, and when it need not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hvd_elastic.control.scaling import ScalingConfig, ScalingController
from hvd_elastic.policy.snapshot import HostOffer
from hvd_elastic.run_events import PredictionMissed
from tests.unit.records.made_events import noted

LIMITS = {"initial_batch_size": 64, "max_batch_size": 512}


def reasons(windows: Sequence[tuple[int, float | None]]) -> list[str]:
    """Of one slot, after each window of so many steps, with the noise scale that is told then."""
    controller = ScalingController(ScalingConfig(max_np=1))
    controller.hosts_are([HostOffer("a", 1)], 0.0)
    controller.formed(["a"], 0.0)
    plan = {"global_batch_size": 64, "accumulation_steps": 0, "limits": LIMITS}
    noted(controller, "batch_plan", plan, 0.0)
    found, now, step = [], 0.0, 0
    for steps, noise in windows:
        now, step = now + 1.5, step + steps
        fields = {"step": step, "examples": 64 * step, "size": 1, "noise_scale": noise}
        noted(controller, "metrics", fields, now)
        look = controller.decide_if_due(now)
        if look is not None:
            found.append(look[0].reason)
    return found


def test_a_noise_scale_that_nobody_can_tell_is_waited_for_no_longer_than_needed():
    # One rank that makes one pass tells none, and its steps may take the same time to a percent.
    found = reasons([(20, None)] * 60)
    assert "noise scale is not known" in found[8]
    assert "useful examples/s" in found[-1]


def test_a_noise_scale_that_is_known_late_is_a_reason_to_look_again():
    # The steps change where it counts as infinite, so that this is what the decision rests on.
    found = reasons([(20, None)] * 30 + [(24, None)] * 20 + [(24, 300.0)] * 20)
    assert "useful examples/s" in found[-1]


class Run:
    """A run whose policy may use three slots; its decisions to change are carried out at once."""

    def __init__(self) -> None:
        self.now, self.step = 0.0, 0
        self.size = 1
        self.misses: list[PredictionMissed] = []
        self.controller = ScalingController(ScalingConfig(max_np=3))
        self.controller.hosts_are([HostOffer(name, 1) for name in "abc"], 0.0)
        self.controller.formed(["a"], 0.0)

    def trains(self, windows: int, step_s: float, **told: float) -> None:
        """So many windows of steps of a fixed batch, until the policy changes the slots."""
        for _ in range(windows):
            self.now, self.step = self.now + 2.0, self.step + round(2.0 / step_s)
            fields = {"step": self.step, "examples": 64 * self.step, "size": self.size, **told}
            noted(self.controller, "metrics", fields, self.now)
            look = self.controller.decide_if_due(self.now)
            if self.controller.miss is not None:
                self.misses.append(self.controller.miss)
            if look is not None and look[0].action != "stay":
                self.size = look[0].target.slots
                self.controller.rescaling()
                self.controller.formed(list("abc")[: self.size], self.now)
                return


@pytest.mark.parametrize("step_s", [0.5, 2.0])
def test_a_prediction_that_was_missed_is_said_once_with_why(step_s: float) -> None:
    run = Run()
    run.trains(30, 0.5)
    assert (run.size, run.misses) == (3, []), "grown by what one slot took"
    run.trains(12, step_s)
    (miss,) = run.misses
    assert miss.measured == pytest.approx(64 / step_s)
    assert miss.predicted > 1.25 * miss.measured
    predicted = f"{miss.predicted:.0f} useful examples/s were predicted on 3 slots"
    measured = f"and {64 / step_s:.0f} are measured"
    step = f"a step of 64 examples takes {step_s:g} s"
    slower = f"{miss.predicted / miss.measured:.1f} times as long as predicted"
    assert miss.reason == f"{predicted}, {measured}: {step}, {slower}"


def test_a_prediction_that_came_true_is_not_talked_about() -> None:
    run = Run()
    run.trains(30, 0.5)
    assert run.size == 3
    run.trains(12, 0.2)
    assert run.misses == []

"""When the scaling controller decides anew, and when it need not."""

from __future__ import annotations

from collections.abc import Sequence

from hvd_elastic.control.scaling import ScalingConfig, ScalingController
from hvd_elastic.policy.snapshot import HostOffer

LIMITS = {"initial_batch_size": 64, "max_batch_size": 512}


def reasons(windows: Sequence[tuple[int, float | None]]) -> list[str]:
    """Of one slot, after each window of so many steps, with the noise scale that is told then."""
    controller = ScalingController(ScalingConfig(max_np=1))
    controller.hosts_are([HostOffer("a", 1)], 0.0)
    controller.formed(["a"], 0.0)
    plan = {"global_batch_size": 64, "accumulation_steps": 0, "limits": LIMITS}
    controller.note("batch_plan", plan, 0.0)
    found, now, step = [], 0.0, 0
    for steps, noise in windows:
        now, step = now + 1.5, step + steps
        fields = {"step": step, "examples": 64 * step, "size": 1, "noise_scale": noise}
        controller.note("metrics", fields, now)
        look = controller.look(now)
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

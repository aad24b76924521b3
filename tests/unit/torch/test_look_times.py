"""What looking at gradients takes: on a CPU, and on a device that works behind the script."""

from __future__ import annotations

import math

import pytest

from hvd_elastic.torch.look_times import LookTimes
from tests.unit.torch.test_own_times import Machine


def test_on_a_cpu_the_looks_of_a_step_are_added_up() -> None:
    machine = Machine()
    times = LookTimes(machine.clock, lambda: None)
    assert math.isnan(times.typical_s())
    for first_s, second_s in [(1.0, 0.5), (0.1, 0.1), (2.0, 3.0)]:
        times.step_begins()
        with times:
            machine.now += first_s
        machine.now += 7.0  # backward pass
        with times:
            machine.now += second_s
        times.step_ends()
    times.step_begins()
    with times:
        machine.now += 9.0  # the step is given up
    assert times.typical_s() == pytest.approx(1.5), "the median"
    assert times.typical_s() == pytest.approx(1.5), "lasts until there are others"


def test_on_a_device_it_is_read_when_the_marks_are_reached() -> None:
    machine = Machine()
    times = LookTimes(machine.clock, machine.mark)
    times.step_begins()
    for work_s, look_s in [(3.0, 0.25), (2.0, 0.5)]:
        machine.launch(work_s)
        with times:
            machine.launch(look_s)
    times.step_ends()
    machine.now = 5.5
    assert math.isnan(times.typical_s()), "the device has not come to the last mark"
    machine.now = 6.0
    assert times.typical_s() == pytest.approx(0.75)

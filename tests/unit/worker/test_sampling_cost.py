"""Cost of sampling gradient statistics: on a CPU, and on a device that works asynchronously."""

from __future__ import annotations

import math

import pytest

from hvd_elastic.worker.planning.compute_times import SamplingCost
from tests.unit.worker.test_compute_times import Machine


def test_on_a_cpu_the_pieces_of_a_step_are_added_up() -> None:
    machine = Machine()
    times = SamplingCost(machine.clock, lambda: None)
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
    times = SamplingCost(machine.clock, machine.mark)
    times.step_begins()
    for work_s, sample_s in [(3.0, 0.25), (2.0, 0.5)]:
        machine.launch(work_s)
        with times:
            machine.launch(sample_s)
    times.step_ends()
    machine.now = 5.5
    assert math.isnan(times.typical_s()), "the device has not come to the last mark"
    machine.now = 6.0
    assert times.typical_s() == pytest.approx(0.75)

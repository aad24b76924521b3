"""Compute time of a rank: on a CPU, and on a device that works asynchronously."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest

from hvd_elastic.worker.planning.compute_times import ComputeTimes


@dataclass
class Machine:
    """A clock, and a device that does its work in order."""

    now: float = 0.0
    busy_until: float = 0.0
    marks: list[Mark] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def launch(self, seconds: float) -> None:
        """Give the device work; the script goes on at once."""
        self.busy_until = max(self.now, self.busy_until) + seconds

    def mark(self) -> Mark:
        self.marks.append(Mark(self))
        return self.marks[-1]


@dataclass
class Mark:
    machine: Machine
    reached_at: float = math.nan
    asked: int = 0

    def record(self) -> None:
        self.reached_at = max(self.machine.now, self.machine.busy_until)

    def query(self) -> bool:
        self.asked += 1
        return self.reached_at <= self.machine.now

    def elapsed_time(self, end_event: Any) -> float:
        assert self.query()
        assert end_event.query(), "reading it would wait for the device"
        return float(1000 * (end_event.reached_at - self.reached_at))


def test_on_a_cpu_it_is_the_step_less_the_waits() -> None:
    machine = Machine()
    times = ComputeTimes(machine.clock, lambda: None, settling_steps=0)
    waited_s = 7.0  # since the process began
    for own_s, wait_s in [(1.0, 0.5), (1.2, 0.3), (9.0, 0.0)]:
        times.step_begins(waited_s)
        machine.now += own_s
        times.work_ends()
        machine.now += wait_s
        waited_s += wait_s
        times.step_ends(waited_s, full=True)
        assert times.all_step_s()[-1] == pytest.approx(own_s + wait_s)
    assert times.typical_s() == pytest.approx(1.2), "the median"
    assert math.isnan(times.typical_s()), "each step counts once"


def test_steps_that_are_short_or_were_never_taken_do_not_count() -> None:
    machine = Machine()
    times = ComputeTimes(machine.clock, lambda: None, settling_steps=0)
    times.step_begins(0.0)
    machine.now += 1
    times.work_ends()
    times.step_ends(0.0, full=False)
    times.step_begins(0.0)
    machine.now += 1
    times.step_ends(0.0, full=True)  # no backward pass
    assert math.isnan(times.typical_s())


def test_steps_after_a_change_are_not_timed() -> None:
    machine = Machine()
    times = ComputeTimes(machine.clock, lambda: None, settling_steps=1)

    def steps(number: int) -> None:
        for _ in range(number):
            times.step_begins(0.0, passes=2)
            machine.now += 1
            times.work_ends()
            times.step_ends(0.0, passes=2, full=True)

    steps(3)
    assert times.step_s == {2: [1.0, 1.0]}
    times.forget()
    steps(1)
    assert times.all_step_s() == []
    assert math.isnan(times.typical_s())
    assert times.passes == 8


def device_step(machine: Machine, times: ComputeTimes, read_s: float, work_s: float) -> None:
    """The script reads, launches and waits for the others, which are ready 5 s later."""
    times.step_begins(0.0)
    machine.now += read_s
    machine.launch(work_s)
    times.work_ends()
    machine.now = machine.busy_until + 5.0
    machine.launch(0.1)  # the optimizer's step
    times.step_ends(0.0, full=True)


def test_on_a_device_it_is_what_lies_between_two_marks_in_its_work() -> None:
    machine = Machine()
    times = ComputeTimes(machine.clock, machine.mark, settling_steps=0)
    device_step(machine, times, read_s=0.5, work_s=2.0)
    assert times.typical_s() == pytest.approx(2.5), "reading counts, the others do not"
    device_step(machine, times, read_s=0.0, work_s=2.0)
    assert times.typical_s() == pytest.approx(2.0), "nor does the optimizer's step of before"


def test_nobody_waits_for_the_device() -> None:
    machine = Machine()
    times = ComputeTimes(machine.clock, machine.mark, settling_steps=0)
    for _ in range(2):  # the script runs ahead
        times.step_begins(0.0)
        machine.launch(3.0)
        times.work_ends()
        times.step_ends(0.0, full=True)
    assert math.isnan(times.typical_s()), "the device has not come to a mark"
    machine.now = 4.0
    assert times.typical_s() == pytest.approx(3.0)
    assert machine.marks[3].asked == 1
    machine.now = 6.0
    assert times.typical_s() == pytest.approx(3.0)
    times.step_begins(0.0)
    machine.launch(3.0)
    times.work_ends()
    times.step_ends(0.0, full=True)
    times.forget()
    machine.now = 60.0
    assert math.isnan(times.typical_s()), "it belongs to the shares of before"

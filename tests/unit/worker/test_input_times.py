"""How long a rank waits for its data, on clocks that the test moves."""

from __future__ import annotations

import pytest

from hvd_elastic.worker import input_times
from hvd_elastic.worker.input_times import InputTimes
from tests.waiting import Clock


class Event:
    """Marks on a device that is ``device.now`` far, or reached as soon as it is idle."""

    def __init__(self, device: Clock) -> None:
        self._device = device
        self._at: float | None = None

    def record(self) -> None:
        self._at = self._device.now

    def query(self) -> bool:
        return self._at is not None

    def elapsed_time(self, end_event: Event) -> float:
        assert self._at is not None
        assert end_event._at is not None
        return 1000 * (end_event._at - self._at)


def test_the_time_in_the_loader_is_the_wait() -> None:
    wall, cpu, delay = Clock(), Clock(), Clock()
    times = InputTimes(wall, cpu, delay)
    assert times.reading() is None
    times.processes = 0
    for _ in range(2):
        times.read_begins()
        wall.now, cpu.now, delay.now = wall.now + 3.0, cpu.now + 2.0, delay.now + 0.5
        times.read_ends(8)
        wall.now, cpu.now, delay.now = wall.now + 1.0, cpu.now + 1.0, delay.now + 1.0
        times.body_ends()
    found = times.reading()
    assert found is not None
    assert (found.loop_s, found.wait_s, found.cpu_s, found.examples) == (8.0, 6.0, 4.0, 16)
    assert (found.starved_s, found.delay_s) == (8.0, 1.0)


def test_the_waits_of_the_processes_of_a_loader_are_counted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    delays = {1: 2.0, 2: 0.5}
    monkeypatch.setattr(input_times, "run_delay_s", delays.__getitem__)
    times = InputTimes(Clock())
    times.processes, times.pids = 2, lambda: tuple(delays)
    times.read_begins()
    times.read_ends(8)
    times.body_ends()

    def delay_s() -> float:
        found = times.reading()
        assert found is not None
        return found.delay_s

    assert delay_s() == 2.5
    delays[1] = 3.0
    assert delay_s() == 3.5
    del delays[2]  # ended
    delays[3] = 0.25
    assert delay_s() == 3.75


def test_a_step_whose_batch_was_ahead_is_not_starved() -> None:
    wall = Clock()
    times = InputTimes(wall)
    for wait_s in (0.1, 3.0, 0.0):
        times.read_begins()
        wall.now += wait_s
        times.read_ends(1)
        wall.now += 5.0
        times.body_ends()
    found = times.reading()
    assert found is not None
    assert found.starved_s == 8.0


def test_what_lies_between_two_loops_is_not_counted() -> None:
    wall = Clock()
    times = InputTimes(wall)
    for _ in range(2):
        times.read_begins()
        wall.now += 1.0
        times.read_ends(1)
        times.body_ends()
        wall.now += 100.0  # an evaluation, or a rescale
    assert times.waited == (2.0, 2.0)


def test_a_gpu_that_is_busy_does_not_wait_for_data() -> None:
    """The loader takes 3 s each time; the second time the GPU has work for all but one of them."""
    wall, device = Clock(), Clock()
    times = InputTimes(wall)
    times.new_event = lambda: Event(device)
    for idle_s in (3.0, 1.0):
        times.read_begins()
        wall.now += 3.0
        device.now += idle_s
        times.read_ends(1)
        device.now += 2.0
        times.body_ends()
    assert times.waited == (6.0, 4.0)

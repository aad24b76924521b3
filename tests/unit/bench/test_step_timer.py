"""The timer of the scaling benchmark, on a clock that the test sets."""

from __future__ import annotations

import pytest

from hvd_elastic.bench.step_timer import StepTimer


class World:
    """Steps of known times."""

    def __init__(self, *, device: bool = False) -> None:
        self.now = 0.0
        self.waits = 0
        self.timer = StepTimer(2.0, self.wait if device else None, lambda: self.now)

    def wait(self) -> None:
        self.waits += 1

    def step(self, size: int, compute_s: float = 0.07, exposed_s: float = 0.02) -> dict[str, float]:
        self.timer.begin_step(size)
        self.now += compute_s
        self.timer.mark("compute")
        self.now += exposed_s
        self.timer.mark("exposed")
        self.now += 0.01
        return self.timer.end_step()

    def measured(self, size: int) -> dict[str, float]:
        for _ in range(1000):
            if found := self.step(size):
                return found
        raise AssertionError("it does not end")


@pytest.mark.parametrize("device", [False, True])
def test_steps_and_their_parts_are_timed_after_the_warm_up(device: bool) -> None:
    world = World(device=device)
    for _ in range(4):
        assert not world.step(4, compute_s=9.0)  # the first steps are slower
    found = world.measured(4)
    assert found == pytest.approx(
        {
            "bench_size": 4, "bench_step_s": 0.1, "bench_half_s": 0.0, "bench_blocks": 5,
            "bench_compute_s": 0.07, "bench_exposed_s": 0.02,
        }, abs=1e-9,
    )  # fmt: skip
    assert world.step(4) == found


def test_a_device_is_not_waited_for_in_each_step() -> None:
    world = World(device=True)
    world.measured(1)
    steps = round(world.now / 0.1)
    # once a step in the warm-up of 1 s, for each block, and for the parts of one block of 4 steps
    assert world.waits <= 11 + 6 + 2 * 5
    assert steps > 30


def test_each_number_of_ranks_is_timed_anew() -> None:
    world = World()
    first = world.measured(2)
    assert not world.step(1, exposed_s=0.0)
    second = world.measured(1)
    assert (first["bench_size"], second["bench_size"]) == (2, 1)

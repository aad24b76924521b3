"""Growth of long-lived processes: leaks are found, noise and steps of the world are not."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.soak.growth import WARM_UP_S, Sample, grown, measure_growth

MIB = 2**20
LENGTH_S = 600


def life(
    memory: Callable[[float], float] = lambda _: 200 * MIB,
    files: Callable[[float], float] = lambda _: 40,
    threads: Callable[[float], float] = lambda _: 12,
    length_s: float = LENGTH_S,
    world_s: float = 20.0,
    size: Callable[[float], int] = lambda _: 3,
    hosts: Callable[[float], int] = lambda _: 3,
) -> list[Sample]:
    """A look every two seconds, a new world every ``world_s``."""
    times = [float(t) for t in range(0, int(length_s), 2)]
    return [
        Sample(
            t,
            int(t // world_s),
            size(t),
            hosts(t),
            int(memory(t)),
            int(files(t)),
            int(threads(t)),
        )
        for t in times
    ]


def findings(samples: list[Sample]) -> list[str]:
    return grown(measure_growth("worker a:0.1", samples))


def test_what_stays_as_it_is_is_no_finding() -> None:
    assert measure_growth("leader", life())
    assert findings(life()) == []


def test_noise_is_no_finding() -> None:
    rng = random.Random(1)
    noisy = life(
        lambda _: 200 * MIB + rng.gauss(0, 20 * MIB),
        lambda _: 40 + rng.randint(-5, 5),
        lambda _: 12 + rng.randint(-3, 3),
    )
    assert findings(noisy) == []


@pytest.mark.parametrize(
    ("leak", "told"),
    [
        ({"memory": lambda t: (200 + t / 5) * MIB}, "memory from"),
        ({"files": lambda t: 40 + t // 20}, "files from"),
        ({"threads": lambda t: 12 + t // 60}, "threads from"),
    ],
)
def test_a_leak_is_found_once(leak: dict[str, Any], told: str) -> None:
    (finding,) = findings(life(**leak))
    assert finding.startswith(f"worker a:0.1: {told}")


def test_growth_during_the_warm_up_is_no_finding() -> None:
    assert findings(life(lambda t: min(t, WARM_UP_S) * 10 * MIB)) == []


def test_a_single_step_up_is_no_finding() -> None:
    # A larger world needs more connections, for as long as it is there.
    assert findings(life(files=lambda t: 40 if t < 200 or t > 300 else 60)) == []


def test_what_a_larger_world_needs_is_no_finding() -> None:
    # It was small for long at first and is large for long at last.
    def size(t: float) -> int:
        return 3 if t < 250 or 400 < t < 450 else 5

    assert findings(life(files=lambda t: 8 * size(t), size=size)) == []
    leaking = life(files=lambda t: 8 * size(t) + t // 20, size=size)
    assert len(findings(leaking)) == 1


def test_what_more_hosts_need_is_no_finding() -> None:
    # Four ranks on three hosts at first, and on four at last, after the hostfile was edited.
    def hosts(t: float) -> int:
        return 3 if t < 250 else 4

    assert findings(life(threads=lambda t: 1 + 5 * hosts(t), hosts=hosts)) == []
    leaking = life(threads=lambda t: 1 + 5 * hosts(t) + t // 30, hosts=hosts)
    assert len(findings(leaking)) == 1


def test_a_short_life_says_nothing() -> None:
    assert measure_growth("worker", life(length_s=60)) == []
    assert measure_growth("worker", []) == []


def test_growth_is_measured_per_generation_as_well() -> None:
    measured = measure_growth("leader", life(files=lambda t: 40 + t // 20))
    per_generation = next(g for g in measured if (g.quantity, g.over) == ("files", "generations"))
    assert per_generation.slope == pytest.approx(1.0)
    assert "+1.00 files per generation" in per_generation.text()
    few = measure_growth("leader", life(world_s=200))
    assert {growth.over for growth in few} == {"time"}

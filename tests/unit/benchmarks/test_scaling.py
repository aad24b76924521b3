"""What the benchmark of the scaling controller makes of a run's events."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.controller.command import measure_virtual, merged
from benchmarks.controller.measure import climb
from benchmarks.controller.observed import (
    goodput_between,
    moments,
    noise_between,
    seconds_until,
)
from benchmarks.controller.workloads import CHANGES, MOST_HOSTS
from hvd_elastic.errors import UsageError


def told(
    mono: float, examples: int, batch: int = 100, size: int = 2, **more: Any
) -> dict[str, Any]:
    return {
        "kind": "metrics",
        "mono": mono,
        "examples": examples,
        "global_batch_size": batch,
        "size": size,
        **more,
    }


def asked(changes: str = "", out: Path | None = None) -> argparse.Namespace:
    return argparse.Namespace(workloads="", changes=changes, forecasts="", out=out)


def steady(begin: int, end: int, per_s: int, batch: int = 100) -> list[dict[str, Any]]:
    return [told(float(t), t * per_s, batch) for t in range(begin, end + 1)]


def test_examples_count_by_what_their_batch_makes_of_them() -> None:
    records = [told(0.0, 0), told(1.0, 1000, batch=100), told(2.0, 2000, batch=300)]
    found = moments(records, noise_scale=100.0, initial_batch_size=100)
    assert [moment.useful for moment in found] == pytest.approx([0.0, 1000.0, 1500.0])
    assert goodput_between(found, 0.0, 1.0) == pytest.approx(1000.0)
    assert goodput_between(found, 1.0, 2.0) == pytest.approx(500.0)
    # Where all is noise every example counts.
    assert moments(records, math.inf, 100)[-1].useful == pytest.approx(2000.0)


def test_examples_that_are_done_again_do_not_count_twice() -> None:
    records = [told(0.0, 0), told(1.0, 500), told(2.0, 400), told(3.0, 600)]
    found = moments(records, math.inf, 100)
    assert [moment.useful for moment in found] == [0.0, 500.0, 500.0, 700.0]


def test_events_of_other_kinds_are_passed_over() -> None:
    records = [{"kind": "decision", "mono": 0.5}, *steady(0, 4, 100)]
    assert len(moments(records, math.inf, 100)) == 5


def test_a_pause_counts_as_time() -> None:
    found = moments([*steady(0, 10, 100), told(20.0, 1000), told(21.0, 1100)], math.inf, 100)
    assert goodput_between(found, 5.0, 20.0) == pytest.approx(500 / 15)


def test_noise_that_nobody_could_tell_is_infinite() -> None:
    records = [told(1.0, 0, noise_scale=50.0), told(2.0, 0), told(3.0, 0)]
    assert noise_between(records, 0.0, 4.0) == math.inf
    assert noise_between(records, 0.0, 1.5) == 50.0
    assert math.isnan(noise_between(records, 5.0, 6.0))


def test_good_enough_is_reached_when_it_lasts() -> None:
    slow = steady(0, 10, 100)
    burst = [told(11.0, 1200), told(12.0, 1300)]
    fast = [told(12.0 + t, 1300 + 200 * t) for t in range(1, 31)]
    found = moments([*slow, *burst, *fast], math.inf, 100)
    reached = seconds_until(found, since=5.0, goal=190.0, for_s=10.0)
    # From 10 s on, of which one second of ten is bad; the good one alone would not do.
    assert reached == 5.0
    assert seconds_until(found, since=5.0, goal=199.0, for_s=10.0) == 7.0
    assert seconds_until(found, since=5.0, goal=250.0, for_s=10.0) is None
    assert seconds_until(found, since=20.0, goal=190.0, for_s=10.0) == 0.0


def test_what_was_not_watched_for_long_enough_is_not_known() -> None:
    found = moments(steady(0, 8, 100), math.inf, 100)
    assert seconds_until(found, since=0.0, goal=90.0, for_s=10.0) is None


def test_a_batch_is_looked_for_up_or_down_and_no_further() -> None:
    asked: list[int] = []

    def measure(batch: int) -> float:
        asked.append(batch)
        return -abs(math.log2(batch / 128))

    found = climb(measure, start=512, at_start=-2.0, least=64, most=1024)
    assert asked == [256, 128, 64], "downwards it is better, so nothing above is tried"
    assert max(found, key=lambda batch: found[batch]) == 128
    asked.clear()
    climb(measure, start=64, at_start=-1.0, least=64, most=64)
    assert asked == []


def test_figures_of_other_cases_are_kept() -> None:
    kept = {
        "steady": [{"workload": "low-noise", "slots": 1}, {"workload": "high-noise", "slots": 2}],
        "forecasts": [{"workload": "slow-device", "hosts": hosts} for hosts in (4, 8)],
    }
    found = {"steady": [{"workload": "low-noise", "slots": 8}], "changes": [], "forecasts": []}
    both = merged(kept, found)
    assert [row["slots"] for row in both["steady"]] == [2, 8]
    assert both["forecasts"] == kept["forecasts"]


def test_hosts_that_come_and_go_are_there() -> None:
    assert {name: change.hosts_after for name, change in CHANGES.items()} == {
        "link": 4,
        "slow": 4,
        "appear": 6,
        "drain": 4,
    }
    assert max(max(c.hosts, c.hosts_after) for c in CHANGES.values()) <= MOST_HOSTS


def test_a_file_of_other_figures_is_not_written_over(tmp_path: Path) -> None:
    out = tmp_path / "kept.json"
    for content in ('{"benchmark": "controller"}', "[]", "{"):
        out.write_text(content)
        with pytest.raises(UsageError, match=r"--out .*kept\.json"):
            measure_virtual(asked(out=out), print)
        assert out.read_text() == content


def test_a_name_that_is_not_known_is_refused_before_anything_is_made() -> None:
    with pytest.raises(UsageError, match="earthquake is not known"):
        measure_virtual(asked("earthquake"), print)

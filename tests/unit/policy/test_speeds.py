"""Which hosts count as slow."""

from __future__ import annotations

import numpy as np

from hvd_elastic.policy.speeds import HostSpeeds


def test_a_slow_host_is_found_by_its_own_time():
    rng = np.random.default_rng(3)
    speeds = HostSpeeds()
    for report in range(8):
        factor = 2.0 if report % 2 else 1.0  # another batch plan: the times of all hosts change
        times = {h: factor * rng.lognormal(0, 0.03) for h in "abcd"}
        speeds.add_report({**times, "c": 3 * times["c"]}, float(report))
    slowness = speeds.slowness()
    assert 2.7 < slowness["c"] < 3.3
    assert all(slowness[host] == 1.0 for host in "abd")


def test_one_odd_report_makes_nobody_slow():
    speeds = HostSpeeds()
    for report in range(6):
        speeds.add_report({"a": 1.0, "b": 9.0 if report == 3 else 1.0, "c": 1.0}, float(report))
    assert set(speeds.slowness().values()) == {1.0}


def test_noise_alone_makes_nobody_slow():
    rng = np.random.default_rng(5)
    speeds = HostSpeeds()
    for report in range(20):
        speeds.add_report({f"h{i}": rng.lognormal(0, 0.03) for i in range(16)}, float(report))
        assert set(speeds.slowness().values()) == {1.0}


def test_nonsense_is_ignored_and_old_news_forgotten():
    speeds = HostSpeeds()
    speeds.add_report({"a": float("nan"), "b": -1.0, "c": float("inf")}, 0.0)
    assert speeds.slowness() == {}
    speeds.add_report({"a": 1.0}, 1.0)
    speeds.add_report({"b": 1.0}, 20_000.0)
    assert set(speeds.slowness()) == {"b"}

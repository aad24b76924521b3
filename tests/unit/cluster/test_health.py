from __future__ import annotations

from typing import Any

import pytest

from hvd_elastic.cluster.health import Level, judge
from hvd_elastic.cluster.hostfile import Host

LEADER: dict[str, Any] = {
    "python": "3.11.4",
    "packages": {"hvd_elastic": "0.1.0", "torch": "2.13.0", "tensorflow": None},
}


def facts(**changes: Any) -> dict[str, Any]:
    return {
        "clock": 100.1,
        "python": "3.11.9",
        "executable": "/usr/bin/python3",
        "packages": {"hvd_elastic": "0.1.0", "torch": "2.13.0", "tensorflow": "2.21.0"},
        "free": {"~": 10 << 30},
        "cpus": 4,
        **changes,
    }


def levels(found: dict[str, Any]) -> dict[str, Level]:
    health = judge(Host("gpu1", slots=4), found, LEADER, before=100.0, after=100.2)
    return {check.name: check.level for check in health.checks if check.level is not Level.OK}


def test_a_fit_host() -> None:
    health = judge(Host("gpu1", slots=4), facts(), LEADER, before=100.0, after=100.2)
    assert health.level is Level.OK
    assert "tensorflow" not in [check.name for check in health.checks]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"python": "3.9.2"}, {"python": Level.FAILED}),
        (
            {"packages": {"hvd_elastic": "0.2.0", "torch": None}},
            {"hvd_elastic": Level.FAILED, "torch": Level.FAILED},
        ),
        ({"free": {"~": 1 << 20}}, {"disk ~": Level.FAILED}),
        ({"free": {"~": 500 << 20}}, {"disk ~": Level.WARNING}),
        ({"free": {"~": None}}, {"disk ~": Level.WARNING}),
        ({"clock": 102.0}, {"clock": Level.WARNING}),
        ({"clock": 98.0}, {"clock": Level.WARNING}),
        ({"clock": 101.15}, {}),
        ({"cpus": 2}, {"cpus": Level.WARNING}),
    ],
)
def test_what_is_wrong(changes: dict[str, Any], expected: dict[str, Level]) -> None:
    assert levels(facts(**changes)) == expected


def test_a_message_says_what_to_do() -> None:
    health = judge(Host("gpu1"), facts(python="3.9.2"), LEADER, 100.0, 100.2)
    assert health.level is Level.FAILED
    assert health.checks[0].detail == (
        "3.9.2 (/usr/bin/python3), the leader has 3.11.4. "
        "Install Python 3.11 there, or name it with --python"
    )

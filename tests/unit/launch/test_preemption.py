"""What a preemption command prints, as the large clouds do."""

from __future__ import annotations

import pytest

from hvd_elastic.launch.preemption import NOTICE_S, seconds_left

NOW = 1_790_000_000.0  # 2026-09-21T14:13:20Z


@pytest.mark.parametrize(
    ("output", "seconds"),
    [
        ('{"action": "terminate", "time": "2026-09-21T14:15:20Z"}', 120.0),
        ('{"EventId": "A", "NotBefore": "2026-09-21T14:13:50+00:00"}', 30.0),
        ("2026-09-21T16:14:20+02:00\n", 60.0),
        ("2026-09-21T14:14:20", 60.0),
        ("2026-09-21T14:00:00Z", 0.0),
        ("45\n", 45.0),
        ("45.5 s", 45.5),
        ("TRUE", NOTICE_S),
        ("", NOTICE_S),
        ("2026-99-21T14:14:20Z", NOTICE_S),
    ],
)
def test_seconds_left(output: str, seconds: float) -> None:
    assert seconds_left(output, NOW) == seconds

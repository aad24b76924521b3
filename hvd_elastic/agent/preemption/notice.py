"""Reads from text how long a host has until it is taken away."""

from __future__ import annotations

import os
import re
from datetime import datetime, timezone

NOTICE_S = 30.0
"""Time until the host goes after a notice without one [s]: the shortest of the large clouds."""
AFTER_SIGTERM = "HVD_ELASTIC_AFTER_SIGTERM_S"
"""Variable that an engine sets where it knows how long after SIGTERM it kills the agent [s]."""

_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)\s*s?\s*")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:?\d\d)?")


def after_sigterm_s() -> float:
    """Return how long this host has after SIGTERM to the agent [s]."""
    return float(os.environ.get(AFTER_SIGTERM) or NOTICE_S)


def seconds_left(output: str, now: float) -> float:
    """Return how long a host has, from the output of the command [s].

    Args:
        output: a number of seconds, or text with an ISO 8601 time (UTC if it has no zone).
        now: current time [unix seconds].

    Returns:
        0 or more; :data:`NOTICE_S` if the output has neither.

    >>> seconds_left("90", 0.0), seconds_left("TRUE", 0.0)
    (90.0, 30.0)
    >>> seconds_left('{"action": "stop", "time": "1970-01-01T00:02:00Z"}', 20.0)
    100.0
    """
    number = _NUMBER.fullmatch(output)
    if number is not None:
        return float(number[1])
    found = _TIME.search(output)
    if found is None:
        return NOTICE_S
    try:
        when = datetime.fromisoformat(found[0].replace("Z", "+00:00"))
    except ValueError:
        return NOTICE_S
    if when.tzinfo is None:
        when = when.replace(tzinfo=timezone.utc)
    return max(0.0, when.timestamp() - now)

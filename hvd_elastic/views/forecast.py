"""Predicts when a run ends and what it costs until then, from how fast its progress has been."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev

from hvd_elastic.records.summary import RunSummary

_BLOCKS = 8
_STUDENT_95 = 2.365
"""Two-sided 95 % of Student's t with 7 degrees of freedom, for 8 blocks."""
_PART = 0.3
"""Part of the run's training that is looked back at."""
_LEAST_S = 20.0
"""Least time to look back at [s]."""


@dataclass(frozen=True)
class EndForecast:
    """When a run ends, if the hosts and the speed stay as they are.

    The time looked back at is cut into blocks; the interval is that of Student's t over their
    speeds (method of batch means), so that pauses of rescales widen it.

    Attributes:
        left_s: time to the end [s].
        low_s, high_s: 95 % interval of it [s]; ``high_s`` may be infinite.
        money_left: price of the present hosts for that time; None: no prices are known.
    """

    left_s: float
    low_s: float
    high_s: float
    money_left: float | None


def predict_end(summary: RunSummary) -> EndForecast | None:
    """Return the forecast; None if the script does not tell how far it is, or not long enough.

    >>> from hvd_elastic.records.summary import summarize
    >>> from hvd_elastic.run_events import Metrics
    >>> events = [Metrics(t, 0, t - 1, t, 1, done=t / 400) for t in range(1, 101)]
    >>> for event in events:
    ...     event.t = float(event.step)
    >>> end = predict_end(summarize(events))
    >>> round(end.left_s), round(end.low_s), round(end.high_s)
    (300, 300, 300)
    """
    series = summary.series.get("done")
    if series is None or not 0 < series.values[-1] < 1:
        return None
    at_s, done = series.at_s, series.values
    # After a return to a checkpoint, progress counts from there.
    first = len(done) - 1
    while first > 0 and done[first - 1] <= done[first]:
        first -= 1
    end = at_s[-1]
    begin = max(at_s[first], end - max(_LEAST_S, _PART * (end - at_s[first])))
    if end - begin < _LEAST_S / 2:
        return None
    edges = [begin + (end - begin) * block / _BLOCKS for block in range(_BLOCKS + 1)]
    made = [_value_at(at_s, done, edge, first) for edge in edges]
    speeds = [(b - a) * _BLOCKS / (end - begin) for a, b in pairwise(made)]
    speed, error = fmean(speeds), _STUDENT_95 * stdev(speeds) / math.sqrt(_BLOCKS)
    if speed <= 0:
        return None
    left = 1 - done[-1]
    price = summary.hourly_price
    return EndForecast(
        left_s=left / speed,
        low_s=left / (speed + error),
        high_s=left / (speed - error) if speed > error else math.inf,
        money_left=left / speed * price / 3600 if price else None,
    )


def _value_at(at_s: Sequence[float], done: Sequence[float], edge: float, first: int) -> float:
    """Return the progress at a time, between two points on the line through them."""
    place = min(max(bisect_left(at_s, edge, lo=first), first + 1), len(at_s) - 1)
    span = at_s[place] - at_s[place - 1]
    part = (edge - at_s[place - 1]) / span if span > 0 else 1.0
    return float(done[place - 1] + (done[place] - done[place - 1]) * min(1.0, max(0.0, part)))

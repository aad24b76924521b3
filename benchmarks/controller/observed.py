"""What a run's events say of its goodput: in a stretch of time, and since when it is good enough.

The noise scale is one number for all stretches that are compared, so that they differ by what the
slots and the batch do alone.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from hvd_elastic.model.goodput import statistical_efficiency


@dataclass(frozen=True)
class Moment:
    """A ``metrics`` event.

    Attributes:
        mono: when [s].
        useful: useful examples made since the first event.
        slots, batch: in use.
    """

    mono: float
    useful: float
    slots: int
    batch: int


def moments(
    records: Sequence[Mapping[str, Any]], noise_scale: float, initial_batch_size: int
) -> list[Moment]:
    """The progress of a run in useful examples, from its events.

    Args:
        records: events, oldest first.
        noise_scale: at which an example is judged [examples]; inf: every example counts.
        initial_batch_size: relative to which.
    """
    metrics = [record for record in records if record["kind"] == "metrics"]
    found: list[Moment] = []
    useful = 0.0
    for before, now in pairwise([*metrics[:1], *metrics]):
        batch = now["global_batch_size"]
        share = float(
            statistical_efficiency(noise_scale, initial_batch_size, max(batch, initial_batch_size))
        )
        useful += max(0, now["examples"] - before["examples"]) * share
        found.append(Moment(now["mono"], useful, now["size"], batch))
    return found


def noise_between(records: Sequence[Mapping[str, Any]], begin: float, end: float) -> float:
    """Median of the noise scales that were told [examples]; those too large to tell are infinite.

    >>> told = [{"kind": "metrics", "mono": t, "noise_scale": 10.0 * t} for t in (1.0, 2.0, 3.0)]
    >>> noise_between(told, 1.5, 3.0)
    25.0
    """
    told = [
        record.get("noise_scale", math.inf)
        for record in records
        if record["kind"] == "metrics" and begin <= record["mono"] <= end
    ]
    return median(told) if told else math.nan


def goodput_between(found: Sequence[Moment], begin: float, end: float) -> float:
    """Useful examples/s in a stretch of time; pauses count.

    >>> steps = [Moment(0.0, 0.0, 1, 8), Moment(2.0, 20.0, 1, 8), Moment(6.0, 20.0, 2, 8)]
    >>> goodput_between(steps, 1.0, 5.0)
    2.5
    """
    return (_useful_at(found, end) - _useful_at(found, begin)) / (end - begin)


def seconds_until(found: Sequence[Moment], since: float, goal: float, for_s: float) -> float | None:
    """From ``since`` to the first moment after which the goodput is as good as ``goal``.

    Args:
        found: of the run.
        since: when something changed [s].
        goal: goodput [useful examples/s].
        for_s: over so long a time the goodput is judged [s].

    Returns:
        None: it never was.
    """
    begins = [since, *(moment.mono for moment in found if moment.mono > since)]
    for begin in begins:
        if begin + for_s > found[-1].mono:
            return None
        if goodput_between(found, begin, begin + for_s) >= goal:
            return begin - since
    return None


def _useful_at(found: Sequence[Moment], mono: float) -> float:
    """Examples are made evenly between two moments."""
    after = bisect_left(found, mono, key=lambda moment: moment.mono)
    if after == 0:
        return found[0].useful
    if after == len(found):
        return found[-1].useful
    left, right = found[after - 1], found[after]
    part = (mono - left.mono) / (right.mono - left.mono)
    return left.useful + part * (right.useful - left.useful)

"""Computes a run's goodput over an interval from its events, and when it reached a goal.

One noise scale is used for all intervals that are compared, so that only the effect of slots and
batch differs.
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
    """Values of a ``metrics`` event.

    Attributes:
        mono: time of the event [s, monotonic].
        useful: useful examples trained since the first event.
        slots: number of slots in use.
        batch: global batch size in use.
    """

    mono: float
    useful: float
    slots: int
    batch: int


def moments(
    records: Sequence[Mapping[str, Any]], noise_scale: float, initial_batch_size: int
) -> list[Moment]:
    """Return the progress of a run in useful examples, from its events.

    Args:
        records: events, oldest first.
        noise_scale: noise scale used for the efficiency [examples]; inf: every example counts.
        initial_batch_size: batch size at which the efficiency is 1.
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
    """Return the median of the reported noise scales [examples]; a missing one is infinite.

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
    """Return the goodput in an interval, pauses included [useful examples/s].

    >>> steps = [Moment(0.0, 0.0, 1, 8), Moment(2.0, 20.0, 1, 8), Moment(6.0, 20.0, 2, 8)]
    >>> goodput_between(steps, 1.0, 5.0)
    2.5
    """
    return (_useful_at(found, end) - _useful_at(found, begin)) / (end - begin)


def seconds_until(found: Sequence[Moment], since: float, goal: float, for_s: float) -> float | None:
    """Return the time from ``since`` until the goodput reached ``goal`` [s].

    Args:
        found: moments of the run.
        since: time of the change [s].
        goal: goodput to reach [useful examples/s].
        for_s: length of the interval over which the goodput is measured [s].

    Returns:
        None if it was never reached.
    """
    begins = [since, *(moment.mono for moment in found if moment.mono > since)]
    for begin in begins:
        if begin + for_s > found[-1].mono:
            return None
        if goodput_between(found, begin, begin + for_s) >= goal:
            return begin - since
    return None


def _useful_at(found: Sequence[Moment], mono: float) -> float:
    """Return the useful examples at a time, interpolated linearly between two moments."""
    after = bisect_left(found, mono, key=lambda moment: moment.mono)
    if after == 0:
        return found[0].useful
    if after == len(found):
        return found[-1].useful
    left, right = found[after - 1], found[after]
    part = (mono - left.mono) / (right.mono - left.mono)
    return left.useful + part * (right.useful - left.useful)

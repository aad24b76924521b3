"""Keeps few points of long lines: as many as plots can show, peaks included."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import islice

from hvd_elastic.records.summary import MetricSeries, RunSummary, take_events
from hvd_elastic.run_events import ReadEvent

MAX_POINTS = 2000
"""Most points of one plot: about two for each pixel of its width."""

KEPT_POINTS = 20_000
"""Points of a metric that are kept at least; when there are twice as many, they are thinned out."""
_TOGETHER = 10_000
"""Events between two looks whether there are too many points."""


def downsample(
    x: Sequence[float], y: Sequence[float], max_points: int = MAX_POINTS
) -> tuple[list[float], list[float]]:
    """Return fewer points of a line for drawing, peaks included.

    The line is cut into equal parts. The first, lowest, highest and last point of each part are
    kept, so that a single bad step remains visible. NaN is neither lowest nor highest.

    Args:
        x: increasing values, any length.
        y: values of the same length.
        max_points: most points to return, at least 4; a shorter line is returned as it is.

    >>> x, y = downsample(range(1000), [0.0] * 500 + [9.0] + [0.0] * 499, max_points=40)
    >>> len(x) <= 40, max(y), (x[0], x[-1])
    (True, 9.0, (0, 999))
    """
    if len(x) <= max_points:
        return list(x), list(y)
    import numpy as np

    count = len(y)
    size = -(-count // (max_points // 4))
    firsts = np.arange(0, count, size)
    # Parts as rows; the last one is filled up with NaN.
    values = np.full(len(firsts) * size, np.nan)
    values[:count] = np.asarray(y, dtype=np.float64)
    values[~np.isfinite(values)] = np.nan
    rows = values.reshape(-1, size)
    some = ~np.isnan(rows).all(axis=1)
    lowest = firsts[some] + np.nanargmin(rows[some], axis=1)
    highest = firsts[some] + np.nanargmax(rows[some], axis=1)
    lasts = np.minimum(firsts + size, count) - 1
    chosen = np.unique(np.concatenate([firsts, lowest, highest, lasts])).tolist()
    return [x[place] for place in chosen], [y[place] for place in chosen]


def thin_out(summary: RunSummary) -> set[str]:
    """Drop points of long metrics, but no peaks; return the names of these metrics."""
    thinned = set()
    for name, series in summary.series.items():
        if len(series.values) >= 2 * KEPT_POINTS:
            x, y = downsample(series.at_s, series.values, KEPT_POINTS)
            summary.series[name] = MetricSeries(array("d", x), array("d", y))
            thinned.add(name)
    return thinned


def summarize_for_plots(events: Iterable[ReadEvent]) -> RunSummary:
    """Return the summary of a run of any length from its events, oldest first, thinned out."""
    summary, rest = RunSummary(), iter(events)
    while some := list(islice(rest, _TOGETHER)):
        take_events(summary, some)
        thin_out(summary)
    return summary

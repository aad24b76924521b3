"""Shows where the time and the money of a run went, and predicts what is left to the end."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev

from hvd_elastic.formatting import duration_words
from hvd_elastic.records.spending import CAUSES, Spent
from hvd_elastic.records.summary import RunSummary
from hvd_elastic.views.page import cell, escape, table

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


_MEANINGS = {
    "training": "steps, without the waits below",
    "start-up": "from the start of a run, or its resume, until the first step",
    "rescales": "pauses for hosts that joined or left",
    "failures": "pauses after a loss, and work that was done again",
    "input": "rank 0 waits for data",
    "communication": "rank 0 waits for other ranks and the network",
    "interruption": "from the end of the run, or its death, until it was resumed",
}


def time_section(summary: RunSummary) -> str:
    """Return a section on time and cost by cause as HTML; empty before the first step."""
    whole_s = summary.duration_s
    if summary.first_step_s is None or whole_s <= 0:
        return ""
    spent = _by_cause(summary)
    rows = []
    bars = []
    priced = any(each.money for each in spent.values())
    x = 0.0
    for cause, each in spent.items():
        part = each.seconds / whole_s
        width = 100 * min(part, max(0.0, 1 - x / 100))
        bars.append(
            f'<rect class="cause-{cause}" x="{x:.3f}" y="0" width="{width:.3f}" height="10">'
            f"<title>{cause}: {part:.1%}</title></rect>"
        )
        x += width
        square = f'<rect width="1" height="1" class="cause-{cause}"></rect>'
        key = f'<svg class="key" viewBox="0 0 1 1" aria-hidden="true">{square}</svg>'
        rows.append(
            [
                f'<td class="h">{key} {escape(cause)}</td>',
                cell(duration_words(each.seconds), "n"),
                cell(f"{part:.1%}", "n"),
                cell(duration_words(each.slot_s), "n"),
                *([cell(f"{each.money:.2f}", "n")] if priced else []),
                cell(_MEANINGS[cause], "w"),
            ]
        )
    heads = [("cause", ""), ("time", "n"), ("part", "n"), ("slot time", "n")]
    heads += [*([("cost", "n")] if priced else []), ("what it is", "")]
    label = "Parts of the time: " + ", ".join(
        f"{cause} {each.seconds / whole_s:.1%}" for cause, each in spent.items()
    )
    return (
        '<section><h2>Time and cost</h2><svg class="spent" viewBox="0 0 100 10" '
        f'preserveAspectRatio="none" role="img" aria-label="{escape(label)}">{"".join(bars)}</svg>'
        f"{table(heads, rows)}</section>"
    )


def cost_so_far(summary: RunSummary) -> float:
    """Return the price of all hosts for the time that they trained."""
    ends = [*(at_s for at_s, _ in summary.placements[1:]), summary.duration_s]
    return sum(
        max(0.0, end - begin) * sum(summary.prices.get(name, 0.0) for name, _ in held) / 3600
        for (begin, held), end in zip(summary.placements, ends, strict=False)
    )


def forecast_words(summary: RunSummary, done: float, forecast: EndForecast | None) -> str:
    """Return how far the run is, and the forecast if there is one, as a sentence."""
    if forecast is None:
        return f"{done:.0%} done."
    if math.isinf(forecast.high_s):
        within = f"at least {duration_words(forecast.low_s)}"
    else:
        within = f"{duration_words(forecast.low_s)} to {duration_words(forecast.high_s)}"
    words = (
        f"{done:.0%} done; {duration_words(forecast.left_s)} to go ({within}), if hosts "
        "and speed stay as they are"
    )
    if forecast.money_left is not None:
        words += f"; cost {cost_so_far(summary):.2f} so far, {forecast.money_left:.2f} more"
    return f"{words}."


def _by_cause(summary: RunSummary) -> dict[str, Spent]:
    """Return what each cause took; what remains of all is training."""
    causes = summary.spending.by_cause
    slot_s = 0.0
    ends = [*(at_s for at_s, _ in summary.sizes[1:]), summary.duration_s]
    for (begin, size), end in zip(summary.sizes, ends, strict=False):
        slot_s += size * max(0.0, end - begin)
    training = Spent(
        max(0.0, summary.duration_s - sum(causes[cause].seconds for cause in CAUSES)),
        max(0.0, slot_s - sum(causes[c].slot_s for c in CAUSES if c != "start-up")),
        max(0.0, cost_so_far(summary) - sum(causes[cause].money for cause in CAUSES)),
    )
    known = {cause: causes[cause] for cause in CAUSES}
    if not known["interruption"].seconds:
        del known["interruption"]
    return {"training": training, **known}

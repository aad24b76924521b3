"""Shows where the time and the money of a run went, and what is left to the end."""

from __future__ import annotations

import math

from hvd_elastic.formatting import duration_words
from hvd_elastic.records.spending import CAUSES, Spent
from hvd_elastic.records.summary import RunSummary
from hvd_elastic.views.forecast import EndForecast
from hvd_elastic.views.page import cell, escape, table

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

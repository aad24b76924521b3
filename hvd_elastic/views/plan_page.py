"""Render a forecast for other numbers of hosts as one HTML file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hvd_elastic.formatting import count, duration_words, number_words
from hvd_elastic.policy.forecast import Forecast
from hvd_elastic.views.page import cell, chart_boxes, escape, render_page, table, written


def render_plan(run_id: str, forecasts: Sequence[Forecast], notes: Sequence[str]) -> str:
    """Return the page as HTML.

    Args:
        run_id: id of the run that was measured.
        forecasts: forecasts by number of hosts.
        notes: sentences about the assumptions.
    """
    known = [entry for entry in forecasts if not entry.unknown]
    charts = _charts(known) if known else []
    heads, rows = plan_cells(forecasts)
    cells = [[cell(text, "n") for text in row] for row in rows]
    hint = (
        "The shaded range holds 80 % by the model. Drag to zoom, double-click to see everything "
        "again."
    )
    body = [
        f"<header><h1>{escape(run_id)}</h1><p>What other numbers of hosts would bring</p></header>",
        f'<section>{chart_boxes(charts)}<p class="hint">{hint}</p></section>',
        f"<section><h2>Hosts</h2>{table([(head, 'n') for head in heads], cells)}"
        + "".join(f'<p class="hint">{escape(note)}</p>' for note in notes)
        + "</section>",
        written("the run's events"),
    ]
    data = {"charts": charts, "marks": [], "x_name": _size_name(forecasts)}
    return render_page(f"{run_id}: plan", "\n".join(body), data)


def plan_cells(forecasts: Sequence[Forecast]) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of the table as text; empty columns are left out."""

    def known(text: Callable[[Forecast], str], otherwise: str = "") -> list[str]:
        return [otherwise if f.unknown else text(f) for f in forecasts]

    columns: list[tuple[str, list[str]]] = [
        ("hosts", [f"{f.hosts}{'*' if f.seen else ''}" for f in forecasts]),
        ("slots", [str(f.slots) for f in forecasts]),
        ("batch", known(lambda f: number_words(f.global_batch_size))),
        ("examples/s", known(lambda f: number_words(round(f.throughput)), "not known")),
        ("efficiency", known(lambda f: f"{f.efficiency:.2f}")),
        ("useful/s", known(lambda f: number_words(round(f.goodput)), "not known")),
        ("80 % range", known(_range)),
        ("speedup", known(lambda f: f"{f.speedup:.2f}")),
        ("price/h", ["" if f.rate is None else f"{f.rate:.2f}" for f in forecasts]),
        ("time", ["" if f.time_s is None else duration_words(f.time_s) for f in forecasts]),
        ("cost", ["" if f.cost is None else f"{f.cost:.2f}" for f in forecasts]),
    ]
    kept = [(head, cells) for head, cells in columns if any(cells)]
    rows = [list(row) for row in zip(*(cells for _, cells in kept), strict=True)]
    return [head for head, _ in kept], rows


def _range(found: Forecast) -> str:
    return f"{number_words(round(found.low))} to {number_words(round(found.high))}"


def _charts(forecasts: Sequence[Forecast]) -> list[dict[str, Any]]:
    charts = [
        _chart(
            forecasts,
            ("goodput", "Goodput", "useful examples/s", "throughput"),
            [f.goodput for f in forecasts],
            [f.low for f in forecasts],
            [f.high for f in forecasts],
        )
    ]
    timed = [f for f in forecasts if f.time_s is not None]
    if timed:
        hours = [(f.time_s or 0.0) / 3600 for f in timed]
        charts.append(
            _chart(
                timed,
                ("time", "Time to the target", "hours", "size"),
                hours,
                [value * f.goodput / f.high for value, f in zip(hours, timed, strict=True)],
                [value * f.goodput / f.low for value, f in zip(hours, timed, strict=True)],
            )
        )
    paid = [f for f in timed if f.cost is not None]
    if paid:
        costs = [f.cost or 0.0 for f in paid]
        charts.append(
            _chart(
                paid,
                ("cost", "Cost to the target", "", "loss"),
                costs,
                [value * f.goodput / f.high for value, f in zip(costs, paid, strict=True)],
                [value * f.goodput / f.low for value, f in zip(costs, paid, strict=True)],
            )
        )
    return charts


def _chart(
    forecasts: Sequence[Forecast],
    words: tuple[str, str, str, str],
    values: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
) -> dict[str, Any]:
    name, title, unit, color = words
    noun = _size_name(forecasts)
    sizes = [f.hosts if noun == "hosts" else f.slots for f in forecasts]
    return {
        "name": name,
        "title": title,
        "unit": unit,
        "color": color,
        "x": sizes,
        "y": _short(values),
        "low": _short(low),
        "high": _short(high),
        "from_zero": True,
        "height": 220,
        "summary": f"{number_words(values[-1])} with {count(sizes[-1], noun[:-1])}",
    }


def _size_name(forecasts: Sequence[Forecast]) -> str:
    """Return the unit of the x axis, ``hosts`` or ``slots``, in which the entries differ."""
    return "hosts" if len({f.hosts for f in forecasts}) == len(forecasts) else "slots"


def _short(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.6g}") for value in values]

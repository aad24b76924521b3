"""Render the result of the scaling benchmark as one HTML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvd_elastic.formatting import number_words
from hvd_elastic.views.page import cell, chart_boxes, escape, render_page, table


def render_scaling(
    title: str, result: Mapping[str, Any], tables: Sequence[tuple[str, list[list[str]]]]
) -> str:
    """Return the page as HTML.

    Args:
        title: what was measured.
        result: the result as in its JSON file.
        tables: heading, and rows of text of each table, the first of which is its head.
    """
    every = sorted([*result["sizes"], *result["predicted"]], key=lambda size: int(size["slots"]))
    measured = {size["slots"]: size["throughput"] for size in result["sizes"]}
    slots = [int(size["slots"]) for size in every]
    first = result["sizes"][0]
    each = first["throughput"] / first["slots"]
    chart = {
        "name": "throughput",
        "title": "Throughput",
        "unit": "examples/s",
        "color": "throughput",
        "x": slots,
        "y": [measured.get(number) for number in slots],
        "low": [size["low"] for size in every],
        "high": [size["high"] for size in every],
        "more": [
            {"color": "muted", "y": [number * each for number in slots]},
            {"color": "loss", "y": [size["throughput"] for size in every]},
        ],
        "from_zero": True,
        "height": 320,
        "summary": f"{number_words(result['sizes'][-1]['throughput'])} with "
        f"{result['sizes'][-1]['slots']} slots",
    }
    shown = [
        f"<section><h2>{escape(heading)}</h2>"
        + table([(text, "n") for text in rows[0]], [[cell(t, "n") for t in r] for r in rows[1:]])
        + "</section>"
        for heading, rows in tables
    ]
    hint = (
        "Points: measured. Grey: the smallest size times the slots. Dashed: measured, and "
        "predicted where nothing was. The shaded range holds 95 %."
    )
    body = [
        f"<header><h1>{escape(title)}</h1><p>{escape(result['words'])}</p></header>",
        f'<section>{chart_boxes([chart])}<p class="hint">{hint}</p></section>',
        *shown,
        f"<footer>Measured {escape(result['conditions']['when'])} by hvd_elastic.</footer>",
    ]
    data = {"charts": [chart], "marks": [], "x_name": "slots"}
    return render_page(f"{title}: scaling", "\n".join(body), data)

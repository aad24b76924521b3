"""Render one self-contained HTML file with plots and tables; it needs no network and no server."""

from __future__ import annotations

import html
import json
import time
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from hvd_elastic.errors import RunError
from hvd_elastic.formatting import date_words
from hvd_elastic.replaced_files import write_whole

MAX_ROWS = 200
"""Most rows of a table; for more, read the events."""


def render_page(title: str, body: str, data: Mapping[str, Any]) -> str:
    """Return the whole page as HTML.

    Args:
        data: input of report.js: ``charts``, ``marks`` and either ``duration_s`` for a time axis or
            ``x_name``, the noun that the integers of the x axis count.
    """
    # "<" could close the script element that holds the data.
    encoded = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return Template(read_asset("report.html")).substitute(
        title=escape(title),
        plot_css=read_asset("uPlot.min.css"),
        css=read_asset("report.css"),
        body=body,
        data=encoded,
        plot_js=read_asset("uPlot.iife.min.js"),
        js=read_asset("picture.js") + read_asset("report.js"),
    )


def write_page(path: Path, text: str) -> None:
    """Write a page atomically.

    Raises:
        RunError: the file cannot be written.
    """
    try:
        write_whole(path, text)
    except OSError as error:
        raise RunError(
            f"cannot write the report to {path}: {error.strerror}. Choose another place with --out."
        ) from error


_SAVE = "".join(
    f'<button type="button" class="save" data-kind="{kind.lower()}" aria-label="save as {kind}">'
    f"{kind}</button>"
    for kind in ("PNG", "SVG")
)


def chart_boxes(charts: Sequence[Mapping[str, Any]]) -> str:
    """Return the HTML elements in which report.js draws the charts, in the same order."""
    boxes = []
    for chart in charts:
        button = (
            '<button type="button" class="log" aria-pressed="false">log</button>'
            if chart.get("log")
            else ""
        )
        boxes.append(
            f'<div class="chart" data-name="{escape(chart["name"])}" role="figure" '
            f'aria-label="{escape(chart["title"])}"><div class="chart-head">'
            f'<h3>{escape(chart["title"])}</h3><span class="unit">{escape(chart["unit"])}</span>'
            f"{button}{_SAVE}"
            '<span class="readout" aria-live="polite"></span></div>'
            '<div class="plot" tabindex="0" role="img" '
            f'aria-label="{escape(chart["title"])}: arrow keys read its points"></div>'
            "<details><summary>Data</summary></details></div>"
        )
    return f'<div class="charts">{"".join(boxes)}</div>'


def table(
    heads: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]], most: int = MAX_ROWS
) -> str:
    """Return an HTML table of the last rows.

    Args:
        heads: text and CSS class of each column.
        rows: cells of each row, from :func:`cell`.
        most: most rows, above 0 if there are rows.
    """
    head = "".join(f'<th class="{kind}">{escape(name)}</th>' for name, kind in heads)
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows[-most:])
    cut = (
        f'<p class="hint">The last {most} of {len(rows)} are shown.</p>' if len(rows) > most else ""
    )
    return (
        f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        f"</div>{cut}"
    )


def cell(text: str, kind: str = "") -> str:
    """Return a table cell; ``kind``: ``n`` for numbers, ``w`` for long text, ``h`` on one line."""
    return f'<td class="{kind}">{escape(text)}</td>' if kind else f"<td>{escape(text)}</td>"


def escape(text: Any) -> str:
    """Return the text with HTML special characters escaped."""
    return html.escape(str(text))


def read_asset(name: str) -> str:
    """Return the text of a file of ``assets``."""
    place = resources.files("hvd_elastic.views") / "assets" / name
    return place.read_text(encoding="utf-8")


def written(source: str) -> str:
    """Return the foot of a page as HTML: when it was written, and from what."""
    return f"<footer>Written {date_words(time.time())} by hvd_elastic from {source}.</footer>"


def progress_bar(done: float) -> str:
    """Return a bar of the part that is done as HTML."""
    return (
        f'<svg class="done" viewBox="0 0 100 1" preserveAspectRatio="none" role="img" '
        f'aria-label="{done:.0%} done"><rect width="{100 * done:.2f}" height="1"></rect></svg>'
    )

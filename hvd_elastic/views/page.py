"""Render one self-contained HTML file with plots and tables, and thin out lines for plots."""

from __future__ import annotations

import html
import json
import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from itertools import islice
from pathlib import Path
from string import Template
from typing import Any

from hvd_elastic.errors import RunError
from hvd_elastic.formatting import date_words
from hvd_elastic.records.summary import MetricSeries, RunSummary, take_events
from hvd_elastic.replaced_files import write_whole
from hvd_elastic.run_events import ReadEvent

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
    """Write a page atomically; characters that UTF-8 lacks are shown as escapes.

    Raises:
        RunError: the file cannot be written.
    """
    try:
        write_whole(path, text.encode(errors="backslashreplace"))
    except OSError as error:
        raise RunError(
            f"cannot write the report to {path}: {error.strerror}. Choose another place with --out."
        ) from error


_SAVE = "".join(
    f'<button type="button" class="save" data-kind="{kind.lower()}" aria-label="save as {kind}">'
    f"{kind}</button>"
    for kind in ("PNG", "SVG")
)


def chart(
    words: tuple[str, str, str, str],
    x: Sequence[float],
    y: Sequence[float | None],
    height: int,
    summary: str,
    **more: Any,
) -> dict[str, Any]:
    """Return a chart as report.js draws it.

    Args:
        words: name, title, unit and colour.
        x, y: points of its first line.
        summary: what is written behind its title.
        more: further fields, such as lines, bounds and the kind of scale.
    """
    name, title, unit, color = words
    told = {"name": name, "title": title, "unit": unit, "color": color, "x": x, "y": y}
    return {**told, "height": height, "summary": summary, **more}


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

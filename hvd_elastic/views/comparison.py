"""Renders several runs side by side as one HTML file."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvd_elastic.errors import RunError
from hvd_elastic.formatting import duration_words, number_words
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.records.summary import MetricSeries, RunSummary
from hvd_elastic.views.page import (
    cell,
    chart,
    chart_boxes,
    escape,
    render_page,
    summarize_for_plots,
    table,
    write_page,
)
from hvd_elastic.views.report import chart_names, chart_title

COLORS = ("size", "loss", "throughput", "other", "note", "bad")
"""Colours of the runs, which are also the most that can be compared."""
_POINTS = 800


def write_comparison(folders: Sequence[RunFolder], out: Path) -> list[RunSummary]:
    """Write a page with the plots of several runs over each other; return their summaries.

    Raises:
        RunError: a run has no events yet, there are too many, or ``out`` cannot be written.
    """
    if len(folders) > len(COLORS):
        raise RunError(f"at most {len(COLORS)} runs can be compared, not {len(folders)}")
    found = []
    for folder in folders:
        alive = folder.leader_alive()  # before its last events are read
        summary = summarize_for_plots(folder.iter_events())
        if summary.started is None:
            raise RunError(f"run {folder.run_id} has no events yet, so there is nothing to compare")
        summary.run_id = folder.run_id
        summary.status, _ = folder.state_of(summary, alive=alive)
        found.append(summary)
    write_page(out, render_comparison(found))
    return found


def render_comparison(summaries: Sequence[RunSummary]) -> str:
    """Return the page as HTML; time begins at the start of each run."""
    parts, data = comparison_parts(summaries, comparison_charts(summaries))
    return render_page(comparison_title(summaries), "\n".join(parts.values()), data)


def comparison_title(summaries: Sequence[RunSummary]) -> str:
    """Return the names of the runs."""
    return " and ".join(summary.run_id for summary in summaries)


def comparison_charts(summaries: Sequence[RunSummary]) -> list[dict[str, Any]]:
    """Return the charts, each with a line for each run."""
    names = dict.fromkeys(name for summary in summaries for name in chart_names(summary))
    charts = [_chart("size", [_sizes(summary) for summary in summaries], summaries)]
    for name in names:
        series = [summary.series.get(name, MetricSeries()) for summary in summaries]
        charts.append(_chart(name, series, summaries))
    return charts


def comparison_parts(
    summaries: Sequence[RunSummary], charts: Sequence[dict[str, Any]]
) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the parts of the page as HTML by name, in their order, and the input of report.js."""
    keys = " ".join(
        f'<span class="key-{color}">{escape(summary.run_id)}</span>'
        for color, summary in zip(COLORS, summaries, strict=False)
    )
    title = escape(comparison_title(summaries))
    parts = {
        "header": f"<header><h1>{title}</h1><p>Time begins at the start of each run.</p></header>",
        "runs": f"<section><h2>Runs</h2>{_run_table(summaries)}</section>",
        "plots": f'<section><p class="keys">{keys}</p>{chart_boxes(charts)}</section>',
    }
    duration_s = max(summary.duration_s for summary in summaries)
    return parts, {"charts": charts, "marks": [], "duration_s": duration_s}


def _sizes(summary: RunSummary) -> MetricSeries:
    times = array("d", (at_s for at_s, _ in summary.sizes))
    return MetricSeries(times, array("d", (size for _, size in summary.sizes)))


def _chart(
    name: str, series: Sequence[MetricSeries], summaries: Sequence[RunSummary]
) -> dict[str, Any]:
    """Return a chart with a line for each run, which has its last value until the run ends."""
    ends = [summary.duration_s for summary in summaries]
    x, lines = sampled_lines(series, ends, 0.0, max(ends))
    title, unit = chart_title(name)
    more = [
        {"color": color, "y": line, "name": summary.run_id, "solid": True}
        for color, line, summary in zip(COLORS[1:], lines[1:], summaries[1:], strict=False)
    ]
    finite = [value for line in lines for value in line if value is not None]
    return chart(
        (name, title, unit, COLORS[0]),
        x,
        lines[0],
        190,
        "",
        line=summaries[0].run_id,
        more=more,
        from_zero=name in ("size", "throughput", "goodput"),
        whole=name == "size",
        log=name != "size" and bool(finite) and min(finite) > 0,
    )


def sampled_lines(
    series: Sequence[MetricSeries], ends_s: Sequence[float], begin_s: float, end_s: float
) -> tuple[list[float], list[list[float | None]]]:
    """Return times between two, and the values of each series there.

    Args:
        series: values of each run.
        ends_s: when each run ends; it has no values after that [s].
        begin_s, end_s: first and last time [s].
    """
    step_s = max(0.0, end_s - begin_s) / _POINTS
    x = [round(begin_s + step_s * point, 3) for point in range(_POINTS + 1)]
    lines = [
        [_value_at(each, at_s, last_s) for at_s in x]
        for each, last_s in zip(series, ends_s, strict=True)
    ]
    return x, lines


def _value_at(series: MetricSeries, at_s: float, end_s: float) -> float | None:
    place = bisect_right(series.at_s, at_s) - 1
    if place < 0 or at_s > end_s:
        return None
    value = series.values[place]
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _run_table(summaries: Sequence[RunSummary]) -> str:
    metrics = dict.fromkeys(name for summary in summaries for name in summary.final_metrics())
    heads = [("run", ""), ("status", ""), ("took", "n"), ("steps", "n"), ("examples", "n")]
    heads += [("examples/s overall", "n"), ("rescales", "n"), ("longest pause", "n")]
    rows = []
    for summary in summaries:
        own = summary.final_metrics()
        texts = [
            duration_words(summary.duration_s),
            number_words(summary.steps),
            number_words(summary.examples),
            number_words(summary.mean_throughput),
            str(len(summary.live_rescales)),
            duration_words(summary.longest_pause_s),
            *(_metric_words(own.get(name)) for name in metrics),
        ]
        first = [cell(summary.run_id, "h"), cell(summary.status)]
        rows.append([*first, *(cell(text, "n") for text in texts)])
    return table([*heads, *((name.replace("_", " "), "n") for name in metrics)], rows)


def _metric_words(value: Any) -> str:
    if value is None:
        return "–"
    return number_words(value) if isinstance(value, (int, float)) else str(value)

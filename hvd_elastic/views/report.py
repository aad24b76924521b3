"""Render the report of a run as one HTML file with plots, rescales and audit."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_elastic.errors import RunError
from hvd_elastic.formatting import (
    bytes_words,
    date_words,
    duration_words,
    number_words,
    worker_name,
)
from hvd_elastic.records.audit import AuditResult, check_audit
from hvd_elastic.records.json_lines import iter_records
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.records.summary import MetricSeries, Rescale, RunSummary
from hvd_elastic.records.wording import departure_words
from hvd_elastic.views.allocation import hosts_section
from hvd_elastic.views.costs import time_section
from hvd_elastic.views.page import (
    MAX_ROWS,
    cell,
    chart,
    chart_boxes,
    downsample,
    escape,
    render_page,
    summarize_for_plots,
    table,
    write_page,
    written,
)

Charts = tuple[list[dict[str, Any]], list[dict[str, Any]]]
"""Charts of a run, and those of an adaptive batch."""

_TITLES = {
    "throughput": ("Throughput", "examples/s", "throughput"),
    "loss": ("Loss", "", "loss"),
    "goodput": ("Goodput", "useful examples/s", "throughput"),
    "data_wait": ("Wait for data", "of the time", "other"),
    "rank_wait": ("Wait for other ranks", "of the time", "other"),
    "lr": ("Learning rate", "", "other"),
    "global_batch_size": ("Global batch size", "examples", "size"),
    "noise_scale": ("Gradient noise scale", "examples", "other"),
    "efficiency": ("Statistical efficiency", "", "other"),
}
_FROM_ZERO = frozenset({"throughput", "goodput", "global_batch_size"})
_SAME_S = 2.0
"""Time between a rescale and what is told with it [s]."""
_OF_THE_BATCH = ("global_batch_size", "noise_scale", "efficiency")
_UNPLOTTED = frozenset({"position", "size", "generation", "rank", "local_rank"})


@dataclass(frozen=True)
class ReportResult:
    """A written report and its contents."""

    path: Path
    summary: RunSummary
    audit: AuditResult


def write_report(folder: RunFolder, out: Path | None = None) -> ReportResult:
    """Write the report of a run.

    Args:
        out: path of the report; None: ``report.html`` in the run folder.

    Raises:
        RunError: the run has no events yet, or ``out`` cannot be written.
    """
    alive = folder.leader_alive()  # before its last events are read
    summary = summarize_for_plots(folder.iter_events())
    if summary.started is None:
        raise RunError(
            f"run {folder.run_id} has no events yet, so there is nothing to report; see: "
            f"hvd-elastic status {folder.run_id}"
        )
    summary.run_id = folder.run_id
    summary.status, _ = folder.state_of(summary, alive=alive)
    audit = audit_of(folder, summary)
    path = folder.path / "report.html" if out is None else Path(out)
    write_page(path, render_report(summary, audit, asked=folder.read_run()))
    return ReportResult(path, summary, audit)


def audit_of(folder: RunFolder, summary: RunSummary) -> AuditResult:
    """Return the audit of a run whose state, as shown to users, is ``summary.status``."""
    finished = summary.status == "succeeded"
    return check_audit(
        iter_records(folder.audit),
        finished=finished,
        ended_in=summary.ended_in,
        steps_made=summary.steps if finished else 0,
        examples_made=summary.examples if finished else 0,
    )


def render_report(
    summary: RunSummary, audit: AuditResult, *, asked: Mapping[str, Any] | None = None
) -> str:
    """Return the report as HTML.

    Args:
        asked: contents of run.json, for the command of the run.
    """
    parts, data = report_parts(summary, audit, asked=asked)
    body = [*(part for part in parts.values() if part), written("the run's events")]
    return render_page(f"{summary.run_id}: {summary.status}", "\n".join(body), data)


def report_parts(
    summary: RunSummary,
    audit: AuditResult,
    *,
    asked: Mapping[str, Any] | None = None,
    charts: Charts | None = None,
) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the parts of the page as HTML by name, in their order, and the input of report.js.

    Args:
        asked: contents of run.json, for the command of the run.
        charts: the charts, as :func:`make_charts` has made them; None: make them.
    """
    if summary.plain:
        parts = {
            "header": _header(summary, asked or {}),
            "failure": _failure(summary),
            "warnings": _warning_table(summary),
        }
        return parts, {"duration_s": summary.duration_s, "charts": [], "marks": []}
    own, of_the_batch = make_charts(summary) if charts is None else charts
    marks = _marks(summary)
    parts = {
        "header": _header(summary, asked or {}),
        "tiles": _tiles(summary, audit),
        "failure": _failure(summary),
        "hosts": hosts_section(summary),
        "plots": _plots(own),
        "batch": _batch_panel(summary, of_the_batch),
        "time": time_section(summary),
        "rescales": _rescale_table(summary),
        "audit": _audit_section(audit),
        "decisions": _decision_table(summary),
        "workers": _worker_table(summary),
        "checkpoints": _checkpoint_table(summary),
        "warnings": _warning_table(summary),
    }
    data = {"duration_s": summary.duration_s, "charts": own + of_the_batch, "marks": marks}
    return parts, data


# -- plots ---------------------------------------------------------------------------------------


def make_charts(summary: RunSummary) -> Charts:
    """Return the charts of the run, and those of an adaptive batch."""
    charts: list[dict[str, Any]] = []
    of_the_batch: list[dict[str, Any]] = []
    if summary.sizes:
        charts.append(_size_chart(summary))
    for name in chart_names(summary):
        made = _metric_chart(name, summary.series[name])
        (of_the_batch if name in _OF_THE_BATCH else charts).append(made)
    return charts, of_the_batch


def chart_names(summary: RunSummary) -> list[str]:
    """Return the names of the metrics that are worth a plot, in their order."""
    names = [name for name in _TITLES if name in summary.series]
    names += [name for name in summary.user_metrics if name in summary.series]
    found = []
    for name in names:
        values = summary.series[name].values
        if name in _UNPLOTTED or not any(map(math.isfinite, values)):
            continue
        # A rate that is constant, and a single rank, which waits for no other, need no plot.
        dull = len(set(values)) <= 1 if name == "lr" else name == "rank_wait" and not any(values)
        if not dull and (summary.batch_plan or name not in _OF_THE_BATCH):
            found.append(name)
    return found


def zoomed_points(
    series: MetricSeries, begin_s: float, end_s: float
) -> tuple[list[float], list[float | None]]:
    """Return the points of a metric between two times, and one beyond each.

    Args:
        begin_s, end_s: times after the start of the run [s].
    """
    first = max(0, bisect_left(series.at_s, begin_s) - 1)
    last = bisect_right(series.at_s, end_s) + 1
    return _points(MetricSeries(series.at_s[first:last], series.values[first:last]))


def _points(series: MetricSeries) -> tuple[list[float], list[float | None]]:
    x, y = downsample(series.at_s, series.values)
    return _rounded(x), [float(f"{value:.6g}") if math.isfinite(value) else None for value in y]


def chart_title(name: str) -> tuple[str, str]:
    """Return the title and the unit of a chart."""
    if name == "size":
        return "Workers", ""
    title, unit, _ = _TITLES.get(name, (_title(name), "", ""))
    return title, unit


def _size_chart(summary: RunSummary) -> dict[str, Any]:
    # The last size holds until the last event, and there is no process before the first.
    x = [0.0, *(at_s for at_s, _ in summary.sizes), summary.duration_s]
    y = [0.0, *(float(size) for _, size in summary.sizes), float(summary.sizes[-1][1])]
    x, y = downsample(x, y)
    told = f"at most {summary.largest_size}"
    size = ("size", "Workers", "", "size")
    return chart(size, _rounded(x), y, 170, told, stepped=True, whole=True, from_zero=True)


def _metric_chart(name: str, series: MetricSeries) -> dict[str, Any]:
    title, unit, color = _TITLES.get(name, (_title(name), "", "other"))
    x, y = _points(series)
    finite = [value for value in y if value is not None]
    return chart(
        (name, title, unit, color),
        x,
        y,
        170,
        f"last {number_words(finite[-1])}",
        stepped=name == "global_batch_size",
        from_zero=name in _FROM_ZERO,
        log=name not in _FROM_ZERO and min(finite) > 0,
    )


def _title(name: str) -> str:
    spaced = name.replace("_", " ")
    return spaced[:1].upper() + spaced[1:]


def _rounded(values: Iterable[float]) -> list[float]:
    return [round(value, 3) for value in values]


def _way(rescale: Rescale) -> str:
    if rescale.to_size > rescale.from_size:
        return "up"
    return "down" if rescale.to_size < rescale.from_size else "same"


# -- parts of the page ---------------------------------------------------------------------------


def status_tone(status: str) -> str:
    """Return the CSS class in which a state of a run is shown."""
    tones = {"succeeded": "good", "failed": "bad", "died": "bad", "running": "on"}
    return tones.get(status, "")


def _header(summary: RunSummary, asked: Mapping[str, Any]) -> str:
    tone = status_tone(summary.status)
    words = [date_words(summary.started or 0.0)]
    if summary.plain:
        words.append(duration_words(summary.duration_s))
    if summary.hosts:
        words.append("hosts " + " ".join(f"{name}:{slots}" for name, slots in summary.hosts))
    if summary.attempts > 1:
        words.append(f"resumed {_times(summary.attempts - 1)}")
    command = asked.get("command")
    if isinstance(command, list):
        import shlex

        command = shlex.join(str(word) for word in command)
    shown = f"<p><code>{escape(command)}</code></p>" if command else ""
    message = f"<p>{escape(summary.message)}</p>" if summary.message else ""
    return (
        f'<header><h1>{escape(summary.run_id)}</h1><span class="pill {tone}">'
        f"{escape(summary.status)}</span><p>{escape(' · '.join(words))}</p>"
        f"{shown}{message}</header>"
    )


def _tiles(summary: RunSummary, audit: AuditResult) -> str:
    tiles = [
        (number_words(value) if isinstance(value, (int, float)) else str(value), name, "")
        for name, value in summary.final_metrics().items()
        if name != "loss"
    ]
    if "loss" in summary.last:
        tiles.append((number_words(summary.last["loss"]), "last loss (rank 0)", ""))
    plan = summary.batch_plan
    if plan:
        name = f"batch, {number_words(plan.limits.initial_batch_size)} at first"
        tiles.append((number_words(plan.global_batch_size), name, ""))
    tiles += [
        (number_words(summary.steps), "steps", ""),
        (number_words(summary.examples), "examples", ""),
        # A batch that adapts makes more passes than the script asked for epochs.
        (number_words(summary.epochs), "passes over data" if plan else "epochs", ""),
        (duration_words(summary.duration_s), "duration", ""),
        (duration_words(summary.first_step_s), "until the first step", ""),
    ]
    if summary.last.get("skipped_steps"):
        tiles.append((number_words(summary.last["skipped_steps"]), "steps left out", "bad"))
    if summary.skipped:
        tiles.append((number_words(len(summary.skipped)), "examples skipped", "bad"))
    if summary.mean_throughput is not None:
        tiles.append((number_words(summary.mean_throughput), "examples/s overall", ""))
    tiles.append((str(len(summary.live_rescales)), "rescales", ""))
    if summary.longest_pause_s is not None:
        tiles.append((duration_words(summary.longest_pause_s), "longest pause", ""))
    if audit.recorded:
        verdicts = {"good": "exactly once", "bad": "with faults", "": "not all recorded"}
        tone = _audit_tone(audit)
        tiles.append((verdicts[tone], "examples used", tone))
    return (
        '<div class="tiles">'
        + "".join(
            f'<div class="tile {tone}"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
            for value, name, tone in tiles
        )
        + "</div>"
    )


def _failure(summary: RunSummary) -> str:
    if not summary.failure:
        return ""
    who = f"The script failed in worker {summary.failed_worker}"
    if summary.plain:
        who = "The command failed; the end of what it printed"
    return (
        f'<section class="failure"><h2>{escape(who)}'
        f"</h2><pre>{escape(summary.failure.rstrip())}</pre></section>"
    )


def _marks(summary: RunSummary) -> list[dict[str, Any]]:
    """Return what happened in the order of time: rescales with their numbers, the rest by sign."""
    marks = [
        _mark(each.at_s, str(number), _way(each), f"rescale {number}", _rescale_words(each))
        for number, each in enumerate(summary.live_rescales, start=1)
    ]
    others = [
        _mark(gone.at_s, "✕", "down", "loss", f"host {gone.host} was lost: {gone.cause}")
        for gone in summary.left
        if gone.local_rank is None
    ]
    others += [_mark(said.at_s, "◆", "same", "decision", said.text) for said in summary.decisions]
    others += [_mark(said.at_s, "!", "warn", "warning", said.text) for said in summary.warnings]
    times = [float(mark["at_s"]) for mark in marks]
    for other in others:
        # What led to a rescale, or followed from the same loss, is told with it.
        place = bisect_left(times, other["at_s"] - _SAME_S)
        if place < len(times) and abs(times[place] - other["at_s"]) <= _SAME_S:
            marks[place]["text"] += f" · {other['what']}: {other['text']}"
        else:
            marks.append(other)
    return sorted(marks, key=lambda mark: float(mark["at_s"]))[-MAX_ROWS:]


def _mark(at_s: float, label: str, way: str, what: str, text: str) -> dict[str, Any]:
    return {
        "key": f"{what} {at_s:.3f}",
        "at_s": round(at_s, 3),
        "label": label,
        "way": way,
        "what": what,
        "text": text,
        "line": label.isdecimal(),
    }


def _rescale_words(rescale: Rescale) -> str:
    pause = duration_words(rescale.pause_s)
    done = f"pause {pause}" if rescale.finished else "not finished"
    return f"{rescale.from_size} → {rescale.to_size} slots, {done}: {rescale.reason}"


def _plots(charts: list[dict[str, Any]]) -> str:
    if not charts:
        return '<section><h2>Plots</h2><p class="hint">No metrics were recorded.</p></section>'
    hint = '<p class="hint">Drag to zoom, double-click to see everything again.</p>'
    return f"<section>{chart_boxes(charts)}{hint}</section>"


def _batch_panel(summary: RunSummary, charts: list[dict[str, Any]]) -> str:
    if not charts or summary.batch_plan is None:
        return ""
    initial = number_words(summary.batch_plan.limits.initial_batch_size)
    hint = (
        "Larger batches train on more examples per second, and each example brings less progress; "
        "the larger the gradient noise scale, the less is lost. Efficiency is the progress of an "
        f"example relative to one in a batch of {initial}. Where the noise scale is infinite or "
        "not known, nothing is drawn. The decisions below have each change and its reason."
    )
    return f'<section><h2>Batch</h2>{chart_boxes(charts)}<p class="hint">{hint}</p></section>'


def _rescale_table(summary: RunSummary) -> str:
    rows = []
    for number, rescale in enumerate(summary.live_rescales, start=1):
        way = _way(rescale)
        pause = "not finished" if not rescale.finished else duration_words(rescale.pause_s)
        rows.append(
            [
                f'<td><span class="mark {way}">{number}</span></td>',
                cell(_clock(rescale.at_s), "n"),
                cell(f"{rescale.from_size} → {rescale.to_size}", f"n {way}"),
                cell(pause, "n"),
                cell(rescale.reason, "w"),
            ]
        )
    heads = [("#", ""), ("at", "n"), ("slots", "n"), ("pause", "n"), ("reason", "")]
    if not rows:
        return '<section><h2>Rescales</h2><p class="hint">None.</p></section>'
    return f"<section><h2>Rescales</h2>{table(heads, rows)}</section>"


def _audit_tone(audit: AuditResult) -> str:
    return "good" if audit.ok else "bad" if audit.faulty else ""


def _audit_section(audit: AuditResult) -> str:
    if not audit.recorded:
        return (
            f'<section><h2>Use of the examples</h2><p class="hint">{escape(audit.sentence())}'
            "</p></section>"
        )
    tone = _audit_tone(audit)
    sign = {"good": "✓", "bad": "✗", "": "?"}[tone]
    parts = [f'<p class="verdict {tone}">{sign} {escape(audit.sentence())}</p>']
    if len(audit.problems()) > 1:
        lines = "\n".join(audit.problems()[:MAX_ROWS])
        parts.append(f"<pre>{escape(lines)}</pre>")
    rows = [
        [
            cell(f"{epoch.epoch}{' (open)' * epoch.open}{' (ended in it)' * epoch.ended}", "n"),
            cell(number_words(epoch.used), "n"),
            cell(number_words(epoch.missing - epoch.unrecorded), "n"),
            cell(number_words(epoch.unrecorded), "n"),
            cell(number_words(epoch.duplicated), "n"),
            cell(number_words(epoch.steps), "n"),
            cell(number_words(epoch.padding), "n"),
        ]
        for epoch in audit.epochs
    ]
    heads = [
        (name, "n")
        for name in ("epoch", "used", "not used", "not recorded", "used twice or more", "steps")
    ] + [("padding", "n")]
    epochs = table(heads, rows)
    if len(rows) > 12 and audit.ok:
        epochs = f"<details><summary>All {len(rows)} epochs</summary>{epochs}</details>"
    parts.append(epochs)
    notes = [f"{number_words(audit.steps)} steps counted, from what the workers really read"]
    if audit.repeated_steps:
        notes.append(f"{audit.repeated_steps} done again after a failure")
    if audit.voided_steps:
        notes.append(f"{audit.voided_steps} undone by going back to a checkpoint")
    parts.append(f'<p class="hint">{escape("; ".join(notes))}.</p>')
    return f"<section><h2>Use of the examples</h2>{''.join(parts)}</section>"


def _decision_table(summary: RunSummary) -> str:
    rows = [
        [cell(_clock(decision.at_s), "n"), cell(decision.text, "w")]
        for decision in summary.decisions
    ]
    return _optional("Decisions", [("at", "n"), ("decision", "")], rows)


def _worker_table(summary: RunSummary) -> str:
    changes: list[tuple[float, str, str, str]] = [
        (join.at_s, worker_name(join.host, join.local_rank), "joined", f"rank {join.rank}")
        for join in summary.joined
    ]
    begun = [(each.at_s, each.reason) for each in summary.live_rescales]
    for gone in summary.left:
        name = gone.host if gone.local_rank is None else worker_name(gone.host, gone.local_rank)
        reason = next((why for at_s, why in reversed(begun) if at_s <= gone.at_s), "")
        cause = departure_words(gone.cause, reason)
        changes.append((gone.at_s, name, "left" if gone.local_rank is not None else "lost", cause))
    rows = [
        [
            cell(_clock(at_s), "n"),
            cell(name),
            cell(what, "up" if what == "joined" else "down" if what == "lost" else ""),
            cell(words, "w"),
        ]
        for at_s, name, what, words in sorted(changes)
    ]
    heads = [("at", "n"), ("worker or host", ""), ("did", ""), ("why", "")]
    return _optional("Workers", heads, rows)


def _checkpoint_table(summary: RunSummary) -> str:
    rows = [
        [
            cell(_clock(checkpoint.at_s), "n"),
            cell(number_words(checkpoint.step), "n"),
            cell(bytes_words(checkpoint.size_bytes), "n"),
            cell(duration_words(checkpoint.seconds), "n"),
            cell(duration_words(checkpoint.blocked_s), "n"),
            cell(checkpoint.path, "w"),
            cell(checkpoint.not_finite, "w"),
        ]
        for checkpoint in summary.checkpoints
    ]
    heads = [("at", "n"), ("step", "n"), ("size", "n"), ("took", "n")]
    heads += [("training waited", "n"), ("file", ""), ("NaN or infinity in", "")]
    return _optional("Checkpoints", heads, rows)


def _warning_table(summary: RunSummary) -> str:
    rows = [
        [cell(_clock(warning.at_s), "n"), cell(warning.text, "w")] for warning in summary.warnings
    ]
    return _optional("Warnings", [("at", "n"), ("warning", "")], rows)


def _optional(title: str, heads: list[tuple[str, str]], rows: list[list[str]]) -> str:
    return f"<section><h2>{title}</h2>{table(heads, rows)}</section>" if rows else ""


def _clock(at_s: float) -> str:
    minutes, seconds = divmod(at_s, 60)
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours}:{minutes:02d}:{seconds:04.1f}" if hours else f"{minutes}:{seconds:04.1f}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"

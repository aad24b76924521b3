"""Shows a search: its trials, their curves against useful examples, and who held which slots."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from hvd_elastic.formatting import count, duration_words, number_words
from hvd_elastic.records.cluster import ClusterSummary, Hold
from hvd_elastic.search.rungs import judged_value, rank_trials, reached_at, rungs_reached
from hvd_elastic.search.trials import Rules, Trial, TrialStatus
from hvd_elastic.views.cluster_page import Piece, slots_picture
from hvd_elastic.views.page import (
    cell,
    chart,
    chart_boxes,
    escape,
    render_page,
    table,
    write_page,
    written,
)
from hvd_elastic.views.report import status_tone

_COLORS = ("muted", "note", "loss", "size", "throughput", "other")
"""Colours by number of rungs that a trial has reached; the last ones share one."""
_POINTS = 200
_WIDTH, _HEIGHT, _MARGIN = 1000, 260, 60
"""Of parallel coordinates, in the units of the drawing."""
_LOG_RATIO = 30.0
"""Ratio of the largest to the smallest value of a parameter from which its axis is logarithmic."""


def write_search_page(
    path: Path,
    name: str,
    rules: Rules,
    trials: Sequence[Trial],
    metric: str,
    cluster: ClusterSummary | None = None,
) -> None:
    """Write the page of a search.

    Raises:
        RunError: the file cannot be written.
    """
    write_page(path, render_search(name, rules, trials, metric, cluster))


def render_search(
    name: str,
    rules: Rules,
    trials: Sequence[Trial],
    metric: str,
    cluster: ClusterSummary | None = None,
) -> str:
    """Return the page of a search as HTML.

    Args:
        metric: name of the metric.
        cluster: what the queue has recorded, for the picture of the slots.
    """
    ranked = rank_trials(rules, trials)
    charts = [_chart(rules, ranked, metric)] if any(trial.points for trial in ranked) else []
    told = f'<p>{escape(_numbers(rules, ranked, metric))}</p><p class="keys">{_keys(rules)}</p>'
    parts = [f"<header><h1>Search {escape(name)}</h1>{told}</header>"]
    if charts:
        drawn = chart_boxes(charts) + _coordinates(rules, ranked, metric)
        parts.append(f"<section>{drawn}</section>")
    if cluster is not None:
        parts.append(_slots(rules, trials, cluster))
    parts += [_trial_table(rules, ranked, metric), written("the study and the queue's events")]
    data = {"charts": charts, "marks": [], "x_name": "useful examples"}
    return render_page(f"Search {name}", "\n".join(parts), data)


def _numbers(rules: Rules, ranked: Sequence[Trial], metric: str) -> str:
    states = Counter(trial.status.value for trial in ranked)
    told = ", ".join(f"{number} {state}" for state, number in states.items())
    words = f"{count(len(ranked), 'trial')} of {rules.trials}: {told or 'none yet'}"
    if ranked and math.isfinite(judged_value(rules, ranked[0])):
        best = ranked[0]
        words += (
            f". The best is trial {best.number}, {metric} {number_words(judged_value(rules, best))}"
        )
    return words


def _color(reached: int) -> str:
    return _COLORS[min(reached, len(_COLORS) - 1)]


def _keys(rules: Rules) -> str:
    """Return the colours of the rungs as HTML."""
    words = ["below rung 1", *(f"rung {rung}" for rung in range(1, len(rules.rung_examples) + 1))]
    return "".join(
        f'<span class="key-{_color(rung)}">{text}</span>' for rung, text in enumerate(words)
    )


# -- curves ----------------------------------------------------------------------------------------


def _chart(rules: Rules, ranked: Sequence[Trial], metric: str) -> dict[str, Any]:
    """Return a chart with the curve of every trial; its readout tells of the best one."""
    most = max(trial.points[-1].examples for trial in ranked if trial.points)
    x = sorted({round(most * point / _POINTS) for point in range(_POINTS + 1)})
    lines = [(_color(rungs_reached(rules, trial)), _sampled(trial, x)) for trial in ranked]
    (color, best), *others = lines
    return chart(
        ("curves", f"{metric} against useful examples", "", color),
        x,
        best,
        300,
        f"trial {ranked[0].number}: {number_words(judged_value(rules, ranked[0]))}",
        more=[{"color": shade, "y": y, "solid": True} for shade, y in others],
        log=all(value > 0 for _, y in lines for value in y if value is not None),
    )


def _sampled(trial: Trial, x: Sequence[int]) -> list[float | None]:
    """Return the metric of a trial at numbers of useful examples; None before and after it."""
    import numpy as np

    points = [point for point in trial.points if math.isfinite(point.value)]
    if not points:
        return [None] * len(x)
    at = [point.examples for point in points]
    found = np.interp(x, at, [point.value for point in points])
    return [
        float(f"{value:.5g}") if at[0] <= examples <= at[-1] else None
        for examples, value in zip(x, found, strict=True)
    ]


# -- parallel coordinates --------------------------------------------------------------------------


def _coordinates(rules: Rules, ranked: Sequence[Trial], metric: str) -> str:
    """Return a line for each trial across an axis for each parameter and for the metric."""
    reported = [trial for trial in ranked if math.isfinite(judged_value(rules, trial))]
    if not reported:
        return ""
    columns: dict[str, Sequence[Any]] = {
        name: [trial.params.get(name) for trial in reported] for name in reported[0].params
    }
    columns[metric] = [judged_value(rules, trial) for trial in reported]
    heights, labels = [], []
    for place, (name, values) in enumerate(columns.items()):
        x = _MARGIN + (_WIDTH - 2 * _MARGIN) * place / max(len(columns) - 1, 1)
        ys, ends = _axis(values)
        heights.append((x, ys))
        labels.append(f'<path class="edge" d="M{x:.0f} 30V{_HEIGHT - 24}"/>')
        for y, text in ((16, name), *ends):
            labels.append(f'<text x="{x:.0f}" y="{y:.0f}">{escape(text)}</text>')
    paths = []
    for number, trial in reversed(list(enumerate(reported))):
        points = "L".join(f"{x:.0f} {ys[number]:.1f}" for x, ys in heights)
        told = ", ".join(f"{key} {number_words(value)}" for key, value in trial.params.items())
        told = f"trial {trial.number}: {told}, {metric} {number_words(judged_value(rules, trial))}"
        color = _color(rungs_reached(rules, trial))
        paths.append(
            f'<path class="key-{color}" d="M{points}"><title>{escape(told)}</title></path>'
        )
    label = f"Parameters and {metric} of {count(len(reported), 'trial')}, a line for each"
    return (
        f'<h3>Parameters</h3><svg class="cluster coordinates" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'role="img" aria-label="{escape(label)}">{"".join([*labels, *paths])}</svg>'
    )


def _axis(values: Sequence[Any]) -> tuple[list[float], list[tuple[float, str]]]:
    """Return the heights of values on an axis, and its labels with theirs."""
    top, bottom = 40.0, _HEIGHT - 34.0
    numbers = [value for value in values if isinstance(value, (int, float))]
    if len(numbers) < len(values):
        kinds = sorted({str(value) for value in values})
        step = (bottom - top) / max(len(kinds) - 1, 1)
        at = {kind: bottom - step * place for place, kind in enumerate(kinds)}
        return [at[str(value)] for value in values], [(at[kind] - 4, kind) for kind in kinds]
    low, high = min(numbers), max(numbers)
    ends = [(_HEIGHT - 8.0, number_words(low)), (32.0, number_words(high))]
    if low > 0 and high / low >= _LOG_RATIO:
        low, high, numbers = math.log(low), math.log(high), [math.log(each) for each in numbers]
    whole = (high - low) or 1.0
    return [bottom - (bottom - top) * (each - low) / whole for each in numbers], ends


# -- slots -----------------------------------------------------------------------------------------


def _slots(rules: Rules, trials: Sequence[Trial], cluster: ClusterSummary) -> str:
    """Return the picture of the slots, with the rung that the trial of each had reached."""
    started = cluster.started or 0.0
    rises = {
        str(trial.job): [at - started for at in reached_at(rules, trial)]
        for trial in trials
        if trial.job
    }

    def pieces(hold: Hold) -> list[Piece]:
        if hold.job not in rises:
            return [(hold.begin_s, hold.end_s, 'class="others"')]
        edges = [hold.begin_s]
        edges += [at for at in rises[hold.job] if hold.begin_s < at < hold.end_s]
        return [
            (begin, end, f'class="key-{_color(sum(at <= begin for at in rises[hold.job]))}"')
            for begin, end in pairwise([*edges, hold.end_s])
        ]

    return slots_picture(cluster, cluster.duration_s, pieces=pieces, words="a colour for each rung")


# -- table -----------------------------------------------------------------------------------------


def _trial_table(rules: Rules, ranked: Sequence[Trial], metric: str) -> str:
    params = list(dict.fromkeys(name for trial in ranked for name in trial.params))
    values = [p.value for trial in ranked for p in trial.points if math.isfinite(p.value)]
    most = max((trial.points[-1].examples for trial in ranked if trial.points), default=1.0)
    bounds = (most, min(values, default=0.0), max(values, default=1.0))
    rows = []
    for place, trial in enumerate(ranked, 1):
        is_done = trial.status is TrialStatus.DONE
        tone = status_tone("succeeded" if is_done else trial.status.value)
        pill = f'<span class="pill {tone}">{trial.status.value}</span>'
        reached = rungs_reached(rules, trial)
        rows.append(
            [
                cell(str(place), "n"),
                cell(str(trial.number), "n"),
                f"<td>{pill}</td>",
                *(cell(number_words(trial.params.get(name, "")), "n") for name in params),
                cell(str(reached), f"n key-{_color(reached)}"),
                cell(number_words(judged_value(rules, trial)) if trial.points else "–", "n"),
                f"<td>{_curve(trial, reached, bounds)}</td>",
                cell(number_words(round(trial.examples)), "n"),
                cell(str(trial.slots or ""), "n"),
                cell(duration_words(trial.slot_s), "n"),
                cell(trial.reason, "w"),
            ]
        )
    heads = [("rank", "n"), ("trial", "n"), ("status", ""), *((name, "n") for name in params)]
    heads += [("rung", "n"), (metric, "n"), ("curve", ""), ("useful examples", "n")]
    heads += [("slots", "n"), ("slot time", "n"), ("reason", "")]
    return f"<section><h2>Trials</h2>{table(heads, rows, max(len(rows), 1))}</section>"


def _curve(trial: Trial, reached: int, bounds: tuple[float, float, float]) -> str:
    """Return the curve of a trial as a small picture; all have the same axes."""
    most, low, high = bounds
    whole = (high - low) or 1.0
    points = [
        f"{100 * point.examples / (most or 1.0):.1f} {20 * (high - point.value) / whole:.1f}"
        for point in trial.points
        if math.isfinite(point.value)
    ]
    if not points:
        return ""
    return (
        f'<svg class="curve" viewBox="0 -1 100 22" preserveAspectRatio="none" aria-hidden="true">'
        f'<path class="key-{_color(reached)}" d="M{"L".join(points)}"/></svg>'
    )

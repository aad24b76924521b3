"""Draws which hosts held how many processes over time, as stacked bars."""

from __future__ import annotations

from hvd_elastic.formatting import count, duration_words
from hvd_elastic.records.summary import RunSummary
from hvd_elastic.views.page import cell, escape, table

_WIDTH, _HEIGHT = 1000, 120
_COLORS = 8
_MOST_BARS = 1500
"""Most pieces of the picture; of more changes the last are drawn."""


def allocation_picture(summary: RunSummary) -> str:
    """Return a section with the picture and its table as HTML; empty without placements."""
    placements = summary.placements[-_MOST_BARS:]
    if not any(held for _, held in placements):
        return ""
    ends = [*(at_s for at_s, _ in placements[1:]), summary.duration_s]
    whole_s = max(summary.duration_s, 1e-3)
    most = max(sum(number for _, number in held) for _, held in placements)
    names = list(dict.fromkeys(name for _, held in placements for name, _ in held))
    color = {name: index % _COLORS for index, name in enumerate(names)}
    held_s = dict.fromkeys(names, 0.0)
    bars = []
    for (begin, held), end in zip(placements, ends, strict=True):
        bottom = 0
        for name, number in held:
            held_s[name] += number * max(0.0, end - begin)
            x, width = _WIDTH * begin / whole_s, _WIDTH * max(0.0, end - begin) / whole_s
            y = _HEIGHT * (1 - (bottom + number) / most)
            bottom += number
            bars.append(
                f'<rect class="host{color[name]}" x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" '
                f'height="{_HEIGHT * number / most:.2f}"><title>{escape(name)}: '
                f"{count(number, 'process')}</title></rect>"
            )
    label = f"Processes on each host over {duration_words(summary.duration_s)}, {most} at most"
    rows = []
    for name, seconds in held_s.items():
        square = f'<rect width="1" height="1" class="host{color[name]}"></rect>'
        key = f'<svg class="key" viewBox="0 0 1 1" aria-hidden="true">{square}</svg>'
        rows.append([f"<td>{key} {escape(name)}</td>", cell(duration_words(seconds), "n")])
    heads = [("host", ""), ("time of all its processes", "n")]
    return (
        f'<section><h2>Hosts</h2><svg class="allocation" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'preserveAspectRatio="none" role="img" aria-label="{escape(label)}">{"".join(bars)}</svg>'
        f'<p class="hint">{escape(label)}.</p>{table(heads, rows)}</section>'
    )

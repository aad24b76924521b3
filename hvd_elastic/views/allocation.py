"""Shows the hosts of a run: their processes over time as stacked bars, and how busy each is."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise
from statistics import median

from hvd_elastic.formatting import bytes_words, count, duration_words
from hvd_elastic.records.summary import HostUse, RunSummary
from hvd_elastic.records.wording import GOES_ON
from hvd_elastic.views.page import cell, escape, table

_WIDTH, _HEIGHT = 1000, 120
_COLORS = 8
_MOST_BARS = 1500
"""Most pieces of the picture; of more changes the last are drawn."""
_SLOW = 1.25
"""Compute time of a step, relative to the median of the hosts, from which a host is marked."""


_MARKS = (
    '<div class="marks" role="group" aria-label="What happened"></div>'
    '<p class="reason" role="status" hidden></p>'
)
"""Place of the marks, which report.js draws on the same axis of time."""


def hosts_section(summary: RunSummary) -> str:
    """Return a section with the picture and the table of hosts as HTML; empty without either.

    ``summary.status`` is the state of the run as shown to users.
    """
    placements = summary.placements[-_MOST_BARS:]
    if not any(held for _, held in placements):
        return f"<section><h2>Hosts</h2>{_MARKS}</section>" if summary.started is not None else ""
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
                f"{count(number, 'worker')}</title></rect>"
            )
    label = f"Processes on each host over {duration_words(summary.duration_s)}, {most} at most"
    return (
        f'<section><h2>Hosts</h2><div data-piece="picture"><svg class="allocation" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label)}">{"".join(bars)}</svg></div>{_MARKS}'
        f'<div data-piece="table"><p class="axis">{_ticks(summary.duration_s)}</p>'
        f"{_host_table(summary, color, held_s)}</div></section>"
    )


def _ticks(whole_s: float) -> str:
    """Return the labels of the axis of time."""
    times = [whole_s * quarter / 4 for quarter in range(5)]
    return "".join(f"<span>{duration_words(at_s) if at_s else '0'}</span>" for at_s in times)


def _host_table(summary: RunSummary, color: dict[str, int], held_s: dict[str, float]) -> str:
    """Return the table of all hosts; of a run that continues with how busy they are."""
    slots = dict(summary.hosts)
    state = summary.status
    now = dict(summary.placements[-1][1]) if summary.trains_now(state) else {}
    goes_on = state in GOES_ON
    shares = _shares(summary, now)
    fresh = summary.present_use(state)
    steps_s = _steps_s(summary, state)
    slow = slow_hosts(summary, state)
    has_gpus = any(use.gpus for use in fresh.values())
    rows = []
    for name in dict.fromkeys([*slots, *color]) if goes_on else color:
        square = f'<rect width="1" height="1" class="host{color.get(name, "-none")}"></rect>'
        key = f'<svg class="key" viewBox="0 0 1 1" aria-hidden="true">{square}</svg>'
        row = [f'<td class="h">{key} {escape(name)}</td>']
        if goes_on:
            words, tone = _state(summary, name, slow, trains=name in now)
            row.append(f'<td><span class="state {tone}">{escape(words)}</span></td>')
            row.append(cell(f"{now.get(name, 0)} of {slots.get(name, 0)}", "n"))
            share = shares.get(name)
            row.append(cell("" if share is None else f"{share:.0%}", "n"))
            row += _use_cells(fresh.get(name), steps_s.get(name), has_gpus=has_gpus)
        rows.append([*row, cell(duration_words(held_s.get(name, 0.0)), "n")])
    heads = [("host", "")]
    if goes_on:
        heads += [("state", ""), ("slots used", "n"), ("of the batch", "n"), ("step", "n")]
        heads += [("CPU", "n"), ("memory", "n"), *([("GPU", "n")] if has_gpus else [])]
        heads += [("sent, received", "n"), ("disk read, written", "n")]
    return table([*heads, ("slot time", "n")], rows)


def host_rows(summary: RunSummary, state: str) -> list[tuple[str, list[str]]]:
    """Return what the hosts that train do now, as text: slots, step, CPU, memory, network."""
    if not summary.trains_now(state) or not summary.placements:
        return []
    rows = []
    present = summary.present_use(state)
    for name, number in summary.placements[-1][1]:
        figures = present[name].figures if name in present else {}
        step_s = figures.get("step_s")
        rates = [f"{bytes_words(figures[key])}/s" for key in ("sent", "received") if key in figures]
        cells = [str(number), "" if step_s is None else f"{1000 * step_s:.3g} ms"]
        cells += [_part(figures.get("cpu")), _part(figures.get("memory")), *rates]
        rows.append((name, cells))
    return rows


def slow_hosts(summary: RunSummary, state: str) -> dict[str, float]:
    """Return the hosts whose steps take much longer than the median of the hosts, and how much."""
    steps_s = _steps_s(summary, state)
    if len(steps_s) < 2:
        return {}
    usual_s = median(steps_s.values())
    return {name: s / usual_s for name, s in steps_s.items() if s > _SLOW * usual_s > 0}


def _steps_s(summary: RunSummary, state: str) -> dict[str, float]:
    """Return the compute time of a step of each host that trains, where it is known [s]."""
    present = summary.present_use(state)
    return {
        name: present[name].figures["step_s"]
        for name, _ in (summary.placements[-1][1] if summary.placements else [])
        if name in present and "step_s" in present[name].figures
    }


def _state(
    summary: RunSummary, name: str, slow: Mapping[str, float], *, trains: bool
) -> tuple[str, str]:
    """Return in a word how a host is, and its tone."""
    if name in summary.draining:
        return "drained" if summary.draining[name].empty else "leaves", "note"
    if not trains:
        lost = [gone for gone in summary.left if gone.host == name and gone.local_rank is None]
        return ("lost", "bad") if lost else ("not used", "")
    if name in summary.faults:
        return "unhealthy", "bad"
    if name in slow:
        return f"slow: {slow[name]:.1f} x", "bad"
    return "trains", "good"


def _shares(summary: RunSummary, now: dict[str, int]) -> dict[str, float]:
    """Return the part of the batch that each host computes; its ranks follow each other."""
    size = sum(now.values())
    shares = [share or 0.0 for share in summary.rank_shares]
    if len(shares) != size or not sum(shares):
        shares = [1.0] * size
    edges = pairwise(accumulate(now.values(), initial=0))
    return {
        name: sum(shares[first:last]) / sum(shares)
        for name, (first, last) in zip(now, edges, strict=True)
    }


def _use_cells(use: HostUse | None, step_s: float | None, *, has_gpus: bool) -> list[str]:
    if use is None:
        return [cell("", "n")] * (6 if has_gpus else 5)
    figures = use.figures
    gpus = ", ".join(f"{busy:.0%}" for busy, _ in use.gpus)
    return [
        cell("" if step_s is None else f"{1000 * step_s:.3g} ms", "n"),
        cell(_part(figures.get("cpu")), "n"),
        cell(_part(figures.get("memory")), "n"),
        *([cell(gpus, "n")] if has_gpus else []),
        cell(_rates(figures, "sent", "received"), "n"),
        cell(_rates(figures, "read", "written"), "n"),
    ]


def _part(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _rates(figures: dict[str, float], *names: str) -> str:
    return ", ".join(f"{bytes_words(figures.get(name, 0.0))}/s" for name in names)

"""Render a forecast for other numbers of hosts, or a scaling benchmark, as one page or picture."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvd_elastic.errors import RunError, UsageError
from hvd_elastic.formatting import count, duration_words, number_words
from hvd_elastic.install.prerequisites import BROWSERS, find_program
from hvd_elastic.policy.forecast import Forecast
from hvd_elastic.views.page import cell, chart_boxes, escape, render_page, table, written


def render_plan(run_id: str, forecasts: Sequence[Forecast], notes: Sequence[str]) -> str:
    """Return the page as HTML.

    Args:
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


_LIMIT_S = 60.0
"""How long a browser may take; on a busy machine it starts slowly."""
_NO_CONTROLS = "<style>button, details { display: none }</style></head>"


def find_browser() -> str:
    """Return the path of a browser that draws pages.

    Raises:
        UsageError: there is none.
    """
    found = find_program(*BROWSERS)
    if found is None:
        raise UsageError(
            "a PNG is drawn by Chromium or Chrome, and neither is installed here. Install one (apt "
            "install chromium), or write an .html file: its chart has a button that saves a PNG"
        )
    return found


def write_picture(page: str, path: Path, width: int, height: int) -> None:
    """Draw the top of a page as a PNG file.

    Args:
        page: page as HTML, without parts from elsewhere.
        width, height: size of the picture [pixels].

    Raises:
        UsageError: there is no browser.
        RunError: the browser failed, or the file cannot be written.
    """
    browser = find_browser()
    with tempfile.TemporaryDirectory(prefix="hvd_elastic-picture-") as name:
        folder = Path(name)
        still = page.replace("</head>", _NO_CONTROLS, 1)
        (folder / "page.html").write_text(still, encoding="utf-8")
        drawn = folder / "page.png"
        options = [f"--screenshot={drawn}", f"--window-size={width},{height}"]
        options += [f"--user-data-dir={folder / 'profile'}", "--hide-scrollbars"]
        if os.geteuid() == 0:
            options.append("--no-sandbox")  # a browser of root has none
        command = [browser, "--headless", *options, (folder / "page.html").as_uri()]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RunError(f"{path} cannot be drawn: {error}") from error
        if not drawn.exists():
            last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
            raise RunError(f"{path} cannot be drawn: {browser} says: {last[0]}")
        try:
            path.write_bytes(drawn.read_bytes())
        except OSError as error:
            raise RunError(f"{path} cannot be written: {error.strerror}") from error


def render_scaling(
    title: str, result: Mapping[str, Any], tables: Sequence[tuple[str, list[list[str]]]]
) -> str:
    """Return the page as HTML.

    Args:
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

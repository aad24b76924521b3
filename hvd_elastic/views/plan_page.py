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
from hvd_elastic.views.page import cell, chart, chart_boxes, escape, render_page, table, written


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
    goodput = ("goodput", "Goodput", "useful examples/s", "throughput")
    charts = [_chart(goodput, [(f, f.goodput, f.low, f.high) for f in forecasts])]
    timed = [(f, f.time_s) for f in forecasts if f.time_s is not None]
    totals = [
        (("time", "Time to the target", "hours", "size"), [(f, s / 3600) for f, s in timed]),
        (
            ("cost", "Cost to the target", "", "loss"),
            [(f, f.cost) for f, _ in timed if f.cost is not None],
        ),
    ]
    for words, found in totals:
        if found:
            bounds = [(f, x, x * f.goodput / f.high, x * f.goodput / f.low) for f, x in found]
            charts.append(_chart(words, bounds))
    return charts


def _chart(
    words: tuple[str, str, str, str], points: Sequence[tuple[Forecast, float, float, float]]
) -> dict[str, Any]:
    """Return a chart of values with their bounds, by number of hosts or slots."""
    forecasts, values, low, high = zip(*points, strict=True)
    noun = _size_name(forecasts)
    sizes = [f.hosts if noun == "hosts" else f.slots for f in forecasts]
    told = f"{number_words(values[-1])} with {count(sizes[-1], noun[:-1])}"
    bounds = {"low": _short(low), "high": _short(high)}
    return chart(words, sizes, _short(values), 220, told, from_zero=True, **bounds)


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
    lines = [
        {"color": "muted", "y": [number * each for number in slots]},
        {"color": "loss", "y": [size["throughput"] for size in every]},
    ]
    last = result["sizes"][-1]
    drawn = chart(
        ("throughput", "Throughput", "examples/s", "throughput"),
        slots,
        [measured.get(number) for number in slots],
        320,
        f"{number_words(last['throughput'])} with {last['slots']} slots",
        low=[size["low"] for size in every],
        high=[size["high"] for size in every],
        more=lines,
        from_zero=True,
    )
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
        f'<section>{chart_boxes([drawn])}<p class="hint">{hint}</p></section>',
        *shown,
        f"<footer>Measured {escape(result['conditions']['when'])} by hvd_elastic.</footer>",
    ]
    data = {"charts": [drawn], "marks": [], "x_name": "slots"}
    return render_page(f"{title}: scaling", "\n".join(body), data)

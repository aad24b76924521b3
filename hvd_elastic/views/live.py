"""All runs of this machine as live pages: the first page, that of a run, and that of several."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import urlencode

from hvd_elastic.errors import RunError
from hvd_elastic.formatting import count, number_words
from hvd_elastic.records.run_folder import RunFolder, list_runs
from hvd_elastic.records.run_row import run_row
from hvd_elastic.records.wording import ENDED, GOES_ON
from hvd_elastic.views.cluster_page import LiveClusters
from hvd_elastic.views.comparison import COLORS
from hvd_elastic.views.live_run import LiveComparison, LiveRun, file_version
from hvd_elastic.views.page import cell, escape, progress_bar, read_asset, table
from hvd_elastic.views.report import status_tone

_ROWS = 100
"""Most runs on the first page, besides those that continue."""
_READABLE_S = 600.0
"""Time for which the figures of a run that has ended can be read [s]: so that a scraper that comes
once in a few minutes sees how it ended."""
_FRESH_S = 0.4
"""Age of the first page up to which all viewers are shown the same [s]."""
_CONTROLS = """<section class="controls" data-control="/runs/{run_id}/control">
<form data-op="scale"><label>workers <input name="np" type="number" min="1" required></label>
<button>scale</button></form>
<form data-op="drain"><label>host <input name="host" required></label><button>drain</button></form>
<form data-op="stop"><button>stop the run</button></form>
<p id="told" role="status"></p></section>
"""


class LiveRuns:
    """All runs of this machine."""

    def __init__(self) -> None:
        self._known: dict[str, LiveRun] = {}
        self._compared: dict[tuple[str, ...], LiveComparison] = {}
        self._clusters = LiveClusters()
        self._lock = threading.Lock()
        self._rows = _Rows()
        self._rendered: dict[str, Any] = {}
        self._rendered_at = -math.inf
        self._rendering = threading.Lock()

    def get(self, run_id: str) -> LiveRun:
        """Return a run.

        Raises:
            UsageError: the run id is not valid.
            RunError: there is no such run.
        """
        folder = RunFolder.open(run_id)
        with self._lock:
            return self._known.setdefault(folder.run_id, LiveRun(folder))

    def compare(self, run_ids: Sequence[str]) -> LiveComparison:
        """Return several runs over each other.

        Raises:
            UsageError: a run id is not valid.
            RunError: there is no such run, or there are too few or too many.
        """
        chosen = tuple(sorted(set(run_ids)))
        if not 2 <= len(chosen) <= len(COLORS):
            raise RunError(f"choose 2 to {len(COLORS)} runs to compare, not {len(chosen)}")
        runs = [self.get(run_id) for run_id in chosen]  # sorted: locked in one order
        with self._lock:
            while len(self._compared) > _ROWS:
                del self._compared[next(iter(self._compared))]
            return self._compared.setdefault(chosen, LiveComparison(runs))

    def recent(self) -> list[LiveRun]:
        """Return the runs whose leader lives, and those that have ended a short while ago."""
        since = time.time() - _READABLE_S
        return [
            self.get(each.run_id)
            for each in list_runs()
            if each.leader_alive() or _changed_at(each.events) > since
        ]

    def render(self) -> dict[str, Any]:
        """Return the parts of the first page, and a line on how the runs stand."""
        with self._rendering:
            if time.monotonic() - self._rendered_at >= _FRESH_S:
                self._rendered = self._render()
                self._rendered_at = time.monotonic()
            return self._rendered

    def _render(self) -> dict[str, Any]:
        folders = list_runs()
        older = [folder for folder in folders[_ROWS:] if folder.leader_alive()]
        rows = self._rows.read_rows([*folders[:_ROWS], *older])
        running = sum(row["status"] in GOES_ON for row in rows)
        html = {"clusters": self._clusters.render(), "runs": _run_table(rows, len(folders))}
        return {"html": html, "live": f"{count(running, 'run')} in progress"}


class _Rows:
    """Rows of the list of runs; that of a run that is over is made once."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[tuple[int, int] | None, dict[str, Any]]] = {}

    def read_rows(self, folders: Sequence[RunFolder]) -> list[dict[str, Any]]:
        before, self._known = self._known, {}
        for folder in folders:
            version = file_version(folder.events)
            known = before.get(folder.run_id)
            if known is None or known[0] != version or known[1]["status"] not in ENDED:
                known = version, run_row(folder)
            self._known[folder.run_id] = known
        return [row for _, row in self._known.values()]


def _changed_at(path: Path) -> float:
    """Return when a file was written to last [Unix s]; 0: there is none."""
    version = file_version(path)
    return 0.0 if version is None else version[0] / 1e9


def run_page(run: LiveRun, *, control: bool = False) -> str:
    """Return the page of a run as HTML; ``control``: with forms to control it."""
    found = run.render()
    run_id = run.folder.run_id
    links = '<a href="/">all runs</a> · '
    forms = _CONTROLS.format(run_id=escape(run_id)) if control else ""
    return _page(run_id, f"/runs/{run_id}/events", found, links, forms)


def comparison_page(run_ids: Sequence[str], comparison: LiveComparison) -> str:
    """Return the page of several runs as HTML."""
    query = urlencode([("run", run_id) for run_id in run_ids])
    links = '<a href="/">all runs</a> · '
    return _page(" and ".join(run_ids), f"/compare/events?{query}", comparison.render(), links)


def first_page(runs: LiveRuns) -> str:
    """Return the page of all runs as HTML."""
    return _page("Runs", "/events", runs.render(), "")


def _page(title: str, events: str, found: Mapping[str, Any], links: str, forms: str = "") -> str:
    body = []
    for name, html in found["html"].items():
        body.append(f'<div data-part="{name}">{html}</div>')
        if name == "words":
            body.append(forms)
    data = found.get("data") or {"charts": [], "marks": [], "duration_s": 0}
    return Template(read_asset("live.html")).substitute(
        title=escape(title),
        events=escape(events),
        links=links,
        live=escape(found["live"]),
        body="\n".join(body),
        data=json.dumps(data, allow_nan=False).replace("<", "\\u003c"),
    )


def _run_table(rows: list[dict[str, Any]], of: int) -> str:
    """Return the table of runs, which are ``of`` in all, as HTML."""
    if not rows:
        return (
            "<h1>Runs</h1><p>There is no run yet. Begin one with: "
            "<code>hvd-elastic run --hostfile HOSTS -- python train.py</code></p>"
        )
    heads = [("run", ""), ("status", ""), ("started", ""), ("done", "")]
    heads += [("steps", "n"), ("workers", "n"), ("examples/s", "n")]
    cells = [
        [
            f'<td class="h"><a href="/runs/{(name := escape(row["run_id"]))}">{name}</a></td>',
            f'<td><span class="pill {status_tone(row["status"])}">{row["status"]}</span></td>',
            cell(time.strftime("%Y-%m-%d %H:%M", time.localtime(row["created"])), "h"),
            _done_cell(row["done"]),
            cell("command" if row["plain"] else number_words(row["steps"]), "n"),
            cell(str(row["size"] or ""), "n"),
            cell("" if row["throughput"] is None else number_words(round(row["throughput"])), "n"),
        ]
        for row in rows
    ]
    cut = f"The newest {_ROWS} of {of} runs, and those that still run." if of > len(rows) else ""
    if len(rows) == 1:
        return f'<h1>Runs</h1><section class="runs">{table(heads, cells)}</section>'
    for row, made in zip(rows, cells, strict=True):
        name = escape(row["run_id"])
        box = f'<input type="checkbox" name="run" value="{name}" aria-label="compare {name}">'
        made.insert(0, f"<td>{box}</td>")
    return (
        f'<h1>Runs</h1><section class="runs"><form action="/compare">'
        f"{table([('compare', ''), *heads], cells)}<p><button>Compare the chosen runs</button>"
        f'<span class="hint">{cut}</span></p></form></section>'
    )


def _done_cell(done: float | None) -> str:
    return "<td></td>" if done is None else f'<td class="part">{progress_bar(done)}</td>'

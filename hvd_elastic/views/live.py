"""Follows the events of runs, and renders what a live page shows of them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from string import Template
from typing import Any

from hvd_elastic.errors import RunError
from hvd_elastic.formatting import count, duration_words, number_words
from hvd_elastic.records.audit import AuditResult, check_audit
from hvd_elastic.records.json_lines import EventFollower, iter_events
from hvd_elastic.records.run_folder import RunFolder, list_runs
from hvd_elastic.records.run_state import run_row, run_state
from hvd_elastic.records.summary import RunSummary, take_event
from hvd_elastic.views.cluster_page import LiveClusters
from hvd_elastic.views.page import cell, escape, read_asset, table
from hvd_elastic.views.report import (
    MAX_POINTS,
    Charts,
    chart_names,
    make_charts,
    report_parts,
    zoomed_points,
)

_FRESH_S = 0.4
"""Age of what was read up to which it is not read again [s]."""
_ROWS = 100
"""Most runs on the first page."""
_CONTROLS = """<section class="controls" data-control="/runs/{run_id}/control">
<form data-op="scale"><label>processes <input name="np" type="number" min="1" required></label>
<button>scale</button></form>
<form data-op="drain"><label>host <input name="host" required></label><button>drain</button></form>
<form data-op="stop"><button>stop the run</button></form>
<p id="told" role="status"></p></section>
"""


class LiveRun:
    """One run, whose events are read as they come; for several threads.

    Args:
        folder: folder of the run.

    Attributes:
        version: grows with every event that was read.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.version = 0
        self._summary = RunSummary()
        self._follower = EventFollower(folder.events)
        self._lock = threading.Lock()
        self._read_at = 0.0
        self._audit: AuditResult | None = None
        self._charts: Charts = ([], [])
        self._charts_key: Any = None
        self._charts_at_s = 0.0
        self._rendered: tuple[tuple[int, str], dict[str, Any]] | None = None

    def read(self) -> RunSummary:
        """Read new events; return the summary, which only this object changes.

        Raises:
            RunError: the folder of the run is gone.
        """
        with self._lock:
            return self._read()

    def _read(self) -> RunSummary:
        if time.monotonic() - self._read_at >= _FRESH_S:
            if not self.folder.path.is_dir():
                raise RunError(f"run {self.folder.run_id} is gone: its folder was removed")
            while records := self._follower.poll():
                for record in records:
                    take_event(self._summary, record)
                self.version += len(records)
            self._read_at = time.monotonic()
            self._summary.run_id = self.folder.run_id
        return self._summary

    def state(self) -> str:
        """Return the state of the run in a word; see :func:`run_state`."""
        summary = self.read()
        alive = self.folder.leader_alive()
        until = None if alive else self.folder.leaderless_until(summary.ended)
        waiting = bool(summary.waiting)
        return run_state(summary.status, alive=alive, waiting=waiting, until=until)

    def render(self) -> dict[str, Any]:
        """Return the parts of the page, the data of its charts, and a line on how it stands."""
        state = self.state()
        with self._lock:
            summary = self._read()
            if self._rendered is not None and self._rendered[0] == (self.version, state):
                return self._rendered[1]
            status, summary.status = summary.status, state
            try:
                parts, data = report_parts(
                    summary,
                    self._audit_of(state),
                    asked=self.folder.read_run(),
                    charts=self._charts_of(state),
                )
            finally:
                summary.status = status
            data["duration_s"] = self._charts_at_s
            if not _has_ended(state):
                parts["audit"] = ""  # it is checked once the run has ended
            parts = {"header": "", "words": _words(summary, state), **parts}
            told = f"{state}, as of its last event at {_clock(summary.ended)}"
            self._rendered = (self.version, state), {"html": parts, "data": data, "live": told}
            return self._rendered[1]

    def zoom(self, name: str, begin_s: float, end_s: float) -> dict[str, Any]:
        """Return the points of a chart between two times after the start [s].

        Raises:
            RunError: the run has no such chart.
        """
        with self._lock:
            summary = self._read()
            if name not in chart_names(summary):
                raise RunError(f"run {self.folder.run_id} has no chart {name!r}")
            x, y = zoomed_points(summary, name, begin_s, end_s)
            return {"x": x, "y": y}

    def _charts_of(self, state: str) -> Charts:
        """Return the charts, made anew where a pixel or more would differ."""
        summary = self._summary
        key = (state, len(summary.sizes), tuple(chart_names(summary)))
        pixel_s = summary.duration_s / MAX_POINTS
        if key != self._charts_key or summary.duration_s - self._charts_at_s >= pixel_s:
            self._charts = make_charts(summary)
            self._charts_key, self._charts_at_s = key, summary.duration_s
        return self._charts

    def _audit_of(self, state: str) -> AuditResult:
        """Return the audit, which is checked once the run has ended."""
        if not _has_ended(state):
            self._audit = None
            return check_audit(())
        if self._audit is None:
            self._audit = check_audit(
                iter_events(self.folder.audit),
                finished=state == "succeeded",
                ended_in=self._summary.ended_in,
            )
        return self._audit


class LiveRuns:
    """All runs of this machine."""

    def __init__(self) -> None:
        self._known: dict[str, LiveRun] = {}
        self._clusters = LiveClusters()
        self._lock = threading.Lock()

    def get(self, run_id: str) -> LiveRun:
        """Return a run.

        Raises:
            UsageError: the run id is not valid.
            RunError: there is no such run.
        """
        folder = RunFolder.open(run_id)
        with self._lock:
            return self._known.setdefault(folder.run_id, LiveRun(folder))

    def alive(self) -> list[LiveRun]:
        """Return the runs whose leader lives."""
        return [self.get(each.run_id) for each in list_runs() if each.leader_alive()]

    def render(self) -> dict[str, Any]:
        """Return the parts of the first page, and a line on how the runs stand."""
        folders = list_runs()
        rows = [run_row(folder) for folder in folders[:_ROWS]]
        running = sum(row["status"] in ("running", "waiting", "leaderless") for row in rows)
        html = {"clusters": self._clusters.render(), "runs": _run_table(rows)}
        return {"html": html, "live": f"{count(running, 'run')} going on"}


def run_page(run: LiveRun, *, control: bool = False) -> str:
    """Return the page of a run as HTML; ``control``: with forms to control it."""
    found = run.render()
    run_id = run.folder.run_id
    links = '<a href="/">all runs</a> · '
    forms = _CONTROLS.format(run_id=escape(run_id)) if control else ""
    return _page(run_id, f"/runs/{run_id}/events", found, links, forms)


def first_page(runs: LiveRuns) -> str:
    """Return the page of all runs as HTML."""
    return _page("Runs", "/events", runs.render(), "")


def _page(title: str, events: str, found: Mapping[str, Any], links: str, forms: str = "") -> str:
    body = [f'<div data-part="{name}">{html}</div>' for name, html in found["html"].items()]
    data = found.get("data") or {"charts": [], "marks": [], "duration_s": 0}
    return Template(read_asset("live.html")).substitute(
        title=escape(title),
        events=escape(events),
        links=links,
        forms=forms,
        live=escape(found["live"]),
        body="\n".join(body),
        data=json.dumps(data, allow_nan=False).replace("<", "\\u003c"),
    )


def _run_table(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return (
            "<h1>Runs</h1><p>There is no run yet: hvd-elastic run --hostfile HOSTS -- python …</p>"
        )
    cells = [
        [
            f'<td><a href="/runs/{escape(row["run_id"])}">{escape(row["run_id"])}</a></td>',
            cell(row["status"]),
            cell(time.strftime("%Y-%m-%d %H:%M", time.localtime(row["created"]))),
            cell(number_words(row["steps"]), "n"),
            cell(str(row["size"] or ""), "n"),
        ]
        for row in rows
    ]
    heads = [("run", ""), ("status", ""), ("started", ""), ("steps", "n"), ("processes", "n")]
    return f"<h1>Runs</h1><section>{table(heads, cells)}</section>"


def _words(summary: RunSummary, state: str) -> str:
    """Return in words what matters now: how fast it is, what is in the way, what is planned."""
    told = []
    if state == "running":
        rate = summary.last.get("throughput")
        fast = f", {number_words(round(rate))} examples/s" if rate else ""
        told.append(f"Trains on {count(summary.size, 'process')}{fast}.")
    elif state == "waiting":
        told.append(f"Waits: {summary.waiting}.")
    if summary.input and "no bottleneck" not in summary.input:
        told.append(f"Data: {summary.input}.")
    paused_s = sum(each.pause_s or 0.0 for each in summary.live_rescales)
    if summary.live_rescales:
        rescales = count(len(summary.live_rescales), "rescale")
        told.append(f"{rescales} took {duration_words(paused_s)} of training together.")
    decided = [said.text for said in summary.decisions if said.kind == "decision"]
    if decided:
        told.append(f"The policy: {decided[-1]}.")
    if summary.missed:
        told.append(f"It fell short: {summary.missed}.")
    if summary.warnings:
        told.append(f"Last warning: {summary.warnings[-1].text}")
    if not told:
        return ""
    return (
        '<section class="words">'
        + "".join(f"<p>{escape(text)}</p>" for text in told)
        + "</section>"
    )


def _has_ended(state: str) -> bool:
    return state in ("succeeded", "failed", "stopped", "died")


def _clock(t: float | None) -> str:
    return "–" if t is None else time.strftime("%H:%M:%S", time.localtime(t))

"""Follows the events of runs, and renders what a live page shows of one, or of several."""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from hvd_elastic.errors import RunError
from hvd_elastic.formatting import bytes_words, clock_words, count
from hvd_elastic.records.audit import check_audit
from hvd_elastic.records.events import decode_event
from hvd_elastic.records.json_lines import LineFollower, decoded
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.records.summary import MetricSeries, RunSummary, take_events
from hvd_elastic.records.wording import ENDED, GOES_ON, READING, run_sentences
from hvd_elastic.views.allocation import slow_hosts
from hvd_elastic.views.comparison import comparison_charts, comparison_parts, sampled_lines
from hvd_elastic.views.costs import forecast_words, predict_end
from hvd_elastic.views.page import MAX_POINTS, escape, progress_bar, thin_out
from hvd_elastic.views.report import (
    Charts,
    audit_of,
    chart_names,
    make_charts,
    report_parts,
    zoomed_points,
)

_FRESH_S = 0.4
"""Age of what was read up to which it is not read again [s]."""
_READ_S = 0.2
"""Longest time that is read on at once [s]; then what there is is shown, and reading continues."""
_PIECE_BYTES = 1 << 21
"""Bytes that are read together."""
_ZOOM_BYTES = 64 << 20
"""Most bytes that are read again for a part that is zoomed to, of a metric that was thinned out."""


class LiveRun:
    """One run, whose events are read as they come; for several threads.

    Attributes:
        lock: held while its summary is read or changed.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.version = 0
        self.lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        """Forget all that was read."""
        self._created = self.folder.read_run().get("created")
        self._summary = RunSummary()
        self._follower = self.folder.follow_events()
        self._read_at = 0.0
        self._unread = 0
        self._pieces: list[tuple[float, int]] = []
        self._thinned: set[str] = set()
        self._charts: Charts = ([], [])
        self._charts_key: Any = None
        self._charts_at_s = 0.0
        self._rendered: tuple[Any, dict[str, Any]] | None = None

    def read(self) -> RunSummary:
        """Read new events; return the summary, which only this object changes.

        Raises:
            RunError: the folder of the run is gone.
        """
        with self.lock:
            return self._read()

    def _read(self) -> RunSummary:
        begin = time.monotonic()
        if begin - self._read_at >= (_FRESH_S / 8 if self._unread else _FRESH_S):
            if not self.folder.path.is_dir():
                raise RunError(f"run {self.folder.run_id} is gone: its folder was removed")
            created = self.folder.read_run().get("created")
            if created is not None and created != self._created:
                self._begin()  # it was removed, and its id is used by another run
                self.version += 1
            while True:  # a piece at least, so that what is unread is known
                at_s, offset = self._summary.duration_s, self._follower.offset
                records = self._follower.poll(_PIECE_BYTES)
                _, size = file_version(self.folder.events) or (0, 0)
                self._unread = max(0, size - self._follower.offset)
                if self._follower.offset == offset:
                    self._unread = 0  # what remains is an incomplete line
                    break
                if not self._pieces or offset - self._pieces[-1][1] >= _PIECE_BYTES:
                    self._pieces.append((at_s, offset))
                take_events(self._summary, records)
                self.version += len(records)
                self._thinned |= thin_out(self._summary)
                if time.monotonic() - begin >= _READ_S:
                    break
            self._read_at = time.monotonic()
            self._summary.run_id = self.folder.run_id
        return self._summary

    def state(self) -> str:
        """Return the state of the run in a word; see :meth:`RunFolder.state_of`."""
        alive = self.folder.leader_alive()  # before its last events are read
        if not alive and self._summary.status not in ENDED:
            self._read_at = 0.0  # what was read a moment ago is not its last
        summary = self.read()
        if self._unread:
            return READING
        state, _ = self.folder.state_of(summary, alive=alive)
        return state

    def render(self) -> dict[str, Any]:
        """Return the parts of the page, the data of its charts, and a line on how it stands."""
        state = self.state()
        with self.lock:
            summary = self._read()
            audited = file_version(self.folder.audit) if state in ENDED else None
            key = self.version, state, audited
            if self._rendered is not None and self._rendered[0] == key:
                return self._rendered[1]
            shown, audit = replace(summary, status=state), check_audit(())
            if state in ENDED:  # else there is nothing to check yet
                audit = audit_of(self.folder, shown)
            asked, charts = self.folder.read_run(), self._charts_of(state)
            parts, data = report_parts(shown, audit, asked=asked, charts=charts)
            data["duration_s"] = self._charts_at_s
            if state not in ENDED:
                parts["audit"] = ""
            parts = {"header": "", "words": _words_section(summary, state), **parts}
            told = f"{state}, as of its last event at {clock_words(summary.ended)}"
            if self._unread:
                told = f"reading its events, {bytes_words(self._unread)} to go"
            found = {"html": parts, "data": data, "live": told, "unread": self._unread}
            self._rendered = key, found
            return found

    def zoom(self, name: str, begin_s: float, end_s: float) -> dict[str, Any]:
        """Return the points of a chart between two times after the start [s].

        Raises:
            RunError: the run has no such chart.
        """
        x, y = zoomed_points(self.part(name, begin_s, end_s), begin_s, end_s)
        return {"x": x, "lines": [y]}

    def part(self, name: str, begin_s: float, end_s: float) -> MetricSeries:
        """Return the values of a metric, between two times in full detail if that can be had.

        Raises:
            RunError: the run has no chart of it.
        """
        with self.lock:
            summary = self._read()
            if name not in chart_names(summary):
                raise RunError(f"run {self.folder.run_id} has no chart {name!r}")
            series = summary.series[name]
            if name in self._thinned:
                series = self._reread(summary, begin_s, end_s).series.get(name, series)
            return MetricSeries(series.at_s[:], series.values[:])

    def _reread(self, summary: RunSummary, begin_s: float, end_s: float) -> RunSummary:
        """Return the metrics between two times as read from the file, if they are not too many."""
        times = [at_s for at_s, _ in self._pieces]
        first = max(0, bisect_left(times, begin_s) - 1)
        last = bisect_right(times, end_s)
        begin = self._pieces[first][1]
        end = self._pieces[last][1] if last < len(times) else self._follower.offset
        if end - begin > _ZOOM_BYTES:
            return summary
        lines = LineFollower(self.folder.events, offset=begin).poll(end - begin)
        metrics = (line for line in lines if b'"metrics"' in line)
        found = RunSummary(started=summary.started, ended=(summary.started or 0.0) + times[first])
        found.first_step_s = summary.first_step_s
        take_events(found, decoded(metrics, decode_event))
        return found

    def _charts_of(self, state: str) -> Charts:
        """Return the charts, made again where a pixel or more would differ."""
        summary = self._summary
        key = (state, len(summary.sizes), tuple(chart_names(summary)))
        pixel_s = summary.duration_s / MAX_POINTS
        if key != self._charts_key or summary.duration_s - self._charts_at_s >= pixel_s:
            self._charts = make_charts(summary)
            self._charts_key, self._charts_at_s = key, summary.duration_s
        return self._charts


def file_version(path: Path) -> tuple[int, int] | None:
    """Return what differs once a file was written to; None: there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


class LiveComparison:
    """Several runs over each other, whose events are read as they come; for several threads."""

    def __init__(self, runs: Sequence[LiveRun]) -> None:
        self._runs = runs
        self._lock = threading.Lock()
        self._charts: list[dict[str, Any]] = []
        self._charts_key: Any = None
        self._rendered: tuple[Any, dict[str, Any]] | None = None

    def render(self) -> dict[str, Any]:
        """Return the parts of the page, the data of its charts, and a line on how they stand."""
        states = [run.state() for run in self._runs]
        summaries = [run.read() for run in self._runs]
        key = [(run.version, state) for run, state in zip(self._runs, states, strict=True)]
        with self._lock, ExitStack() as held:
            for run in self._runs:
                held.enter_context(run.lock)
            if self._rendered is not None and self._rendered[0] == key:
                return self._rendered[1]
            shown = [replace(s, status=state) for s, state in zip(summaries, states, strict=True)]
            whole_s = max(summary.duration_s for summary in shown)
            # The charts are made again where a pixel or more would differ.
            charts_key = (states, [len(s.sizes) for s in shown], int(whole_s / _pixel_s(whole_s)))
            if charts_key != self._charts_key:
                self._charts, self._charts_key = comparison_charts(shown), charts_key
            parts, data = comparison_parts(shown, self._charts)
            alive = sum(state not in ENDED for state in states)
            found = {"html": parts, "data": data, "live": f"{count(alive, 'run')} in progress"}
            self._rendered = key, found
            return found

    def zoom(self, name: str, begin_s: float, end_s: float) -> dict[str, Any]:
        """Return the points of a chart between two times after the start of each run [s]."""
        parts = []
        for run in self._runs:
            try:
                parts.append(run.part(name, begin_s, end_s))
            except RunError:  # it has no such metric
                parts.append(MetricSeries())
        ends = [run.read().duration_s for run in self._runs]
        x, lines = sampled_lines(parts, ends, begin_s, min(end_s, max(ends)))
        return {"x": x, "lines": lines}


def _pixel_s(whole_s: float) -> float:
    """Return the time of a pixel, to the next power of two [s]."""
    return float(2.0 ** math.ceil(math.log2(max(whole_s, 1.0) / MAX_POINTS)))


def _words_section(summary: RunSummary, state: str) -> str:
    """Return what matters now as HTML, in words, with a bar of the part that is done."""
    done = summary.last.get("done") if state in GOES_ON else None
    forecast = bar = ""
    if isinstance(done, float):
        end = predict_end(summary) if summary.trains_now(state) else None
        forecast, bar = forecast_words(summary, done, end), progress_bar(done)
    told = run_sentences(summary, state, forecast, slow_hosts(summary, state))
    lines = "".join(f"<p>{escape(text)}</p>" for text in told)
    return f'<section class="words">{lines}{bar}</section>' if told else ""

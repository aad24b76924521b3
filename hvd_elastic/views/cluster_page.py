"""Shows a cluster that many jobs share: who held which slots over time, the queue, and why."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hvd_elastic.config import runs_folder
from hvd_elastic.errors import RunError
from hvd_elastic.formatting import count, duration_words
from hvd_elastic.jobs.job import Job
from hvd_elastic.jobs.place import ClusterFolder, list_clusters, open_cluster
from hvd_elastic.jobs.rights import ClusterEvents, open_queue
from hvd_elastic.records.cluster import (
    ClusterSummary,
    Hold,
    JobDecision,
    JobRecord,
    summarize_cluster,
)
from hvd_elastic.views.page import (
    MAX_ROWS,
    cell,
    escape,
    render_page,
    table,
    write_page,
    written,
)
from hvd_elastic.views.report import status_tone

_WIDTH = 1000
_SLOT_HEIGHT, _LEAST_HEIGHT, _MOST_HEIGHT = 12, 96, 480
"""Height of a slot, and bounds of the whole picture's, in the units of the drawing."""
_QUEUE_HEIGHT = 60
_MOST_BARS = 3000
"""Most bars of the picture, besides those of jobs that still run when it begins; of more the last
are drawn."""
_LIVE_BARS, _LIVE_S = 600, 86400.0
"""The same on a live page, and the time that it shows [s]."""
_SIMULATED_S = 86400
"""A cluster that began before this Unix time is a simulated one, which begins at 0 [s]."""
_DAY = len("11-25 ")
"""Length of the day in the time of a decision."""
_GROWS_S = 5.0
"""How often bars of jobs that continue grow on a live page [s]."""
_GOLDEN_ANGLE = 137.508
"""Hues at this distance [degrees] stay apart from each other, however many there are."""


def write_cluster_report(name: str | None, out: Path | None = None) -> tuple[Path, ClusterSummary]:
    """Write the report of a cluster; return its place and the summary.

    Args:
        name: name of the cluster; None: see :func:`open_cluster`.
        out: path of the report; None: ``report.html`` in the cluster's folder, or in that of this
            user's keeper if the cluster is another user's.

    Raises:
        RunError: there is no such cluster, it has no jobs yet, or ``out`` cannot be written.
    """
    folder = open_cluster(name)
    summary = summarize_cluster(ClusterEvents(folder), folder.name)
    if not summary.jobs:
        raise RunError(f"cluster {summary.name} has had no jobs yet, so there is nothing to report")
    path = (folder.keeper if folder.is_others else folder.path) / "report.html"
    path = path if out is None else out
    write_page(path, render_cluster(summary))
    return path, summary


def render_cluster(summary: ClusterSummary, heading: str = "") -> str:
    """Return the page of a cluster as HTML.

    Args:
        heading: line under the title; empty: the hosts and jobs in numbers.
    """
    told = heading or _numbers(summary)
    body = [
        f"<header><h1>Cluster {escape(summary.name)}</h1><p>{escape(told)}</p></header>",
        *cluster_parts(summary).values(),
        written("the queue's events"),
    ]
    data = {"charts": [], "marks": [], "duration_s": summary.duration_s}
    return render_page(f"Cluster {summary.name}", "\n".join(body), data)


def cluster_parts(
    summary: ClusterSummary,
    now_s: float | None = None,
    *,
    most_bars: int = _MOST_BARS,
    since_s: float = 0.0,
    linked: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the parts of the page as HTML by name.

    Args:
        now_s: present time, after the first event [s]; None: the last event.
        since_s: beginning of the picture, after the first event [s].
        linked: address of the page of each run.
    """
    now_s = summary.duration_s if now_s is None else now_s
    return {
        "picture": slots_picture(summary, now_s, most_bars=most_bars, since_s=since_s),
        "jobs": _job_table(summary, now_s, linked or {}),
        "decisions": _decision_table(summary),
    }


def _numbers(summary: ClusterSummary) -> str:
    states = Counter(job.status for job in summary.jobs.values())
    told = ", ".join(f"{number} {state}" for state, number in states.items())
    hosts = f"{count(len(summary.hosts), 'host')} with {count(summary.slots, 'slot')}"
    return f"{hosts}; {count(len(summary.jobs), 'job')}: {told or 'none'}"


# -- the picture -----------------------------------------------------------------------------------


@dataclass
class _Lanes:
    """The slots of a host, one above the other, so that a job stays where it is.

    Attributes:
        free: since when each is free [s].
    """

    slots: int
    free: list[float] = field(default_factory=list)

    def place_bar(self, hold: Hold) -> list[tuple[int, int]]:
        """Return the places of a bar: (lowest slot, number of slots), together if possible."""
        self.free += [0.0] * (self.slots - len(self.free))
        places = [at for at, since in enumerate(self.free) if since <= hold.begin_s + 1e-6]
        for at in range(len(places) - hold.slots + 1):
            if places[at + hold.slots - 1] - places[at] == hold.slots - 1:
                places = places[at : at + hold.slots]
                break
        found: list[tuple[int, int]] = []
        for place in places[: hold.slots]:
            self.free[place] = hold.end_s
            if found and sum(found[-1]) == place:
                found[-1] = (found[-1][0], found[-1][1] + 1)
            else:
                found.append((place, 1))
        return found


Piece = tuple[float, float, str]
"""Part of a bar: begin and end [s], and what gives it its colour: attributes of its element."""


def slots_picture(
    summary: ClusterSummary,
    now_s: float,
    *,
    most_bars: int = _MOST_BARS,
    since_s: float = 0.0,
    pieces: Callable[[Hold], Sequence[Piece]] | None = None,
    words: str = "a colour for each job",
) -> str:
    """Return the section with who held which slots over time as HTML.

    Args:
        pieces: parts of a bar; None: one, in the colour of its job.
        words: what the colours mean.
    """
    if pieces is None:

        def pieces(hold: Hold) -> Sequence[Piece]:
            color = f'fill="{job_color(summary.jobs[hold.job])}"'
            return [(hold.begin_s, hold.end_s, color)]

    holds = sorted(summary.all_holds(now_s), key=lambda hold: (hold.begin_s, hold.host, hold.job))
    shown = [hold for hold in holds if hold.end_s > since_s and hold.end_s > hold.begin_s]
    if not shown:
        return '<section><h2>Slots</h2><p class="hint">No job has held a slot yet.</p></section>'
    begin_s = max(since_s, shown[-most_bars].begin_s if len(shown) > most_bars else 0.0)
    shown = [hold for hold in shown if hold.end_s > begin_s]
    whole_s = max(now_s - begin_s, 1e-3)
    slots = _slots_of_hosts(summary, shown)
    total = sum(slots.values())
    height = min(max(_LEAST_HEIGHT, _SLOT_HEIGHT * total), _MOST_HEIGHT)
    bottom: dict[str, int] = {}
    lanes: dict[str, _Lanes] = {}
    for host, number in slots.items():
        bottom[host] = sum(slots[other] for other in bottom)
        lanes[host] = _Lanes(number)

    def x(at_s: float) -> float:
        return _WIDTH * (max(at_s, begin_s) - begin_s) / whole_s

    bars = []
    for hold in shown:
        job = summary.jobs[hold.job]
        told = f"{job.name}: {count(hold.slots, 'slot')} on {hold.host}"
        told += f" for {duration_words(hold.end_s - hold.begin_s)}"
        places = lanes[hold.host].place_bar(hold)
        bars += [
            f'<rect {color} x="{x(begin_at):.1f}" '
            f'y="{height * (bottom[hold.host] + lowest) / total:.1f}" '
            f'width="{x(end_at) - x(begin_at):.1f}" '
            f'height="{height * number / total:.1f}"><title>{escape(told)}</title></rect>'
            for lowest, number in places
            for begin_at, end_at, color in pieces(hold)
        ]
    edges = [
        f'<path class="edge" d="M0 {height * at / total:.1f}H{_WIDTH}"/>'
        for at in list(bottom.values())[1:]
    ]
    marks = [
        f'<path class="decision" d="M{x(at_s):.1f} 0v8"><title>{escape(told)}</title></path>'
        for at_s, told in _marks(summary, begin_s)
    ]
    of_hosts = f"Slots of {count(len(slots), 'host')} over {duration_words(whole_s)}"
    label = f"{of_hosts}, {words}"
    used = dict.fromkeys({**slots, **summary.slots_since}, 0.0)
    for hold in shown:
        used[hold.host] += hold.slots * (hold.end_s - max(hold.begin_s, begin_s))
    # A job may stay on a host for a while after it was taken out of the hostfile.
    offered = [max(summary.slot_s_of_host(host, begin_s, now_s), s) for host, s in used.items()]
    names = list(slots)
    bands = f"; a band for each host, from {names[0]} to {names[-1]}" if len(names) > 1 else ""
    hint = (
        f"{label}{bands}. "
        f"{100 * sum(used.values()) / sum(offered):.0f} % of the slots were in use. "
        "Marks at the top are decisions; point at one for its reason."
    )
    return (
        f'<section><h2>Slots</h2><svg class="cluster" viewBox="0 0 {_WIDTH} {height}" '
        f'preserveAspectRatio="none" role="img" aria-label="{escape(label)}">'
        f"{''.join([*bars, *edges, *marks])}</svg>{_axis(summary, begin_s, now_s)}"
        f'<p class="hint">{escape(hint)}</p>{_queue(summary, begin_s, now_s)}</section>'
    )


def _slots_of_hosts(summary: ClusterSummary, shown: Sequence[Hold]) -> dict[str, int]:
    """Return the slots of each host, those that are gone included."""
    slots = dict(summary.hosts)
    for hold in shown:
        slots[hold.host] = max(slots.get(hold.host, 0), hold.slots)
    return slots


def _marks(summary: ClusterSummary, begin_s: float) -> list[tuple[float, str]]:
    """Return the last decisions of the picture, those of one moment together."""
    found: dict[float, list[str]] = {}
    for made in summary.decisions[-5 * MAX_ROWS :]:
        if made.at_s >= begin_s:
            found.setdefault(made.at_s, []).append(_decision_words(summary, made))
    return [(at_s, "\n".join(words)) for at_s, words in list(found.items())[-MAX_ROWS:]]


def _queue(summary: ClusterSummary, begin_s: float, now_s: float) -> str:
    """Return the number of jobs that wait over time."""
    points = [(max(at_s, begin_s), number) for at_s, number in summary.waiting]
    before = [number for at_s, number in summary.waiting if at_s <= begin_s][-1:] or [0]
    points = [(begin_s, before[0]), *(point for point in points if point[0] > begin_s)]
    most = max(number for _, number in points)
    if not most:
        return '<h3>Queue</h3><p class="hint">No job waited.</p>'
    whole_s = max(now_s - begin_s, 1e-3)
    path = f"M0 {_QUEUE_HEIGHT}"
    for at_s, number in points:
        path += f"H{_WIDTH * (at_s - begin_s) / whole_s:.1f}"
        path += f"V{_QUEUE_HEIGHT * (1 - number / most):.1f}"
    label = f"Jobs that wait, {most} at most, {points[-1][1]} at the end"
    return (
        f'<h3>Queue</h3><svg class="cluster" viewBox="0 0 {_WIDTH} {_QUEUE_HEIGHT}" '
        f'preserveAspectRatio="none" role="img" aria-label="{escape(label)}">'
        f'<path class="queue" d="{path}H{_WIDTH}V{_QUEUE_HEIGHT}z"/></svg>'
        f'<p class="hint">{escape(label)}.</p>'
    )


def _axis(summary: ClusterSummary, begin_s: float, now_s: float) -> str:
    started = summary.started or 0.0
    marks = [begin_s + (now_s - begin_s) * part / 4 for part in range(5)]
    times = [_clock(started, at_s) for at_s in marks]
    days = {words[:_DAY] for words in times}
    if len(days) == 1 and started >= _SIMULATED_S:
        times = [words[_DAY:] for words in times]
    texts = "".join(f"<span>{escape(words)}</span>" for words in times)
    return f'<div class="axis">{texts}</div>'


def job_color(job: JobRecord) -> str:
    """Return the colour of a job, which depends on its number only."""
    digits = "".join(letter for letter in job.job if letter.isdigit())
    number = int(digits) if digits else sum(job.job.encode())
    return f"hsl({number * _GOLDEN_ANGLE % 360:.0f} 55% {46 + 8 * (number % 3)}%)"


# -- tables ----------------------------------------------------------------------------------------


def _job_table(summary: ClusterSummary, now_s: float, linked: Mapping[str, str]) -> str:
    rows = []
    for job in shown_jobs(summary):
        run_s, slot_s = summary.slot_s_of(job, now_s)
        color = f'<rect width="1" height="1" fill="{job_color(job)}"></rect>'
        key = f'<svg class="key" viewBox="0 0 1 1" aria-hidden="true">{color}</svg>'
        run = job.run_ids[-1] if job.run_ids else ""
        name = escape(job.name)
        if run in linked:
            name = f'<a href="{escape(linked[run])}">{name}</a>'
        slots = sum(job.held.values())
        pill = f'<span class="pill {status_tone(job.status)}">{escape(job.status)}</span>'
        rows.append(
            [
                cell(job.job, "n"),
                f'<td class="job">{key} {name}</td>',
                f"<td>{pill}</td>",
                cell(str(slots or ""), "n"),
                cell(_clock(summary.started or 0.0, job.submitted_s), "n"),
                cell(duration_words(job.wait_s(now_s)), "n"),
                cell(duration_words(run_s) if job.started_s is not None else "–", "n"),
                cell(duration_words(slot_s), "n"),
                cell(job.reason or job.message, "w"),
            ]
        )
    heads = [("#", "n"), ("job", ""), ("status", ""), ("slots", "n"), ("submitted", "n")]
    heads += [("waited", "n"), ("had slots for", "n"), ("slot time", "n"), ("reason", "")]
    cut = f", {len(rows)} of {len(summary.jobs)}" if len(summary.jobs) > len(rows) else ""
    return f"<section><h2>Jobs{cut}</h2>{table(heads, rows, len(rows))}</section>"


def shown_jobs(summary: ClusterSummary) -> list[JobRecord]:
    """Return all jobs that run, then those that wait, and then the last ones that have ended."""
    running = [job for job in summary.jobs.values() if job.status == "running"]
    waiting = [job for job in summary.jobs.values() if job.status == "queued"]
    ended = [job for job in summary.jobs.values() if job.status not in ("queued", "running")]
    ended.sort(key=lambda job: -(job.ended_s or 0.0))
    rest = max(0, MAX_ROWS - len(running))
    room_for_ended = min(len(ended), max(rest - len(waiting), rest // 4))
    return [*running, *waiting[: rest - room_for_ended], *ended[:room_for_ended]]


def _decision_table(summary: ClusterSummary) -> str:
    rows = [
        [
            cell(_clock(summary.started or 0.0, made.at_s), "n"),
            cell(f"{summary.jobs[made.job].name}"),
            cell(f"{made.before} → {made.after}", _way(made)),
            cell(made.reason, "w"),
        ]
        for made in summary.decisions[: -MAX_ROWS - 1 : -1]
    ]
    if not rows:
        return ""
    heads = [("at", "n"), ("job", ""), ("slots", "n"), ("reason", "")]
    made = len(summary.decisions)
    cut = f", the last {MAX_ROWS} of {made}" if made > MAX_ROWS else ""
    return f"<section><h2>Decisions, newest first{cut}</h2>{table(heads, rows)}</section>"


def _way(made: JobDecision) -> str:
    if made.after > made.before:
        return "n up"
    return "n down" if made.after < made.before else "n"


def _decision_words(summary: ClusterSummary, made: JobDecision) -> str:
    at = _clock(summary.started or 0.0, made.at_s)
    return f"{at} {summary.jobs[made.job].name}: {made.reason}"


def _clock(started: float, at_s: float) -> str:
    if started < _SIMULATED_S:
        return duration_words(at_s)
    return time.strftime("%m-%d %H:%M:%S", time.localtime(started + at_s))


# -- live ------------------------------------------------------------------------------------------


class LiveClusters:
    """The clusters of this user, whose events are read as they come; for several threads."""

    def __init__(self) -> None:
        self._known: dict[str, _LiveCluster] = {}
        self._lock = threading.Lock()

    def render(self) -> str:
        """Return the pictures and tables of all clusters that have had jobs, as HTML."""
        with self._lock:
            folders = list_clusters()
            live = [self._known.setdefault(each.name, _LiveCluster(each)) for each in folders]
            return "".join(each.render() for each in live)


class _LiveCluster:
    def __init__(self, folder: ClusterFolder) -> None:
        self._folder = folder
        self._events = ClusterEvents(folder)
        self._summary = ClusterSummary(folder.name)
        self._taken = 0
        self._rendered: tuple[object, str] = (None, "")

    def render(self) -> str:
        """Return the picture and tables as HTML; empty before the first job."""
        summary = self._summary
        with contextlib.suppress(RunError):  # a daemon of another user is not there
            for record in self._events:
                summary.take_event(record)
                self._taken += 1
        if not summary.jobs or summary.started is None:
            return ""
        now_s = summary.duration_s
        alive = self._folder.daemon_alive()
        if alive:  # what continues grows every few seconds, not with every look
            now_s = max(now_s, (time.time() - summary.started) // _GROWS_S * _GROWS_S)
        reasons = self._read_reasons()
        key = (self._taken, now_s, alive, reasons)
        if self._rendered[0] != key:
            self._rendered = key, self._render(now_s, alive=alive)
        return self._rendered[1]

    def _read_reasons(self) -> Mapping[str, str]:
        """Return why the jobs that are shown run or wait: that changes without an event."""
        shown = [job for job in shown_jobs(self._summary) if job.status in ("queued", "running")]
        found: Mapping[int, Job] = {}
        with contextlib.suppress(RunError):  # a queue that cannot be read says so to its own verbs
            with contextlib.closing(open_queue(self._folder)) as store:
                found = store.jobs([int(job.job) for job in shown])
        for job in shown:
            if int(job.job) in found:
                job.reason = found[int(job.job)].reason
        return {job.job: job.reason for job in shown}

    def _render(self, now_s: float, *, alive: bool) -> str:
        summary = self._summary
        shown = shown_jobs(summary)
        runs = {run for job in shown for run in job.run_ids[-1:]}
        parts = cluster_parts(
            summary,
            now_s,
            most_bars=_LIVE_BARS,
            since_s=max(0.0, now_s - _LIVE_S),
            linked={run: f"/runs/{run}" for run in runs if (runs_folder() / run).is_dir()},
        )
        told = _numbers(summary) + ("" if alive else "; its daemon does not run")
        title = f"<h1>Cluster {escape(summary.name)}</h1><p>{escape(told)}</p>"
        return title + "".join(parts.values())

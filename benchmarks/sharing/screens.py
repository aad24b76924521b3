"""Compare what the screens of a cluster say with its processes, grants and leaders."""

from __future__ import annotations

import contextlib
import functools
import html
import io
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil
import typer

from benchmarks.sharing.cluster import Cluster
from hvd_elastic.cli.jobs import daemon as daemon_commands
from hvd_elastic.cli.jobs import queue as queue_commands
from hvd_elastic.config import runs_folder
from hvd_elastic.errors import HvdElasticError
from hvd_elastic.hosts.hostfile import parse_hostfile
from hvd_elastic.jobs.place import ClusterFolder
from hvd_elastic.records.json_lines import Follower, decode_record
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.views.live import LiveRuns
from hvd_elastic.views.prometheus import prometheus_text
from hvd_elastic.virtual import VirtualCluster

LONGEST_S = 3.0
"""Longest time for which a screen may contradict what is [s]."""
_READABLE_S = 60.0
"""Time for which the figures of a run that has failed can be read [s]."""
_ASKED = 3
"""Jobs that wait, and that have failed, of which ``why`` is asked."""
_TAIL_BYTES = 64 * 1024
_ACTIVE = ("queued", "running")
_SLOTS = re.compile(r"(\d+) slots? on (\d+) hosts?")
_JOB_ROW = re.compile(
    r'<tr><td class="n">(?P<job>\d+)</td><td class="job">.*?</td>'
    r"<td><span [^>]*>(?P<status>[^<]*)</span></td>"
    r'<td class="n">(?P<slots>[^<]*)</td>.*?<td class="w">(?P<reason>[^<]*)</td></tr>'
)
_RUN_ROW = re.compile(
    r'<a href="/runs/(?P<run>[^"]+)">.*?<span class="pill [^"]*">(?P<status>[^<]*)</span>'
)
_SLOT = "HVD_ELASTIC_LOCAL_RANK"
"""Environment variable that only workers have."""
Slots = dict[str, int]
"""Number of slots by host."""


@dataclass(frozen=True)
class Truth:
    """What is, whatever the screens say.

    Attributes:
        slots: slots of the hosts in the hostfile.
        processes: slots of each run on each host in which a worker lives.
        grants: slots of each run on each host, by the hostfile that its leader watches.
        leaders: runs whose leader lives.
        daemon: whether a daemon lives.
        silent: hosts that nobody can reach.
        cut_off: runs that hear from none of their hosts, with the time since when [Unix s], by
            their last events.
    """

    slots: Slots
    processes: Mapping[str, Slots]
    grants: Mapping[str, Slots]
    leaders: frozenset[str]
    daemon: bool
    silent: frozenset[str]
    cut_off: Mapping[str, float]

    def taken(self, host: str) -> int:
        """Return the slots of a host that are granted, or in which a worker lives."""
        runs = {*self.processes, *self.grants}
        return sum(
            max(self.grants.get(run, {}).get(host, 0), self.processes.get(run, {}).get(host, 0))
            for run in runs
        )

    def empty(self) -> int:
        """Return the slots of reachable hosts that nobody holds or occupies."""
        reachable = self.slots.keys() - self.silent
        return sum(max(0, self.slots[host] - self.taken(host)) for host in reachable)


def read_truth(cluster: Cluster, hosts: VirtualCluster) -> Truth:
    """Return what is now."""
    processes: dict[str, Slots] = {}
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error):
            env = psutil.Process(pid).environ()
            if env.get("HVD_ELASTIC_HOME") == str(cluster.home) and _SLOT in env:
                held = processes.setdefault(env.get("HVD_ELASTIC_RUN_ID", ""), {})
                host, slot = env.get("HVD_ELASTIC_HOST", ""), int(env[_SLOT]) + 1
                held[host] = max(held.get(host, 0), slot)
    state = hosts.state
    silent = {name for name in hosts.hosts if state.host(name).status != "up"}
    place = ClusterFolder(cluster.folder)
    grants = {path.name: _slots(path) for path in place.hostfiles.iterdir() if path.is_file()}
    runs = [RunFolder(path) for path in runs_folder().glob("*")]
    leaders = frozenset(run.run_id for run in runs if run.leader_alive())
    led = [run for run in runs if run.run_id in leaders]
    cut_off = {run.run_id: at for run in led if (at := _cut_off_since(run)) is not None}
    return Truth(
        _slots(cluster.hostfile),
        processes,
        grants,
        leaders,
        place.daemon_alive(),
        frozenset(silent),
        cut_off,
    )


def _cut_off_since(run: RunFolder) -> float | None:
    since: float | None = None
    for event in Follower(run.events, decode_record, last_bytes=_TAIL_BYTES).poll():
        if event["kind"] == "leader_cut_off":
            since = float(event["t"]) - float(event["silent_s"])
        elif event["kind"] in ("run_started", "hosts_changed", "run_finished"):
            since = None
    return since


def _slots(path: Any) -> Slots:
    with contextlib.suppress(HvdElasticError):
        return {host.name: host.slots for host in parse_hostfile(path).hosts}
    return {}


@dataclass(frozen=True)
class State:
    """What is, and the jobs of the queue: a screen is compared with those before and after it.

    Attributes:
        truth: processes, grants and leaders.
        jobs: rows of ``queue --all --json``.
        now: time [Unix s].
    """

    truth: Truth
    jobs: list[dict[str, Any]]
    now: float


Found = Iterator[tuple[str, str]]
"""What a screen says that is not so: a key that stays the same, and the words."""


def _printed(command: Callable[[], None]) -> str:
    """Return what a command prints, in this process to be fast; nothing if it fails."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        try:
            command()
        except (HvdElasticError, typer.Exit):
            return ""
    return out.getvalue()


def wrong_hosts(state: State, told: str) -> Found:
    """Compare what ``hosts`` prints."""
    truth = state.truth
    rows: dict[str, tuple[str, int, str]] = {}
    for line in told.splitlines()[1:]:
        name, status, _, room, *others = line.split(None, 4)
        rows[name] = (status, int(room), "".join(others))
    if not truth.daemon or not rows:
        return
    for host in {*truth.slots, *(h for held in truth.processes.values() for h in held)}:
        if truth.taken(host) and host not in rows:
            yield f"hosts: {host} is missing", f"{truth.taken(host)} slots are taken there"
    for host, (status, free, rest) in rows.items():
        wanted = max(0, truth.slots.get(host, 0) - truth.taken(host))
        used_by = [run for run in truth.cut_off if truth.grants.get(run, {}).get(host)]
        if host in truth.silent and used_by and status == "up":
            yield f"hosts: state of {host}", f"{status}, and {used_by} do not hear from it"
        if free != (0 if status in ("lost", "silent") else wanted):
            yield f"hosts: free slots of {host}", f"{free}, not {wanted} ({status} {rest})"
        if host not in truth.slots and status == "up":
            yield f"hosts: state of {host}", f"{status}, and it is not in the hostfile"
        if status in ("lost", "silent") or host in truth.silent:
            continue
        for run in {*truth.grants, *truth.processes}:
            has = truth.grants.get(run, {}).get(host) or truth.processes.get(run, {}).get(host)
            if has and run not in rest:
                yield f"hosts: {run} on {host}", f"'{rest}' does not name it"
            if not has and run in rest:
                yield f"hosts: {run} on {host}", f"'{rest}' names it, and it has left"


def wrong_queue(state: State, jobs: list[dict[str, Any]]) -> Found:
    """Compare what ``queue`` says."""
    truth = state.truth
    if not truth.daemon:
        return
    statuses = {job["job"]: job["status"] for job in state.jobs}
    for job in jobs:
        number, run, status = job["job"], job["run_id"], job["status"]
        held, is_led, reason = truth.grants.get(run, {}), run in truth.leaders, job["reason"]
        lives = any(host not in truth.silent for host in truth.processes.get(run, {}))
        if status == "running":
            has = (sum(held.values()), len(held))
            told = _SLOTS.search(reason)
            if not is_led and not lives:
                yield f"queue: job {number} runs", "it has neither a leader nor a worker"
            if job["hosts"] != held:
                yield f"queue: hosts of job {number}", f"{job['hosts']}, not {held}"
            if told and tuple(map(int, told.groups())) != has and "as soon as" not in reason:
                words = f"'{reason}', and it has {has[0]} on {has[1]}"
                yield f"queue: reason of job {number}", words
            if run in truth.cut_off and "hears from none" not in reason and not job["stopping"]:
                yield f"queue: reason of job {number}", f"'{reason}', and it is cut off"
            if run not in truth.cut_off and "hears from none" in reason:
                yield f"queue: reason of job {number}", f"'{reason}', and it is not cut off"
            if run in truth.cut_off and job["eta"] is not None:
                yield f"queue: end of job {number}", "is expected, and it is cut off"
            if reason.startswith("waits"):
                yield f"queue: reason of job {number}", f"'{reason}', and it runs"
        elif is_led:
            yield f"queue: job {number} is {status}", "its leader lives"
        if status == "queued":
            yield from _wrong_waiting(truth, job, statuses)


def _wrong_waiting(truth: Truth, job: Mapping[str, Any], statuses: Mapping[int, str]) -> Found:
    number, reason = job["job"], job["reason"]
    awaited = [int(each.partition(":")[2]) for each in job["after"]]
    for each in awaited:
        told = re.search(rf"job {each} .*; it is (\w+)", reason)
        if told and told[1] != statuses.get(each):
            yield f"queue: reason of job {number}", f"'{reason}': it is {statuses.get(each)}"
    if any(statuses.get(each) in _ACTIVE for each in awaited):
        return
    if job["min_np"] <= truth.empty():
        yield f"queue: job {number} waits", f"'{reason}', and {truth.empty()} slots are empty"


def wrong_why(state: State, told: Mapping[int, str]) -> Found:
    """Compare what ``why`` says of jobs."""
    for job in state.jobs:
        number, text = job["job"], told.get(job["job"])
        if text is None or not state.truth.daemon:
            continue
        if f", {job['status']}" not in text:
            yield f"why: status of job {number}", f"{text} ({job['status']})"
        if job["reason"] and job["reason"] not in text:
            yield f"why: reason of job {number}", f"{text} ('{job['reason']}')"
        if job["eta"] is None and job["status"] in _ACTIVE and " in about " in text:
            yield f"why: end or start of job {number}", text
        held = state.truth.grants.get(job["run_id"], {})
        for host, slots in held.items() if job["status"] == "running" else ():
            if f"{host}: {slots}" not in text:
                yield f"why: slots of job {number}", f"{text} ({held})"
        if job["name"] == "broken" and job["status"] == "failed" and "broken at" not in text:
            yield f"why: error of job {number}", text
        if job["name"] == "fails" and job["status"] == "failed" and "no such data" not in text:
            yield f"why: error of job {number}", text


def wrong_page(state: State, page: str) -> Found:
    """Compare the page of all clusters and runs."""
    truth = state.truth
    rows = {int(row["job"]): row for row in _JOB_ROW.finditer(page)}
    runs = {html.unescape(row["run"]): row["status"] for row in _RUN_ROW.finditer(page)}
    for job in state.jobs:
        number, run = job["job"], job["run_id"]
        if job["status"] in _ACTIVE and truth.daemon:
            row = rows.get(number)
            if row is None:
                yield f"page: job {number} is missing", f"it is {job['status']}"
                continue
            if row["status"] != job["status"]:
                yield f"page: status of job {number}", f"{row['status']}, not {job['status']}"
            if (row["slots"] or "0") != str(sum(job["hosts"].values())):
                yield f"page: slots of job {number}", f"{row['slots']}, not {job['hosts']}"
            if html.unescape(row["reason"]) != job["reason"]:
                words = f"'{html.unescape(row['reason'])}', not '{job['reason']}'"
                yield f"page: reason of job {number}", words
        if run in truth.leaders and truth.processes.get(run) and job["kind"] == "plain":
            if runs.get(run) not in ("running", None):
                yield f"page: status of run {run}", f"{runs[run]}, and its command runs"
        if run not in truth.leaders and runs.get(run) in ("running", "waiting", "starting"):
            yield f"page: status of run {run}", f"{runs[run]}, and it has no leader"


def wrong_metrics(state: State, metrics: str) -> Found:
    """Compare what Prometheus reads: a run that has failed can be read for a while."""
    for job in state.jobs:
        run, ended = job["run_id"], job["ended"] or 0.0
        if job["status"] == "failed" and state.now - ended < _READABLE_S:
            if (runs_folder() / run).is_dir() and f'run="{run}"' not in metrics:
                yield f"metrics: job {job['job']} has failed", "none of its figures can be read"


@dataclass
class Lasting:
    """A contradiction, and how long it lasted.

    Attributes:
        what: which screen says what of whom.
        words: what was said last.
        begin_s, end_s: when it was seen first and last, after the begin of the day [s].
    """

    what: str
    words: str
    begin_s: float
    end_s: float

    @property
    def lasted_s(self) -> float:
        """Time from the first to the last look that saw it [s]."""
        return self.end_s - self.begin_s


@dataclass
class Watch:
    """Looks at the screens again and again, and keeps what they said that was not so."""

    cluster: Cluster
    hosts: VirtualCluster
    began: float = field(default_factory=time.time)
    looks: int = 0
    over: list[Lasting] = field(default_factory=list)
    _going: dict[str, Lasting] = field(default_factory=dict)
    _live: LiveRuns = field(default_factory=LiveRuns)

    def look(self) -> list[Lasting]:
        """Compare all screens once; return what has lasted too long by now, each once."""
        before = self._state()
        at_s = before.now - self.began
        found: dict[str, str] = {}
        for read, wrong in (
            (lambda: _printed(daemon_commands.hosts), wrong_hosts),
            (_queue, wrong_queue),
            (functools.partial(_why, before), wrong_why),
            (lambda: "".join(self._live.render()["html"].values()), wrong_page),
            (lambda: _metrics(self._live), wrong_metrics),
        ):
            screen: Any = read()
            after = self._state()
            still = dict(wrong(after, screen))
            found |= {what: still[what] for what, _ in wrong(before, screen) if what in still}
            before = after
        self.looks += 1
        for what in [what for what in self._going if what not in found]:
            self.over.append(self._going.pop(what))
        late = []
        for what, words in found.items():
            known = self._going.setdefault(what, Lasting(what, words, at_s, at_s))
            lasted_s = known.lasted_s
            known.words, known.end_s = words, at_s
            if lasted_s <= LONGEST_S < known.lasted_s:
                late.append(known)
        return late

    def _state(self) -> State:
        now = time.time()
        return State(read_truth(self.cluster, self.hosts), _queue(), now)

    @property
    def all(self) -> list[Lasting]:
        """Return all contradictions, the longest first."""
        return sorted([*self.over, *self._going.values()], key=lambda each: -each.lasted_s)


def _queue() -> list[dict[str, Any]]:
    found = _printed(lambda: queue_commands.queue(all_=True, as_json=True))
    return list(json.loads(found)) if found else []


def _why(state: State) -> dict[int, str]:
    """Return what ``why`` prints of the jobs that run, and of some that wait or have failed."""
    asked = [job["job"] for job in state.jobs if job["status"] == "running"]
    for status in ("queued", "failed"):
        asked += [job["job"] for job in state.jobs if job["status"] == status][:_ASKED]
    return {number: _printed(lambda: queue_commands.why(str(number))) for number in asked}  # noqa: B023


def _metrics(live: LiveRuns) -> str:
    return prometheus_text([(run.read(), run.state()) for run in live.recent()])

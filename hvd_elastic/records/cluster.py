"""Summarizes what happened on a cluster that many jobs share, from the events of its queue.

The queue writes ``clusters/NAME/events.jsonl``; see docs/run-folder.md for the kinds of events.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

Held = dict[str, int]
"""Slots on each host."""


@dataclass
class JobRecord:
    """Times and end of a job.

    Attributes:
        job: its number in the queue, as text.
        command: its command as a user would type it.
        min_np, max_np: fewest and most slots; ``max_np`` None: no limit.
        deadline: when it should be finished [Unix s]; None: no deadline.
        hosts: list of the hosts that it might have when it was submitted; empty: all.
        submitted_s: when it was submitted, after the first event of the cluster [s].
        started_s: when it began to run first [s]; None: it has not.
        ended_s: when it ended [s]; None: it has not.
        status: ``queued``, ``running``, or how it has ended.
        message: what was said of its end, or why it went back to the queue.
        run_ids: its runs, oldest first.
        run_s: time during which it held slots [s].
        slot_s: slots times seconds that it held.
        requeues: how often it went back to the queue.
    """

    job: str
    name: str
    command: str
    priority: float
    min_np: int
    max_np: int | None
    deadline: float | None
    submitted_s: float
    hosts: str = ""
    started_s: float | None = None
    ended_s: float | None = None
    status: str = "queued"
    message: str = ""
    run_ids: list[str] = field(default_factory=list)
    held: Held = field(default_factory=dict)
    reason: str = ""
    run_s: float = 0.0
    slot_s: float = 0.0
    requeues: int = 0

    def wait_s(self, now_s: float) -> float:
        """Return the time from its submission to its first start, or until now [s]."""
        until = self.started_s if self.started_s is not None else self.ended_s
        return max(0.0, (now_s if until is None else until) - self.submitted_s)


@dataclass(frozen=True)
class Hold:
    """Slots of a job on a host over a time.

    Attributes:
        begin_s, end_s: since when and until when [s].
    """

    job: str
    host: str
    slots: int
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class JobDecision:
    """A change of the slots of a job.

    Attributes:
        at_s: when [s].
    """

    at_s: float
    job: str
    before: int
    after: int
    reason: str


@dataclass
class ClusterSummary:
    """Everything that the events tell about a cluster; times are seconds after the first event.

    Attributes:
        started, ended: times of the first and of the last event [Unix s]; None: there is none.
        jobs: all jobs, oldest first.
        slots_since: slots of each host over time, as (time [s], slots), …; 0 when it is gone.
        holds: who held which slots, as far as it is over.
        waiting: number of jobs that wait over time, as (time [s], jobs).
        decisions: changes of slots, oldest first.
    """

    name: str = ""
    started: float | None = None
    ended: float | None = None
    hosts: Held = field(default_factory=dict)
    slots_since: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    jobs: dict[str, JobRecord] = field(default_factory=dict)
    holds: list[Hold] = field(default_factory=list)
    waiting: list[tuple[float, int]] = field(default_factory=list)
    decisions: list[JobDecision] = field(default_factory=list)
    _since_s: dict[tuple[str, str], float] = field(default_factory=dict)
    _run_since_s: dict[str, float] = field(default_factory=dict)
    _active: dict[str, JobRecord] = field(default_factory=dict)

    @property
    def duration_s(self) -> float:
        """Return the time from the first to the last event [s]."""
        if self.started is None or self.ended is None:
            return 0.0
        return max(0.0, self.ended - self.started)

    @property
    def slots(self) -> int:
        """Return the number of slots of all hosts."""
        return sum(self.hosts.values())

    def all_holds(self, now_s: float) -> list[Hold]:
        """Return who held which slots until now [s], those that still hold some included."""
        present = [
            Hold(job, host, self.jobs[job].held[host], since_s, max(now_s, since_s))
            for (job, host), since_s in self._since_s.items()
        ]
        return [*self.holds, *present]

    def slot_s_of_host(self, host: str, begin_s: float, end_s: float) -> float:
        """Return slots times seconds that a host offered between two times [s]."""
        changes = self.slots_since.get(host, [])
        return sum(
            slots * max(0.0, min(until_s, end_s) - max(at_s, begin_s))
            for (at_s, slots), (until_s, _) in pairwise([*changes, (end_s, 0)])
        )

    def slot_s_of(self, job: JobRecord, now_s: float) -> tuple[float, float]:
        """Return how long a job held slots, and slots times seconds, until now [s]."""
        if not job.held:
            return job.run_s, job.slot_s
        slot_s = sum(
            slots * max(0.0, now_s - self._since_s[job.job, host])
            for host, slots in job.held.items()
        )
        run_s = max(0.0, now_s - self._run_since_s[job.job])
        return job.run_s + run_s, job.slot_s + slot_s

    def as_json(self, now_s: float | None = None) -> dict[str, Any]:
        """Return plain data for ``--json``."""
        now_s = self.duration_s if now_s is None else now_s
        jobs = []
        for job in self.jobs.values():
            run_s, slot_s = self.slot_s_of(job, now_s)
            waited = {"wait_s": job.wait_s(now_s), "run_s": run_s, "slot_s": slot_s}
            jobs.append({**asdict(job), **waited})
        return {
            "name": self.name,
            "started": self.started,
            "ended": self.ended,
            "hosts": self.hosts,
            "jobs": jobs,
            "decisions": [asdict(decision) for decision in self.decisions],
        }

    # -- events ----------------------------------------------------------------------------

    def take_event(self, record: Mapping[str, Any]) -> None:
        """Take one event, in the order of the file; unknown kinds and fields are skipped."""
        at = _number(record.get("t"))
        if at is None:
            return
        if self.started is None or self.ended is None:
            self.started = self.ended = at
        self.ended = max(at, self.ended)  # a clock that was set back stops meanwhile
        at_s = self.ended - self.started
        key = str(record.get("job"))
        match record.get("kind"):
            case "cluster_hosts":
                before, self.hosts = self.hosts, _held(record.get("hosts"))
                for host in {**before, **self.hosts}:
                    if (slots := self.hosts.get(host, 0)) != before.get(host, 0):
                        self.slots_since.setdefault(host, []).append((at_s, slots))
            case "job_submitted":
                self.jobs[key] = self._active[key] = _submitted(key, record, at_s)
                self._count_waiting(at_s, 1)
            case "job_started" if key in self.jobs:
                self._started(self.jobs[key], record, at_s)
            case "jobs_decided":
                self._decided(record, at_s)
            case "job_requeued" if key in self.jobs:
                job = self.jobs[key]
                self._hold(job, {}, self._ended_s(job, record, at_s))
                self._set_status(job, "queued", at_s)
                job.ended_s = None
                job.message, job.reason = _text(record, "reason"), _text(record, "reason")
                job.requeues += 1
            case "job_finished" if key in self.jobs:
                job = self.jobs[key]
                job.ended_s = self._ended_s(job, record, at_s)
                self._hold(job, {}, job.ended_s)
                self._set_status(job, _text(record, "status") or "ended", at_s)
                job.message, job.reason = _text(record, "message"), ""

    def _started(self, job: JobRecord, record: Mapping[str, Any], at_s: float) -> None:
        self._set_status(job, "running", at_s)
        job.started_s = at_s if job.started_s is None else job.started_s
        run_id = _text(record, "run_id")
        if run_id and run_id not in job.run_ids:
            job.run_ids.append(run_id)

    def _decided(self, record: Mapping[str, Any], at_s: float) -> None:
        wanted, reasons = record.get("allocations"), record.get("reasons")
        if not isinstance(wanted, Mapping):
            return
        allocations = {str(job): _held(held) for job, held in wanted.items()}
        for key, reason in reasons.items() if isinstance(reasons, Mapping) else ():
            if str(key) in self.jobs:
                self.jobs[str(key)].reason = str(reason)
        for key, job in self._active.items():
            held = allocations.get(key, {})
            if held != job.held:
                before = sum(job.held.values())
                after = sum(held.values())
                self._hold(job, held, at_s)
                self.decisions.append(JobDecision(at_s, key, before, after, job.reason))

    def _ended_s(self, job: JobRecord, record: Mapping[str, Any], at_s: float) -> float:
        """Return when the run of a job ended [s]: before the event, if no daemon was there."""
        ended = _number(record.get("ended"))
        if ended is None or self.started is None:
            return at_s
        held_since_s = (self._since_s[job.job, host] for host in job.held)
        return min(at_s, max(job.submitted_s, ended - self.started, *held_since_s))

    def _hold(self, job: JobRecord, held: Held, at_s: float) -> None:
        """Change the slots that a job holds."""
        if job.held and not held:
            job.run_s += at_s - self._run_since_s.pop(job.job)
        elif held and not job.held:
            self._run_since_s[job.job] = at_s
        for host, slots in job.held.items():
            if held.get(host) != slots:
                since_s = self._since_s.pop((job.job, host))
                job.slot_s += slots * (at_s - since_s)
                self.holds.append(Hold(job.job, host, slots, since_s, at_s))
        for host, slots in held.items():
            if job.held.get(host) != slots:
                self._since_s[job.job, host] = at_s
        job.held = dict(held)

    def _set_status(self, job: JobRecord, status: str, at_s: float) -> None:
        """Change the state of a job, and the number of those that wait."""
        change = (status == "queued") - (job.status == "queued")
        job.status = status
        if status in ("queued", "running"):
            self._active[job.job] = job
        else:
            self._active.pop(job.job, None)
        if change:
            self._count_waiting(at_s, change)

    def _count_waiting(self, at_s: float, change: int) -> None:
        waited = self.waiting[-1][1] if self.waiting else 0
        if self.waiting and self.waiting[-1][0] == at_s:
            self.waiting.pop()
        self.waiting.append((at_s, waited + change))


def summarize_cluster(records: Iterable[Mapping[str, Any]], name: str = "") -> ClusterSummary:
    """Return the summary of a cluster's events.

    >>> events = [
    ...     {"t": 0.0, "kind": "cluster_hosts", "hosts": {"a": 2}},
    ...     {"t": 1.0, "kind": "job_submitted", "job": 1, "name": "digits", "min_np": 1},
    ...     {"t": 3.0, "kind": "jobs_decided", "allocations": {"1": {"a": 2}}, "reasons": {}},
    ...     {"t": 3.0, "kind": "job_started", "job": 1, "run_id": "digits-1"},
    ...     {"t": 9.0, "kind": "job_finished", "job": 1, "status": "succeeded", "message": ""},
    ... ]
    >>> job = summarize_cluster(events).jobs["1"]
    >>> job.status, job.wait_s(9.0), job.run_s, job.slot_s
    ('succeeded', 2.0, 6.0, 12.0)
    """
    summary = ClusterSummary(name)
    for record in records:
        summary.take_event(record)
    return summary


def _submitted(key: str, record: Mapping[str, Any], at_s: float) -> JobRecord:
    command = record.get("command")
    words = [str(word) for word in command] if isinstance(command, list) else [str(command or "")]
    most = _number(record.get("max_np"))
    return JobRecord(
        key,
        _text(record, "name") or key,
        " ".join(words),
        _number(record.get("priority")) or 1.0,
        int(_number(record.get("min_np")) or 1),
        None if most is None else int(most),
        _number(record.get("deadline")),
        at_s,
        _text(record, "hosts"),
    )


def _held(value: Any) -> Held:
    """Return slots on each host; those that are not whole numbers above 0 are left out."""
    if not isinstance(value, Mapping):
        return {}
    return {
        str(host): slots
        for host, slots in value.items()
        if isinstance(slots, int) and not isinstance(slots, bool) and slots > 0
    }


def _text(record: Mapping[str, Any], name: str) -> str:
    value = record.get(name)
    return "" if value is None else str(value)


def _number(value: Any) -> float | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e18:
        return float(value)
    return None

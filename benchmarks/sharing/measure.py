"""Measure twelve real jobs on virtual hosts under a policy, and predict them by simulation."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.sharing.cluster import Cluster, virtual_hosts
from benchmarks.sharing.workload import HOSTS, JOBS, KINDS, SLOTS
from benchmarks.testbed.command import Say
from benchmarks.testbed.figures import figure
from hvd_elastic.errors import UsageError
from hvd_elastic.policy.schedule.policies import POLICIES
from hvd_elastic.records.audit import check_audit
from hvd_elastic.records.cluster import ClusterSummary, summarize_cluster
from hvd_elastic.records.json_lines import read_records
from hvd_elastic.sim.jobs.history import History, read_history, simulate_history

OTHER = {"goodput": "equal", "equal": "goodput", "fifo": "goodput"}
"""The policy under which the speeds were measured from which a policy is predicted."""
_LONGEST = 6.0
"""All jobs have to end within this many times the time over which they come."""
_MEASURED = "measured.json"
_OTHER_STEPS = ("rescale_started", "batch_plan")
"""Events after which the steps of a run may take another time."""
_Step = tuple[float, float]
"""A value from a time on [Unix s, value]."""


@dataclass(frozen=True)
class Shared:
    """What happened to the jobs under a policy.

    Attributes:
        minutes: time over which they came.
        cluster: what the queue has recorded.
        training: processes that train or execute a command, over time.
        waiting: jobs that wait for slots, over time.
        pauses_s: pauses of training jobs when slots were given up, and when some came [s].
        stalls_s: by how much each of them is longer than a step [s].
        audits: whether every example of a job was used exactly once an epoch, by run id.
        history: the jobs with their measured speeds.
        loads: load average of the machine, sampled.
    """

    minutes: int
    cluster: ClusterSummary
    training: Sequence[_Step]
    waiting: Sequence[_Step]
    pauses_s: Sequence[float]
    stalls_s: Sequence[float]
    audits: Mapping[str, bool]
    history: History
    loads: Sequence[float]

    @property
    def completion_s(self) -> dict[str, float]:
        """Time from submission to the end of each job [s]."""
        return {job.name: job.took_s for job in self.history.jobs}

    @property
    def mean_s(self) -> float:
        """Mean completion time [s]."""
        return statistics.fmean(self.completion_s.values())


def measure_shared(
    policies: Iterable[str], minutes: int, folder: Path, say: Say
) -> list[dict[str, Any]]:
    """Return a row for each policy, also of those that an earlier call has left in the folder.

    Args:
        policies: policies to measure now.
        minutes: time over which the jobs come, which also sets their length.
        folder: where the records of each policy are kept.
        say: is told what is measured.

    Raises:
        UsageError: the folder has a measurement of the policy.
    """
    for policy in policies:
        if (folder / policy).exists():
            raise UsageError(f"{folder / policy} exists: remove it to measure {policy} again")
        with virtual_hosts(HOSTS, SLOTS, folder) as hosts:
            text = "".join(f"{host} slots={SLOTS}\n" for host in hosts.hosts)
            options = ("--policy", policy, "--ssh-config", hosts.ssh_config)
            cluster = Cluster(folder / policy, text, *options)
            with cluster.up():
                loads = _submit_all(cluster, policy, 60 * minutes, say)
            told = {"minutes": minutes, "loads": loads}
            (cluster.home / _MEASURED).write_text(json.dumps(told), encoding="utf-8")
    kept = [policy for policy in POLICIES if (folder / policy / _MEASURED).exists()]
    found = {policy: _read(folder / policy) for policy in kept}
    return [_row(policy, found) for policy in found]


def _submit_all(cluster: Cluster, policy: str, over_s: float, say: Say) -> list[float]:
    """Submit the jobs when it is time, and wait for their end; return load averages."""
    loads = []
    began = time.monotonic()
    for job in JOBS:
        while (left := began + job.at * over_s - time.monotonic()) > 0:
            time.sleep(min(left, 10.0))
            loads.append(os.getloadavg()[0])
        run_id = cluster.submit(*job.arguments(cluster.script, over_s, asks=policy == "fifo"))
        say(f"{policy}: {time.monotonic() - began:.0f} s, submitted {run_id}")
    while True:
        ended = [event for event in cluster.queue_events() if event["kind"] == "job_finished"]
        if len(ended) == len(JOBS):
            break
        if time.monotonic() - began > _LONGEST * over_s:
            raise RuntimeError(f"{policy}: {len(JOBS) - len(ended)} jobs have not ended")
        time.sleep(1.0)
        loads.append(os.getloadavg()[0])
    failed = [event for event in ended if event["status"] != "succeeded"]
    if failed:
        raise RuntimeError(f"{policy}: not all jobs have succeeded: {failed}")
    return loads


def _read(home: Path) -> Shared:
    told = json.loads((home / _MEASURED).read_text(encoding="utf-8"))
    queue = read_records(home / "clusters/hosts/events.jsonl")
    summary = summarize_cluster(queue, "hosts")
    with mock.patch.dict(os.environ, HVD_ELASTIC_HOME=str(home)):
        history = read_history(summary)
    waiting: list[_Step] = []
    training: list[_Step] = []
    pauses: list[tuple[float, float]] = []
    audits = {}
    changes = {"job_submitted": 1, "job_requeued": 1, "job_started": -1}
    running: set[Any] = set()
    for event in queue:
        change = changes.get(event["kind"], 0)
        if event["kind"] == "job_started":
            change = 0 if event["job"] in running else -1  # its leader was started again
            running.add(event["job"])
        elif event["kind"] == "job_requeued":
            running.discard(event["job"])
        waiting.append((event["t"], change))
    for job in summary.jobs.values():
        (run_id,) = job.run_ids
        if job.name == "command":
            begin, end = job.started_s or 0.0, job.ended_s or 0.0
            at = summary.started or 0.0
            training += [(at + begin, 1), (at + end, -1)]
            continue
        folder = home / "runs" / run_id
        audits[run_id] = check_audit(read_records(folder / "audit.jsonl"), finished=True).ok
        events = read_records(folder / "events.jsonl")
        pauses += pauses_of(events)
        sizes = _sizes(events)
        training += [(at, after - before) for (_, before), (at, after) in pairwise(sizes)]
    return Shared(
        told["minutes"],
        summary,
        _summed(training),
        _summed(waiting),
        [pause_s for pause_s, _ in pauses],
        [max(0.0, pause_s - step_s) for pause_s, step_s in pauses],
        audits,
        history,
        told["loads"],
    )


def _sizes(events: Iterable[Mapping[str, Any]]) -> list[_Step]:
    """Return how many processes of a run train over time."""
    sizes: list[_Step] = [(0.0, 0)]
    for event in events:
        if event["kind"] == "rescale_finished":
            sizes.append((event["t"], event["size"]))
        elif event["kind"] == "run_finished":
            sizes.append((event["t"], 0))
    return sizes


def pauses_of(events: Sequence[Mapping[str, Any]]) -> Iterator[tuple[float, float]]:
    """Yield each pause of a run, which ends with a whole step, and the time of a step then [s]."""
    for number, event in enumerate(events, 1):
        if event["kind"] != "rescale_finished" or event.get("pause_s") is None:
            continue
        later = takewhile(lambda each: each["kind"] not in _OTHER_STEPS, events[number:])
        marks = [(each["step"], each["mono"]) for each in later if each["kind"] == "metrics"]
        steps = [(end - begin) / (to - at) for (at, begin), (to, end) in pairwise(marks) if to > at]
        yield float(event["pause_s"]), statistics.median(steps) if steps else 0.0


def _summed(changes: Iterable[_Step]) -> list[_Step]:
    """Return a value over time from its changes.

    >>> _summed([(2.0, 1), (1.0, 1), (3.0, -2)])
    [(1.0, 1), (2.0, 2), (3.0, 0)]
    """
    value: float = 0
    found = []
    for at, change in sorted(changes):
        value += change
        found.append((at, value))
    return found


def mean_while(values: Sequence[_Step], condition: Sequence[_Step]) -> tuple[float, float]:
    """Return the mean of a value while a condition is above 0, and for how long that was [s].

    >>> mean_while([(0.0, 4), (2.0, 8)], [(1.0, 1), (3.0, 0)])
    (6.0, 2.0)
    """
    area = length = 0.0
    for (begin, holds), (end, _) in pairwise(condition):
        if holds <= 0:
            continue
        inner = [at for at, _ in values if begin < at < end]
        for left, right in pairwise([begin, *inner, end]):
            now = next((value for at, value in reversed(values) if at <= left), 0)
            area += now * (right - left)
        length += end - begin
    return (area / length if length else float("nan")), length


def _held(cluster: ClusterSummary) -> list[_Step]:
    """Return how many slots the jobs hold over time."""
    began = cluster.started or 0.0
    changes: list[_Step] = []
    for hold in cluster.all_holds(cluster.duration_s):
        changes += [(began + hold.begin_s, hold.slots), (began + hold.end_s, -hold.slots)]
    return _summed(changes)


def predicted_s(policy: str, history: History) -> float:
    """Return the mean completion time that the simulator predicts for a policy [s]."""
    if policy == "fifo":
        asking = []
        for job in history.jobs:
            asked = KINDS[job.name.split()[1]].asked
            asking.append(replace(job, min_slots=asked, max_slots=asked))
        history = replace(history, jobs=asking)
    outcome = simulate_history(history, history.hosts, policy=POLICIES[policy])
    return outcome.mean_completion_s


def _row(policy: str, found: Mapping[str, Shared]) -> dict[str, Any]:
    one = found[policy]
    other = found.get(OTHER[policy], one)
    expected_s = predicted_s(policy, other.history)
    slots = HOSTS * SLOTS
    held, waited_s = mean_while(_held(one.cluster), one.waiting)
    training, _ = mean_while(one.training, one.waiting)
    return {
        "policy": policy,
        "minutes": one.minutes,
        "mean_completion_s": round(one.mean_s, 1),
        "predicted_s": round(expected_s, 1),
        "predicted_from": OTHER[policy] if OTHER[policy] in found else policy,
        "error": round(expected_s / one.mean_s - 1, 3),
        "last_end_s": round(one.history.span_s, 1),
        "waited_s": round(waited_s, 1),
        "held_while_waiting": round(held / slots, 3),
        "training_while_waiting": round(training / slots, 3),
        "rescales": len(one.pauses_s),
        "pause": figure(one.pauses_s),
        "pauses_above_half_a_second": sum(pause > 0.5 for pause in one.pauses_s),
        "stall": figure(one.stalls_s),
        "stalls_above_half_a_second": sum(stall > 0.5 for stall in one.stalls_s),
        "audits_exact": f"{sum(one.audits.values())} of {len(one.audits)}",
        "load_average": round(statistics.fmean(one.loads), 1),
        "completion_s": [round(seconds, 1) for seconds in one.completion_s.values()],
    }

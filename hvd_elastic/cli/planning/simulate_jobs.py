"""Implement ``hvd-elastic simulate`` for many jobs that share a cluster."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_elastic.cli.output import print_json
from hvd_elastic.errors import UsageError
from hvd_elastic.formatting import count, duration_words

if TYPE_CHECKING:
    from hvd_elastic.policy.schedule.jobs import HostSlots
    from hvd_elastic.sim.jobs.run import Outcome


def simulate_many(
    trace: Path,
    policy: str,
    profiles: Path | None,
    cluster: str,
    interval_s: float,
    rescale_s: float,
    out: Path | None,
    *,
    as_json: bool,
) -> None:
    """Print what happens to a workload under a policy; see ``hvd-elastic simulate --help``.

    Raises:
        UsageError: a file or option is not valid; names the valid ones.
    """
    from hvd_elastic.policy.schedule.jobs import HostSlots
    from hvd_elastic.sim.jobs.policies import POLICIES
    from hvd_elastic.sim.jobs.profiles import read_applications, read_workload
    from hvd_elastic.sim.jobs.run import simulate_jobs

    if policy not in POLICIES:
        valid = ", ".join(POLICIES)
        raise UsageError(f"--policy {policy!r} is not known for many jobs; valid: {valid}")
    if profiles is None:
        raise UsageError(
            "a workload of many jobs needs --profiles FOLDER with constants.json and "
            "profiles/APPLICATION/*.csv (docs/scheduling.md)"
        )
    numbers = cluster.split("x")
    if len(numbers) != 2 or not all(each.isdigit() and int(each) for each in numbers):
        raise UsageError(f"--cluster takes HOSTSxSLOTS, such as 16x4, not {cluster!r}")
    shape = [int(each) for each in numbers]
    hosts = [HostSlots(f"host{number + 1}", shape[1]) for number in range(shape[0])]
    workload = read_workload(trace, read_applications(profiles))
    entry = POLICIES[policy]
    began = time.perf_counter()
    try:
        outcome = simulate_jobs(workload, hosts, entry, interval_s, rescale_s)
    except ValueError as error:
        raise UsageError(f"workload {trace}: {error}") from error
    took_s = time.perf_counter() - began
    summary = {"policy": policy, "knows": entry.knows, **_summary(outcome)}
    if out is not None:
        heading = f"{policy} on {count(len(hosts), 'host')} of {count(shape[1], 'slot')}, simulated"
        _draw(outcome, hosts, trace.stem, heading, out)
    if as_json:
        changes = [{**vars(change), "slots": change.slots} for change in outcome.changes]
        jobs = {"jobs": outcome.completion_s, "fairness_of_jobs": outcome.fairness}
        print_json({**summary, **jobs, "changes": changes})
        return
    for change in outcome.changes:
        at = duration_words(change.at_s)
        print(f"{at:>12}  {change.job:<16} {change.slots:>4}  {change.reason}")
    print()
    rows = {
        "policy": f"{policy}; knows {entry.knows}",
        "jobs": f"{len(outcome.completion_s)} on {count(len(hosts), 'host')} of "
        f"{count(hosts[0].slots, 'slot')}",
        "completion": f"{summary['mean_completion_s'] / 3600:.3f} h in the mean, "
        f"{summary['p99_completion_s'] / 3600:.2f} h at the 99th percentile",
        "fairness": f"{summary['mean_fairness']:.2f} times the completion time with an equal share "
        f"in the mean, {summary['worst_fairness']:.2f} for the worst job",
        "rescales": str(outcome.rescales),
        "decision": f"{1e3 * summary['mean_decision_s']:.1f} ms in the mean, "
        f"{1e3 * summary['max_decision_s']:.0f} ms at most",
    }
    if out is not None:
        rows["picture"] = str(out)
    for name, value in rows.items():
        print(f"{name:<12} {value}")
    print(f"simulated in {duration_words(took_s)}", file=sys.stderr)


def simulate_past(
    name: str | None,
    policy: str,
    added_hosts: int,
    interval_s: float | None,
    rescale_s: float | None,
    out: Path | None,
    *,
    as_json: bool,
) -> None:
    """Print what further hosts would have brought; see ``hvd-elastic simulate --help``.

    Raises:
        RunError: the cluster has no history.
        UsageError: the policy is not known.
    """
    from hvd_elastic.jobs.place import open_cluster
    from hvd_elastic.policy.schedule.policies import POLICIES
    from hvd_elastic.records.cluster import summarize_cluster
    from hvd_elastic.records.json_lines import iter_events
    from hvd_elastic.sim.jobs.history import read_history, simulate_history

    if policy not in POLICIES:
        valid = ", ".join(POLICIES)
        raise UsageError(f"--policy {policy!r} is not known for --history; valid: {valid}")
    folder = open_cluster(name)
    cluster = summarize_cluster(iter_events(folder.events), folder.name)
    history = read_history(cluster)
    hosts = [history.hosts_with(0), history.hosts_with(added_hosts)]
    outcomes = [
        simulate_history(history, each, interval_s, rescale_s, POLICIES[policy]) for each in hosts
    ]
    without, added = outcomes
    if out is not None:
        heading = f"its past jobs with {count(added_hosts, 'further host')}, simulated"
        _draw(added, hosts[1], cluster.name, heading, out)
    measured_s = statistics.fmean(job.took_s for job in history.jobs)
    ratio = added.mean_completion_s / without.mean_completion_s
    guessed = sum(job.speed is None for job in history.jobs)
    found = {
        "cluster": cluster.name,
        "policy": policy,
        "jobs": len(history.jobs),
        "jobs_left_out": history.left_out,
        "jobs_of_unknown_speed": guessed,
        "added_hosts": added_hosts,
        "measured_mean_completion_s": measured_s,
        "without": _summary(without),
        "with": _summary(added),
        "ratio": ratio,
    }
    if as_json:
        print_json(found)
        return
    rows = {
        "cluster": f"{cluster.name}: {count(len(hosts[0]), 'host')}, "
        f"{count(sum(host.slots for host in hosts[0]), 'slot')}",
        "jobs": f"{len(history.jobs)} that succeeded"
        + (f"; {history.left_out} others are left out" if history.left_out else ""),
        "measured": f"{duration_words(measured_s)} from submission to end in the mean",
        "simulated": f"{duration_words(without.mean_completion_s)} with the same hosts"
        + (f" under {policy}" if policy != "goodput" else ""),
        f"+ {count(added_hosts, 'host')}": f"{duration_words(added.mean_completion_s)}, "
        f"{100 * (1 - ratio):.0f} % less; {_busy(added, hosts[1]):.0f} % of the slots in use "
        f"instead of {_busy(without, hosts[0]):.0f} %",
    }
    if out is not None:
        rows["picture"] = str(out)
    for label, value in rows.items():
        print(f"{label:<12} {value}")
    if guessed:
        print(
            f"Too little was measured of {count(guessed, 'job')}: taken to be as fast on any slots."
        )


def _busy(outcome: Outcome, hosts: Sequence[HostSlots]) -> float:
    """Return how much of the slots was in use [%]."""
    return 100 * outcome.slot_s / (sum(host.slots for host in hosts) * outcome.span_s)


def _draw(outcome: Outcome, hosts: Sequence[HostSlots], name: str, heading: str, out: Path) -> None:
    from hvd_elastic.records.cluster import summarize_cluster
    from hvd_elastic.sim.jobs.run import queue_events
    from hvd_elastic.views.cluster_page import render_cluster
    from hvd_elastic.views.page import write_page

    summary = summarize_cluster(queue_events(outcome, hosts), name)
    write_page(out, render_cluster(summary, heading))


def _summary(outcome: Outcome) -> dict[str, Any]:
    found = {
        "mean_completion_s": outcome.mean_completion_s,
        "p99_completion_s": outcome.percentile_completion_s(99),
        "rescales": outcome.rescales,
        "slot_s": outcome.slot_s,
        "span_s": outcome.span_s,
        "mean_decision_s": statistics.fmean(outcome.decision_s),
        "max_decision_s": max(outcome.decision_s),
    }
    if outcome.fairness:
        found["mean_fairness"] = outcome.mean_fairness
        found["worst_fairness"] = outcome.worst_fairness
    return found

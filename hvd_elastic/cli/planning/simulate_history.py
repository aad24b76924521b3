"""Implement ``hvd-elastic simulate --history``: the past jobs of a cluster on other hosts."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hvd_elastic.cli.output import print_json
from hvd_elastic.errors import UsageError
from hvd_elastic.formatting import count, duration_words

if TYPE_CHECKING:
    from hvd_elastic.policy.schedule.jobs import HostSlots
    from hvd_elastic.sim.jobs.run import Outcome


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
    from hvd_elastic.records.json_lines import iter_records
    from hvd_elastic.sim.jobs.history import read_history, simulate_history

    if policy not in POLICIES:
        valid = ", ".join(POLICIES)
        raise UsageError(f"--policy {policy!r} is not known for --history; valid: {valid}")
    folder = open_cluster(name)
    cluster = summarize_cluster(iter_records(folder.events), folder.name)
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
        "without": without.figures(),
        "with": added.figures(),
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

"""Implement ``hvd-elastic simulate`` for many jobs that share a cluster."""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_elastic.errors import UsageError
from hvd_elastic.formatting import count, duration_words

if TYPE_CHECKING:
    from hvd_elastic.sim.jobs.run import Outcome


def simulate_many(
    trace: Path,
    policy: str,
    profiles: Path | None,
    cluster: str,
    interval_s: float,
    rescale_s: float,
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
    if as_json:
        changes = [vars(change) for change in outcome.changes]
        print(json.dumps({**summary, "jobs": outcome.completion_s, "changes": changes}, indent=2))
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
        "rescales": str(outcome.rescales),
        "decision": f"{1e3 * summary['mean_decision_s']:.1f} ms in the mean, "
        f"{1e3 * summary['max_decision_s']:.0f} ms at most",
    }
    for name, value in rows.items():
        print(f"{name:<12} {value}")
    print(f"simulated in {took_s:.1f} s", file=sys.stderr)


def _summary(outcome: Outcome) -> dict[str, Any]:
    return {
        "mean_completion_s": outcome.mean_completion_s,
        "p99_completion_s": outcome.percentile_completion_s(99),
        "rescales": outcome.rescales,
        "slot_s": outcome.slot_s,
        "span_s": outcome.span_s,
        "mean_decision_s": statistics.fmean(outcome.decision_s),
        "max_decision_s": max(outcome.decision_s),
    }

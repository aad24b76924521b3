"""Mean completion time of published workloads under policies that share a cluster, simulated.

The workloads and profiles are those of the artifact of Pollux (OSDI 2021); they are not part of
this repository. Example: ``python benchmarks/schedule.py pollux --workloads pollux/workloads``.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.published.policies import POLICIES
from benchmarks.published.profiles import read_applications, read_workload
from benchmarks.published.simulate import simulate_jobs
from benchmarks.testbed.command import Say, at_least_one, check_names, names, run_benchmark
from benchmarks.testbed.figures import Result, conditions, kept_rows
from hvd_elastic.errors import UsageError
from hvd_elastic.policy.schedule.decide import decide
from hvd_elastic.policy.schedule.jobs import Job
from hvd_elastic.policy.snapshot import HostOffer

_BENCHMARK = "schedule"
HOSTS = [HostOffer(f"host{number + 1}", 4) for number in range(16)]
PUBLISHED = (60.0, 30.0)
"""Time between decisions and pause of a rescale in the artifact's simulator [s]."""
PUBLISHED_H = {"fifo": 6.54, "optimus": 1.58, "tiresias": 1.12, "equal": 0.88, "sia": 0.78}
"""Mean completion time of the eight workloads in the artifact's simulator [h]."""
OURS = (10.0, 1.0)
"""The same with rescales in living processes [s]; measured pauses are shorter."""
COSTS = {"published": PUBLISHED, "ours": OURS}
_OUR_POLICIES = ("goodput", "goodput-unknown")
"""Those that are simulated at our cost of a rescale too."""


def simulate_one(task: tuple[Path, Path, str, float, float, float]) -> dict[str, float]:
    """Return the figures of one workload under one policy."""
    profiles, workload, policy, interval_s, rescale_s, noise = task
    jobs = read_workload(workload, read_applications(profiles))
    outcome = simulate_jobs(jobs, HOSTS, POLICIES[policy], interval_s, rescale_s, noise)
    return {
        "mean_h": outcome.mean_completion_s / 3600,
        "p99_h": outcome.percentile_completion_s(99) / 3600,
        "mean_fairness": outcome.mean_fairness,
        "worst_fairness": outcome.worst_fairness,
        "rescales": outcome.rescales,
        "decision_ms": 1e3 * float(np.mean(outcome.decision_s)),
    }


def summarize(
    policy: str,
    interval_s: float,
    rescale_s: float,
    noise: float,
    found: Sequence[Mapping[str, float]],
) -> dict[str, Any]:
    """Return a row of the figures of one policy on all workloads."""

    def mean(name: str) -> float:
        return float(np.mean([each[name] for each in found]))

    return {
        "policy": policy,
        "interval_s": interval_s,
        "rescale_s": rescale_s,
        "noise": noise,
        "mean_h": [round(each["mean_h"], 3) for each in found],
        "mean_of_all_h": round(mean("mean_h"), 3),
        "published_h": PUBLISHED_H.get(policy)
        if interval_s == PUBLISHED[0] and not noise
        else None,
        "p99_h": round(mean("p99_h"), 2),
        "mean_fairness": round(mean("mean_fairness"), 3),
        "worst_fairness": [round(each["worst_fairness"], 2) for each in found],
        "worst_of_all_fairness": round(max(each["worst_fairness"] for each in found), 2),
        "rescales": round(mean("rescales")),
        "decision_ms": round(mean("decision_ms"), 2),
    }


def decision_time_s(hosts: int, jobs: int) -> float:
    """Return the longest of three decisions about synthetic jobs on hosts of 4 slots [s]."""
    rng = np.random.default_rng(0)
    cluster = [HostOffer(f"host{number}", 4) for number in range(hosts)]
    slots = np.arange(1, 65)
    waiting = [
        Job(
            f"job{number}",
            float(number),
            np.append(0, slots ** rng.uniform(0.4, 1)),
            float(rng.lognormal(9, 1.5)),
            rescale_s=0.2,
            max_slots=int(2 ** rng.integers(0, 7)),
        )
        for number in range(jobs)
    ]
    longest = 0.0
    for now in (1e4, 2e4, 3e4):
        began = time.process_time()
        decide(waiting, cluster, now)
        longest = max(longest, time.process_time() - began)
    return longest


def measure(options: argparse.Namespace, say: Say) -> Result:
    """Simulate all workloads under each policy, and time decisions.

    Rows of other policies are kept in the file of ``--out``.
    """
    check_names("--policies", options.policies, POLICIES)
    check_names("--costs", options.costs, COSTS)
    kept = kept_rows(options.out, _BENCHMARK, ["workloads"])["workloads"]
    files = sorted(options.workloads.glob("workload-*.csv"))
    if not files:
        raise UsageError(f"{options.workloads} has no workload-N.csv")
    load_before = os.getloadavg()
    settings = [
        (policy, *COSTS[cost], options.noise)
        for cost in options.costs
        for policy in options.policies
        if cost == "published" or policy in _OUR_POLICIES
    ]
    rows = [row for row in kept if _setting(row) not in settings]
    with ProcessPoolExecutor(options.processes) as pool:
        for policy, interval_s, rescale_s, noise in settings:
            tasks = [
                (options.profiles, file, policy, interval_s, rescale_s, noise) for file in files
            ]
            found = list(pool.map(simulate_one, tasks))
            row = summarize(policy, interval_s, rescale_s, noise, found)
            rows.append(row)
            say(f"{policy}, a decision each {interval_s:g} s: mean {row['mean_of_all_h']} h")
    decisions = [
        {"slots": 4 * hosts, "jobs": jobs, "longest_s": round(decision_time_s(hosts, jobs), 3)}
        for hosts, jobs in ((16, 160), (256, 1000), (1024, 2560))
    ]
    note = "Virtual time; other work on the machine only lengthens decisions."
    taken = conditions("a simulated cluster", note, load_before)
    rows.sort(
        key=lambda row: (
            row["interval_s"] != PUBLISHED[0],
            _setting(row)[-1],
            [*POLICIES].index(row["policy"]),
        )
    )
    return Result(_BENCHMARK, taken, {"workloads": rows, "decisions": decisions})


def _setting(row: Mapping[str, Any]) -> tuple[str, float, float, float]:
    return row["policy"], row["interval_s"], row["rescale_s"], row.get("noise") or 0.0


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("profiles", type=Path, help="folder of constants.json and profiles/")
    parser.add_argument("--workloads", type=Path, required=True, help="folder of workload-N.csv")
    told = f"of {', '.join(POLICIES)}"
    parser.add_argument("--policies", type=names, default=list(POLICIES), help=told)
    told = f"costs of a rescale, of {', '.join(COSTS)} (both; the latter for our policies alone)"
    parser.add_argument("--costs", type=names, default=list(COSTS), help=told)
    told = "relative error of the goodput that a policy reads, such as 0.05 (0)"
    parser.add_argument("--noise", type=float, default=0.0, help=told)
    told = "processes that simulate at once (2)"
    parser.add_argument("--processes", type=at_least_one, default=2, help=told)
    return run_benchmark(parser, measure)


if __name__ == "__main__":
    sys.exit(main())

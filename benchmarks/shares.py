"""Six users who share a cluster by weight: what they have, and what it costs.

``virtual``: the jobs of published workloads (see ``schedule.py``), simulated with shares and
without. ``real``: a daemon, six accounts and jobs that train, on virtual hosts.
Example: ``python benchmarks/shares.py --parts virtual --profiles pollux --workloads
pollux/workloads --out benchmarks/results/shares.json``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.published.profiles import read_applications, read_workload
from benchmarks.published.simulate import simulate_jobs
from benchmarks.published.users import DEALINGS, SharedRun, UseOfShares, dealt, use_of_shares
from benchmarks.schedule import HOSTS
from benchmarks.testbed.command import Say, at_least_one, check_names, names, run_benchmark
from benchmarks.testbed.figures import Result, conditions, kept_rows
from hvd_elastic.errors import UsageError
from hvd_elastic.formatting import parse_duration
from hvd_elastic.policy.schedule.shares import Shares

_BENCHMARK = "shares"
PARTS = ("virtual", "real")
_CAPACITY = sum(host.slots for host in HOSTS)


def users(dealing: str) -> dict[str, float]:
    """Return the weights of the users of a dealing."""
    return {f"user{number + 1}": float(one) for number, one in enumerate(DEALINGS[dealing])}


def simulate_one(task: tuple[Path, Path, str, int, float, float, float]) -> dict[str, Any]:
    """Return the figures of one workload: of one dealing, or without shares of all."""
    profiles, workload, dealing, seed, interval_s, rescale_s, half_life_s = task
    jobs = read_workload(workload, read_applications(profiles))
    of_jobs = {name: dealt([job.name for job in jobs], users(name), seed) for name in DEALINGS}
    run = SharedRun()
    if dealing:
        run = SharedRun(of_jobs[dealing], users(dealing), Shares(half_life_s))
    outcome = simulate_jobs(jobs, HOSTS, run.entry(), interval_s, rescale_s)
    use: dict[str, UseOfShares] = {
        name: use_of_shares(run.rounds, of_jobs[name], users(name), _CAPACITY)
        for name in DEALINGS
        if dealing in ("", name)
    }
    return {"mean_h": outcome.mean_completion_s / 3600, "rescales": outcome.rescales, "use": use}


def measure_virtual(options: argparse.Namespace, say: Say) -> list[dict[str, Any]]:
    """Simulate the workloads without shares, and with those of each dealing."""
    if options.profiles is None or options.workloads is None:
        raise UsageError("--parts virtual needs --profiles and --workloads; see schedule.py")
    files = sorted(options.workloads.glob("workload-*.csv"))[: options.first]
    if not files:
        raise UsageError(f"{options.workloads} has no workload-N.csv")
    half_life_s = parse_duration("--half-life", options.half_life)
    settings = (options.seed, options.interval, options.rescale, half_life_s)
    rows = []
    with ProcessPoolExecutor(options.processes) as pool:
        tasks = [
            (options.profiles, file, dealing, *settings)
            for file in files
            for dealing in ("", *DEALINGS)
        ]
        without: dict[str, Any] = {}
        for (_, file, dealing, *_), found in zip(tasks, pool.map(simulate_one, tasks), strict=True):
            if not dealing:
                without = found
                continue
            row = {
                "workload": file.stem.rpartition("-")[2],
                "dealing": dealing,
                "seed": options.seed,
                "interval_s": options.interval,
                "rescale_s": options.rescale,
                "half_life_h": half_life_s / 3600,
                "mean_h": round(found["mean_h"], 3),
                "without_h": round(without["mean_h"], 3),
                "longer": round(found["mean_h"] / without["mean_h"] - 1, 3),
                "rescales": found["rescales"],
                "rescales_without": without["rescales"],
            }
            use, use_without = found["use"][dealing], without["use"][dealing]
            for name in ("worst", "all_h", "worst_of_all"):
                row[name] = round(getattr(use, name), 3)
                row[f"{name}_without"] = round(getattr(use_without, name), 3)
            row["used_h"] = [round(hours, 1) for hours in use.used_h.values()]
            row["fair_h"] = [round(hours, 1) for hours in use.fair_h.values()]
            rows.append(row)
            say(
                f"workload {row['workload']}, {dealing}: mean {row['mean_h']} h "
                f"({row['longer']:+.1%}), use within {row['worst']:.1%} of the fair share "
                f"({row['worst_without']:.0%} without); {row['all_h']} h in which all could use "
                f"more: within {row['worst_of_all']:.1%}"
            )
    return rows


def sums(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each dealing: what users had in all workloads together, and the cost."""
    found = []
    for dealing in dict.fromkeys(row["dealing"] for row in rows):
        own = [row for row in rows if row["dealing"] == dealing]
        hours = [
            [sum(column) for column in zip(*(row[name] for row in own), strict=True)]
            for name in ("used_h", "fair_h")
        ]
        apart = [abs(used / fair - 1) for used, fair in zip(*hours, strict=True)]
        means = [sum(row[name] for row in own) / len(own) for name in ("mean_h", "without_h")]
        found.append(
            {
                "dealing": dealing,
                "workloads": len(own),
                "worst_of_users": round(max(apart), 3),
                "mean_h": round(means[0], 3),
                "longer": round(means[0] / means[1] - 1, 3),
            }
        )
    return found


def measure(options: argparse.Namespace, say: Say) -> Result:
    """Measure the parts that were asked for; rows of others are kept in the file of ``--out``."""
    check_names("--parts", options.parts, PARTS)
    kept = kept_rows(options.out, _BENCHMARK, PARTS)
    load_before = os.getloadavg()
    found = {part: kept[part] for part in PARTS}
    if "virtual" in options.parts:
        found["virtual"] = measure_virtual(options, say)
    if "real" in options.parts:
        from benchmarks.sharing.accounts import measure_accounts

        found["real"] = [
            measure_accounts(users(dealing), options.minutes, say) | {"dealing": dealing}
            for dealing in options.dealings
        ]
    note = "Virtual: 16 hosts of 4 slots in virtual time. Real: six accounts, virtual hosts."
    found["sums"] = sums(found["virtual"])
    return Result(_BENCHMARK, conditions("a simulated cluster", note, load_before), found)


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    told = f"of {', '.join(PARTS)} (virtual)"
    parser.add_argument("--parts", type=names, default=["virtual"], help=told)
    parser.add_argument("--seed", type=int, default=0, help="of the dealing (0)")
    told = "of virtual: folder of constants.json and profiles/"
    parser.add_argument("--profiles", type=Path, help=told)
    parser.add_argument("--workloads", type=Path, help="of virtual: folder of workload-N.csv")
    parser.add_argument("--first", type=at_least_one, help="of virtual: number of workloads (all)")
    told = "of virtual: time between decisions [s] (10)"
    parser.add_argument("--interval", type=float, default=10.0, help=told)
    told = "of virtual: pause of a rescale [s] (1)"
    parser.add_argument("--rescale", type=float, default=1.0, help=told)
    told = "of virtual: time after which use counts half (7d)"
    parser.add_argument("--half-life", default="7d", help=told)
    told = "of virtual: processes that simulate at once (2)"
    parser.add_argument("--processes", type=at_least_one, default=2, help=told)
    told = "of real: how long all users have work waiting (30)"
    parser.add_argument("--minutes", type=float, default=30.0, help=told)
    told = f"of real: weights of the users, of {', '.join(DEALINGS)}"
    parser.add_argument("--dealings", type=names, default=list(DEALINGS), help=told)
    return run_benchmark(parser, measure)


if __name__ == "__main__":
    sys.exit(main())

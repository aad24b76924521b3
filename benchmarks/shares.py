"""Six users who share a cluster by weight: what they have, and what it costs.

``virtual``: the jobs of published workloads (see ``schedule.py``), simulated with shares and
without. ``real``: a daemon, six accounts and jobs that train, on virtual hosts.
Example: ``python benchmarks/shares.py --parts virtual --profiles pollux --workloads
pollux/workloads --out benchmarks/results/shares.json``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.published.job import KnownJob, SimulatedJob
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


def users(dealing: str) -> dict[str, float]:
    """Return the weights of the users of a dealing."""
    return {f"user{number + 1}": float(one) for number, one in enumerate(DEALINGS[dealing])}


def simulate_one(task: tuple[Path, Path, int, float, float, bool, str, float]) -> dict[str, Any]:
    """Return the figures of one workload: of one dealing, or without shares of all."""
    profiles, workload, seed, interval_s, rescale_s, is_known, dealing, half_life_s = task
    jobs = read_workload(workload, read_applications(profiles))
    of_jobs = {name: dealt([job.name for job in jobs], users(name), seed) for name in DEALINGS}
    run = SharedRun()
    if dealing:
        run = SharedRun(of_jobs[dealing], users(dealing), Shares(half_life_s))
    kind = KnownJob if is_known else SimulatedJob
    outcome = simulate_jobs(jobs, HOSTS, run.entry(), interval_s, rescale_s, kind=kind)
    use: dict[str, UseOfShares] = {
        name: use_of_shares(run.rounds, of_jobs[name], users(name))
        for name in DEALINGS
        if dealing in ("", name)
    }
    return {"mean_h": outcome.mean_completion_s / 3600, "use": use}


def measure_virtual(options: argparse.Namespace, say: Say) -> list[dict[str, Any]]:
    """Simulate the workloads without shares, and with those of each dealing and half-life."""
    if options.profiles is None or options.workloads is None:
        raise UsageError("--parts virtual needs --profiles and --workloads; see schedule.py")
    files = sorted(options.workloads.glob("workload-*.csv"))[: options.first]
    if not files:
        raise UsageError(f"{options.workloads} has no workload-N.csv")
    half_lives = {text: parse_duration("--half-life", text) for text in options.half_life}
    kinds = [("", ""), *((dealing, text) for dealing in DEALINGS for text in half_lives)]
    settings = (options.seed, options.interval, options.rescale, options.known_speeds)
    tasks = [(file, *kind) for file in files for kind in kinds]
    rows = []
    with ProcessPoolExecutor(options.processes) as pool:
        simulated = pool.map(
            simulate_one,
            [
                (options.profiles, file, *settings, dealing, half_lives.get(text, 0.0))
                for file, dealing, text in tasks
            ],
        )
        without: dict[str, Any] = {}
        for (file, dealing, text), found in zip(tasks, simulated, strict=True):
            if not dealing:
                without = found
                continue
            use, before = found["use"][dealing], without["use"][dealing]
            row = {
                "workload": int(file.stem.rpartition("-")[2]),
                "dealing": dealing,
                "half_life": text,
                "longer": round(found["mean_h"] / without["mean_h"] - 1, 3),
                "lack": round(use.lack, 3),
                "over": round(use.over, 3),
                "lack_without": round(before.lack, 3),
                "over_without": round(before.over, 3),
            }
            rows.append(row)
            say(
                f"workload {row['workload']}, {dealing}, {text}: mean {found['mean_h']:.3f} h "
                f"({row['longer']:+.1%}); of the fair share nobody lacked more than {use.lack:.1%} "
                f"({before.lack:.0%} without) or had more than {use.over:.0%} beyond it "
                f"({before.over:.0%}), in {use.contended_h:.1f} h"
            )
    return rows


def sums(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each dealing and half-life: the means and worst figures of all workloads."""
    found = []
    for dealing, half_life in dict.fromkeys((row["dealing"], row["half_life"]) for row in rows):
        own = [row for row in rows if (row["dealing"], row["half_life"]) == (dealing, half_life)]
        found.append(
            {
                "dealing": dealing,
                "half_life": half_life,
                "longer": round(statistics.fmean(row["longer"] for row in own), 3),
                "lack": max(row["lack"] for row in own),
                "over": max(row["over"] for row in own),
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
    note = (
        f"Virtual: 16 hosts of 4 slots, decisions each {options.interval:g} s, pauses of "
        f"{options.rescale:g} s, seed {options.seed}, speeds "
        f"{'known' if options.known_speeds else 'measured'}. Real: six accounts, virtual hosts."
    )
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
    told = "of virtual: times after which use counts half (7d)"
    parser.add_argument("--half-life", type=names, default=["7d"], help=told)
    told = "of virtual: jobs know their speeds, which takes a quarter of the time"
    parser.add_argument("--known-speeds", action="store_true", help=told)
    told = "of virtual: processes that simulate at once (2)"
    parser.add_argument("--processes", type=at_least_one, default=2, help=told)
    told = "of real: how long all users have work waiting (30)"
    parser.add_argument("--minutes", type=float, default=30.0, help=told)
    told = f"of real: weights of the users, of {', '.join(DEALINGS)}"
    parser.add_argument("--dealings", type=names, default=list(DEALINGS), help=told)
    return run_benchmark(parser, measure)


if __name__ == "__main__":
    sys.exit(main())

"""What a policy does with one published workload, change by change, in virtual time.

Workload and profiles are as for ``schedule.py``. Example: ``python benchmarks/workload.py
pollux/workloads/workload-1.csv --profiles pollux --policy sia --picture sia.html``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.published.policies import POLICIES
from benchmarks.published.profiles import read_applications, read_workload
from benchmarks.published.simulate import FairOutcome, simulate_jobs
from benchmarks.testbed.command import check_names, end_with
from hvd_elastic.errors import UsageError
from hvd_elastic.formatting import count, duration_words
from hvd_elastic.policy.snapshot import HostOffer
from hvd_elastic.records.cluster import summarize_cluster
from hvd_elastic.sim.jobs.run import queue_events
from hvd_elastic.views.cluster_page import render_cluster
from hvd_elastic.views.page import write_page


def simulate_workload(options: argparse.Namespace) -> None:
    """Simulate the workload of the options; print, and draw where it is asked.

    Raises:
        UsageError: a file or option is not valid; names the valid ones.
    """
    check_names("--policy", [options.policy], POLICIES)
    numbers = options.cluster.split("x")
    if len(numbers) != 2 or not all(each.isdigit() and int(each) for each in numbers):
        raise UsageError(f"--cluster takes HOSTSxSLOTS, such as 16x4, not {options.cluster!r}")
    shape = [int(each) for each in numbers]
    hosts = [HostOffer(f"host{number + 1}", shape[1]) for number in range(shape[0])]
    workload = read_workload(options.workload, read_applications(options.profiles))
    entry = POLICIES[options.policy]
    began = time.perf_counter()
    try:
        outcome = simulate_jobs(workload, hosts, entry, options.interval, options.rescale)
    except ValueError as error:
        raise UsageError(f"workload {options.workload}: {error}") from error
    took_s = time.perf_counter() - began
    on = f"{count(shape[0], 'host')} of {count(shape[1], 'slot')}"
    if options.picture is not None:
        summary = summarize_cluster(queue_events(outcome, hosts), options.workload.stem)
        page = render_cluster(summary, f"{options.policy} on {on}, simulated")
        write_page(options.picture, page)
    if options.json:
        found = {"policy": options.policy, "knows": entry.knows, **_figures(outcome)}
        print(json.dumps(found, indent=1))
        return
    for change in outcome.changes:
        at = duration_words(change.at_s)
        print(f"{at:>12}  {change.job:<16} {change.slots:>4}  {change.reason}")
    figures = _figures(outcome)
    rows = {
        "policy": f"{options.policy}; knows {entry.knows}",
        "jobs": f"{len(outcome.completion_s)} on {on}",
        "completion": f"{figures['mean_completion_s'] / 3600:.3f} h in the mean, "
        f"{figures['p99_completion_s'] / 3600:.2f} h at the 99th percentile",
        "fairness": f"{outcome.mean_fairness:.2f} times the completion time with an equal share "
        f"in the mean, {outcome.worst_fairness:.2f} for the worst job",
        "rescales": str(outcome.rescales),
        "decision": f"{1e3 * figures['mean_decision_s']:.1f} ms in the mean, "
        f"{1e3 * figures['max_decision_s']:.0f} ms at most",
    }
    print()
    for name, value in rows.items():
        print(f"{name:<12} {value}")
    print(f"simulated in {duration_words(took_s)}", file=sys.stderr)


def _figures(outcome: FairOutcome) -> dict[str, Any]:
    return {
        **outcome.figures(),
        "mean_fairness": outcome.mean_fairness,
        "worst_fairness": outcome.worst_fairness,
        "jobs": outcome.completion_s,
        "fairness_of_jobs": outcome.fairness,
        "changes": [{**vars(change), "slots": change.slots} for change in outcome.changes],
    }


def main() -> int:
    """Simulate a workload; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", type=Path, help="CSV of the jobs")
    told = "folder of constants.json and profiles/"
    parser.add_argument("--profiles", type=Path, required=True, help=told)
    parser.add_argument("--policy", default="goodput", help=f"of {', '.join(POLICIES)} (goodput)")
    parser.add_argument("--cluster", default="16x4", help="HOSTSxSLOTS (16x4)")
    told = "time between decisions [s] (10)"
    parser.add_argument("--interval", type=_positive, default=10.0, help=told)
    parser.add_argument("--rescale", type=float, default=1.0, help="pause of a rescale [s] (1)")
    parser.add_argument("--picture", type=Path, help="where to draw who had which slots, as HTML")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    options = parser.parse_args()
    return end_with(lambda: simulate_workload(options))


def _positive(text: str) -> float:
    if (value := float(text)) <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


if __name__ == "__main__":
    sys.exit(main())

"""Implement ``hvd-elastic simulate``: a policy on a trace, past jobs, or spot machines."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from hvd_elastic.cli.options import (
    AsJson,
    argument,
    command,
    number_option,
    option,
    parse_duration,
    whole_number_option,
)
from hvd_elastic.cli.output import print_json, print_rows, print_table
from hvd_elastic.cli.runs.scaling_options import ObjectiveOptions, flag_of
from hvd_elastic.errors import UsageError
from hvd_elastic.formatting import count, duration_words, number_words
from hvd_elastic.leader.spec import check_choices

if TYPE_CHECKING:
    from hvd_elastic.policy.snapshot import HostOffer
    from hvd_elastic.sim.jobs.run import Outcome


@command(ObjectiveOptions, but=["target_examples"])
def simulate(
    goal: ObjectiveOptions,
    cluster_name: Annotated[
        str | None, argument("for --history (default: the one used last)", "[CLUSTER]")
    ] = None,
    trace: Annotated[Path | None, option("hosts, workload and changes of a run, as JSON")] = None,
    history: Annotated[
        bool, option("the past jobs of a cluster instead of a trace", "--history")
    ] = False,
    add_hosts: Annotated[
        int, whole_number_option("for --history: further hosts", "--add-hosts", least=0)
    ] = 0,
    policy: Annotated[
        str,
        option("of a run: fixed (the trace's np) or goodput; of --history: goodput, equal or fifo"),
    ] = "goodput",
    interval: Annotated[
        float | None,
        number_option(
            "for --history: time between decisions [s] (default: 10; a short past: less)",
            "--interval",
            above=True,
        ),
    ] = None,
    rescale: Annotated[
        float | None,
        number_option("for --history: pause of a rescale [s] (default: as measured)", "--rescale"),
    ] = None,
    out: Annotated[
        Path | None, option("for --history: where to draw who had which slots, as HTML")
    ] = None,
    spot: Annotated[
        bool, option("the cost of spot machines beside a job that restarts as a whole", "--spot")
    ] = False,
    spot_trace: Annotated[
        list[Path] | None,
        option("for --spot: measured availability of a pool, as JSON; repeatable", "--spot-trace"),
    ] = None,
    instances: Annotated[
        int, whole_number_option("for --spot: most machines of the job", "--instances", least=1)
    ] = 16,
    work: Annotated[
        str, option("for --spot: time that the job takes on all machines", metavar="TIME")
    ] = "24h",
    seed: Annotated[
        int, whole_number_option("seed of the jitter, and of generated traces", "--seed", least=0)
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Try a policy on a trace in virtual time: what it decides, when, and why.

    The controller is a real run's. Its goodput is compared with the best fixed size and
    batch, found by exhaustive search. docs/autoscaling.md describes the format of a trace.

    Examples:
      hvd-elastic simulate --trace day.json

      hvd-elastic simulate --trace day.json --objective cost --budget 40/h --json

      hvd-elastic simulate --history gpus --add-hosts 2 --out gpus.html

      hvd-elastic simulate --spot --instances 16 --work 24h --deadline 36h
    """
    if spot:
        if history or trace is not None or cluster_name is not None:
            raise UsageError("--spot takes no --trace and no --history: give --spot-trace FILE")
        simulate_spot_machines(
            spot_trace or [], instances, work, goal.deadline, seed, as_json=as_json
        )
        return
    if spot_trace:
        raise UsageError("--spot-trace is for --spot; add that")
    if history:
        if trace is not None:
            raise UsageError("--history has the jobs of a cluster, and takes no --trace")
        simulate_past(cluster_name, policy, add_hosts, interval, rescale, out, as_json=as_json)
        return
    if trace is None or cluster_name is not None or add_hosts:
        raise UsageError(
            "give --trace FILE, --spot, or --history, a cluster and --add-hosts, such as: "
            "hvd-elastic simulate --history gpus --add-hosts 2"
        )
    of_history = {"--interval": interval, "--rescale": rescale, "--out": out}
    given = [name for name, value in of_history.items() if value is not None]
    if given:
        raise UsageError(f"{', '.join(given)}: only with --history, not for the trace of a run")
    from hvd_elastic.control.scaling import ScalingConfig
    from hvd_elastic.sim.run import simulate as run_trace
    from hvd_elastic.sim.static import best_static
    from hvd_elastic.sim.trace import read_trace

    check_choices({"policy": policy}, flag_of)
    found = read_trace(trace)
    if goal.deadline is not None:
        goal = replace(goal, target_examples=found.workload.examples)
    objective = goal.as_objective(policy)
    goal.check_prices(found.hosts, found.min_np)
    config = None
    if policy == "goodput":
        config = ScalingConfig(found.min_np, found.max_np, objective)
    began = time.perf_counter()
    try:
        result = run_trace(found, config, seed)
        best = best_static(found)
    except ValueError as error:
        raise UsageError(f"trace {trace}: {error}") from error
    took_s = time.perf_counter() - began
    goodput = result.mean_goodput(found.duration_s)
    summary: dict[str, Any] = {
        "policy": policy,
        "goodput": goodput,
        "best_static": {
            "slots": best.slots,
            "batch": best.batch,
            "accumulation_steps": best.accumulation_steps,
            "goodput": best.goodput,
        },
        "share_of_best_static": goodput / best.goodput,
        "rescales": result.rescales,
        "cost": result.cost,
        "reached_s": result.reached_s,
        "decisions": [vars(decision) for decision in result.decisions],
    }
    if as_json:
        print_json(summary)
        return
    _show(summary)
    print(f"simulated in {duration_words(took_s)}", file=sys.stderr)


def _show(summary: dict[str, Any]) -> None:
    for decision in summary["decisions"]:
        at = duration_words(decision["at_s"])
        print(f"{at:>12}  {decision['action']:<6} {decision['slots']:>4}  {decision['reason']}")
    if not summary["decisions"]:
        print("nothing was changed")
    best = summary["best_static"]
    rows = {
        "goodput": f"{number_words(summary['goodput'])} useful examples/s",
        "best static": f"{number_words(best['goodput'])} useful examples/s, with {best['slots']} "
        f"slots and a batch of {best['batch']}",
        "share": f"{100 * summary['share_of_best_static']:.1f} %",
        "rescales": str(summary["rescales"]),
        "cost": number_words(summary["cost"]),
        "target": "not reached"
        if summary["reached_s"] is None
        else f"reached after {duration_words(summary['reached_s'])}",
    }
    print()
    print_rows(rows.items())


_SPOT_DAYS = 20
"""Number of generated traces; the mean cost of so many is known to about 3 %."""
_SPOT_POOLS = 3
_SPOT_PRICE = 1 / 3
"""Price of spot machines in a measured trace, relative to on demand: such traces have no prices."""


def simulate_spot_machines(
    paths: Sequence[Path],
    machines: int,
    work: str,
    deadline: str | None,
    seed: int,
    *,
    as_json: bool,
) -> None:
    """Print what a job on spot machines costs under each rule.

    Args:
        paths: measured traces, one for each pool; empty: traces are generated.
        work: time that the job takes on all machines.
        deadline: time within which it should end; None: half more than the work takes.

    Raises:
        UsageError: a trace is not valid or too short, or the deadline cannot be met.
    """
    import numpy as np

    from hvd_elastic.sim.spot import (
        RULES,
        SpotJob,
        generate_trace,
        read_traces,
        simulate_spot,
        windows,
    )

    work_s = parse_duration("--work", work)
    deadline_s = 1.5 * work_s if deadline is None else parse_duration("--deadline", deadline)
    job = SpotJob(machines, work_s / 3600, deadline_s / 3600)
    least_s = work_s + 2 * (job.start_s + job.lost_s)
    if deadline_s < least_s:
        raise UsageError(
            f"--deadline {deadline} cannot be met: the work takes {duration_words(work_s)} on all "
            f"machines, and two starts are needed. Give at least {math.ceil(least_s / 60)}m"
        )
    if paths:
        measured = read_traces(paths, _SPOT_PRICE)
        traces = windows(measured, job.longest_h)
        if not traces:
            raise UsageError(
                f"the spot traces are {duration_words(measured.ticks * measured.gap_s)} long, and "
                f"--deadline {deadline or duration_words(deadline_s)} needs "
                f"{duration_words(job.longest_h * 3600)}; give longer ones, or a nearer deadline"
            )
    else:
        traces = [
            generate_trace(np.random.default_rng([seed, day]), job.longest_h, _SPOT_POOLS, machines)
            for day in range(_SPOT_DAYS)
        ]
    found = {
        rule: [simulate_spot(trace, job, make(trace, job)) for trace in traces]
        for rule, make in RULES.items()
    }
    rows = [
        {
            "policy": rule,
            "relative_cost": statistics.fmean(each.relative_cost for each in outcomes),
            "spot_hours": statistics.fmean(each.spot_h for each in outcomes),
            "on_demand_hours": statistics.fmean(each.on_demand_h for each in outcomes),
            "interruptions": statistics.fmean(each.interruptions for each in outcomes),
            "late": sum(each.late for each in outcomes),
            "traces": len(outcomes),
        }
        for rule, outcomes in found.items()
    ]
    if as_json:
        print_json({"deadline_s": deadline_s, "work_s": work_s, "rows": rows})
        return
    head = ["POLICY", "COST", "SPOT", "ON DEMAND", "INTERRUPTIONS", "LATE"]
    cells = [
        [
            str(row["policy"]),
            f"{row['relative_cost']:.2f}",
            f"{row['spot_hours']:.0f} h",
            f"{row['on_demand_hours']:.0f} h",
            f"{row['interruptions']:.1f}",
            f"{row['late']} of {row['traces']}",
        ]
        for row in rows
    ]
    print_table([head, *cells], left={0})
    source = "measured" if paths else f"generated availability of {_SPOT_POOLS} pools"
    print(
        f"Cost relative to {count(machines, 'machine')} on demand, mean of "
        f"{count(len(traces), 'trace')} ({source}); {duration_words(work_s)} of work, to be done "
        f"within {duration_words(deadline_s)}"
    )


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
    from hvd_elastic.jobs.rights import ClusterEvents
    from hvd_elastic.policy.schedule.policies import POLICIES
    from hvd_elastic.records.cluster import summarize_cluster
    from hvd_elastic.sim.jobs.history import read_history, simulate_history

    if policy not in POLICIES:
        valid = ", ".join(POLICIES)
        raise UsageError(f"--policy {policy!r} is not known for --history; valid: {valid}")
    folder = open_cluster(name)
    cluster = summarize_cluster(ClusterEvents(folder), folder.name)
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
    print_rows(rows.items())
    if guessed:
        print(
            f"Too little was measured of {count(guessed, 'job')}: taken to be as fast on any slots."
        )


def _busy(outcome: Outcome, hosts: Sequence[HostOffer]) -> float:
    """Return how much of the slots was in use [%]."""
    return 100 * outcome.slot_s / (sum(host.slots for host in hosts) * outcome.span_s)


def _draw(outcome: Outcome, hosts: Sequence[HostOffer], name: str, heading: str, out: Path) -> None:
    from hvd_elastic.records.cluster import summarize_cluster
    from hvd_elastic.sim.jobs.run import queue_events
    from hvd_elastic.views.cluster_page import render_cluster
    from hvd_elastic.views.page import write_page

    summary = summarize_cluster(queue_events(outcome, hosts), name)
    write_page(out, render_cluster(summary, heading))

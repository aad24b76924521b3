"""Implement ``hvd-elastic simulate``: try the policy of real runs in virtual time."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from hvd_elastic.cli.options import AsJson, command, number_option, whole_number_option
from hvd_elastic.cli.output import print_json
from hvd_elastic.cli.planning.simulate_history import simulate_past
from hvd_elastic.cli.runs.scaling_options import ObjectiveOptions
from hvd_elastic.errors import UsageError
from hvd_elastic.formatting import duration_words, number_words

_POLICIES = ("fixed", "goodput")


@command(ObjectiveOptions, but=["target_examples"])
def simulate(
    goal: ObjectiveOptions,
    cluster_name: Annotated[
        str | None,
        typer.Argument(metavar="[CLUSTER]", help="for --history (default: the one used last)"),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="hosts, workload and changes of a run, as JSON")
    ] = None,
    history: Annotated[
        bool, typer.Option("--history", help="the past jobs of a cluster instead of a trace")
    ] = False,
    add_hosts: Annotated[
        int, whole_number_option("--add-hosts", least=0, help="for --history: further hosts")
    ] = 0,
    policy: Annotated[
        str,
        typer.Option(
            help="of a run: fixed (the trace's np) or goodput; of --history: goodput, equal or fifo"
        ),
    ] = "goodput",
    interval: Annotated[
        float | None,
        number_option(
            "--interval",
            above=True,
            help="for --history: time between decisions [s] (default: 10; a short past: less)",
        ),
    ] = None,
    rescale: Annotated[
        float | None,
        number_option(
            "--rescale",
            help="for --history: pause of a rescale [s] (default: as measured)",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="for --history: where to draw who had which slots, as HTML")
    ] = None,
    seed: Annotated[int, whole_number_option("--seed", least=0, help="seed of the jitter")] = 0,
    as_json: AsJson = False,
) -> None:
    """Try a policy on a trace in virtual time: what it decides, when, and why.

    The controller is that of a real run. Its goodput is compared with the best fixed size and
    batch, found by exhaustive search. docs/autoscaling.md describes the format of a trace.

    Examples:
      hvd-elastic simulate --trace day.json

      hvd-elastic simulate --trace day.json --objective cost --budget 40/h --json

      hvd-elastic simulate --history gpus --add-hosts 2 --out gpus.html
    """
    if history:
        if trace is not None:
            raise UsageError("--history has the jobs of a cluster, and takes no --trace")
        simulate_past(cluster_name, policy, add_hosts, interval, rescale, out, as_json=as_json)
        return
    if trace is None or cluster_name is not None or add_hosts:
        raise UsageError(
            "give --trace FILE, or --history, the name of a cluster and --add-hosts, for example: "
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

    if policy not in _POLICIES:
        raise UsageError(f"--policy {policy!r} is not known; valid: {', '.join(_POLICIES)}")
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
    for name, value in rows.items():
        print(f"{name:<12} {value}")

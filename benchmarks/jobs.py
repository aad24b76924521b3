"""The queue of a cluster: a long history, starts beside ``run``, slots that move, and shared hosts.

Example: ``python benchmarks/jobs.py --rounds 5 --out benchmarks/results/jobs.json``.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil

from benchmarks.sharing.cluster import Cluster, this_machine
from benchmarks.sharing.measure import measure_shared
from benchmarks.testbed.command import Say, at_least_one, check_names, names, run_benchmark
from benchmarks.testbed.figures import Result, conditions, figure, kept_rows, text_table
from hvd_elastic.policy.schedule.policies import POLICIES

_BENCHMARK = "jobs"
PARTS = ("history", "start", "moves", "turns", "shared")
_DEADLINE_S = 180.0
_HISTORY = 10_000
_CANCELLED = 1_000


def measure_history(rounds: int, say: Say) -> list[dict[str, Any]]:
    """Time commands on a queue of many jobs."""
    with this_machine(1) as cluster:
        cluster.call("submit", "--plain", "--name", "holds", "--", "sleep", "3600")
        count = _HISTORY + rounds * _CANCELLED
        array = ("--plain", "--array", f"1-{count}", "--after", "any:1", "--", "true")
        say(f"submitting {count:,} jobs")
        submitted = [cluster.timed("submit", *array)]
        cancelled = []
        for number in range(rounds):
            first = 2 + number * _CANCELLED
            cancelled.append(cluster.timed("cancel", f"{first}-{first + _CANCELLED - 1}"))
            say(f"cancelled {_CANCELLED:,}: {cancelled[-1]:.2f} s")
        cluster.call("cancel", f"{2 + rounds * _CANCELLED}-{count + 1}")
        shown = [cluster.timed("queue") for _ in range(3 * rounds)]
        empty = [cluster.timed("list") for _ in range(3 * rounds)]
        cluster.call("cancel", "holds")
    return [
        {"what": f"submit an array of {count:,}", "time": figure(submitted)},
        {"what": f"cancel {_CANCELLED:,} queued jobs", "time": figure(cancelled)},
        {"what": f"queue, with {count:,} ended jobs", "time": figure(shown)},
        {"what": "list, of no runs (start of Python)", "time": figure(empty)},
    ]


def measure_start(rounds: int, say: Say) -> list[dict[str, Any]]:
    """Time from the command to the first step: ``run``, and ``submit`` to an idle cluster."""
    took: dict[str, list[float]] = {"run": [], "submit": []}
    with this_machine(2) as cluster:
        train = ("--", sys.executable, cluster.script)
        for number in range(rounds):
            for way in ("run", "submit") if number % 2 else ("submit", "run"):
                began = time.time()
                if way == "run":
                    run_id = f"run-{number}"
                    hosts = ("--hostfile", cluster.hostfile, "--np", "1")
                    cluster.call("run", "--detach", *hosts, "--run-id", run_id, *train)
                else:
                    run_id = cluster.submit("--max-np", "1", *train)
                took[way].append(cluster.wait_event(run_id, "metrics")["t"] - began)
                say(f"{way}: {took[way][-1]:.2f} s")
                cluster.call("stop", run_id)
    beyond = statistics.median(
        one - other for one, other in zip(took["submit"], took["run"], strict=True)
    )
    return [
        *({"what": f"{way} to the first step", "time": figure(took[way])} for way in took),
        {"what": "submit beyond run, median of pairs", "time": figure([beyond])},
    ]


def measure_moves(rounds: int, say: Say) -> list[dict[str, Any]]:
    """Pauses of two jobs while slots move from one to the other and back."""
    shrinks: list[float] = []
    grows: list[float] = []
    with this_machine(4) as cluster:
        long = cluster.submit(
            *("--name", "long", "--", sys.executable, cluster.script, "--epochs", "10000")
        )
        cluster.wait_event(long, "rescale_finished", size=4)
        for _ in range(rounds):
            seen = len(cluster.events(long, "rescale_finished"))
            short = cluster.submit(
                *("--name", "short", "--", sys.executable, cluster.script, "--epochs", "6")
            )
            cluster.wait_event(short, "run_finished")
            deadline = time.monotonic() + _DEADLINE_S
            while cluster.events(long, "rescale_finished")[-1]["size"] != 4:
                if time.monotonic() > deadline:
                    raise RuntimeError("the long job did not get its slots back")
                time.sleep(0.1)
            for events in (
                cluster.events(long, "rescale_finished")[seen - 1 :],
                cluster.events(short, "rescale_finished"),
            ):
                for before, after in itertools.pairwise(events):
                    shrinks_now = after["size"] < before["size"]
                    (shrinks if shrinks_now else grows).append(after["pause_s"])
            say(f"pauses so far: {[round(each, 2) for each in [*shrinks, *grows]]}")
        cluster.call("cancel", "long")
    return [
        {"what": "pause of a job that gives up slots", "time": figure(shrinks)},
        {"what": "pause of a job that gets slots", "time": figure(grows)},
    ]


def measure_turns(rounds: int, say: Say) -> list[dict[str, Any]]:
    """Times after a decision that moves one slot between two warm jobs, back and forth."""
    after: dict[str, list[float]] = {}
    with this_machine(3) as cluster:
        train = (sys.executable, cluster.script, "--epochs", "10000")
        runs = {name: cluster.submit("--name", name, "--", *train) for name in ("one", "two")}
        for number in range(2 * rounds + 2):
            gains, gives = ("one", "two") if number % 2 else ("two", "one")
            cluster.call("priority", gives, "--to", "1")
            cluster.call("priority", gains, "--to", "16")
            deadline = time.monotonic() + _DEADLINE_S
            while [e["size"] for e in cluster.events(runs[gains], "rescale_finished")][-1:] != [2]:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"job {gains} did not get a second slot")
                time.sleep(0.1)
            _wait_for_templates(cluster)
            if number < 2:  # from now on both were measured on two slots
                continue
            for what, took_s in _turn(cluster, runs[gains], runs[gives]).items():
                after.setdefault(what, []).append(took_s)
            say(f"decision to the first step: {after['the other takes its first step'][-1]:.2f} s")
    return [{"what": f"decision until {what}", "time": figure(s)} for what, s in after.items()]


def _wait_for_templates(cluster: Cluster) -> None:
    """Wait until the templates of both jobs have imported what they import."""
    before: list[float] = []
    deadline = time.monotonic() + _DEADLINE_S
    while True:
        spent = [
            process.info["cpu_times"].user
            for process in psutil.process_iter(["name", "cpu_times", "environ"])
            if process.info["name"] == "hvd-template"
            and (process.info["environ"] or {}).get("HVD_ELASTIC_HOME") == str(cluster.home)
        ]
        if len(spent) == len(before) == 2 and spent == before:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"{len(spent)} of 2 templates are there, or they still import")
        before = spent
        time.sleep(3.0)


def _turn(cluster: Cluster, gains: str, gives: str) -> dict[str, float]:
    """Return the time from the decision that moves a slot to what follows [s]."""
    begun = cluster.events(gives, "rescale_started")[-1]["t"]
    decided = max(
        each["t"]
        for each in cluster.queue_events()
        if each["kind"] == "jobs_decided" and each["t"] <= begun
    )

    def since(run_id: str, kind: str) -> float:
        return float(cluster.events(run_id, kind)[-1]["t"] - decided)

    return {
        "one rank of the job that gives is asked to leave": since(gives, "rescale_started"),
        "that job trains on": since(gives, "rescale_finished"),
        "the rank has ended": since(gives, "worker_left"),
        "a worker of the other is started": since(gains, "worker_started"),
        "it is ready": since(gains, "worker_standby"),
        "the other's rescale is announced": since(gains, "rescale_started"),
        "the other takes its first step": since(gains, "rescale_finished"),
    }


def measure(options: argparse.Namespace, say: Say) -> Result:
    """Measure the parts that were asked for; rows of others are kept in the file of ``--out``."""
    check_names("--parts", options.parts, PARTS)
    check_names("--policies", options.policies, POLICIES)
    kept = kept_rows(options.out, _BENCHMARK, ("times", "shared"))
    load_before = os.getloadavg()
    measures = {
        "history": measure_history,
        "start": measure_start,
        "moves": measure_moves,
        "turns": measure_turns,
    }
    rows = [
        {"part": part, **row}
        for part in options.parts
        if part in measures
        for row in measures[part](options.rounds, say)
    ]
    times = [row for row in kept["times"] if row["part"] not in options.parts] + rows
    shared = []
    if "shared" in options.parts:
        with tempfile.TemporaryDirectory(prefix="jobs-") as scratch:
            folder = options.folder or Path(scratch)
            folder.mkdir(parents=True, exist_ok=True)
            shared = measure_shared(options.policies, options.minutes, folder.absolute(), say)
    note = "Whole commands, start of Python included; conditions are those of the newest part."
    taken = conditions("this machine, and six virtual hosts of two slots", note, load_before)
    whole = {"times": times, "shared": shared or kept["shared"]}
    return Result(_BENCHMARK, taken, whole, [text_table({"times": rows, "shared": shared})])


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    told = f"of {', '.join(PARTS)} (all but shared, which takes more than an hour)"
    parser.add_argument("--parts", type=names, default=list(PARTS[:-1]), help=told)
    parser.add_argument("--rounds", type=at_least_one, default=5, help="repetitions (5)")
    told = "of shared: time over which the jobs come, which also sets their length (20)"
    parser.add_argument("--minutes", type=at_least_one, default=20, help=told)
    told = f"of shared: policies, of {', '.join(POLICIES)}"
    parser.add_argument("--policies", type=names, default=list(POLICIES), help=told)
    told = "of shared: where to keep the records of each policy, so that others can be added later"
    parser.add_argument("--folder", type=Path, help=told)
    return run_benchmark(parser, measure)


if __name__ == "__main__":
    sys.exit(main())

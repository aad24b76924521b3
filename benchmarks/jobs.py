"""The queue of a cluster: a long history, starts beside ``run``, and slots that move between jobs.

Example: ``python benchmarks/jobs.py --rounds 5 --out benchmarks/results/jobs.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.testbed.command import Say, at_least_one, check_names, names, run_benchmark
from benchmarks.testbed.figures import Result, conditions, figure
from hvd_elastic.records.json_lines import Record, read_events

PARTS = ("history", "start", "moves")
_DEADLINE_S = 180.0
_HISTORY = 10_000
_CANCELLED = 1_000

EMULATED = '''\
"""A small model; a pass takes as long for each example as on an emulated device."""
import argparse
import time

import torch
from torch.utils.data import TensorDataset

import hvd_elastic.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--example-s", type=float, default=0.004)
args = parser.parse_args()
torch.set_num_threads(1)
hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
data = TensorDataset(torch.randn(2400, 4), torch.randint(2, (2400,)))
loader = hvd.DataLoader(data, 48, shuffle=True)


@hvd.run
def train(state):
    for epoch in hvd.epochs(args.epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            time.sleep(args.example_s * len(inputs))
            torch.nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()


train(hvd.State(model=model, optimizer=optimizer))
'''


class Cluster:
    """A cluster of this machine in a home of its own, with its daemon.

    Args:
        home: an empty folder.
        slots: number of slots.
    """

    def __init__(self, home: Path, slots: int) -> None:
        self.home = home
        self.hostfile = home / "hosts"
        self.hostfile.write_text(f"localhost slots={slots}\n", encoding="utf-8")
        self.script = home / "emulated.py"
        self.script.write_text(EMULATED, encoding="utf-8")

    def call(self, *arguments: object) -> str:
        """Run ``hvd-elastic`` to its end and return what it printed."""
        done = subprocess.run(
            [sys.executable, "-m", "hvd_elastic.cli.app", *map(str, arguments)],
            env={**os.environ, "HVD_ELASTIC_HOME": str(self.home)},
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{arguments} ended with {done.returncode}: {done.stderr}")
        return done.stdout

    def timed(self, *arguments: object) -> float:
        """Return how long a command takes, from its start to its end [s]."""
        began = time.perf_counter()
        self.call(*arguments)
        return time.perf_counter() - began

    def submit(self, *arguments: object) -> str:
        """Submit a job that runs the emulated script; return its run id."""
        answer = self.call("submit", "--json", *arguments)
        return str(json.loads(answer)["run_ids"][0])

    def events(self, run_id: str, kind: str) -> list[Record]:
        """Return the events of one kind of a run."""
        found = read_events(self.home / "runs" / run_id / "events.jsonl")
        return [event for event in found if event["kind"] == kind]

    def wait_event(self, run_id: str, kind: str, **fields: Any) -> Record:
        """Wait for an event with these fields."""
        deadline = time.monotonic() + _DEADLINE_S
        while True:
            for event in self.events(run_id, kind):
                if fields.items() <= event.items():
                    return event
            if time.monotonic() > deadline:
                raise RuntimeError(f"{run_id}: no {kind} {fields} within {_DEADLINE_S:g} s")
            time.sleep(0.02)


@contextlib.contextmanager
def cluster_up(slots: int) -> Iterator[Cluster]:
    """Yield a cluster whose daemon runs; take it down afterwards."""
    with tempfile.TemporaryDirectory(prefix="jobs-") as folder:
        cluster = Cluster(Path(folder), slots)
        cluster.call("up", cluster.hostfile, "--detach")
        try:
            yield cluster
        finally:
            cluster.call("down")


def measure_history(rounds: int, say: Say) -> list[dict[str, Any]]:
    """Time commands on a queue of many jobs."""
    with cluster_up(1) as cluster:
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
    with cluster_up(2) as cluster:
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
    with cluster_up(4) as cluster:
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


def measure(options: argparse.Namespace, say: Say) -> Result:
    """Measure the parts that were asked for."""
    check_names("--parts", options.parts, PARTS)
    load_before = os.getloadavg()
    measures = {"history": measure_history, "start": measure_start, "moves": measure_moves}
    rows = [
        {"part": part, **row}
        for part in options.parts
        for row in measures[part](options.rounds, say)
    ]
    taken = conditions("this machine", "Whole commands, start of Python included.", load_before)
    return Result("jobs", taken, {"times": rows})


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    told = f"of {', '.join(PARTS)}"
    parser.add_argument("--parts", type=names, default=list(PARTS), help=told)
    parser.add_argument("--rounds", type=at_least_one, default=5, help="repetitions (5)")
    return run_benchmark(parser, measure)


if __name__ == "__main__":
    sys.exit(main())

"""Measures the time from the command to the first finished training step, and its parts.

Run it: ``python benchmarks/startup.py --repetitions 5``. Three launchers alternately start the same
script on the same hosts, so that other load on the machine affects all of them equally.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.testbed.command import Say, at_least_one, run_benchmark
from benchmarks.testbed.figures import Conditions, Figure, Result, conditions, figure, ratio, table
from benchmarks.testbed.hosts import DIGITS, Testbed, make_testbed
from benchmarks.testbed.launchers import LAUNCHERS, OURS, ROOT, Launcher, Order
from benchmarks.testbed.marks import Process, first_step
from hvd_elastic.errors import RunError
from hvd_elastic.records.json_lines import Record, read_records

TARGET_S = 8.0
_DEADLINE_S = 120.0
_HOSTS = 3
_MEDIAN = "median (range)"

PHASES = (
    "command line: our own start",
    "ssh and agents on all hosts",
    "Python of the last worker",
    "import torch",
    "import Horovod, build model, read data",
    "communicator, state and first step",
)
"""Phases of a start, in order; each ends when the slowest host has finished it."""

_NOTE = (
    "Steps are not padded (no sleep in them). One round before the measured ones warms the file "
    "cache for all."
)


def measure_startup(options: argparse.Namespace, say: Say) -> Result:
    """Measure the starts, after one round that is not measured."""
    repetitions = options.repetitions
    load_before = os.getloadavg()
    samples: dict[str, list[float]] = {launcher.name: [] for launcher in LAUNCHERS}
    breakdown: list[dict[str, float]] = []
    with make_testbed(_HOSTS, loopback=options.loopback) as bed:
        for number in range(repetitions + 1):
            for launcher in LAUNCHERS:
                seconds, phases = _start_once(bed, launcher)
                say(f"round {number} of {repetitions}: {launcher.name}: {seconds:.2f} s")
                if number:
                    samples[launcher.name].append(seconds)
                    if phases:
                        breakdown.append(phases)
        hosts = bed.description
    python = [_python_time([*flags]) for flags in _PROGRAMS.values()]
    return startup_result(
        conditions(hosts, _NOTE, load_before),
        {launcher: figure(taken) for launcher, taken in samples.items()},
        {name: figure([taken[name] for taken in breakdown]) for name in PHASES},
        dict(zip(_PROGRAMS, python, strict=True)),
    )


_PROGRAMS = {
    "python -c pass": ("-c", "pass"),
    "import hvd_elastic": ("-c", "import hvd_elastic"),
    "hvd-elastic --help": ("-m", "hvd_elastic.cli.app", "--help"),
}


def _start_once(bed: Testbed, launcher: Launcher) -> tuple[float, dict[str, float]]:
    training = [str(DIGITS), "--data", str(bed.data), "--quiet", "--epochs", "1"]
    order = Order(dict.fromkeys(bed.hosts, 1), training, min_np=_HOSTS)
    with launcher.job(bed, order) as job:
        first = job.wait(lambda: first_step(job.marks.processes), _DEADLINE_S, "made no step")
        # The job runs to its end: horovodrun would leave processes behind if it were ended.
        try:
            for process in job.processes():
                process.wait(_DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise RunError(f"{launcher.name} did not end:\n{job.output_tail()}") from None
        job.marks.poll()
        sizes = {step.size for process in job.marks.processes for step in process.steps}
        if sizes != {_HOSTS}:
            raise RunError(f"{launcher.name} trained on {sizes} ranks, not {_HOSTS}")
        phases = {}
        if launcher == OURS:
            phases = phases_of(job.asked, read_records(job.events_path), job.marks.processes)
    return first - job.asked, phases


def phases_of(
    asked: float, events: Iterable[Record], processes: Sequence[Process]
) -> dict[str, float]:
    """Return the duration of each of the :data:`PHASES` of one start of ours [s].

    Args:
        asked: when the command was started [s, monotonic].
        events: events of the run, in order, with the leader's times.
        processes: the workers.
    """
    ends: dict[str, float] = {}
    for event in events:
        if event["kind"] == "rescale_started":
            break
        ends[event["kind"]] = event["mono"]  # the last one of a kind is the slowest host's
    first = first_step(processes)
    torch = [process.torch for process in processes if process.torch is not None]
    assert first is not None
    ladder = [
        ends["run_started"],
        ends["agent_started"],
        max(process.born for process in processes),
        max(torch),
        ends["worker_standby"],
        first,
    ]
    phases = {}
    for name, end in zip(PHASES, ladder, strict=True):
        # What a host does while a slower one is in an earlier phase does not delay the start.
        phases[name] = round(max(0.0, end - asked), 4)
        asked = max(asked, end)
    return phases


def _python_time(arguments: list[str], repetitions: int = 5) -> Figure:
    """Measure the wall time of a new interpreter, after one that warms the file cache."""
    samples = []
    for number in range(repetitions + 1):
        begin = time.perf_counter()
        subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        if number:
            samples.append(time.perf_counter() - begin)
    return figure(samples)


def startup_result(
    taken: Conditions,
    first_step: Mapping[str, Figure],
    phases: Mapping[str, Figure],
    programs: Mapping[str, Figure],
) -> Result:
    """Return the result with its tables: by launcher, by phase of our start, by program."""
    ours = first_step[OURS.name]
    times = {name: ratio(each, ours) for name, each in first_step.items()}
    rows = [(name, str(each), f"{times[name]:.2f}") for name, each in first_step.items()]
    title = "From the command to the first finished training step"
    tables = [table(title, ("launcher", _MEDIAN, "times ours"), rows)]
    for title, heading, found in (
        (f"Where {OURS.name} spends it", "until the slowest host is through with", phases),
        ("Programs alone, in a fresh interpreter", "program", programs),
    ):
        shown = [(name, str(each)) for name, each in found.items()]
        tables.append(table(title, (heading, _MEDIAN), shown))
    body: dict[str, Any] = {
        "target_s": TARGET_S,
        "target_met": (ours.median_s or TARGET_S) < TARGET_S,
        "first_step": {
            name: {**vars(each), "times_ours": times[name]} for name, each in first_step.items()
        },
        "phases": phases,
        "programs": programs,
    }
    return Result("startup", taken, body, tables)


def main() -> int:
    """Run the benchmark with its command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="startup.py", description=__doc__)
    told = "measured rounds (3)"
    parser.add_argument("--repetitions", "-n", type=at_least_one, default=3, help=told)
    told = "hosts without network namespaces (no root needed)"
    parser.add_argument("--loopback", action="store_true", help=told)
    return run_benchmark(parser, measure_startup)

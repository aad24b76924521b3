"""How long it takes from the command to the first finished training step, and what it is spent on.

Three launchers start the same script on the same hosts, in turn, so that whatever else the machine
does meets all of them alike.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hvd_elastic.bench.figures import Figure, conditions, figure, ratio, write_result
from hvd_elastic.bench.launchers import LAUNCHERS, OURS, ROOT, Job, Launcher, Order
from hvd_elastic.bench.marks import Process, first_step
from hvd_elastic.bench.testbed import DIGITS, Testbed, make_testbed
from hvd_elastic.errors import RunError
from hvd_elastic.records.json_lines import Record, read_events

__all__ = [
    "PHASES",
    "TARGET_S",
    "measure_startup",
    "phases_of",
    "show_startup",
    "startup_as_json",
    "write_startup",
]

TARGET_S = 8.0
_DEADLINE_S = 120.0
_HOSTS = 3

PHASES = (
    "command line: our own start",
    "ssh and agents on all hosts",
    "Python of the last worker",
    "import torch",
    "import Horovod, build model, read data",
    "communicator, state and first step",
)
"""In order; each ends when the slowest host has got there."""

_NOTE = (
    "Steps are not padded (no sleep in them). One round before the measured ones warms the file "
    "cache for all."
)


def measure_startup(
    repetitions: int, say: Callable[[str], None], *, loopback: bool = False
) -> dict[str, Any]:
    """Measure; returns what :func:`show_startup` shows and the JSON file holds.

    Args:
        repetitions: measured rounds; one more is run before them.
        say: told what is going on.
        loopback: hosts on the loopback network although there is root.
    """
    load_before = os.getloadavg()
    samples: dict[str, list[float]] = {launcher.name: [] for launcher in LAUNCHERS}
    breakdown: list[dict[str, float]] = []
    with make_testbed(_HOSTS, loopback=loopback) as bed:
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
    return {
        "conditions": conditions(hosts, _NOTE, load_before),
        "first_step": {launcher: figure(taken) for launcher, taken in samples.items()},
        "phases": {name: figure([taken[name] for taken in breakdown]) for name in PHASES},
        "programs": dict(zip(_PROGRAMS, python, strict=True)),
    }


_PROGRAMS = {
    "python -c pass": ("-c", "pass"),
    "import hvd_elastic": ("-c", "import hvd_elastic"),
    "hvd-elastic --help": ("-m", "hvd_elastic.cli.app", "--help"),
}


def _start_once(bed: Testbed, launcher: Launcher) -> tuple[float, dict[str, float]]:
    training = [str(DIGITS), "--data", str(bed.data), "--quiet", "--epochs", "1"]
    order = Order(training, dict.fromkeys(bed.hosts, 1), min_np=_HOSTS, max_np=_HOSTS)
    with bed.job(launcher, order) as job:
        first = _wait_for_first_step(job)
        # The job is left to end by itself: horovodrun would leave its processes behind.
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
            phases = phases_of(job.asked, read_events(job.events), job.marks.processes)
    return first - job.asked, phases


def _wait_for_first_step(job: Job) -> float:
    while True:
        ended = job.ended() is not None
        job.marks.poll()
        first = first_step(job.marks.processes)
        if first is not None:
            return first
        if ended:
            job.check_alive()
        if time.monotonic() - job.asked > _DEADLINE_S:
            raise RunError(
                f"{job.launcher} made no step within {_DEADLINE_S:.0f} s:\n{job.output_tail()}"
            )
        job.sleep()


def phases_of(
    asked: float, events: Iterable[Record], processes: Sequence[Process]
) -> dict[str, float]:
    """Where the seconds of one start of ours went, by :data:`PHASES`.

    Args:
        asked: when the command was given [s, monotonic].
        events: of the run, in order, stamped by the leader.
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
        # What one host does while a slower one is still at an earlier phase costs nothing.
        phases[name] = round(max(0.0, end - asked), 4)
        asked = max(asked, end)
    return phases


def _python_time(arguments: list[str], repetitions: int = 5) -> Figure:
    """Wall time of a fresh interpreter, after one that warms the file cache."""
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


def show_startup(result: dict[str, Any], console: Any) -> None:
    """Print the tables."""
    from rich.table import Table

    times: dict[str, Figure] = result["first_step"]
    table = Table(
        title="From the command to the first finished training step", title_justify="left"
    )
    for heading in ("launcher", "median (range)", "times ours"):
        table.add_column(heading)
    for launcher, taken in times.items():
        table.add_row(launcher, str(taken), f"{ratio(taken, times[OURS.name]):.2f}")
    console.print(table)
    table = Table(title=f"Where {OURS.name} spends it", title_justify="left")
    for heading in ("until the slowest host is through with", "median (range)"):
        table.add_column(heading)
    for name, taken in result["phases"].items():
        table.add_row(name, str(taken))
    console.print(table)
    table = Table(title="Programs alone, in a fresh interpreter", title_justify="left")
    for heading in ("program", "median (range)"):
        table.add_column(heading)
    for name, taken in result["programs"].items():
        table.add_row(name, str(taken))
    console.print(table)
    console.print(result["conditions"].sentence(), style="dim")


def startup_as_json(result: dict[str, Any]) -> dict[str, Any]:
    """The body of the kept file."""
    times: dict[str, Figure] = result["first_step"]
    return {
        "target_s": TARGET_S,
        "target_met": (times[OURS.name].median_s or TARGET_S) < TARGET_S,
        "first_step": {
            launcher: {**asdict(taken), "times_ours": ratio(taken, times[OURS.name])}
            for launcher, taken in times.items()
        },
        "phases": {name: asdict(taken) for name, taken in result["phases"].items()},
        "programs": {name: asdict(taken) for name, taken in result["programs"].items()},
    }


def write_startup(result: dict[str, Any], path: Path) -> None:
    """Keep the result."""
    write_result(path, "startup", result["conditions"], startup_as_json(result))

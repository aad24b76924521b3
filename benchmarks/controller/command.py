"""The command line of ``benchmarks/controller.py``, which keeps results of earlier calls."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from benchmarks.controller.measure import measure_change, measure_forecast, measure_steady
from benchmarks.controller.simulated import measure_simulated
from benchmarks.controller.workloads import CHANGES, FORECASTS, MOST_HOSTS, WORKLOADS
from benchmarks.elasticity.stage import Stage
from benchmarks.testbed.command import Say, check_names, names, run_benchmark
from benchmarks.testbed.figures import Result, conditions, kept_rows, text_table
from benchmarks.testbed.launchers import FailedPlayError
from hvd_elastic.errors import UsageError

_LIMIT_S = 240.0
_EMULATED = (
    "Device time is emulated: a pass over m examples sleeps a + b m seconds, so that each of 8 to "
    "12 slots behaves like one with a device of its own. Gradients, reductions, rescales and links "
    "(tc) are real. Noise is made by labels drawn at random, load on links by zeros that are "
    "reduced too. The best static choice is the best of those tried in the same job (12, 10, 8, 6, "
    "4, 2, 1 slots; batches by factors of two), judged at the noise scale that the run measured."
)
_Measure = Callable[[Stage, str, Say], list[dict[str, Any]]]
_PARTS: dict[str, tuple[str, str, Collection[str], str, _Measure]] = {
    "steady": ("workloads", "workload", WORKLOADS, "steady state", measure_steady),
    "changes": ("changes", "change", CHANGES, "changes in mid-run", measure_change),
    "forecasts": (
        *("forecasts", "workload", FORECASTS, "what 2 hosts predict of 4 and 8"),
        measure_forecast,
    ),
}
"""For each part: option, field that names a row, valid names, meaning, function that measures."""
_BENCHMARK = "controller_virtual"


def main() -> int:
    """Run the benchmark with its command line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="controller.py",
        description="The scaling controller in virtual time; with --virtual real jobs train on "
        "virtual hosts, and what the file of --out holds of other cases stays.",
    )
    parser.add_argument("--virtual", action="store_true", help="real jobs on virtual hosts (root)")
    for option, _, valid, what, _ in _PARTS.values():
        known = ",".join(valid)
        told = f"{what}, with --virtual: of {known} (default: all; an empty text: none)"
        parser.add_argument(f"--{option}", default=known, metavar="NAMES", help=told)
    return run_benchmark(parser, _measure)


def _measure(options: argparse.Namespace, say: Say) -> Result:
    return measure_virtual(options, say) if options.virtual else measure_simulated(say)


def measure_virtual(options: argparse.Namespace, say: Say) -> Result:
    """Measure real jobs on virtual hosts.

    The file of ``--out`` is rewritten after each case, so that no measurement is lost. Its figures
    of other cases are kept.

    Raises:
        UsageError: a name is unknown, this process is not root, or ``--out`` is another file.
    """
    wanted = {part: names(getattr(options, option)) for part, (option, *_) in _PARTS.items()}
    for part, (option, _, valid, *_) in _PARTS.items():
        check_names(f"--{option}", wanted[part], valid)
    if os.geteuid() != 0:
        raise UsageError(
            "this benchmark limits the links of virtual hosts, which needs root (network "
            "namespaces). Run it as root; without --virtual it works without"
        )
    out: Path | None = options.out
    kept = kept_rows(out, _BENCHMARK, _PARTS)
    load_before = os.getloadavg()
    found: dict[str, Any] = {part: [] for part in _PARTS}

    def result() -> Result:
        taken = conditions(stage.description, _EMULATED, load_before)
        return Result(_BENCHMARK, taken, merged(kept, found), [text_table(found)])

    with Stage(_LIMIT_S, hosts=MOST_HOSTS) as stage:
        for part, (_, _, _, what, measure) in _PARTS.items():
            for name in wanted[part]:
                say(f"{what}: {name}")
                began, load = time.monotonic(), os.getloadavg()[0]
                try:
                    rows = measure(stage, name, say)
                except FailedPlayError as error:
                    say(f"  no figure: {error}")
                    continue
                beside = {
                    "minutes": round((time.monotonic() - began) / 60, 2),
                    "load_before": load,
                    "load_average": os.getloadavg()[0],
                }
                found[part] += [{**row, **beside} for row in rows]
                if out is not None:
                    result().write(out)
        return result()


def merged(kept: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rows of the cases measured now, and the kept rows of all others.

    >>> merged({"changes": [{"change": "link", "slots": 8}, {"change": "slow", "slots": 6}]},
    ...        {"changes": [{"change": "link", "slots": 7}]})["changes"]
    [{'change': 'slow', 'slots': 6}, {'change': 'link', 'slots': 7}]
    """
    result = {}
    for part, (_, name, *_) in _PARTS.items():
        new = list(found.get(part, []))
        measured = {row[name] for row in new}
        result[part] = [row for row in kept.get(part, []) if row[name] not in measured] + new
    return result

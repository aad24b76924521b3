"""Measures the controller on virtual hosts, and merges what was measured before."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.controller.measure import (
    Row,
    Say,
    measure_change,
    measure_forecast,
    measure_steady,
)
from benchmarks.controller.workloads import CHANGES, FORECASTS, MOST_HOSTS, WORKLOADS
from benchmarks.elasticity.stage import FailedPlayError, Stage
from benchmarks.testbed.figures import Result, conditions, rows_of, text_table
from hvd_elastic.errors import UsageError

__all__ = ["measure_virtual", "merged"]

_LIMIT_S = 240.0
_EMULATED = (
    "Device time is emulated: a pass over m examples sleeps a + b m seconds, so that each of 8 to "
    "12 slots behaves like one with a device of its own. Gradients, reductions, rescales and links "
    "(tc) are real. Noise is made by labels drawn at random, load on links by zeros that are "
    "reduced too. The best static choice is the best of those tried in the same job (12, 10, 8, 6, "
    "4, 2, 1 slots; batches by factors of two), judged at the noise scale that the run measured."
)
_NAMES = {"steady": "workload", "changes": "change", "forecasts": "workload"}
"""By part: what its rows are called by."""
_BENCHMARK = "controller_virtual"


def measure_virtual(
    workloads: Sequence[str],
    changes: Sequence[str],
    forecasts: Sequence[str],
    say: Say,
    out: Path | None = None,
) -> Result:
    """Measure on virtual hosts.

    Args:
        workloads: of which the steady state is wanted, of ``WORKLOADS``.
        changes: of ``CHANGES``.
        forecasts: for which more hosts are foretold, of ``FORECASTS``.
        say: told what is going on.
        out: written anew after each case, so that what was measured is not lost. What it holds of
            other cases stays.

    Raises:
        UsageError: a name is not known, there is no root, or ``out`` is another file.
    """
    for option, names, valid in (
        ("--workloads", workloads, WORKLOADS),
        ("--changes", changes, CHANGES),
        ("--forecasts", forecasts, FORECASTS),
    ):
        unknown = [name for name in names if name not in valid]
        if unknown:
            raise UsageError(
                f"{option}: {', '.join(unknown)} is not known. Valid: {', '.join(valid)}, or an "
                "empty text for none"
            )
    if os.geteuid() != 0:
        raise UsageError(
            "this benchmark limits the links of virtual hosts, which needs root (network "
            "namespaces). Run it as root; without --virtual it works without"
        )
    kept = _kept(out)
    load_before = os.getloadavg()
    parts: tuple[tuple[str, str, Callable[[Stage, str, Say], list[Row]], Sequence[str]], ...] = (
        ("steady", "steady state", measure_steady, workloads),
        ("changes", "change", measure_change, changes),
        ("forecasts", "forecast", measure_forecast, forecasts),
    )
    found: dict[str, Any] = {part: [] for part, *_ in parts}
    with Stage(_LIMIT_S, hosts=MOST_HOSTS) as stage:
        for part, title, measure, names in parts:
            for name in names:
                say(f"{title}: {name}")
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
                    taken = conditions(stage.description, _EMULATED, load_before)
                    Result(_BENCHMARK, taken, merged(kept, found)).write(out)
        taken = conditions(stage.description, _EMULATED, load_before)
    return Result(_BENCHMARK, taken, merged(kept, found), [text_table(found)])


def merged(kept: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Rows of cases that were measured now, and what was kept of all others.

    >>> merged({"changes": [{"change": "link", "slots": 8}, {"change": "slow", "slots": 6}]},
    ...        {"changes": [{"change": "link", "slots": 7}]})["changes"]
    [{'change': 'slow', 'slots': 6}, {'change': 'link', 'slots': 7}]
    """
    result = {}
    for part, name in _NAMES.items():
        new = list(found.get(part, []))
        measured = {row[name] for row in new}
        result[part] = [row for row in kept.get(part, []) if row[name] not in measured] + new
    return result


def _kept(out: Path | None) -> Mapping[str, Any]:
    if out is None or not out.exists():
        return {}
    try:
        content = json.loads(out.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--out {out} is there and cannot be read: {error}") from error
    if not isinstance(content, dict) or content.get("benchmark") != _BENCHMARK:
        raise UsageError(
            f"--out {out} holds something else than figures of this benchmark on virtual hosts. "
            "Name another file"
        )
    return {part: rows_of(content.get(part, [])) for part in _NAMES}

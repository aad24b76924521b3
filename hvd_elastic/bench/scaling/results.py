"""Measures what was asked for, and shows and keeps what was found."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hvd_elastic.bench import controller
from hvd_elastic.bench.elasticity.stage import Stage
from hvd_elastic.bench.figures import Conditions, conditions, write_result
from hvd_elastic.bench.scaling.measure import (
    Row,
    Say,
    measure_changes,
    measure_forecasts,
    measure_steady,
)
from hvd_elastic.bench.scaling.workloads import CHANGES, FORECASTS, HOSTS, SLOTS, WORKLOADS
from hvd_elastic.errors import UsageError

__all__ = ["measure_virtual", "show_virtual"]

_LIMIT_S = 240.0
_EMULATED = (
    "Device time is emulated: a pass over m examples sleeps a + b m seconds, so that each of "
    f"{HOSTS} hosts x {SLOTS} slots behaves like one with devices of its own. Gradients, "
    "reductions, rescales and links (tc) are real. Noise is made by labels drawn at random, load "
    "on links by zeros that are reduced too. The best static choice is the best of those tried in "
    "the same job (8, 6, 4, 2, 1 slots; batches by factors of two), judged at the noise scale that "
    "the run itself measured."
)


def measure_virtual(
    workloads: Sequence[str],
    changes: Sequence[str],
    forecasts: Sequence[str],
    say: Say,
    out: Path | None = None,
) -> dict[str, Any]:
    """Measure on virtual hosts.

    Args:
        workloads: of which the steady state is wanted, of ``WORKLOADS``.
        changes: of ``CHANGES``.
        forecasts: for which more hosts are foretold, of ``FORECASTS``.
        say: told what is going on.
        out: written anew after each case, so that what was measured is not lost.

    Raises:
        UsageError: a name is not known, or there is no root.
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
    load_before = os.getloadavg()
    parts: tuple[tuple[str, Callable[[Stage, Sequence[str], Say], Iterator[Row]], Any], ...] = (
        ("steady", measure_steady, workloads),
        ("changes", measure_changes, changes),
        ("forecasts", measure_forecasts, forecasts),
    )
    found: dict[str, Any] = {part: [] for part, _, _ in parts}
    with Stage(_LIMIT_S) as stage:
        for part, measure, names in parts:
            for row in measure(stage, names, say):
                found[part].append({**_finite(row), "load_average": os.getloadavg()[0]})
                if out is not None:
                    taken = conditions(stage.description, _EMULATED, load_before)
                    write_result(out, "controller_virtual", taken, found)
        taken = conditions(stage.description, _EMULATED, load_before)
    return {**found, "conditions": taken}


def _finite(row: Row) -> Row:
    """JSON knows no infinite noise."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }


def show_virtual(found: dict[str, Any]) -> str:
    """Tables, and what one must know to read them."""
    parts = {
        part: [
            {k: "-" if v is None else v for k, v in row.items() if k != "statics"} for row in rows
        ]
        for part, rows in found.items()
        if isinstance(rows, list) and rows
    }
    taken: Conditions = found["conditions"]
    return f"{controller.table(parts)}\n\n{taken.sentence()}"

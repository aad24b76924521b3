"""How many more examples a larger batch needs: predicted from the noise scale, and measured."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvd_elastic.model.goodput import statistical_efficiency

SCALES = (1, 2, 4, 8, 16)
"""Batch sizes over the initial one."""


@dataclass(frozen=True)
class Problem:
    """What its trainings have to reach.

    Attributes:
        initial: global batch size, as in the example of ``scripts/examples``, and in the
            benchmark's other parts.
        rate: learning rate for it: of the digits the best of 0.0125 to 0.2, in steps of the square
            root of 2, of the characters that of the example.
        level: loss to reach: of all training examples (digits), of text held out (characters).
        look_examples: examples between looks at the loss, a step at least.
        most_examples: after which a training is given up.
    """

    initial: int
    rate: float
    level: float
    look_examples: int
    most_examples: int


PROBLEMS = {
    "digits": Problem(32, 0.025, 0.01, 512, 300_000),
    "characters": Problem(32, 1e-3, 2.4, 1024, 400_000),
}

Look = tuple[float, float, float | None]
"""Examples used so far, loss then, and noise scale then; None: not known yet, or infinite."""


def crossing(curve: Sequence[Look], level: float) -> float | None:
    """Examples after which the loss first was at a level; None where it never was.

    Between two looks the logarithm of the loss is taken for a straight line.

    >>> crossing([(0, 4.0, None), (100, 1.0, None), (200, 0.5, None)], 2.0)
    50.0
    """
    for (before, high, _), (after, low, _) in itertools.pairwise(curve):
        if low <= level:
            share = 1.0 if high <= level else math.log(high / level) / math.log(high / low)
            return before + share * (after - before)
    return None


def predicted_ratio(curve: Sequence[Look], initial: int, batch: int, until: float) -> float:
    """Examples that a batch needs over those of the initial one, for the same progress.

    Each example of the training is worth ``1 / E(batch)`` ones at the other batch, with the noise
    scale b of that moment ``(b + batch) / (b + initial)``; this is their mean over the training.

    Args:
        curve: of a training with the initial batch. Before the noise scale is first known it is
            taken to be that first one; where it is missing later it is infinite.
        initial, batch: global batch sizes.
        until: examples after which the training had reached its level.

    Source: McCandlish et al. 2018, section 2.3 (the totals as integrals over training).

    >>> predicted_ratio([(0, 9.0, None), (50, 8.0, 32.0), (100, 7.0, None)], 32, 96, until=100)
    1.5
    """
    noises = [noise for _, _, noise in curve]
    first = next((number for number, noise in enumerate(noises) if noise is not None), 0)
    noises[:first] = [noises[first]] * first
    total, weights = 0.0, 0.0
    for ((before, _, _), (after, _, _)), noise in zip(
        itertools.pairwise(curve), noises[1:], strict=True
    ):
        known = math.inf if noise is None else noise
        weight = max(0.0, min(after, until) - before)
        total += weight / float(statistical_efficiency(known, initial, batch))
        weights += weight
    return total / weights


def examples_rows(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each problem and batch, the examples needed.

    Args:
        found: what the job ``examples`` wrote, a row for each training: ``problem``, ``batch``,
            ``seed``, ``level`` and ``curve``.

    Returns:
        A row for each problem and batch: median of the ``examples`` needed, ``measured`` (their
        ratio to those of the smallest batch) and ``predicted``, median of what each training with
        the smallest batch foretells. ``noise_scale`` is the median of what these measured,
        ``fitting_noise_scale`` the constant one that would have foretold what was measured. None
        is where the level was not reached in half of the trainings, or nothing fits.
    """
    rows: list[dict[str, Any]] = []
    for problem in dict.fromkeys(row["problem"] for row in found):
        mine = [row for row in found if row["problem"] == problem]
        of_batch = {
            batch: [row for row in mine if row["batch"] == batch]
            for batch in sorted({row["batch"] for row in mine})
        }
        initial = min(of_batch)
        needed = {batch: _median_needed(trainings) for batch, trainings in of_batch.items()}
        ended = [
            (row["curve"], until)
            for row in of_batch[initial]
            if (until := crossing(row["curve"], row["level"])) is not None
        ]
        noises = [
            noise
            for curve, until in ended
            for used, _, noise in curve
            if used <= until and noise is not None
        ]
        for batch, trainings in of_batch.items():
            row: dict[str, Any] = {"problem": problem, "batch": batch, "seeds": len(trainings)}
            row["noise_scale"] = statistics.median(noises) if noises else None
            row["examples"] = needed[batch] if math.isfinite(needed[batch]) else None
            row["measured"] = row["predicted"] = row["error"] = row["fitting_noise_scale"] = None
            if ended:
                ratios = [predicted_ratio(curve, initial, batch, until) for curve, until in ended]
                row["predicted"] = statistics.median(ratios)
            if ended and row["examples"] is not None and math.isfinite(needed[initial]):
                row["measured"] = needed[batch] / needed[initial]
                row["error"] = row["predicted"] / row["measured"] - 1
                if row["measured"] > 1:
                    fitting = (batch - row["measured"] * initial) / (row["measured"] - 1)
                    row["fitting_noise_scale"] = fitting
            rows.append(row)
    return rows


def median_error(rows: Sequence[Mapping[str, Any]]) -> float:
    """How far predictions were off, of all batches above the smallest; none measured is infinite.

    >>> first = {"batch": 32, "measured": 1.0, "error": 0.0}
    >>> median_error([first, {"measured": 2.0, "error": -0.1}, {"measured": 3.0, "error": 0.3}])
    0.2
    """
    errors = [
        math.inf if row["error"] is None else abs(row["error"])
        for row in rows
        if row["measured"] != 1.0
    ]
    return statistics.median(errors)


def _median_needed(rows: Sequence[Mapping[str, Any]]) -> float:
    """Examples; infinite where at least half of the trainings never reached the level."""
    found = (crossing(row["curve"], row["level"]) for row in rows)
    return statistics.median(math.inf if each is None else each for each in found)

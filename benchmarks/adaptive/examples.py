"""Compares the examples that a larger batch needs with the prediction from the noise scale."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvd_elastic.model.goodput import statistical_efficiency

SCALES = (1, 2, 4, 8, 16)
"""Batch sizes as multiples of the initial one."""


@dataclass(frozen=True)
class Problem:
    """A training problem and the loss that its trainings have to reach.

    Attributes:
        initial: initial global batch size, as in the example in ``scripts/examples`` and in the
            benchmark's other parts.
        rate: learning rate for it: for the digits the best of 0.0125 to 0.2, in steps of the square
            root of 2; for the characters that of the example.
        level: loss to reach: over all training examples (digits), over held-out text (characters).
        look_examples: examples between two evaluations of the loss, at least one step.
        most_examples: examples after which a training is given up.
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
"""Examples used so far, and loss and noise scale at that time; None: not known, or infinite."""


def crossing(curve: Sequence[Look], level: float) -> float | None:
    """Return the number of examples after which the loss first reached a level, or None.

    Between two evaluations the logarithm of the loss is interpolated linearly.

    >>> crossing([(0, 4.0, None), (100, 1.0, None), (200, 0.5, None)], 2.0)
    50.0
    """
    for (before, high, _), (after, low, _) in itertools.pairwise(curve):
        if low <= level:
            share = 1.0 if high <= level else math.log(high / level) / math.log(high / low)
            return before + share * (after - before)
    return None


def predicted_ratio(curve: Sequence[Look], initial: int, batch: int, until: float) -> float:
    """Return the predicted ratio of the examples needed at a batch and at the initial batch.

    One example at the initial batch makes as much progress as ``1 / E(batch)`` examples at the
    other batch; with the noise scale b at that time this is ``(b + batch) / (b + initial)``. The
    result is its mean over the training.

    Args:
        curve: course of a training with the initial batch. Before the first known noise scale that
            first value is used; a later None counts as infinite.
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
    """Return the examples needed for each problem and batch, measured and predicted.

    Args:
        found: rows that the job ``examples`` wrote, one for each training: ``problem``, ``batch``,
            ``seed``, ``level`` and ``curve``.

    Returns:
        A row for each problem and batch: median of the ``examples`` needed, ``measured`` (their
        ratio to those of the smallest batch) and ``predicted``, the median of the predictions from
        each training with the smallest batch. ``noise_scale`` is the median that these trainings
        measured, ``fitting_noise_scale`` the constant noise scale that would have predicted the
        measured ratio. Values are None if half of the trainings did not reach the level, or nothing
        fits.
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
    """Return the median relative error of the predictions for all batches above the smallest.

    A batch that was not measured counts as infinite.

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
    """Return the median of examples needed; infinite if half of the trainings failed."""
    found = (crossing(row["curve"], row["level"]) for row in rows)
    return statistics.median(math.inf if each is None else each for each in found)

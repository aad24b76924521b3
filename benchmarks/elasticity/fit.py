"""Fits a small model of how a stall grows with the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_CANDIDATES = ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2))
"""Candidate models, each as the powers of the number of ranks that it has."""
_NAMES = ("constant", "linear", "quadratic")
_ROUNDING = 1e-9
_EXACT_S = 1e-6
"""Smaller residuals count as this one: they are below the resolution of the measurement."""


@dataclass(frozen=True)
class StallModel:
    """Model of a stall: ``constant + linear * ranks + quadratic * ranks ** 2``.

    Attributes:
        constant_s, linear_s, quadratic_s: coefficients [s], none negative; 0 where the data does
            not support the term.
        error_s: root of the mean squared residual [s].
        samples: number of measurements that it was fitted to.
    """

    constant_s: float
    linear_s: float
    quadratic_s: float
    error_s: float
    samples: int

    def terms(self, ranks: int) -> dict[str, float]:
        """Return the value of each term at a number of ranks [s]."""
        values = (self.constant_s, self.linear_s * ranks, self.quadratic_s * ranks**2)
        return dict(zip(_NAMES, values, strict=True))

    def predict(self, ranks: int) -> float:
        """Return the predicted stall at a number of ranks [s].

        >>> StallModel(0.1, 0.01, 0.0, 0.0, 4).predict(10)
        0.2
        """
        return sum(self.terms(ranks).values())

    def dominant(self, ranks: int) -> str:
        """Return the name of the largest term at a number of ranks.

        >>> StallModel(0.1, 0.01, 0.0, 0.0, 4).dominant(64)
        'linear'
        """
        terms = self.terms(ranks)
        return max(terms, key=lambda name: terms[name])

    def __str__(self) -> str:
        parts = [f"{self.constant_s:.3f} s"]
        if self.linear_s:
            parts.append(f"{self.linear_s * 1e3:.2f} ms · n")
        if self.quadratic_s:
            parts.append(f"{self.quadratic_s * 1e3:.3f} ms · n²")
        return " + ".join(parts)


def fit_stall(ranks: Sequence[int], seconds: Sequence[float]) -> StallModel | None:
    """Return the simplest model that the measurements support.

    Each combination of terms (constant, linear, quadratic) is fitted by least squares. Fits with a
    negative coefficient are dropped, and of the others the one with the lowest Bayesian information
    criterion is returned, which penalises every additional term.

    Args:
        ranks: world sizes.
        seconds: stall at each world size [s].

    Returns:
        The model; None with fewer than two different world sizes.

    Raises:
        ValueError: the two do not have the same length.
    """
    if len(ranks) != len(seconds):
        raise ValueError(f"{len(ranks)} world sizes and {len(seconds)} stalls")
    if len(set(ranks)) < 2:
        return None
    sizes, stalls = np.asarray(ranks, dtype=float), np.asarray(seconds, dtype=float)
    best: tuple[float, StallModel] | None = None
    for powers in _CANDIDATES:
        if len(powers) > len(set(ranks)) - (len(powers) > 2):
            continue  # too many terms for the number of world sizes
        matrix = np.stack([sizes**power for power in powers], axis=1)
        solution, *_ = np.linalg.lstsq(matrix, stalls, rcond=None)
        if (solution < -_ROUNDING).any():
            continue  # the candidate without this term covers the case
        error = max(_EXACT_S, float(np.sqrt(np.mean((matrix @ solution - stalls) ** 2))))
        count = len(stalls)
        criterion = 2 * count * math.log(error) + len(powers) * math.log(count)
        found = dict(zip(powers, solution.clip(min=0).tolist(), strict=True))
        model = StallModel(found.get(0, 0.0), found.get(1, 0.0), found.get(2, 0.0), error, count)
        if best is None or criterion < best[0]:
            best = (criterion, model)
    assert best is not None  # a constant fits any stalls
    return best[1]

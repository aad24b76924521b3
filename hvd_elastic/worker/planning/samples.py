"""The squared norms of gradients that one rank has measured, step by step.

For each sampled step a rank keeps two numbers per parameter group: the weighted sum of the squared
norms of its passes' gradients, before these are added up and averaged, and the squared norm of its
part of the mean over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

MOMENT_STEPS = 6
"""Fewest gradients in Adam's second moment before a step is sampled. The sum of k squared normal
variables is chi-squared with k degrees of freedom, and its inverse has a finite variance only from
k = 5 on: with fewer steps a few elements with tiny moments dominate the norm, which is then so
large that later samples hardly matter in the average."""


class Samples:
    """Collects the samples of one optimizer's gradients; a frontend's subclass measures them.

    Norms are arrays or tensors with one number for each parameter group; those of a device stay
    there until all are read at once.

    Args:
        groups: number of parameter groups.
        read: returns norms of equal lengths as the rows of a matrix.
    """

    def __init__(self, groups: int, read: Callable[[list[Any]], np.ndarray] = np.stack) -> None:
        self.groups = groups
        self._read = read
        self._own: Any = None
        self._own_passes = 0
        self._rows: list[tuple[int, int, int, Any, Any]] = []

    @property
    def ready(self) -> bool:
        """Whether a step can be sampled: Adam's moments need some gradients first."""
        raise NotImplementedError

    def add_pass(self, share: float, norms: Any) -> None:
        """Add what was measured of a pass.

        Args:
            share: its fraction of the step's examples, 0 for padding.
            norms: squared norms of its gradients.
        """
        if share > 0:
            self._own = share * norms if self._own is None else self._own + share * norms
            self._own_passes += 1

    def add_step(self, step: int, examples: int, total: Any, factor: Any = None) -> None:
        """Store the sample of a step.

        Args:
            step: number of optimizer steps taken before it.
            examples: examples of the step over all ranks together.
            total: squared norms of this rank's part of the mean gradient.
            factor: factor on all norms of the step; None: 1.
        """
        own = 0 * total if self._own is None else self._own
        if factor is not None:
            own, total = factor * own, factor * total
        self._rows.append((step, examples, self._own_passes, own, total))
        self._own, self._own_passes = None, 0

    def drop_step(self) -> None:
        """Drop what was sampled of the step in flight."""
        self._own, self._own_passes = None, 0

    def forget_step(self, step: int) -> None:
        """Drop the sample of ``step`` if it is the latest: the step is not taken."""
        if self._rows and self._rows[-1][0] == step:
            self._rows.pop()

    def drain(self) -> np.ndarray:
        """Return the samples since the last call, one row for each sampled step.

        Returns:
            Shape (steps, 3 + 2 groups), float64: step, examples, passes of this rank, weighted
            squared norms of its gradients, squared norms of its part of the mean gradient.
        """
        rows, self._rows = self._rows, []
        if not rows:
            return np.zeros((0, 3 + 2 * self.groups))
        norms = self._read([each for *_, own, total in rows for each in (own, total)])
        steps = np.array([row[:3] for row in rows], float)
        return np.column_stack([steps, norms.reshape(len(rows), 2 * self.groups)])

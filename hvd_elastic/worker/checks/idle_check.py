"""Warns if a script takes steps that train nothing, since it leaves a call out."""

from __future__ import annotations

from hvd_elastic.formatting import count
from hvd_elastic.worker.worker import Worker

_PATIENCE_STEPS = 1000
"""Steps that may train nothing: a script may begin with some, to fill a replay buffer."""


class IdleCheck:
    """Counts the steps of this process, and warns once if none of them has trained anything."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._steps = 0

    def step_counted(self) -> None:
        """Note that a step was counted: its optimizer has taken it, or it was left out."""
        self._steps += 1
        if self._steps == _PATIENCE_STEPS:
            self._warn()

    def training_ends(self) -> None:
        """Warn at the end of a shorter training, if this process has seen all of it."""
        if self._worker.progress.step <= self._steps < _PATIENCE_STEPS:
            self._warn()

    def _warn(self) -> None:
        why = self._worker.averagers.idle
        if why and self._steps:
            taken = count(self._steps, "step")
            self._worker.warn_once(f"{taken} of training, and nothing was trained: {why}")

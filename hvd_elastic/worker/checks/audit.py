"""Records which dataset indices the ranks read in each step (``--audit``)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvd_elastic.wire import messages as msg
from hvd_elastic.worker.step import Pass
from hvd_elastic.worker.worker import Worker

_SKIPPED = 1 << 62
"""Added to the index of an example that cannot be decoded, where ranks gather indices."""
_REMEMBERED_STEPS = 4096  # far more steps than a run takes before the leader records the first


class Audit:
    """Gathers the indices that all ranks read in a step and records them once it is counted."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._begun: list[Any] = []
        self._read: list[list[int]] = []
        self._used: deque[msg.Used] = deque(maxlen=_REMEMBERED_STEPS)

    def gather_indices(self, passes: Sequence[Pass]) -> None:
        """Begin to gather the indices that all ranks read for a step, epoch by epoch."""
        own: dict[int, list[int]] = {}
        for each in passes:
            # Padding was read, but has weight 0 in the step: a negative sign marks it.
            marks = {index: index + _SKIPPED for index in each.skipped}
            read = [-1 - i if each.padding else marks.get(i, i) for i in each.indices or []]
            own.setdefault(each.epoch, []).extend(read)
        self._begun = [
            self._worker.communicator.gather_async(
                np.array(indices, np.int64), f"hvd_elastic.audit.{number}"
            )
            for number, indices in enumerate(own.values())
        ]

    def finish(self) -> None:
        """Wait for what :meth:`gather_indices` began."""
        begun, self._begun = self._begun, []
        if begun:
            self._read = [self._worker.communicator.wait(each).tolist() for each in begun]

    def record(self, epoch: int, position: int) -> None:
        """Record the step just counted, which began at ``position`` of ``epoch``."""
        worker = self._worker
        used, *later = [[i % _SKIPPED for i in read if i >= 0] for read in self._read] or [[]]
        record = msg.Used(
            generation=worker.generation,
            step=worker.progress.step,
            epoch=epoch,
            position=position,
            indices=used,
            padding=[-1 - i for read in self._read for i in read if i < 0],
            later=later,
            skipped=[i - _SKIPPED for read in self._read for i in read if i >= _SKIPPED],
        )
        while self._used and worker.link and self._used[0].step <= worker.link.recorded_step:
            self._used.popleft()
        self._used.append(record)
        if worker.rank == 0:
            worker.sink.send(record)

    def send_again(self) -> None:
        """Send all records that the leader may lack, since rank 0, which sent them, may be lost."""
        for record in self._used:
            self._worker.sink.send(record)

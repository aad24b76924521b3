"""Decides which workers to ask for the last checkpoint of a run that is stopped early.

A worker that is asked may be frozen or dead, so others are asked if it does not respond. One
response is enough: a training member makes its whole generation write, and a waiting worker writes
the whole state by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_ASK_OTHERS_S = 2.0
"""Time for the first worker to respond before all are asked [s]; it does so after its step."""
_ASK_AGAIN_S = 5.0
"""Time between further requests to all workers [s], in case some were lost."""


class LastCheckpoint:
    """State of the request for a last checkpoint; times are arguments.

    Args:
        now: when it is requested [s].
        patience_s: how long to wait for it [s].
        step: last step that is known to be done; 0 if unknown. Only a checkpoint of this step or
            a later one counts.

    >>> last = LastCheckpoint(0.0, 15.0, step=90)
    >>> last.whom_to_ask(["rank 0", "rank 1"], 0.0), last.whom_to_ask(["rank 0", "rank 1"], 1.0)
    (['rank 0'], [])
    >>> last.whom_to_ask(["rank 1"], 2.0)
    ['rank 1']
    >>> last.written(90)
    >>> last.is_kept(60), last.is_kept(90)
    (False, True)
    """

    def __init__(self, now: float, patience_s: float, *, step: int) -> None:
        self.deadline = now + patience_s
        self._step = step
        self._ask_at = now
        self._asked = False
        self._written = math.inf

    def whom_to_ask(self, holders: Sequence[str], now: float) -> list[str]:
        """Return the workers to ask now, if any.

        Args:
            holders: live workers that hold the state, in order of preference.
            now: time [s].
        """
        if now < self._ask_at or not holders:
            return []
        asked = list(holders) if self._asked else [holders[0]]
        self._ask_at = now + (_ASK_AGAIN_S if self._asked else _ASK_OTHERS_S)
        self._asked = True
        return asked

    def survives_at(self, step: int) -> None:
        """Note that the newest state among the surviving workers is that of ``step``."""
        self._step = min(self._step, step)

    def written(self, step: int) -> None:
        """Note that a worker has written its shard of the checkpoint of ``step``."""
        if step >= self._step:
            self._written = min(self._written, step)

    def is_kept(self, newest_step: int) -> bool:
        """Return whether the checkpoint of step ``newest_step`` is the requested one or newer."""
        return newest_step >= self._written

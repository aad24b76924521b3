"""The checkpoint that a run writes before it ends early: who is asked for it, and when it is there.

Whoever is asked may be frozen, or about to be found dead, so others are asked when nothing came of
it. One answer is enough: a training member has all of its generation write, and a worker that
waits writes the whole state by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["LastCheckpoint"]

_ASK_OTHERS_S = 2.0
_ASK_AGAIN_S = 5.0


class LastCheckpoint:
    """Pure: times are given.

    Args:
        now: when it is asked for [s].
        patience_s: how long to wait for it [s].
        step: as far as training is known to be; 0 where that is not known.

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
        """Workers to be asked now.

        Args:
            holders: those that are alive and hold the state, the one to be asked first in front.
            now: time [s].
        """
        if now < self._ask_at or not holders:
            return []
        asked = list(holders) if self._asked else [holders[0]]
        self._ask_at = now + (_ASK_AGAIN_S if self._asked else _ASK_OTHERS_S)
        self._asked = True
        return asked

    def survives_at(self, step: int) -> None:
        """No worker that is left is further than ``step``."""
        self._step = min(self._step, step)

    def written(self, step: int) -> None:
        """A worker has written its share of a checkpoint."""
        if step >= self._step:
            self._written = min(self._written, step)

    def is_kept(self, newest_step: int) -> bool:
        """Whether the newest complete checkpoint is the one, or a later one."""
        return newest_step >= self._written

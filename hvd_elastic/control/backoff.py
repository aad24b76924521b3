"""Slows down, and in the end gives up, when generations break though nobody died."""

from __future__ import annotations

from collections.abc import Sequence

from hvd_elastic.control.fleet import backoff

__all__ = ["FailureBackoff"]


class FailureBackoff:
    """Counts failures in a row that nobody's death explains.

    Args:
        delays: pauses before the next attempt after 2, 3, … such failures.
        max_stuck: so many generations may break at the same step.
    """

    def __init__(self, delays: Sequence[float], max_stuck: int) -> None:
        self._delays = delays
        self._max_stuck = max_stuck
        self._in_a_row = 0
        self._stuck = 0
        self._stuck_at = -1
        self.pause_until = 0.0
        """No new attempt before."""

    def explained(self) -> None:
        """A member died: that is reason enough, and the next generation is another one."""
        self._in_a_row = self._stuck = 0

    def broke_while_running(self, step: int, now: float) -> int:
        """It broke at ``step``; the number of times it broke there, 0 while there is hope.

        A shape that differs between ranks breaks every generation at the same step, for ever.
        """
        self._stuck = self._stuck + 1 if step == self._stuck_at else 1
        self._stuck_at = step
        self._in_a_row = self._stuck
        self._pause(now)
        return self._stuck if self._stuck >= self._max_stuck else 0

    def did_not_form(self, now: float) -> None:
        """Workers that had been together could not meet: the network, perhaps for a while."""
        self._in_a_row += 1
        self._pause(now)

    def _pause(self, now: float) -> None:
        # The first failure is answered at once: most often it is a passing one.
        self.pause_until = now + backoff(self._delays, self._in_a_row - 1)

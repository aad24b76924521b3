"""Delays attempts after failures in a row; gives up when generations break at the same place."""

from __future__ import annotations

from collections.abc import Sequence

HOST_PAUSES_S = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Pauses before a host that failed is tried again after 1, 2, … failures in a row [s]: a reboot or
a service that restarts is noticed soon, and a host that stays away costs little."""


def backoff(delays: Sequence[float], tries: int) -> float:
    """Return the delay after the ``tries``-th failure in a row; the last delay is repeated.

    >>> [backoff((0.5, 1, 2), tries) for tries in (0, 1, 2, 3, 9)]
    [0.0, 0.5, 1, 2, 2]
    """
    return delays[min(tries, len(delays)) - 1] if tries else 0.0


class Retry:
    """When something that failed is tried again: after pauses that grow with failures in a row.

    Args:
        pauses: pauses after 1, 2, … failures in a row [s]; the last one is repeated.

    Attributes:
        at: time from which it may be tried [s]; infinite: not again.
    """

    def __init__(self, pauses: Sequence[float]) -> None:
        self._pauses = pauses
        self.worked()

    @property
    def pause_s(self) -> float:
        """Return the pause after the last failure [s]."""
        return backoff(self._pauses, self.failures)

    def failed(self, now: float) -> None:
        """Note that it failed.

        Args:
            now: time [s].
        """
        self.failures += 1
        self.at = now + self.pause_s

    def worked(self) -> None:
        """Note that it worked: it may be tried at once when it fails again."""
        self.failures, self.at = 0, 0.0


class FailureBackoff:
    """Counts failures in a row that are not explained by a worker that somebody killed.

    Args:
        delays: pauses before the next attempt after 2, 3, … such failures [s].
        max_stuck: number of generations in a row that may break at the same step, or by crashes
            without progress.
    """

    def __init__(self, delays: Sequence[float], max_stuck: int) -> None:
        self._delays = delays
        self._max_stuck = max_stuck
        self._in_a_row = 0
        self._stuck = 0
        self._stuck_at = -1
        self._crashes = 0
        self._furthest = self._saved = -1
        self.pause_until = 0.0
        """Time before which no new attempt may begin [s]."""

    def explained(self) -> None:
        """Reset the counts: the end of a member explains the failure, so it need not recur."""
        self._in_a_row = self._stuck = 0

    def broke_while_running(self, step: int, now: float) -> int:
        """Count a generation that broke while training.

        An error such as a tensor shape that differs between ranks breaks every generation at the
        same step, so repeating is pointless.

        Args:
            now: time [s].

        Returns:
            How often generations broke at that step in a row, once ``max_stuck`` is reached; 0
            before.
        """
        self._stuck = self._stuck + 1 if step == self._stuck_at else 1
        self._stuck_at = step
        self._in_a_row = self._stuck
        self._pause(now)
        return self._stuck if self._stuck >= self._max_stuck else 0

    def crashed(self, step: int, now: float) -> int:
        """Count a generation that broke by the crash of a member.

        An example that crashes the process that reads it does so on any rank, and again.

        Args:
            step: step of the survivors; -1: there are none.
            now: time [s].

        Returns:
            How often members crashed without progress between, once ``max_stuck`` is reached; 0
            before.
        """
        self._crashes = 1 if step > self._furthest else self._crashes + 1
        self._furthest = max(self._furthest, step)
        self._in_a_row = self._crashes
        self._pause(now)
        return self._crashes if self._crashes >= self._max_stuck else 0

    def saved(self, step: int) -> None:
        """Note that a checkpoint of a step exists: if it is later than others, that is progress."""
        if step > self._saved:
            self._saved, self._crashes = step, 0

    def did_not_form(self, now: float) -> None:
        """Count a generation in which workers that had trained together could not connect."""
        self._in_a_row += 1
        self._pause(now)

    def _pause(self, now: float) -> None:
        # The first failure causes no pause, since most are transient.
        self.pause_until = now + backoff(self._delays, self._in_a_row - 1)

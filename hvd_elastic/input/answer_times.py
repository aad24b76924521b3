"""When an answer of a process that reads is late, and whether a rank would be faster alone."""

from __future__ import annotations

import math
from collections import Counter, deque
from statistics import median

LATE_FACTOR = 4.0
"""Multiple of the usual time for an answer after which a batch is asked for once more."""
LATE_AT_LEAST_S = 0.5
_FIRST_ANSWER_S = 5.0
"""Time for an answer that is taken as usual before the first [s]: files are opened, code loaded."""
_KEPT = 64
"""Latest answers whose time is kept."""
_LATE_LIMIT = 8
"""Late answers of a host, more than those in time, after which it is not used any more."""
_SLOWER = 1.25
"""Multiple of the time of a step alone from which on hosts make it slower, noise apart."""
_TRIALS = 3
"""Batches that the rank reads itself to see how long that takes; a pause of the host, its link or
this process falls into one of them at most."""
_TRIAL_EVERY = 48
"""Answers between two of them: the running mean has forgotten a pause of seconds by then."""
_TRIALS_EVERY = 256
"""Answers after a comparison until the next one begins."""
WEIGHT = 0.1
"""Of the latest value in a running mean."""


class AnswerTimes:
    """Holds the times of the latest answers, and counts those of each host.

    >>> times = AnswerTimes()
    >>> times.late_s
    20.0
    >>> times.answered("cpu1", 0.25, 0.2)
    >>> times.late_s
    1.0
    """

    def __init__(self) -> None:
        self._took_s: deque[float] = deque(maxlen=_KEPT)
        self._in_time: Counter[str] = Counter()
        self._late: Counter[str] = Counter()
        self._cpu_s = math.nan
        self._body_s = math.nan
        self._went_on_at = math.nan
        self._until_trial = _KEPT
        self._trials: list[tuple[float, float]] = []

    @property
    def late_s(self) -> float:
        """Time after which an answer is late [s]."""
        usual_s = median(self._took_s) if self._took_s else _FIRST_ANSWER_S
        return max(LATE_AT_LEAST_S, LATE_FACTOR * usual_s)

    def answered(self, host: str, took_s: float, cpu_s: float) -> None:
        """Note an answer.

        Args:
            host: empty: of the rank's own process.
            took_s: time since it was asked for [s].
            cpu_s: processor time that it took [s].
        """
        self._in_time[host] += took_s < self.late_s
        self._took_s.append(took_s)
        self._cpu_s = mean(self._cpu_s, cpu_s)
        self._until_trial -= 1

    def is_too_late(self, host: str) -> bool:
        """Note that an answer of a host is late; return whether the host is mostly late."""
        self._late[host] += 1
        return self._late[host] >= max(_LATE_LIMIT, self._in_time[host] + 1)

    # -- the rank alone ----------------------------------------------------------------------

    def rank_asks(self, now: float) -> None:
        """Note that the rank asks for a batch, at this time [s]."""
        if not math.isnan(self._went_on_at):
            self._body_s = mean(self._body_s, now - self._went_on_at)

    def rank_goes_on(self, now: float) -> None:
        """Note that the rank has got its batch."""
        self._went_on_at = now

    def calls_for_trial(self, hosts_s: float) -> bool:
        """Return whether the rank, which waits, may be faster alone than with input hosts.

        Args:
            hosts_s: time between two batches of all hosts together [s]; infinite: not known.
        """
        if self._until_trial > 0:
            return False
        if not self._trials and not self.is_slower(hosts_s, self._cpu_s):
            return False
        self._until_trial = _TRIAL_EVERY
        return True

    def compare(self, hosts_s: float, alone_s: float) -> str:
        """Note how long a trial took; after the last one, compare the rank with the input hosts.

        Args:
            hosts_s: time between two batches of all hosts together [s].
            alone_s: time in which the rank has read a batch itself [s].

        Returns:
            Why training is slower with the hosts; empty: it is not, or more trials are needed.
        """
        self._trials.append((hosts_s, alone_s))
        if len(self._trials) < _TRIALS:
            return ""
        hosts_s, alone_s = map(median, zip(*self._trials, strict=True))
        self._trials, self._until_trial = [], _TRIALS_EVERY
        return self._why_slower(hosts_s, alone_s) if self.is_slower(hosts_s, alone_s) else ""

    def is_slower(self, hosts_s: float, alone_s: float) -> bool:
        """Return whether training with input hosts is slower than alone.

        Alone the rank first reads, and then takes its step. Hosts read meanwhile.

        Args:
            hosts_s: time between two batches of all hosts together [s]; infinite: not known.
            alone_s: time in which the rank reads a batch itself [s].
        """
        return self._alone_step_s(alone_s) * _SLOWER <= hosts_s < math.inf

    def _why_slower(self, hosts_s: float, alone_s: float) -> str:
        return (
            f"batches come every {1000 * hosts_s:.0f} ms over its link, and a step of a training "
            f"process that reads itself takes {1000 * self._alone_step_s(alone_s):.0f} ms"
        )

    def _alone_step_s(self, alone_s: float) -> float:
        return self._body_s + alone_s


def mean(before: float, value: float) -> float:
    """Return a running mean; ``before`` is not a number before the first value.

    >>> mean(mean(float("nan"), 1.0), 2.0)
    1.1
    """
    return value if math.isnan(before) else before + WEIGHT * (value - before)

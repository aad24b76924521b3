"""Tells what took the time of a run, and its money, besides training.

Time is counted once, in seconds of the run; slot time is time multiplied by the processes that it
kept from training. Waits for data and for other ranks are those of rank 0, as parts of the time
between two ``metrics`` events.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import mul, sub

CAUSES = ("start-up", "rescales", "failures", "input", "communication", "interruption")
"""In this order; what remains is training."""


@dataclass
class Spent:
    """Time and money that one cause took.

    Attributes:
        seconds: time of the run [s].
        slot_s: time multiplied by processes [s].
        money: price of the hosts meanwhile, in the currency of the hostfile.
    """

    seconds: float = 0.0
    slot_s: float = 0.0
    money: float = 0.0


@dataclass
class Spending:
    """Time and money that each cause has taken so far.

    Attributes:
        by_cause: by name of the cause, those of :data:`CAUSES`.
        rate: price of the hosts that train now [per hour]; 0: not known.
        failed: whether a worker or host was lost since the last rescale began.
        idle_s: time of the run since when no process trains [s]; None: some do.
        heard_s: time of the run when training was last heard of [s].
    """

    by_cause: dict[str, Spent] = field(default_factory=lambda: {cause: Spent() for cause in CAUSES})
    rate: float = 0.0
    size: int = 0
    failed: bool = False
    idle_s: float | None = 0.0
    heard_s: float = 0.0
    _told_s: float | None = None

    def add_time(self, cause: str, seconds: float, unused_s: float = 0.0) -> None:
        """Add time [s] of all processes to a cause; for a part of it no hosts were in use."""
        spent = self.by_cause[cause]
        spent.seconds += seconds
        spent.slot_s += (seconds - unused_s) * self.size
        spent.money += (seconds - unused_s) * self.rate / 3600

    def trains_from(self, at_s: float) -> None:
        """Note that training continues at a time of the run [s]."""
        self._told_s, self.idle_s, self.heard_s = at_s, None, at_s

    def stopped(self) -> float:
        """Note that no process trains any more; return since when, a time of the run [s]."""
        self._told_s = None
        if self.idle_s is None:
            self.idle_s = self.heard_s
        return self.idle_s

    def trained(
        self, at_s: Sequence[float], data_wait: Sequence[float], rank_wait: Sequence[float]
    ) -> None:
        """Add the waits of intervals of training.

        Args:
            at_s: times of ``metrics`` events, which end the intervals [s].
            data_wait, rank_wait: part of each interval that waits for data, and for other ranks.
        """
        since_s = at_s[0] if self._told_s is None else self._told_s
        spans = [*map(sub, at_s, [since_s, *at_s])]
        self.add_time("input", sum(map(mul, spans, data_wait)))
        self.add_time("communication", sum(map(mul, spans, rank_wait)))
        self._told_s = at_s[-1]

    def went_back(self, checkpoint_at_s: float) -> None:
        """Add the work since a checkpoint that has to be done again."""
        self.add_time("failures", max(0.0, self.stopped() - checkpoint_at_s))

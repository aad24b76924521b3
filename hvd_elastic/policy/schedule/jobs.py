"""Describe jobs, hosts and allocations for the scheduler."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

Allocation = Mapping[str, int]
"""Slots on each host; empty: the job waits."""


@dataclass(frozen=True)
class Job:
    """A job as the scheduler knows it.

    Attributes:
        submitted_s: when it was submitted [s, on the clock of ``now``].
        goodput: goodput by number of slots on as few hosts as possible, shape (most + 1,), any
            unit; ``goodput[0]`` is 0. None: nothing was measured yet.
        remaining: goodput seconds that are left, in the unit of ``goodput``: useful examples, if
            goodput is in useful examples per second. None: the job has not said how long it trains.
        occupied: slots of each host in which its processes live or start, those included that it
            is leaving.
        attained_slot_s: slots times seconds that it has had.
        rescale_s: training time lost by a change of its slots [s].
        min_slots, max_slots: fewest and most slots.
        is_held_back: whether ``max_slots`` is less than the job takes, until it has trained on that
            many, since its model is not known for more yet.
        priority: weight of the job relative to others, above 0.
        deadline_s: when it has to be finished [s]; None: no deadline.
        preemptible: whether all its slots may be taken away.
        fixed: whether it keeps its number of slots as long as it runs.
        movable: whether it can move to other hosts while it runs.
        rescales: number of changes of its slots so far; None: not known.
        noise: relative standard error of ``goodput``; a change has to gain more than by chance.
        timed: numbers of slots with which it was measured; None: ``goodput`` is exact.
        precedence: place in the queue by priority and age, least first; None: there is no queue.
        user: name of the user whose job it is.
        hosts: hosts that it may have; None: all.
    """

    name: str
    submitted_s: float
    goodput: np.ndarray | None = None
    remaining: float | None = None
    held: Allocation = field(default_factory=dict)
    attained_slot_s: float = 0.0
    rescale_s: float = 0.0
    min_slots: int = 1
    max_slots: int = 1
    priority: float = 1.0
    deadline_s: float | None = None
    preemptible: bool = True
    fixed: bool = False
    movable: bool = True
    rescales: int | None = None
    occupied: Allocation = field(default_factory=dict)
    noise: float = 0.0
    is_held_back: bool = False
    timed: Collection[int] | None = None
    precedence: tuple[float, float] | None = None
    user: str = ""
    hosts: Collection[str] | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.min_slots <= self.max_slots:
            raise ValueError(
                f"job {self.name}: min_slots {self.min_slots} and max_slots {self.max_slots} must "
                "be 1 or more, and min_slots not above max_slots"
            )
        if not self.priority > 0:
            raise ValueError(f"job {self.name}: priority is {self.priority:g}, must be above 0")

    @property
    def slots(self) -> int:
        """Number of slots that it holds."""
        return sum(self.held.values())


@dataclass(frozen=True)
class Assignment:
    """The decision about one job.

    Attributes:
        hosts: its slots on each host; empty: it waits.
    """

    hosts: Allocation
    reason: str

"""What a run is after, and how patient the policy is: everything about it that can be set."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["OBJECTIVES", "Objective", "Parameters"]

OBJECTIVES = ("goodput", "efficiency", "cost")


@dataclass(frozen=True)
class Objective:
    """What to reach.

    ``goodput``: as fast as it goes. ``efficiency``: as fast as it goes while every slot brings at
    least a share of what one slot alone does. ``cost``: as fast as a budget allows, or as cheaply
    as a deadline allows.

    Attributes:
        kind: one of the three.
        min_speedup_per_slot: for ``efficiency``: least speedup over one slot, divided by the
            slots, in (0, 1]. Source: Pollux, OSDI 2021, section 4.2 (the speedup).
        budget: for ``cost``: most that the hosts in use may cost [currency per hour].
        deadline_s: for ``cost``: time from the start until the target [s].
        target: for ``deadline_s``: useful examples to be reached.

    The command line checks that the values fit together.
    """

    kind: str = "goodput"
    min_speedup_per_slot: float = 0.5
    budget: float | None = None
    deadline_s: float | None = None
    target: float | None = None


@dataclass(frozen=True)
class Parameters:
    """How patient and how curious the policy is.

    Attributes:
        horizon_s: a change has to pay within this time [s].
        min_gain: net gain of a change over the horizon, relative to staying, below which nothing
            is changed.
        cooldown_s: least time between two changes of the policy's own [s].
        cooldown_pauses: the same in pauses of a rescale; the longer time holds. Each change
            beyond the second doubles it, until the surroundings change.
        max_cooldown_s: but not beyond this [s].
        confirmations: looks in a row that must want a change of the same direction.
        evidence: timed windows of steps in the current allocation before anything is decided.
        trial_s: how long a try lasts that turns out badly [s].
        slot_worth: a further slot must bring this share of what those in use bring on average.
        max_uncertainty: standard deviation of the logarithm of a goodput that is believed at most;
            the wide priors would otherwise promise everything.
        silence_s: without a measurement for so long nothing is decided [s].
        deadline_margin: part of the time left that a plan may not need.
    """

    horizon_s: float = 600.0
    min_gain: float = 0.02
    cooldown_s: float = 5.0
    cooldown_pauses: float = 10.0
    max_cooldown_s: float = 600.0
    confirmations: int = 3
    evidence: int = 5
    trial_s: float = 15.0
    slot_worth: float = 0.03
    max_uncertainty: float = 0.5
    silence_s: float = 30.0
    deadline_margin: float = 0.03

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

    Raises:
        ValueError: the values do not fit together; says which and what is valid.
    """

    kind: str = "goodput"
    min_speedup_per_slot: float = 0.5
    budget: float | None = None
    deadline_s: float | None = None
    target: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in OBJECTIVES:
            valid = ", ".join(OBJECTIVES)
            raise ValueError(f"objective {self.kind!r} is not known; valid: {valid}")
        if not 0 < self.min_speedup_per_slot <= 1:
            raise ValueError(
                f"min_speedup_per_slot is {self.min_speedup_per_slot:g}, it must be above 0 and at "
                "most 1"
            )
        for name in ("budget", "deadline_s", "target"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} is {value:g}, it must be above 0 and finite")
            if value is not None and self.kind != "cost":
                raise ValueError(f"{name} belongs to the objective cost, not to {self.kind}")
        if self.kind == "cost" and self.budget is None and self.deadline_s is None:
            raise ValueError("the objective cost needs a budget or a deadline")
        if (self.deadline_s is None) != (self.target is None):
            raise ValueError(
                "a deadline and a target in useful examples belong together: without the target "
                "nobody knows what has to be done by then"
            )


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

    def __post_init__(self) -> None:
        for name in ("horizon_s", "evidence", "confirmations"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be above 0")
        for name in ("min_gain", "cooldown_s", "trial_s", "slot_worth", "silence_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be 0 or more")

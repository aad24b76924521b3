"""What a decision rests on: plain frozen data, nothing that asks anybody anything."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hvd_elastic.model.goodput import BatchLimits, BatchPlan
from hvd_elastic.model.step_time import StepTimeModel

__all__ = ["Allocation", "Decision", "HostOffer", "Memory", "Snapshot"]


@dataclass(frozen=True)
class HostOffer:
    """A host that may be used.

    Attributes:
        name: of the hostfile.
        slots: processes it can hold.
        price: of the whole host [any currency, per hour]; None: not known.
        slowness: time of a pass on it, relative to the fastest host known; 1 until measured.
        pinned: the user wants all of it in use, whatever it brings.
    """

    name: str
    slots: int
    price: float | None = None
    slowness: float = 1.0
    pinned: bool = False


@dataclass(frozen=True)
class Allocation:
    """Slots in use: how many on which host.

    Attributes:
        counts: (host, slots > 0), in the order of the hostfile.
    """

    counts: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, counts: Mapping[str, int] | Iterable[tuple[str, int]]) -> Allocation:
        """From a mapping or pairs; hosts without a slot are left out.

        >>> Allocation.of({"a": 2, "b": 0}).counts
        (('a', 2),)
        """
        pairs = counts.items() if isinstance(counts, Mapping) else counts
        return cls(tuple((host, number) for host, number in pairs if number > 0))

    @property
    def slots(self) -> int:
        return sum(number for _, number in self.counts)

    @property
    def hosts(self) -> int:
        return len(self.counts)

    def __str__(self) -> str:
        """As in a hostfile, on one line; the first of many.

        >>> print(Allocation.of({"a": 2, "b": 1}))
        a:2 b:1
        """
        shown = [f"{host}:{number}" for host, number in self.counts[:6]]
        more = [f"and {self.hosts - 6} more"] if self.hosts > 6 else []
        return " ".join([*shown, *more]) or "nothing"


@dataclass(frozen=True)
class Memory:
    """What decisions leave behind for the next one.

    Attributes:
        changed_at: when the policy last changed something [s]; -inf: never.
        wish: what the last look wanted and hysteresis or cool-down did not let happen.
        wished: looks in a row with a wish in the same direction.
        changes: of the policy since the surroundings last changed.
        asked: for which slots the last change was; None: there was none.
    """

    changed_at: float = -math.inf
    wish: Allocation | None = None
    wished: int = 0
    changes: int = 0
    asked: Allocation | None = None


@dataclass(frozen=True)
class Snapshot:
    """A run, as far as a decision needs to know it.

    Attributes:
        hosts: in the order of the hostfile.
        current: slots that train now.
        plan: the batch plan now.
        limits: what a batch plan must keep to; ``max_batch_size == initial_batch_size`` where
            the script's batch is fixed.
        model: fitted to the step times seen; None: nothing was measured.
        noise_scale: gradient noise scale [examples]; NaN: not known, inf: gradients are all noise.
        measured: timed windows of steps since the current allocation began to train.
        silent_s: since the last measurement [s].
        pause_s: typical pause of the rescales seen [s].
        min_np, max_np: bounds of the slots; None: no upper bound.
        done: useful examples so far (throughput x statistical efficiency, integrated).
        started_at: when training began [s, the clock of ``now``].
        memory: of earlier decisions.
        unequal_shares: whether slow ranks get fewer examples of a step, so that all end together.
        constant_examples: so many take a rank as long as what is constant in a pass; 0 where that
            is not known.
        rejected: reports of the workers that made no sense.
    """

    hosts: tuple[HostOffer, ...]
    current: Allocation
    plan: BatchPlan
    limits: BatchLimits
    model: StepTimeModel | None
    noise_scale: float
    measured: int
    silent_s: float
    pause_s: float
    min_np: int
    max_np: int | None
    done: float = 0.0
    started_at: float = 0.0
    memory: Memory = field(default_factory=Memory)
    unequal_shares: bool = False
    constant_examples: float = 0.0
    rejected: int = 0

    def as_fields(self) -> dict[str, Any]:
        """Plain data for the ``decision`` event; what is not finite is None."""
        model = self.model
        return {
            "hosts": [[h.name, h.slots, h.price, round(h.slowness, 3)] for h in self.hosts],
            "pinned": [h.name for h in self.hosts if h.pinned],
            "unequal_shares": self.unequal_shares,
            "constant_examples": round(self.constant_examples, 2),
            "current": [list(pair) for pair in self.current.counts],
            "global_batch_size": self.plan.global_batch_size,
            "accumulation_steps": self.plan.accumulation_steps,
            "initial_batch_size": self.limits.initial_batch_size,
            "max_batch_size": self.limits.max_batch_size,
            "noise_scale": _finite(self.noise_scale),
            "measured": self.measured,
            "rejected": self.rejected,
            "pause_s": round(self.pause_s, 3),
            "min_np": self.min_np,
            "max_np": self.max_np,
            "done": round(self.done),
            "step_time": None
            if model is None
            else {
                name: float(f"{getattr(model, name):.4g}")
                for name in ("alpha_c", "beta_c", "alpha_r", "beta_r", "alpha_n", "beta_n", "gamma")
            },
        }


@dataclass(frozen=True)
class Decision:
    """What to do, and why.

    Attributes:
        action: ``stay``, ``grow``, ``shrink`` or ``move`` (as many slots, elsewhere).
        reason: in words, with the numbers it rests on.
        target: the slots to train on from now on; for ``stay`` the current ones.
        wish: what it would be if it had been wished for often enough, or not too soon; None: the
            target is the wish.
        known: False where too little was measured to decide anything.
        kept: False where nothing keeps to the budget, the deadline or the efficiency asked for.
        goodput: that is expected on the target [useful examples/s]; NaN for ``stay``.
        batch: global batch size that it is expected with; 0 for ``stay``.
    """

    action: str
    reason: str
    target: Allocation
    wish: Allocation | None = None
    known: bool = True
    kept: bool = True
    goodput: float = math.nan
    batch: int = 0


def _finite(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None

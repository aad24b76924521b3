"""Define the input and the output of a scaling decision as immutable data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hvd_elastic.model.goodput import BatchLimits, BatchPlan
from hvd_elastic.model.step_time import StepTimeModel
from hvd_elastic.policy.input import InputSupply
from hvd_elastic.run_events import Action


@dataclass(frozen=True)
class HostOffer:
    """A host that may be used.

    Attributes:
        price: price of the whole host [currency per hour]; None: not known.
        slowness: time of a pass relative to that of a reference host; 1 until measured.
        pinned: whether the user wants all its slots in use regardless of their gain.
    """

    name: str
    slots: int
    price: float | None = None
    slowness: float = 1.0
    pinned: bool = False


@dataclass(frozen=True)
class Allocation:
    """Slots in use by host.

    Attributes:
        counts: pairs (host, number of slots > 0), in the order of the hostfile.
    """

    counts: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, counts: Mapping[str, int] | Iterable[tuple[str, int]]) -> Allocation:
        """Return the allocation of a mapping or of pairs; hosts without slots are left out.

        >>> Allocation.of({"a": 2, "b": 0}).counts
        (('a', 2),)
        """
        pairs = counts.items() if isinstance(counts, Mapping) else counts
        return cls(tuple((host, number) for host, number in pairs if number > 0))

    @cached_property
    def slots(self) -> int:
        return sum(number for _, number in self.counts)

    @property
    def hosts(self) -> int:
        return len(self.counts)

    def __str__(self) -> str:
        """Return the first hosts with their slots on one line, as in a hostfile.

        >>> print(Allocation.of({"a": 2, "b": 1}))
        a:2 b:1
        """
        shown = [f"{host}:{number}" for host, number in self.counts[:6]]
        more = [f"and {self.hosts - 6} more"] if self.hosts > 6 else []
        return " ".join([*shown, *more]) or "nothing"


@dataclass(frozen=True)
class Memory:
    """State that is kept from one decision to the next.

    Attributes:
        changed_at: time of the last change by the policy [s]; -inf: there was none.
        wish: change that the last decision wanted and postponed; None: there was none.
        wished: number of consecutive decisions that wanted a change in the same direction.
        changes: number of changes by the policy since hosts or step times last changed.
        asked: slots that the last change asked for; None: there was none.
    """

    changed_at: float = -math.inf
    wish: Allocation | None = None
    wished: int = 0
    changes: int = 0
    asked: Allocation | None = None


@dataclass(frozen=True)
class Snapshot:
    """State of a run that a decision depends on.

    Attributes:
        hosts: available hosts, in the order of the hostfile.
        current: slots that train now.
        limits: limits of the batch plan; ``max_batch_size == initial_batch_size`` if the batch of
            the script is fixed.
        model: step-time model; None: nothing was measured.
        noise_scale: gradient noise scale [examples]; NaN: not known, inf: gradients are all noise.
        measured: number of windows timed since the current allocation began to train.
        silent_s: time since the last measurement [s].
        pause_s: typical pause of a rescale [s].
        min_np, max_np: bounds of the number of slots; None: no upper bound.
        done: number of useful examples so far (throughput x statistical efficiency, integrated).
        started_at: time when training began [s, the clock of ``now``].
        memory: state kept from earlier decisions.
        unequal_shares: whether slow ranks get fewer examples of a step, to finish together.
        constant_examples: number of examples whose compute time equals the fixed cost of one pass;
            0: not known.
        supply: what the hosts' cores can read; None: training does not wait for that.
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
    supply: InputSupply | None = None

    def as_fields(self) -> dict[str, Any]:
        """Return plain data for the ``decision`` event; numbers that are not finite become None."""
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
            "pause_s": round(self.pause_s, 3),
            "min_np": self.min_np,
            "max_np": self.max_np,
            "done": round(self.done),
            "core_s": None if self.supply is None else float(f"{self.supply.core_s:.4g}"),
            "step_time": None
            if model is None
            else {
                name: float(f"{getattr(model, name):.4g}")
                for name in ("alpha_c", "beta_c", "alpha_r", "beta_r", "alpha_n", "beta_n", "gamma")
            },
        }


@dataclass(frozen=True)
class Decision:
    """A decision with its reason.

    Attributes:
        action: ``stay``, ``grow``, ``shrink`` or ``move`` (the same number of slots on others).
        reason: sentence with the numbers that the decision is based on.
        target: slots to train on from now on; for ``stay`` the current ones.
        wish: slots wanted, if the change is postponed by the cool-down or until it is confirmed;
            else None.
        known: whether enough was measured to decide.
        kept: whether the target keeps to the budget, the deadline or the least efficiency.
        goodput: expected goodput on the target [useful examples/s]; NaN for ``stay``.
        batch: expected global batch size on the target; 0 for ``stay``.
    """

    action: Action
    reason: str
    target: Allocation
    wish: Allocation | None = None
    known: bool = True
    kept: bool = True
    goodput: float = math.nan
    batch: int = 0


def _finite(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None

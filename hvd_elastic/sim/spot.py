"""Simulate a training on spot machines with a deadline: any number of them, or a gang of all.

The policy is that of real runs, :func:`hvd_elastic.policy.spot.plan_machines`. The gang is what
launchers without elastic training do: all machines in one zone, and a restart of all from the last
checkpoint when one is interrupted. Availability comes from a file of measured counts, or is
generated with the figures of such measurements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
import numpy as np

from hvd_elastic.errors import UsageError
from hvd_elastic.policy.spot import MachineNeed, next_order, plan_machines

_HOUR_S = 3600.0
_GAP_S = 300.0
"""Time between two counts of a generated trace, as in the published ones [s]."""
_UP_H = (1.9, 0.42)
_DOWN_H = (2.3, 0.7)
"""Mean and median time that a pool has machines, and that it has none [h], which are lognormal.

Source: the traces of 16 machines of "Can't Be Late" (NSDI 2024), us-west-2a and us-west-2c: 1.8 and
1.9 h in the mean with a median of 0.42 h, then 2.2 and 2.5 h with a median of 0.75 and 0.71 h. A
pool has machines 44 and 45 % of the time."""
_PARTIAL_H = 0.17
"""Mean time that a pool has only some of the machines, when they come or go [h]; same source: 0.16
and 0.18 h, which is 3 % of the time."""
_SPOT_PRICE = (0.28, 0.38)
"""Price of spot machines, relative to on demand; it drifts between these."""


@dataclass(frozen=True)
class SpotPool:
    """Spot machines of one type in one zone.

    Attributes:
        name: its name.
        counts: number of machines that can be had at each tick.
        prices: price of one at each tick [currency per hour].
        slots: slots of a machine.
    """

    name: str
    counts: tuple[int, ...]
    prices: tuple[float, ...]
    slots: int = 1


@dataclass(frozen=True)
class SpotTrace:
    """Availability of several pools.

    Attributes:
        gap_s: length of a tick [s].
        on_demand: price of a machine on demand, which can always be had [currency per hour].
    """

    gap_s: float
    pools: tuple[SpotPool, ...]
    on_demand: float = 1.0

    @property
    def ticks(self) -> int:
        """Number of ticks that all pools have."""
        return min(len(pool.counts) for pool in self.pools)


@dataclass(frozen=True)
class SpotJob:
    """A training with a deadline.

    Attributes:
        machines: most machines; a gang has exactly so many.
        work_h: time that it takes on all machines [h].
        deadline_h: time within which it should end [h].
        start_s: time from the request for a machine until it trains [s].
        lost_s: training time that a gang loses with an interruption, half the time between two
            checkpoints [s]. Elastic training loses none: the notice is longer than a step.
        notice_s: time between the notice and the end of a spot machine [s]. Elastic training leaves
            the machine at once; a gang uses it up to its end.
        left_out_s: how long a pool that had too few machines is not asked again [s].
        exponent: n machines train n to this power times as fast as one.
    """

    machines: int = 16
    work_h: float = 24.0
    deadline_h: float = 36.0
    start_s: float = 360.0
    lost_s: float = 300.0
    notice_s: float = 120.0
    left_out_s: float = 600.0
    exponent: float = 0.95

    @property
    def longest_h(self) -> float:
        """Length of a trace that shows also by how much the deadline is missed [h]."""
        return 1.1 * self.deadline_h + 1

    def speed(self, machines: float) -> float:
        """Return the speed on a number of machines, relative to all of them."""
        return float((machines / self.machines) ** self.exponent)


@dataclass
class SpotOutcome:
    """What a policy made of a job.

    Attributes:
        cost: cost of all machines [currency].
        relative_cost: cost relative to all machines on demand from the start to the end.
        spot_h, on_demand_h: machine-hours paid.
        interruptions: at how many ticks machines of the run were taken away.
        finished_h: time of its end [h]; None: not within the trace.
        late: whether the deadline has passed before.
    """

    cost: float = 0.0
    relative_cost: float = math.nan
    spot_h: float = 0.0
    on_demand_h: float = 0.0
    interruptions: int = 0
    finished_h: float | None = None
    late: bool = False

    def pay(
        self, spot_prices: float, spot: int, on_demand: int, price: float, hours: float
    ) -> None:
        """Add the cost of machines over some time.

        Args:
            spot_prices: total price of the spot machines [currency per hour].
            price: price of one machine on demand [currency per hour].
        """
        self.spot_h += spot * hours
        self.on_demand_h += on_demand * hours
        self.cost += (spot_prices + on_demand * price) * hours


ON_DEMAND = -1
"""Number of the pool of machines on demand."""


@dataclass(frozen=True)
class _Pool:
    number: int
    spot: bool
    price: float
    slots: int


@dataclass(frozen=True)
class _Machine:
    """A machine of the run.

    Attributes:
        pool: number of its pool.
        ready_h: time from which on it trains [h].
    """

    pool: int
    ready_h: float


class Rule(Protocol):
    """Decides about machines at each tick of a trace."""

    def tick(self, tick: int, done_h: float, outcome: SpotOutcome) -> float:
        """Take and give back machines, pay them for a tick, and return the work done [h]."""


class ElasticSpot:
    """The policy of this package: any number of machines, each used as long as it is there."""

    def __init__(self, trace: SpotTrace, job: SpotJob) -> None:
        self._trace, self._job = trace, job
        self._machines: list[_Machine] = []
        self._left_out_h: dict[int, float] = {}
        """Until when pools are not asked, by number [h]."""

    def tick(self, tick: int, done_h: float, outcome: SpotOutcome) -> float:
        """See :class:`Rule`."""
        trace, job = self._trace, self._job
        gap_h = trace.gap_s / _HOUR_S
        now_h = tick * gap_h
        lost = [self._keep(number, pool.counts[tick]) for number, pool in enumerate(trace.pools)]
        outcome.interruptions += any(lost)
        on_demand = self._held(ON_DEMAND)
        need = MachineNeed(
            job.machines,
            len(self._machines) - on_demand,
            on_demand,
            left_s=(job.deadline_h - now_h - gap_h) * _HOUR_S,  # the next decision is a tick away
            work_s=(job.work_h - done_h) * _HOUR_S,
            start_s=job.start_s,
        )
        pools = [
            _Pool(number, True, pool.prices[tick], pool.slots)
            for number, pool in enumerate(trace.pools)
        ]
        demand = _Pool(ON_DEMAND, False, trace.on_demand, pools[0].slots)
        plan = plan_machines(need, [*pools, demand])
        ready_h = now_h + job.start_s / _HOUR_S
        usable = [pool for pool in pools if self._left_out_h.get(pool.number, 0.0) <= now_h]
        usable.append(demand)
        while True:
            held = {pool: self._held(pool.number) for pool in [*pools, demand]}
            missing = plan.spot + plan.on_demand - len(self._machines)
            if (order := next_order(plan, usable, held, missing)) is None:
                break
            pool, had = order
            if pool.spot:
                had = min(had, trace.pools[pool.number].counts[tick] - held[pool])
            self._machines += [_Machine(pool.number, ready_h)] * had
            if had < order[1]:
                usable.remove(pool)
                self._left_out_h[pool.number] = now_h + job.left_out_s / _HOUR_S
        held = {pool: self._held(pool.number) for pool in [*pools, demand]}
        prices = sum(pool.price * held[pool] for pool in pools)
        dear = held[demand]
        outcome.pay(prices, len(self._machines) - dear, dear, trace.on_demand, gap_h)
        training = sum(
            min(1.0, max(0.0, (now_h + gap_h - machine.ready_h) / gap_h))
            for machine in self._machines
        )
        # What was counted of a machine after it had its notice, before this tick.
        training = max(0.0, training - sum(lost) * job.notice_s / trace.gap_s)
        return gap_h * job.speed(min(training, job.machines))

    def held(self) -> list[int]:
        """Return the pool of each machine, by number."""
        return [machine.pool for machine in self._machines]

    def _held(self, pool: int) -> int:
        return sum(machine.pool == pool for machine in self._machines)

    def _keep(self, pool: int, most: int) -> int:
        """Keep so many machines of a pool, the oldest; return how many are gone."""
        of_pool = [machine for machine in self._machines if machine.pool == pool][:most]
        others = [machine for machine in self._machines if machine.pool != pool]
        lost = len(self._machines) - len(of_pool) - len(others)
        self._machines = others + of_pool
        return lost


class Gang:
    """A job that runs on all of its machines in one zone, or not at all.

    Spot machines until the deadline forces machines on demand: the rule "greedy" of "Can't Be Late"
    (NSDI 2024), which gives it the same knowledge of the deadline as our policy has.
    """

    def __init__(self, trace: SpotTrace, job: SpotJob) -> None:
        self._trace, self._job = trace, job
        self._on: int | str = ""
        """Number of its pool, ``demand``, or empty: it waits."""
        self._warming_h = 0.0

    def tick(self, tick: int, done_h: float, outcome: SpotOutcome) -> float:
        """See :class:`Rule`."""
        trace, job = self._trace, self._job
        gap_h, delay_h = trace.gap_s / _HOUR_S, (job.start_s + job.lost_s) / _HOUR_S
        now_h = tick * gap_h
        there = [
            number for number, pool in enumerate(trace.pools) if pool.counts[tick] >= job.machines
        ]
        there.sort(key=lambda number: trace.pools[number].prices[tick])
        if isinstance(self._on, int) and self._on not in there:
            outcome.interruptions += 1
            self._on = ""
        left_h = job.deadline_h - now_h - gap_h
        wanted = self._on
        if self._on == "" and left_h <= job.work_h - done_h + 2 * delay_h:
            wanted = "demand"
        elif self._on == "" and there:
            wanted = there[0]
        if wanted != self._on:
            self._on, self._warming_h = wanted, delay_h
        if self._on == "":
            return 0.0
        if isinstance(self._on, int):
            price = job.machines * trace.pools[self._on].prices[tick]
            outcome.pay(price, job.machines, 0, trace.on_demand, gap_h)
        else:
            outcome.pay(0.0, 0, job.machines, trace.on_demand, gap_h)
        trained_h = max(0.0, gap_h - self._warming_h)
        self._warming_h = max(0.0, self._warming_h - gap_h)
        return trained_h


RULES: Mapping[str, Callable[[SpotTrace, SpotJob], Rule]] = {"elastic": ElasticSpot, "gang": Gang}
"""Rules by name."""


def simulate_spot(trace: SpotTrace, job: SpotJob, rule: Rule) -> SpotOutcome:
    """Simulate a job on a trace, up to its end or that of the trace."""
    outcome, gap_h, done_h = SpotOutcome(), trace.gap_s / _HOUR_S, 0.0
    for tick in range(trace.ticks):
        cost = outcome.cost
        work_h = rule.tick(tick, done_h, outcome)
        if done_h + work_h >= job.work_h - 1e-9:
            # The last tick is paid as far as it was needed.
            part = (job.work_h - done_h) / work_h if work_h else 0.0
            outcome.cost = cost + (outcome.cost - cost) * part
            outcome.finished_h = (tick + part) * gap_h
            break
        done_h += work_h
    outcome.late = outcome.finished_h is None or outcome.finished_h > job.deadline_h
    outcome.relative_cost = outcome.cost / (job.machines * job.work_h * trace.on_demand)
    return outcome


def generate_trace(
    rng: np.random.Generator, hours: float, pools: int = 3, machines: int = 16, slots: int = 1
) -> SpotTrace:
    """Generate the availability and prices of pools that are independent of each other.

    Args:
        hours: length [h].
        machines: number of machines that a pool has, if it has all.
    """
    ticks = math.ceil(hours * _HOUR_S / _GAP_S)
    made = []
    for number in range(pools):
        counts: list[int] = []
        is_up = bool(rng.random() < _UP_H[0] / (_UP_H[0] + _DOWN_H[0]))
        while len(counts) < ticks:
            mean, median = _UP_H if is_up else _DOWN_H
            length = _ticks(rng.lognormal(math.log(median), math.sqrt(2 * math.log(mean / median))))
            part = _ticks(rng.exponential(_PARTIAL_H)) if is_up else 0
            some = int(rng.integers(1, machines)) if machines > 1 else 1
            counts += [some] * min(part, length) + [machines * is_up] * max(0, length - part)
            is_up = not is_up
        low, high = _SPOT_PRICE
        steps = rng.normal(0.0, (high - low) / 40, ticks).cumsum() + rng.uniform(low, high)
        # A price that would leave the band is reflected at its edge.
        within = low + np.abs((steps - low + (high - low)) % (2 * (high - low)) - (high - low))
        made.append(
            SpotPool(f"zone {number + 1}", tuple(counts[:ticks]), tuple(within.tolist()), slots)
        )
    return SpotTrace(_GAP_S, tuple(made))


def windows(trace: SpotTrace, hours: float) -> list[SpotTrace]:
    """Return parts of a trace of so many hours, one from each eighth hour on."""
    length, step = math.ceil(hours * _HOUR_S / trace.gap_s), round(8 * _HOUR_S / trace.gap_s)
    return [
        replace(
            trace,
            pools=tuple(
                replace(
                    pool,
                    counts=pool.counts[first : first + length],
                    prices=pool.prices[first : first + length],
                )
                for pool in trace.pools
            ),
        )
        for first in range(0, trace.ticks - length + 1, step)
    ]


def _ticks(hours: float) -> int:
    return max(1, round(hours * _HOUR_S / _GAP_S))


class _Metadata(msgspec.Struct):
    gap_seconds: Annotated[float, msgspec.Meta(gt=0)]


class _File(msgspec.Struct):
    metadata: _Metadata
    data: Annotated[list[float], msgspec.Meta(min_length=1)]


def read_traces(paths: Sequence[Path], spot_price: float) -> SpotTrace:
    """Read measured availability, one file for each pool, in the form of the published traces.

    Each is a JSON object ``{"metadata": {"gap_seconds": 300}, "data": [16, 16, 3, 0]}``.

    Args:
        spot_price: price of spot machines, relative to on demand.

    Raises:
        UsageError: a file cannot be read, or is not of this form, or its ticks differ in length.
    """
    pools, gaps = [], {}
    for path in paths:
        try:
            file = msgspec.json.decode(path.read_bytes(), type=_File)
        except OSError as error:
            raise UsageError(f"spot trace {path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise UsageError(
                f"spot trace {path} is not of the form "
                f'{{"metadata": {{"gap_seconds": 300}}, "data": [16, 16, 3, 0]}}: {error}'
            ) from error
        gaps[file.metadata.gap_seconds] = path
        counts = tuple(max(0, int(value)) for value in file.data)
        pools.append(SpotPool(path.stem, counts, (spot_price,) * len(counts)))
    if len(gaps) > 1:
        told = ", ".join(f"{gap:g} s in {path}" for gap, path in gaps.items())
        raise UsageError(f"the ticks of the spot traces differ: {told}; give traces of one kind")
    return SpotTrace(next(iter(gaps)), tuple(pools))

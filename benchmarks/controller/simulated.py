"""Measures the controller in the simulator: workloads, changes, jitter, budgets and deadlines.

Everything runs in virtual time. Step times follow the model of :mod:`hvd_elastic.model.step_time`
with true parameters that the controller does not see; jitter is log-normal.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from typing import Any

from benchmarks.controller.adaptdl import AdaptDLRule
from benchmarks.testbed.command import Say
from benchmarks.testbed.figures import Result, conditions
from hvd_elastic.control.scaling import ScalingConfig
from hvd_elastic.model.goodput import BatchLimits, BatchPlan
from hvd_elastic.model.step_time import Observation, fit_step_time
from hvd_elastic.policy.autoscale import decide
from hvd_elastic.policy.objective import Objective
from hvd_elastic.policy.scoring import placements
from hvd_elastic.policy.snapshot import Allocation, HostOffer, Snapshot
from hvd_elastic.sim.run import SimResult, simulate
from hvd_elastic.sim.static import best_at, best_static
from hvd_elastic.sim.trace import Change, Trace, Workload

_HOUR_S = 3600.0

_BASE = Workload(
    alpha_c=0.01,
    beta_c=0.001,
    alpha_r=0.002,
    beta_r=1e-4,
    alpha_n=0.006,
    beta_n=2e-4,
    gamma=1.5,
    limits=BatchLimits(128, 4096),
    noise_scale=(1000.0, 1000.0),
    examples=1e12,
)
_HOSTS = tuple(HostOffer(f"n{number}", 4, 1.0) for number in range(8))


def _trace(hosts: tuple[HostOffer, ...] = _HOSTS, **workload: Any) -> Trace:
    return Trace(hosts, dataclasses.replace(_BASE, **workload), 1.5 * _HOUR_S)


WORKLOADS: dict[str, Trace] = {
    "compute-bound": _trace(beta_c=0.005),
    "communication-bound": _trace(alpha_n=0.15, beta_n=0.01, noise_scale=(300.0, 300.0)),
    "low noise": _trace(noise_scale=(30.0, 30.0)),
    "high noise": _trace(noise_scale=(30_000.0, 30_000.0)),
    "noise growing tenfold": _trace(noise_scale=(300.0, 3000.0), examples=5e7),
    "unequal hosts": _trace(
        hosts=tuple(
            dataclasses.replace(host, slowness=1.0 if number < 5 else 3.0)
            for number, host in enumerate(_HOSTS)
        )
    ),
}
"""Runs of an hour and a half that start with one slot, on eight hosts with four slots each."""

_CHANGES: dict[str, Change] = {
    "link ten times slower": Change(0.0, link=10.0),
    "one host three times slower": Change(0.0, slow={"n1": 3.0}),
    "two hosts appear": Change(0.0, add=(HostOffer("m0", 4, 1.0), HostOffer("m1", 4, 1.0))),
    "two hosts go": Change(0.0, remove=("n6", "n7")),
}
_CHANGE_AT_S = 1800.0


def measure_simulated(progress: Say) -> Result:
    """Measure all parts; ``progress`` is called with the name of each."""
    load_before = os.getloadavg()
    found = {
        "steady": [_steady(name, trace, progress) for name, trace in WORKLOADS.items()],
        "changes": [_changed(name, change, progress) for name, change in _CHANGES.items()],
        "whole_run": [*_whole_runs(progress)],
        "flapping": [_flapping(jitter, progress) for jitter in (0.03, 0.1)],
        "cost": [*_cost(progress)],
        "decision_ms": [_decision_ms(hosts) for hosts in (8, 512)],
    }
    note = "Virtual time: only how long a decision takes depends on this machine."
    return Result("controller", conditions("the simulator", note, load_before), found)


def _config(trace: Trace, objective: Objective | None = None) -> ScalingConfig:
    return ScalingConfig(trace.min_np, trace.max_np, objective or Objective())


def _reaches(result: SimResult, since_s: float, share: float = 0.95) -> float:
    """Return the time until the goodput and its next minute's mean reach a share of the best [s].

    NaN: it never did. The mean includes pauses, also those of further improvements.
    """
    after = [s for s in result.samples if s.at_s >= since_s]
    for place, sample in enumerate(after):
        end = sample.at_s + 60
        soon = [(s.at_s, s.goodput / s.best) for s in after[place:] if s.at_s < end]
        if sample.goodput >= share * sample.best and _integral(soon, end) >= 60 * share:
            return sample.at_s - since_s
    return float("nan")


def _steady(name: str, trace: Trace, progress: Say) -> dict[str, Any]:
    progress(f"steady state: {name}")
    result = simulate(trace, _config(trace), 0, with_best=True)
    last = result.samples[-1]
    late = [s for s in result.samples if s.at_s >= 0.1 * last.at_s and s.goodput > 0]
    shares = [s.goodput / s.best for s in late]
    static = best_static(trace)
    return {
        "workload": name,
        "share_of_best_after_10_percent": statistics.mean(shares),
        "lowest_share": min(shares),
        "share_of_best_static_over_all": result.mean_goodput(trace.duration_s) / static.goodput,
        "slots": last.slots,
        "batch": last.batch,
        "best_static_slots": static.slots,
        "best_static_batch": static.batch,
        "rescales": result.rescales,
        "seconds_to_95_percent": _reaches(result, 0.0),
    }


def _changed(name: str, change: Change, progress: Say) -> dict[str, Any]:
    progress(f"change: {name}")
    changes = (dataclasses.replace(change, at_s=_CHANGE_AT_S),)
    trace = dataclasses.replace(_trace(), duration_s=2 * _CHANGE_AT_S, changes=changes)
    result = simulate(trace, _config(trace), 0, with_best=True)
    last = result.samples[-1]
    return {
        "change": name,
        "seconds_to_95_percent": _reaches(result, _CHANGE_AT_S + 1.0),
        "decisions_after": sum(d.at_s >= _CHANGE_AT_S for d in result.decisions),
        "slots": last.slots,
        "share_at_the_end": last.goodput / last.best,
    }


_EVENTFUL = dataclasses.replace(
    _trace(noise_scale=(300.0, 3000.0), examples=2e8),
    duration_s=4 * _HOUR_S,
    changes=(
        Change(2400.0, link=10.0),
        Change(4800.0, slow={"n1": 3.0}),
        Change(7200.0, link=1.0, add=(HostOffer("n8", 4, 1.0), HostOffer("n9", 4, 1.0))),
        Change(9600.0, remove=("n2", "n3")),
        Change(12_000.0, slow={"n1": 1.0}),
    ),
)
"""Four hours in which the link and a host slow down and recover, two hosts appear, two disappear,
and the noise grows."""

_ADAPTDL_PAUSE_S = 9.0
"""AdaptDL's pause, since it restarts from a checkpoint for every change: 8.3 to 12.2 s to grow and
5.5 to 9.0 s to shrink, with a small network on two cores (AdaptDL 0.2.11)."""


def _whole_runs(progress: Say) -> list[dict[str, Any]]:
    """Compare policies over the eventful training; the oracle knows everything and never pauses."""
    progress("a whole training")
    trace = _EVENTFUL
    ours = simulate(trace, _config(trace), 0, with_best=True)
    oracle = _integral([(s.at_s, s.best) for s in ours.samples], trace.duration_s)
    slots = _integral([(s.at_s, s.slots) for s in ours.samples], trace.duration_s)
    average = dataclasses.replace(trace, np=max(1, round(slots / trace.duration_s)))
    equal = dataclasses.replace(average, unequal_shares=False)
    batch = trace.workload.limits.initial_batch_size
    plain = dataclasses.replace(
        equal, workload=dataclasses.replace(trace.workload, limits=BatchLimits(batch, batch))
    )
    theirs = dataclasses.replace(trace, unequal_shares=False)
    restarted = dataclasses.replace(theirs, pause_s=_ADAPTDL_PAUSE_S)
    fixed = f"fixed: {average.np} slots (goodput's average)"
    results = {
        "goodput": ours,
        "AdaptDL's rule, our pause": simulate(theirs, _config(theirs), 0, rule=AdaptDLRule),
        "AdaptDL's rule, its own pause": simulate(
            restarted, _config(restarted), 0, rule=AdaptDLRule
        ),
        f"fixed: {trace.np} slot, batch adapts": simulate(trace, None, 0),
        f"{fixed}, batch {batch}, equal shares": simulate(plain, None, 0),
        f"{fixed}, batch adapts, equal shares": simulate(equal, None, 0),
        f"{fixed}, batch and shares adapt": simulate(average, None, 0),
    }
    *_, no_adapting, _, adapting = results.values()
    rows: list[tuple[str, float, Any, Any]] = [
        (name, result.done, result.rescales, result.cost) for name, result in results.items()
    ]
    return [
        {
            "policy": name,
            "useful_examples": done,
            "share_of_oracle": done / oracle,
            "over_fixed_slots_and_batch": done / no_adapting.done,
            "over_fixed_slots_that_adapt": done / adapting.done,
            "rescales": rescales,
            "host_hours": cost,
        }
        for name, done, rescales, cost in [*rows, ("the oracle", oracle, "-", "-")]
    ]


def _integral(values: list[tuple[float, float]], end: float) -> float:
    """Return the integral over time of values that each hold until the next sample."""
    times = [at for at, _ in values[1:]] + [end]
    return sum((after - at) * v for (at, v), after in zip(values, times, strict=True))


def _flapping(jitter: float, progress: Say) -> dict[str, Any]:
    progress(f"flapping at {100 * jitter:.0f} % jitter")
    worst = total = 0
    for trace in WORKLOADS.values():
        shaky = dataclasses.replace(trace, jitter=jitter)
        result = simulate(shaky, _config(shaky), 0)
        times = [d.at_s for d in result.decisions if d.at_s >= 0.1 * shaky.duration_s]
        total += len(times)
        worst = max([worst, *(sum(0 <= other - at < 600 for other in times) for at in times)])
    return {
        "jitter": jitter,
        "rescales_per_run_in_steady_state": total / len(WORKLOADS),
        "most_in_10_minutes": worst,
    }


def _cost(progress: Say) -> list[dict[str, Any]]:
    rows = []
    dear = tuple(
        dataclasses.replace(host, price=1.0 if number < 4 else 3.0)
        for number, host in enumerate(_HOSTS)
    )
    for budget in (2.0, 5.0, 10.0):
        progress(f"budget {budget:g}/h")
        trace = _trace(hosts=dear)
        config = _config(trace, Objective("cost", budget=budget))
        result = simulate(trace, config, 0, with_best=True)
        late = [s for s in result.samples if s.at_s >= 0.1 * trace.duration_s and s.goodput > 0]
        rows.append(
            {
                "goal": f"budget {budget:g}/h",
                "kept": max(sample.rate for sample in result.samples) <= budget,
                "share_of_best": statistics.mean(s.goodput / s.best for s in late),
                "cost": result.cost,
            }
        )
    examples = 2e7
    fastest = best_at(_BASE, dear, 1.0, 1000.0).goodput
    for slack in (1.3, 2.0, 5.0):
        deadline_s = slack * examples / fastest
        progress(f"deadline {deadline_s:.0f} s")
        trace = dataclasses.replace(_trace(hosts=dear, examples=examples), duration_s=1e6)
        goal = Objective("cost", deadline_s=deadline_s, target=examples)
        result = simulate(trace, _config(trace, goal), 0)
        cheapest = _cheapest(dear, examples, deadline_s)
        rows.append(
            {
                "goal": f"deadline {slack:g} x the fastest ({deadline_s:.0f} s)",
                "kept": result.reached_s is not None and result.reached_s <= deadline_s,
                "share_of_best": cheapest / result.cost,
                "cost": result.cost,
            }
        )
    return rows


def _cheapest(hosts: tuple[HostOffer, ...], examples: float, deadline_s: float) -> float:
    """Return the cost of the cheapest fixed number of hosts that meets the deadline."""
    found = []
    by_price = sorted(hosts, key=lambda host: host.price or 0.0)
    for number in range(1, len(hosts) + 1):
        used = by_price[:number]
        goodput = best_at(_BASE, used, 1.0, 1000.0).goodput
        if examples / goodput <= deadline_s:
            rate = sum(host.price or 0.0 for host in used)
            found.append(rate * examples / goodput / 3600)
    return min(found)


def _decision_ms(hosts: int) -> dict[str, Any]:
    """Measure the time of a decision with hosts of two speeds and unequal shares."""
    offers = tuple(HostOffer(f"n{i}", 8, 2.0, 2.0 if i % 4 == 3 else 1.0) for i in range(hosts))
    seen = [Observation(1, 1, 64, 0, 0.1), Observation(2, 12, 32, 0, 0.06)]
    snapshot = Snapshot(
        hosts=offers,
        current=Allocation.of({"n0": 8, "n1": 4}),
        plan=BatchPlan(384),
        limits=BatchLimits(128, 8192),
        model=fit_step_time(seen),
        noise_scale=1000.0,
        measured=9,
        silent_s=0.0,
        pause_s=1.0,
        min_np=1,
        max_np=None,
        unequal_shares=True,
        constant_examples=4.0,
    )
    times = []
    for _ in range(20):
        placements.cache_clear()  # as after a change of the hosts
        began = time.perf_counter()
        decide(snapshot, 0.0)
        times.append(1000 * (time.perf_counter() - began))
    return {"slots": 8 * hosts, "median_ms": statistics.median(times), "best_ms": min(times)}

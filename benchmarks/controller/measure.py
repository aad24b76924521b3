"""Measures the controller on real jobs: what it settles on, after changes, and what it foretells.

The best static choice is looked for in the same job, once the policy is paused: for each number of
slots, batches that double or halve for as long as that brings more. What looks best is measured
again, since of many short stretches the luckiest one looks best.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import Any

from benchmarks.controller.observed import (
    Moment,
    goodput_between,
    moments,
    noise_between,
    seconds_until,
)
from benchmarks.controller.play import Play, playing
from benchmarks.controller.workloads import (
    CHANGES,
    FORECASTS,
    INITIAL_BATCH,
    MAX_BATCH,
    MOST_HOSTS,
    SLOTS,
    WORKLOADS,
)
from benchmarks.elasticity.stage import Stage
from benchmarks.testbed.command import Say
from benchmarks.testbed.launchers import FailedPlayError
from hvd_elastic.policy.forecast import forecast
from hvd_elastic.policy.replay import replay
from hvd_elastic.policy.snapshot import HostOffer

_GOODPUT = ("--policy", "goodput")
_SETTLE_S = (40.0, 90.0)
_CHANGE_S = (50.0, 100.0)
_JUDGED_S = 20.0
"""Over so long a time a goodput is taken, in which a job that has settled did not change."""
_SETTLING_S = 1.0
_STATIC_S = 5.0
_SIZES = (12, 10, 8, 6, 4, 2, 1)
_HOPELESS = 0.7
"""A number of slots that brings less of the best at its first batch is not looked into; after two
of them fewer slots are not tried."""
_AGAIN = 2
"""So many of the best are measured once more, in turn, twice."""
_SHARE = 0.95
_FORECAST_S = 20.0
_FORETOLD = (4, 8)

Row = dict[str, Any]


@dataclass(frozen=True)
class Static:
    """Slots and a batch that did not change, and what they brought [useful examples/s]."""

    slots: int
    batch: int
    goodput: float


def climb(
    measure: Callable[[int], float], start: int, at_start: float, least: int, most: int
) -> dict[int, float]:
    """Halve or double a batch for as long as that brings more; all that was measured.

    >>> climb(lambda batch: -abs(batch - 32), start=8, at_start=-24, least=4, most=64)
    {8: -24, 4: -28, 16: -16, 32: 0, 64: -32}
    """
    found = {start: at_start}
    for factor in (0.5, 2.0):
        batch = start
        while least <= int(batch * factor) <= most:
            before, batch = batch, int(batch * factor)
            found[batch] = measure(batch)
            if found[batch] < found[before]:
                break
        if len(found) > 2:
            break  # the summit lies on this side
    return found


def best_static(found: Sequence[Static]) -> Static:
    """The one that brought most; what was measured twice counts by its mean.

    >>> best_static([Static(2, 64, 90.0), Static(8, 64, 80.0), Static(2, 64, 60.0)])
    Static(slots=8, batch=64, goodput=80.0)
    """
    choices: dict[tuple[int, int], list[float]] = {}
    for static in found:
        choices.setdefault((static.slots, static.batch), []).append(static.goodput)
    means = [Static(*choice, mean(goodputs)) for choice, goodputs in choices.items()]
    return max(means, key=lambda static: static.goodput)


def measure_steady(stage: Stage, name: str, say: Say) -> list[Row]:
    """What the controller settles on, against the best static choice."""
    case = WORKLOADS[name]
    with playing(stage, case.workload, case.hosts, _GOODPUT) as play:
        play.make(case)
        play.settle(*_SETTLE_S, _JUDGED_S)
        end = play.records[-1]["mono"]
        row = _against_statics(play, end, case.hosts * SLOTS, say)
        rescales = play.since(play.since(0.0, "metrics")[0]["mono"], "rescale_started")
        row["rescales"] = sum(rescale["mono"] <= end for rescale in rescales)
        return [{"workload": name, **row}]


def measure_change(stage: Stage, name: str, say: Say) -> list[Row]:
    """How fast the controller finds the best choice anew."""
    change = CHANGES[name]
    with playing(stage, change.workload, change.hosts, _GOODPUT) as play:
        play.settle(*_SETTLE_S, _JUDGED_S)
        before = play.since(0.0, "metrics")[-1]
        began = play.make(change)
        play.settle(*_CHANGE_S, _JUDGED_S)
        end = play.records[-1]["mono"]
        row = _against_statics(play, end, change.hosts_after * SLOTS, say)
        goal = _SHARE * row["best_static_goodput"]
        found = [
            moment
            for moment in moments(play.records, row["noise_scale"], INITIAL_BATCH)
            if moment.mono <= end
        ]
        row["seconds_to_95_percent"] = seconds_until(found, began, goal, _JUDGED_S)
        rescales = play.since(began, "rescale_started")
        row["rescales_after"] = sum(rescale["mono"] <= end for rescale in rescales)
        row["slots_before"] = before["size"]
        return [{"change": name, **row}]


def measure_forecast(stage: Stage, name: str, say: Say) -> list[Row]:
    """What one and two hosts of one slot foretell of more, beside what these do."""
    with playing(stage, FORECASTS[name], MOST_HOSTS, slots=1) as play:
        for hosts in (1, 2):
            play.use(hosts, None)
            play.train(_FORECAST_S)
        offers = [HostOffer(f"host{number}", 1) for number in range(MOST_HOSTS)]
        try:
            told = forecast(replay(play.records), offers, MOST_HOSTS)
        except ValueError as error:
            raise FailedPlayError(str(error)) from error
        rows: list[Row] = []
        for entry in told:
            if entry.hosts not in _FORETOLD:
                continue
            row = {"workload": name, "hosts_seen": 2, "hosts": entry.hosts}
            if entry.unknown:
                say(f"  {entry.hosts} hosts: not known: {entry.unknown}")
                rows.append({**row, "not_known": entry.unknown})
                continue
            play.use(entry.slots, entry.global_batch_size)
            measured = _measure(play, math.inf)
            off = entry.throughput / measured - 1
            say(f"  {entry.hosts} hosts: {measured:.0f} examples/s, foretold with {off:+.0%}")
            rows.append(
                {
                    **row,
                    "batch": entry.global_batch_size,
                    "foretold_throughput": entry.throughput,
                    "measured_throughput": measured,
                    "error": off,
                }
            )
        return rows


# ----------------------------------------------------------------------------------------------


def _against_statics(play: Play, end: float, most: int, say: Say) -> Row:
    """What the policy settled on until ``end``, beside static choices measured from now on."""
    noise = noise_between(play.records, end - 2 * _JUDGED_S, end)
    found = moments(play.records, noise, INITIAL_BATCH)
    chosen = _last_before(found, end)
    goodput = goodput_between(found, end - _JUDGED_S, end)
    say(f"  chosen: {chosen.slots} slots, batch {chosen.batch}: {goodput:.0f} useful examples/s")
    play.pause_policy()
    statics = _statics(play, noise, [n for n in _SIZES if n <= most], chosen, say)
    best = best_static(statics)
    return {
        "share_of_best_static": goodput / best.goodput,
        "goodput": goodput,
        "slots": chosen.slots,
        "batch": chosen.batch,
        "best_static_goodput": best.goodput,
        "best_static_slots": best.slots,
        "best_static_batch": best.batch,
        "noise_scale": noise,
        "statics": [dataclasses.asdict(static) for static in statics],
    }


def _statics(
    play: Play, noise: float, sizes: Sequence[int], chosen: Moment, say: Say
) -> list[Static]:
    """The choice itself, then batches around the best one of the size before."""

    def measure(slots: int, batch: int) -> float:
        play.use(slots, batch)
        goodput = _measure(play, noise)
        say(f"  {slots} slots, batch {batch}: {goodput:.0f} useful examples/s")
        return goodput

    found = [Static(chosen.slots, chosen.batch, measure(chosen.slots, chosen.batch))]
    start = INITIAL_BATCH * 2 ** round(math.log2(chosen.batch / INITIAL_BATCH))
    best = 0.0
    hopeless = 0
    for slots in sizes:
        first = measure(slots, start)
        on_slots = {start: first}
        if first >= _HOPELESS * best:
            on_slots = climb(partial(measure, slots), start, first, INITIAL_BATCH, MAX_BATCH)
            hopeless = 0
            start = max(on_slots, key=lambda batch: on_slots[batch])
        else:
            hopeless += 1
        best = max(best, *on_slots.values())
        found += [Static(slots, batch, goodput) for batch, goodput in on_slots.items()]
        if hopeless == 2:
            break
    ranked = sorted(found, key=lambda static: -static.goodput)
    again = list(dict.fromkeys((static.slots, static.batch) for static in ranked))[:_AGAIN]
    found += [Static(*choice, measure(*choice)) for choice in again * 2]
    return found


def _measure(play: Play, noise: float) -> float:
    """Goodput of what is in force now."""
    play.train(_SETTLING_S)
    begin = play.records[-1]["mono"]
    play.train(_STATIC_S)
    found = moments(play.records, noise, INITIAL_BATCH)
    return goodput_between(found, begin, found[-1].mono)


def _last_before(found: Sequence[Moment], end: float) -> Moment:
    return [moment for moment in found if moment.mono <= end][-1]

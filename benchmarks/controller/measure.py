"""Measures the controller on real jobs: steady state, reaction to changes, and its forecasts.

The best static choice is searched in the same job, after the policy was paused: for each number of
slots, the batch is doubled or halved as long as that raises the goodput. The best choices are
measured again, since among many short measurements the best one is partly luck.
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
from hvd_elastic.policy.evidence import replay
from hvd_elastic.policy.forecast import forecast
from hvd_elastic.policy.snapshot import HostOffer
from hvd_elastic.records.events import event_of

_GOODPUT = ("--policy", "goodput")
_SETTLE_S = (40.0, 90.0)
_CHANGE_S = (50.0, 100.0)
_JUDGED_S = 20.0
"""Time over which a goodput is measured, and without changes after which a job has settled."""
_SETTLING_S = 1.0
_STATIC_S = 5.0
_SIZES = (12, 10, 8, 6, 4, 2, 1)
_HOPELESS = 0.7
"""A number of slots with less than this fraction of the best goodput at its first batch is not
examined further; after two of them fewer slots are not tried."""
_AGAIN = 2
"""Number of best choices that are measured again, alternately, twice each."""
_SHARE = 0.95
_FORECAST_S = 20.0
_FORETOLD = (4, 8)

Row = dict[str, Any]


@dataclass(frozen=True)
class Static:
    """A fixed number of slots and batch size, and their goodput [useful examples/s]."""

    slots: int
    batch: int
    goodput: float


def climb(
    measure: Callable[[int], float], start: int, at_start: float, least: int, most: int
) -> dict[int, float]:
    """Halve or double a batch as long as that raises the goodput; return all measurements.

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
            break  # the maximum lies on this side
    return found


def best_static(found: Sequence[Static]) -> Static:
    """Return the choice with the highest goodput; repeated measurements count by their mean.

    >>> best_static([Static(2, 64, 90.0), Static(8, 64, 80.0), Static(2, 64, 60.0)])
    Static(slots=8, batch=64, goodput=80.0)
    """
    choices: dict[tuple[int, int], list[float]] = {}
    for static in found:
        choices.setdefault((static.slots, static.batch), []).append(static.goodput)
    means = [Static(*choice, mean(goodputs)) for choice, goodputs in choices.items()]
    return max(means, key=lambda static: static.goodput)


def measure_steady(stage: Stage, name: str, say: Say) -> list[Row]:
    """Measure what the controller settles on, against the best static choice."""
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
    """Measure how fast the controller finds the best choice again after a change."""
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
    """Compare the forecast from one and two hosts of one slot with measurements on more hosts."""
    with playing(stage, FORECASTS[name], MOST_HOSTS, slots=1) as play:
        for hosts in (1, 2):
            play.use(hosts, None)
            play.train(_FORECAST_S)
        offers = [HostOffer(f"host{number}", 1) for number in range(MOST_HOSTS)]
        try:
            told = forecast(replay(map(event_of, play.records)), offers, MOST_HOSTS)
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
    """Compare the policy's choice until ``end`` with static choices, which are measured now."""
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
    """Measure the policy's choice, then for each size batches around the previous size's best."""

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
    """Measure the goodput of the present slots and batch."""
    play.train(_SETTLING_S)
    begin = play.records[-1]["mono"]
    play.train(_STATIC_S)
    found = moments(play.records, noise, INITIAL_BATCH)
    return goodput_between(found, begin, found[-1].mono)


def _last_before(found: Sequence[Moment], end: float) -> Moment:
    return [moment for moment in found if moment.mono <= end][-1]

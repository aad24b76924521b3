"""Decide whether to change the slots of a run, to which, and why, as a pure function.

The value of a change is its expected gain over a horizon, less the pause of the rescale and the
expected loss if the change turns out badly. Probabilities follow from the uncertainty of the
step-time model. So an allocation that was never measured is tried as soon as the possible gain is
worth the cost of a try.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvd_elastic.formatting import count, duration_words, hosts_named
from hvd_elastic.model.goodput import statistical_efficiency
from hvd_elastic.model.step_time import Observation
from hvd_elastic.policy.objective import Objective, Parameters
from hvd_elastic.policy.scoring import (
    Scores,
    expected_gain_and_loss,
    placements,
    score_allocations,
    sizes_to_try,
)
from hvd_elastic.policy.snapshot import Allocation, Decision, Memory, Snapshot
from hvd_elastic.run_events import Action, PredictionMissed

_NOTABLE = 0.005
"""A relative gain below this is reported as no gain."""
_SURE = 0.05
"""Standard deviation of its logarithm above which a goodput is reported with its uncertainty."""
_MISSED = 0.8
"""A prediction is missed if less than this part of the predicted goodput was measured."""
_DIFFERS = 0.1
"""Relative error above which a part of a prediction is named as the cause."""
_STARVED = 0.1
"""Part of the time that further slots would wait for data, above which it is said."""
_QUICK_CHANGES = 2
"""Number of changes before the cool-down begins to double."""


def decide(
    snapshot: Snapshot,
    now: float,
    objective: Objective | None = None,
    parameters: Parameters | None = None,
) -> Decision:
    """Decide which slots a run should use.

    Args:
        now: monotonic time [s].
        objective: objective of the run; None: goodput.
        parameters: parameters of the policy; None: the defaults.

    Returns:
        The decision with its reason.

    Source: Pollux, OSDI 2021, sections 3.3 and 4.2 (gain over a horizon less the pause, speedup per
    slot). Uncertainty, placement, cost and hysteresis are added here.
    """
    goal, how = objective or Objective(), parameters or Parameters()
    waiting = _why_undecided(snapshot, goal, how)
    if waiting:
        return Decision("stay", waiting, snapshot.current, known=False)
    options = _options(snapshot, goal)
    scores = score_allocations(snapshot, options)
    possible = scores.goodput > 0
    if not possible.any():
        return Decision(
            "stay",
            "no batch plan keeps to the limits of the batch size on any number of slots",
            snapshot.current,
        )
    ranking = _rank(snapshot, goal, how, options, scores, now)
    best, why = ranking.best, ranking.why + _why_starved(snapshot, options, scores)
    kept = ranking.kept
    if options[best] == snapshot.current:
        return Decision("stay", why, snapshot.current, kept=kept)
    target = options[best]
    held = _held_back(snapshot, how, target, ranking, now)
    if held:
        return Decision("stay", f"{why}; {held}", snapshot.current, wish=target, kept=kept)
    goodput, batch = float(scores.goodput[best]), int(scores.batch[best])
    action = _action(snapshot.current, target)
    return Decision(action, why, target, kept=kept, goodput=goodput, batch=batch)


def out_of_reach(snapshot: Snapshot, now: float, objective: Objective) -> str:
    """Return why a deadline cannot be met, judged by earlier measurements of the run.

    Args:
        snapshot: state of the run, which need not train yet.
        now: monotonic time [s].

    Returns:
        The reason, with the fastest allocation; empty if it can be met or this is not known.
    """
    unknown = snapshot.model is None or math.isnan(snapshot.noise_scale) or not snapshot.hosts
    if objective.deadline_s is None or objective.target is None or unknown:
        return ""
    options = [option for option in _options(snapshot, objective) if option.slots]
    scores = score_allocations(snapshot, options)
    allowed = scores.goodput > 0
    if objective.budget is not None:
        allowed &= scores.rate <= objective.budget
    if not allowed.any():
        return ""
    best = int(np.argmax(np.where(allowed, scores.goodput, -np.inf)))
    left_s = max(0.0, snapshot.started_at + objective.deadline_s - now)
    todo = max(0.0, objective.target - snapshot.done)
    needed_s = todo / scores.goodput[best]
    if needed_s <= left_s:
        return ""
    return (
        f"the deadline cannot be met, by what this run has measured: {todo:.0f} useful examples "
        f"take {duration_words(needed_s)} and {duration_words(left_s)} are left, on the fastest "
        f"choice, {_describe(options[best], scores, best)}"
    )


def compare_prediction(
    decision: Decision, then: Snapshot, now: Snapshot, timed: Observation
) -> PredictionMissed | None:
    """Compare the predicted goodput of a change with the measured one.

    Args:
        then: snapshot that the decision was made by.
        now: present snapshot, on the slots that were decided on.

    Returns:
        The event, with what differs; None if at least four fifths of the prediction were measured.
    """
    assert then.model is not None
    size = timed.ranks * timed.atomic_batch_size * (timed.accumulation_steps + 1)
    initial = now.limits.initial_batch_size
    useful = [
        float(statistical_efficiency(noise, initial, max(size, initial)))
        for noise in (now.noise_scale, then.noise_scale)
    ]
    measured = size * useful[0] / timed.step_s
    if not measured < _MISSED * decision.goodput:
        return None
    expected_s = then.model.step_s(
        timed.hosts, timed.ranks, timed.atomic_batch_size, timed.accumulation_steps, timed.slowness
    )
    slower = timed.step_s / float(expected_s)
    causes = []
    if slower > 1 + _DIFFERS:
        causes.append(
            f"a step of {size:.0f} examples takes {timed.step_s:.2g} s, {slower:.1f} times as long "
            "as predicted"
        )
    if size < (1 - _DIFFERS) * decision.batch:
        causes.append(f"the batch is {size:.0f} examples, not {decision.batch}")
    if useful[0] < (1 - _DIFFERS) * useful[1]:
        before = "infinite" if math.isinf(then.noise_scale) else f"{then.noise_scale:.0f}"
        causes.append(
            f"the gradient noise scale is {now.noise_scale:.0f} examples, not {before}, so larger "
            "batches bring less"
        )
    why = ": " + "; ".join(causes) if causes else ""
    return PredictionMissed(
        decision.goodput,
        measured,
        f"{decision.goodput:.0f} useful examples/s were predicted on "
        f"{count(timed.ranks, 'slot')}, and {measured:.0f} are measured{why}",
    )


def remember(memory: Memory, decision: Decision, current: Allocation, now: float) -> Memory:
    """Return the memory for the next decision."""
    if decision.action == "stay":
        wish = decision.wish
        if wish is None:
            asked = None if decision.known else memory.asked  # its slots are given back
            return dataclasses.replace(memory, wish=None, wished=0, asked=asked)
        same = memory.wish is not None and _action(current, wish) == _action(current, memory.wish)
        return dataclasses.replace(memory, wish=wish, wished=memory.wished + 1 if same else 1)
    # Slots may take minutes to start; asking for the same ones again is not another change.
    again = decision.target == memory.asked
    return Memory(changed_at=now, changes=memory.changes + (not again), asked=decision.target)


def surroundings_changed(memory: Memory) -> Memory:
    """Return the memory after hosts came or left or step times changed: the cool-down restarts."""
    return dataclasses.replace(memory, changes=0)


# ----------------------------------------------------------------------------------------------


def _why_undecided(snapshot: Snapshot, goal: Objective, how: Parameters) -> str:
    """Return why no decision is possible; empty if one is."""
    if not snapshot.current.slots:
        return "nothing trains yet"
    if snapshot.model is None or snapshot.measured < how.evidence:
        have = "none" if not snapshot.measured else str(snapshot.measured)
        return f"{have} of {count(how.evidence, 'measurement')} on {snapshot.current} so far"
    if snapshot.silent_s > how.silence_s:
        silent = duration_words(snapshot.silent_s)
        return f"no measurement for {silent}: what was known may be out of date"
    if math.isnan(snapshot.noise_scale):
        return "the gradient noise scale is not known yet"
    if not snapshot.hosts:
        return "the hostfile offers no slot that can be used"
    if goal.kind == "cost":
        missing = [host.name for host in snapshot.hosts if host.price is None]
        if len(missing) == len(snapshot.hosts):
            return "no host of the hostfile has a price: add price= to its line"
    return ""


def _options(snapshot: Snapshot, goal: Objective) -> list[Allocation]:
    hosts = tuple(h for h in snapshot.hosts if goal.kind != "cost" or h.price is not None)
    offered = sum(host.slots for host in hosts)
    most = min(offered, snapshot.max_np or offered)
    least = min(max(snapshot.min_np, sum(host.slots for host in hosts if host.pinned)), most)
    sizes = sizes_to_try(least, most, snapshot.current.slots, [host.slots for host in hosts])
    found = placements(hosts, tuple(sizes), snapshot.current)
    return [snapshot.current, *(a for a in found if a != snapshot.current)]


@dataclass(frozen=True)
class _Ranking:
    """The best option.

    Attributes:
        best: index of the option.
        must: whether to change at once because a limit is broken.
        kept: whether the option fulfils the objective.
    """

    best: int
    why: str
    must: bool
    kept: bool = True


def _rank(
    snapshot: Snapshot,
    goal: Objective,
    how: Parameters,
    options: Sequence[Allocation],
    scores: Scores,
    now: float,
) -> _Ranking:
    goodput = scores.goodput
    fits, broken, limit = _limits(snapshot, goal, how, scores, now)
    fits &= goodput > 0
    missing = _allocation_is_gone(snapshot)
    fits[0] &= not missing
    if not fits.any():
        return _nearest_to_objective(goal, options, scores, limit)
    by_deadline = goal.deadline_s is not None
    value = goodput / np.maximum(scores.rate, 1e-9) if by_deadline else goodput
    # A further slot must bring a part of the mean goodput of those in use.
    worth = 0.0 if by_deadline else how.slot_worth * goodput[0] / scores.slots[0]
    if not fits[0]:  # the present allocation is not allowed, so take the best of those that are
        best = int(np.argmax(np.where(fits, value - worth * scores.slots, -np.inf)))
        cause = missing or broken
        return _Ranking(best, f"{cause}; {_describe(options[best], scores, best)}", must=True)

    horizon = how.horizon_s
    if goal.target is not None and goodput[0] > 0:
        horizon = min(horizon, max(0.0, goal.target - snapshot.done) / goodput[0])
    unsure = np.minimum(scores.uncertainty, how.max_uncertainty)
    unsure[0] = 0.0
    here = float(value[0])
    gain, loss, bad = expected_gain_and_loss(value, unsure, here)
    net = (
        gain * horizon
        - here * snapshot.pause_s
        - loss * how.trial_s
        - bad * here * snapshot.pause_s
        - worth * (scores.slots - scores.slots[0]) * horizon
    )
    net[0] = 0.0
    net = np.where(fits, net, -np.inf)
    best = int(np.argmax(net))
    if net[best] < how.min_gain * here * horizon or best == 0:
        per = "for each unit of money" if by_deadline else ""
        stay = _why_stay(
            options, scores, 3600 * value if per else value, net, per, snapshot.pause_s
        )
        return _Ranking(0, f"{stay}{limit and '; '}{limit}", must=False)
    sure = f", give or take {100 * math.expm1(unsure[best]):.0f} %," if unsure[best] > _SURE else ""
    why = (
        f"{_describe(options[best], scores, best)}{sure} instead of {goodput[0]:.0f} on "
        f"{count(options[0].slots, 'slot')}"
    )
    if by_deadline:
        why += (
            f"; {3600 * scores.goodput[best] / scores.rate[best]:.0f} instead of "
            f"{3600 * goodput[0] / max(scores.rate[0], 1e-9):.0f} useful examples for each unit "
            "of money"
        )
    elif goodput[best] >= (1 + how.min_gain) * goodput[0]:
        more = 100 * (goodput[best] / goodput[0] - 1)
        why += f", which is {more:.0f} % more for {_cost_words(options, best, snapshot.pause_s)}"
    else:
        freed = int(scores.slots[0] - scores.slots[best])
        less = 1 - goodput[best] / goodput[0]
        brought = f"{100 * less:.0f} % of it" if less >= _NOTABLE else "nothing"
        give_back = f"giving back {count(freed, 'slot')} that brought {brought}"
        why += f": {give_back if freed > 0 else 'worth trying'}"
    return _Ranking(best, f"{why}{limit and '; '}{limit}", must=False)


def _limits(
    snapshot: Snapshot, goal: Objective, how: Parameters, scores: Scores, now: float
) -> tuple[np.ndarray, str, str]:
    """Return which options the objective allows, why the current one is not, and the limits.

    The last two are words for the reason of a decision.
    """
    fits = np.ones(len(scores.slots), bool)
    goodput = scores.goodput
    broken = []
    said = []
    if goal.kind == "efficiency":
        # Speedup is relative to one slot, or to the fewest slots that have a batch plan.
        fewest = np.min(scores.slots[goodput > 0])
        alone = int(np.argmax(np.where(scores.slots == fewest, goodput, -np.inf)))
        one = goodput[alone] / fewest
        # Be optimistic where nothing was measured: trying few slots costs little.
        doubt = math.exp(min(float(scores.uncertainty[alone]), how.max_uncertainty))
        per_slot = goodput / scores.slots / np.where(scores.slots == fewest, one, one * doubt)
        least = goal.min_speedup_per_slot
        fits &= per_slot >= least
        if per_slot[0] < 0.95 * least and not fits[0]:
            broken.append(f"a slot brings {per_slot[0]:.2f} of what one alone does, not {least:g}")
        elif not fits[0]:
            fits[0] = True  # so near to the limit, noise would cause changes to and fro
        said.append(f"at least {least:g} of a single slot's goodput for each slot")
    if goal.budget is not None:
        allowed = scores.rate <= goal.budget
        fits &= allowed
        if not allowed[0]:
            broken.append(f"{scores.rate[0]:g} per hour is above the budget of {goal.budget:g}")
        said.append(f"within {goal.budget:g} per hour")
    if goal.deadline_s is not None and goal.target is not None:
        left_s = snapshot.started_at + goal.deadline_s - now
        todo = max(0.0, goal.target - snapshot.done)
        needs = todo / np.maximum(goodput, 1e-9) + snapshot.pause_s
        allowed = needs <= left_s * (1 - how.deadline_margin)
        # The present allocation is given up only when it would miss the deadline itself.
        allowed[0] = needs[0] - snapshot.pause_s <= left_s * (1 - how.deadline_margin / 2)
        fits &= allowed
        left = duration_words(max(left_s, 0.0))
        if not allowed[0]:
            broken.append(f"{duration_words(needs[0])} are needed and {left} are left")
        said.append(f"{left} left for {todo:.0f} useful examples")
    return fits, " and ".join(broken), ", ".join(said)


def _allocation_is_gone(snapshot: Snapshot) -> str:
    """Return why the present slots are not available or allowed any more; empty if they are."""
    offered = {host.name: host.slots for host in snapshot.hosts}
    gone = [host for host, slots in snapshot.current.counts if slots > offered.get(host, 0)]
    if gone:
        return f"{count(len(gone), 'host')} in use ({', '.join(gone[:4])}) cannot be used further"
    used = dict(snapshot.current.counts)
    unused = [h.name for h in snapshot.hosts if h.pinned and used.get(h.name, 0) < h.slots]
    if unused:
        return f"not all slots of pinned {hosts_named(unused)} are in use"
    slots = snapshot.current.slots
    if slots > (snapshot.max_np or slots):
        return f"{count(slots, 'slot')} in use, above the most allowed, {snapshot.max_np}"
    if slots < min(snapshot.min_np, sum(offered.values())):
        return f"{count(slots, 'slot')} in use, below the least allowed, {snapshot.min_np}"
    return ""


def _nearest_to_objective(
    goal: Objective, options: Sequence[Allocation], scores: Scores, limit: str
) -> _Ranking:
    """Return the option that comes nearest to an objective that none fulfils."""
    possible = scores.goodput > 0
    if goal.budget is not None:
        best = int(np.lexsort((-scores.goodput, np.where(possible, scores.rate, np.inf)))[0])
        what = f"the cheapest costs {scores.rate[best]:g} per hour"
    elif goal.deadline_s is not None:
        best = int(np.argmax(scores.goodput))
        what = "this is the fastest"
    else:
        best = int(np.argmax(np.where(possible, scores.goodput / scores.slots, -np.inf)))
        what = "this wastes least"
    best = 0 if scores.goodput[best] <= 0 else best
    why = f"nothing keeps to it ({limit}); {what}: {_describe(options[best], scores, best)}"
    return _Ranking(best, why, must=False, kept=False)


def _describe(option: Allocation, scores: Scores, index: int) -> str:
    text = (
        f"{count(option.slots, 'slot')} on {count(option.hosts, 'host')} ({option}) with a batch "
        f"of {scores.batch[index]:.0f}: {scores.goodput[index]:.0f} useful examples/s expected"
    )
    return text + (f" at {scores.rate[index]:g} per hour" if scores.rate[index] else "")


def _why_stay(
    options: Sequence[Allocation],
    scores: Scores,
    value: np.ndarray,
    net: np.ndarray,
    per: str,
    pause_s: float,
) -> str:
    """Return the comparison of the current option with the best other one that is allowed.

    Args:
        options: all options, the current one first.
        value: quantity to compare: goodput, or useful examples ``per`` unit of money.
        net: net gain of each option; -inf where it is not allowed.
        per: unit of ``value`` in words; empty for goodput.
        pause_s: pause of a rescale [s].
    """
    slots = [count(option.slots, "slot") for option in options]
    text = f"{scores.goodput[0]:.0f} useful examples/s expected on {slots[0]}"
    if per:
        text += f", {value[0]:.0f} {per}"
    others = np.where(np.isfinite(net), value, -np.inf)
    others[0] = -np.inf
    second = int(np.argmax(others))
    if not np.isfinite(others[second]):
        return text
    more = value[second] / value[0] - 1
    if more < _NOTABLE:
        next_best = f"next: {value[second]:.0f} on {slots[second]}"
        return f"{text}, and no more on any other slots ({next_best})"
    return (
        f"{text}; {slots[second]} on {count(options[second].hosts, 'host')} would bring "
        f"{value[second]:.0f}, {100 * more:.1f} % more, which is not worth "
        f"{_cost_words(options, second, pause_s)}"
    )


def _cost_words(options: Sequence[Allocation], index: int, pause_s: float) -> str:
    further = options[index].slots - options[0].slots
    slots = f" and {count(further, 'further slot')}" if further > 0 else ""
    return f"a pause of {pause_s:.2g} s{slots}"


def _held_back(
    snapshot: Snapshot, how: Parameters, target: Allocation, ranking: _Ranking, now: float
) -> str:
    """Return why a change has to wait; empty if it does not."""
    if ranking.must:
        return ""
    memory = snapshot.memory
    cool_s = max(how.cooldown_s, how.cooldown_pauses * snapshot.pause_s)
    cool_s *= 2 ** max(0, memory.changes - _QUICK_CHANGES)
    cool_s = min(cool_s, how.max_cooldown_s)
    if now < memory.changed_at + cool_s:
        since = duration_words(now - memory.changed_at)
        return (
            f"waiting: the last change was {since} ago, and {duration_words(cool_s)} have to pass"
        )
    same = memory.wish is not None and _action(snapshot.current, memory.wish) == _action(
        snapshot.current, target
    )
    wished = (memory.wished if same else 0) + 1
    if wished < how.confirmations:
        return f"seen {wished} of {how.confirmations} times in a row"
    return ""


def _why_starved(snapshot: Snapshot, options: Sequence[Allocation], scores: Scores) -> str:
    """Return which further slots would wait for data, for the reason; empty: none would."""
    supply = snapshot.supply
    starved = np.where(scores.slots > scores.slots[0], scores.starved, 0.0)
    if supply is None or not (starved > _STARVED).any():
        return ""
    most = int(np.argmin(np.where(starved > _STARVED, scores.slots, np.inf)))
    return (
        f"; {count(options[most].slots, 'slot')} ({options[most]}) would wait for data "
        f"{100 * starved[most]:.0f} % of the time: its cores read "
        f"{supply.most(options[most].counts):.0f} examples/s at most, with "
        f"{1000 * supply.core_s:.2g} ms of a core for each"
    )


def _action(current: Allocation, target: Allocation) -> Action:
    if target.slots == current.slots:
        return "stay" if target == current else "move"
    return "grow" if target.slots > current.slots else "shrink"

"""What a run's own metrics say of it: step times by configuration, noise, pauses, progress.

Takes the fields of the run's events as they come and never trusts them: what is not a finite
number of the right sign is left out, and counted.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from hvd_elastic.model.goodput import BatchLimits, BatchPlan, statistical_efficiency
from hvd_elastic.model.step_time import Observation, StepTimeModel, fit_step_time, has_shifted
from hvd_elastic.policy.constant_part import ConstantPart
from hvd_elastic.policy.place import HostSpeeds
from hvd_elastic.policy.snapshot import Allocation

__all__ = ["Evidence", "Sharing"]

_WINDOW_S = 1.0
"""Shorter windows are joined: the clock of the metrics is not finer than a step."""
_MOST = 2**53
"""More examples, steps or seconds than any run has; beyond it floats are not exact."""
_SHORTEST_S = 1e-9
_KEPT = 12
_SETTLING = 1
"""Windows after a change that are not timed: readers start, memory is allocated."""
_UNEVEN = 1.2
_BALANCED_AFTER = 5
"""Reports, after which ranks that take so unlike times will not share out the batch any more."""
_SHIFT = 1.25
_SHIFT_WINDOWS = 4
_MOVED = 0.05
_NOISE_PATIENCE = 20
"""Windows after which a noise scale that nobody could tell counts as infinite."""
_FIRST_PAUSE_S = 1.0
_PAUSES = 8
_CONFIGURATIONS = 48
_PASSES = 16
"""Sizes of a pass whose own times are kept."""
_OWN_DRIFT = 0.05
"""What a rank's own time may lack of that of a step it makes alone: the optimizer's on a GPU."""
_DRIFT_PER_S = 0.4 / 3600
_MOST_DRIFT = 0.5
"""Links are shared and change unseen while nothing is timed on them: when hosts come or go an hour
later, step times across hosts are believed to 40 %, and what was found wanting is tried again."""


@dataclass(frozen=True)
class _Configuration:
    hosts: int
    ranks: int
    batch: int
    extra: float
    slowness: float


class Sharing(NamedTuple):
    """How many ranks share the cores of one machine."""

    ranks: int
    cores: int

    @property
    def ranks_per_core(self) -> float:
        return self.ranks / self.cores


class _Told(NamedTuple):
    """By a metrics event: when, and the run's progress; ``passes`` None: not told."""

    at_s: float
    step: float
    examples: float
    passes: float | None


class Evidence:
    """Collects measurements of one run.

    Attributes:
        rejected: reports that made no sense.
        done: useful examples so far.
        noise_scale: as last told [examples]; NaN: not known.
        limits: of the batch plan; None: nothing was told yet.
        unequal_shares: whether slow ranks get fewer examples of a step.
        densest: the most ranks for each core that steps were timed with; None: not known.
    """

    def __init__(self) -> None:
        self.rejected = 0
        self.done = 0.0
        self.noise_scale = math.nan
        self.limits: BatchLimits | None = None
        self.plan: BatchPlan | None = None
        self.unequal_shares = False
        self.densest: Sharing | None = None
        self._machines: dict[str, tuple[str, int]] = {}
        self._shares: tuple[int, ...] = ()
        self._adaptive = False
        self._allocation = Allocation()
        self._ranks: tuple[str, ...] = ()
        self._speeds = HostSpeeds()
        self._constant = ConstantPart()
        self._slowness: dict[str, float] = {}
        self._rank_s: Sequence[Any] = ()
        self._times: dict[_Configuration, deque[float]] = {}
        self._own: dict[_Configuration, deque[float]] = {}
        self._timed_at: dict[_Configuration, float] = {}
        self._pauses: deque[float] = deque(maxlen=_PAUSES)
        self._last: _Told | None = None
        self._passes = 1.0
        self._settling = _SETTLING
        self._uneven = 0
        self._measured = 0
        self._present: _Configuration | None = None
        """What trains now; None until it was timed."""
        self._measured_at = -math.inf
        self._windows = 0
        self._model: StepTimeModel | None = None
        self._fitted: dict[_Configuration, float] = {}
        self._fitted_own: dict[_Configuration, float] = {}
        self._drift: dict[_Configuration, float] = {}
        self._noise_looked_at = math.nan
        self.news = False
        """Something changed that a decision should know at once."""

    # -- what is told ----------------------------------------------------------------------

    def formed(self, hosts_of_ranks: Sequence[str]) -> None:
        """Another generation: the host of each rank, in their order."""
        counts: dict[str, int] = {}
        for host in hosts_of_ranks:
            counts[host] = counts.get(host, 0) + 1
        self._allocation = Allocation.of(counts)
        self._ranks = tuple(hosts_of_ranks)
        self._shares = ()
        self._last = None
        self._passes = self._planned_passes
        self._settling = _SETTLING
        self._uneven = 0
        self._measured = 0
        self._present = None

    def note(self, kind: str, fields: Mapping[str, Any], now: float) -> None:
        """An event of the run; those that say nothing of this are ignored.

        Args:
            kind: of the event.
            fields: as in events.jsonl.
            now: when it came [s].
        """
        if kind == "metrics":
            self._on_metrics(fields, now)
        elif kind == "batch_plan":
            self._on_plan(fields)
        elif kind == "agent_started":
            self._on_agent(fields)
        elif kind == "rescale_finished":
            pause = _number(fields.get("pause_s"))
            if pause is not None:
                self._pauses.append(pause)

    def _on_agent(self, fields: Mapping[str, Any]) -> None:
        host, cores = str(fields.get("host")), _whole(fields.get("cpus"), 1)
        if cores is not None:
            self._machines[host] = (str(fields.get("machine") or host), cores)

    def _on_plan(self, fields: Mapping[str, Any]) -> None:
        batch = _whole(fields.get("global_batch_size"), 1)
        extra = _whole(fields.get("accumulation_steps"), 0)
        if batch is None or extra is None:
            self.rejected += 1
            return
        self.plan = BatchPlan(batch, extra)
        self._last = self._present = None
        self._passes = self._planned_passes
        self._settling = _SETTLING
        limits = _limits(fields.get("limits"))
        if limits is not None:
            self.limits, self._adaptive = limits, True

    def _on_metrics(self, fields: Mapping[str, Any], now: float) -> None:
        step, examples = _number(fields.get("step")), _number(fields.get("examples"))
        if step is None or examples is None:
            self.rejected += 1
            return
        if fields.get("size") not in (None, self._allocation.slots):
            self._last = None  # of the world before
            return
        noise = _number(fields.get("noise_scale"))
        if noise is not None:
            self.noise_scale = noise
        self._note_shares(fields.get("shares"))
        self._note_speeds(fields.get("rank_s"), now)
        told = _Told(now, step, examples, _number(fields.get("passes")))
        last = self._last
        if last is None or step < last.step or examples < last.examples or now < last.at_s:
            self._last = told
            return
        passed_s, steps, made = now - last.at_s, step - last.step, examples - last.examples
        if steps < 1 or passed_s < _WINDOW_S:
            return
        self._last = told
        self._passes = self._planned_passes
        if told.passes is not None and last.passes is not None:
            self._passes = max(1.0, (told.passes - last.passes) / steps)
        self._note_window(passed_s / steps, made / steps, fields, now)
        self.done += made * self._efficiency()

    def _note_window(
        self, step_s: float, batch: float, fields: Mapping[str, Any], now: float
    ) -> None:
        self._measured_at = now
        self._windows += 1
        told = _whole(fields.get("global_batch_size"), 1)
        if not self._adaptive:
            # The batch is what full steps have; the last one of an epoch is smaller.
            known = self.plan.global_batch_size if self.plan else 0
            whole = told or max(known, math.ceil(batch - 0.01))
            if whole > 0 and whole != known:
                self.plan = BatchPlan(whole)
                self.limits = BatchLimits(whole, whole, max_accumulation_steps=0)
        plan = self.plan
        if self._settling > 0:
            self._settling -= 1
            return
        if self.unequal_shares and 0 < self._uneven <= _BALANCED_AFTER:
            return  # the ranks are about to share out the batch: other times are coming
        if plan is None or batch < 0.97 * plan.global_batch_size:
            return  # an epoch ended in it
        key = _Configuration(
            self._allocation.hosts,
            self._allocation.slots,
            plan.global_batch_size,
            round(4 * self._passes) / 4 - 1,  # where not all steps are alike, the rest is chance
            self.steps_slowness,
        )
        times = self._times.setdefault(key, deque(maxlen=_KEPT))
        times.append(step_s)
        self._present = key
        sharing = self.sharing(self._allocation.counts)
        self.densest = max(sharing, self.densest, key=_density)
        self._timed_at[key] = now
        self._drift.pop(key, None)
        self._measured += 1
        if has_shifted(times, _SHIFT_WINDOWS, _SHIFT_WINDOWS, _SHIFT):
            self._forget_what_is_out_of_date(key)
        while len(self._times) > _CONFIGURATIONS:
            del self._times[next(iter(self._times))]
        if len(self._timed_at) > 2 * _CONFIGURATIONS:
            self._timed_at = {known: self._timed_at[known] for known in self._times}

    def _note_shares(self, told: Any) -> None:
        """Examples of each rank in a full step; nothing is told where they are always equal."""
        if not isinstance(told, Sequence) or len(told) != len(self._ranks):
            return
        shares = tuple(whole for share in told if (whole := _whole(share, 1)) is not None)
        if len(shares) != len(told):
            return
        self.unequal_shares = True
        if shares != self._shares and (self._shares or max(shares) - min(shares) > 1):
            self._last = None
            self._settling = _SETTLING
            self._uneven = 0
        self._shares = shares

    def _note_speeds(self, rank_s: Any, now: float) -> None:
        if not isinstance(rank_s, Sequence) or not rank_s or len(rank_s) != len(self._ranks):
            return
        if rank_s == self._rank_s:
            return  # metrics come more often than the ranks report
        self._rank_s = rank_s
        told = [_number(seconds, _SHORTEST_S) or 0.0 for seconds in rank_s]
        self._uneven = self._uneven + 1 if max(told) > _UNEVEN * median(told) else 0
        if self.plan is not None and all(told):
            passes, examples = round(self._passes), self._examples(self.plan)
            self._constant.note(self._ranks, passes, examples, told)
            self._note_passes(self.plan, examples, told)
        by_host: dict[str, list[float]] = {}
        for host, value, load in zip(self._ranks, told, self._loads(), strict=True):
            if value:
                by_host.setdefault(host, []).append(value / load)
        # A host is as slow as its slowest slot: all wait for that.
        self._speeds.note({host: max(values) for host, values in by_host.items()}, now)
        before, self._slowness = self._slowness, self._speeds.slowness()
        for host, slowness in self._slowness.items():
            if abs(math.log(slowness / before.get(host, 1.0))) > 2 * _MOVED:
                self._forget_what_was_timed_meanwhile()

    def _note_passes(
        self, plan: BatchPlan, examples: Sequence[float], own_s: Sequence[float]
    ) -> None:
        """What the fastest of several ranks took for their own work: a step alone takes as long.

        So what a step takes beyond that is known to be the reduction.
        """
        if len(own_s) < 2:
            return  # the step itself was timed
        fastest = min(self.slowness(host) for host in self._ranks)
        of_fastest = [
            (made, took_s)
            for host, made, took_s in zip(self._ranks, examples, own_s, strict=True)
            if self.slowness(host) == fastest
        ]
        made, took_s = (median(values) for values in zip(*of_fastest, strict=True))
        key = _Configuration(1, 1, round(made), plan.accumulation_steps, fastest)
        if key.batch < 1:
            return
        times = self._own.pop(key, deque(maxlen=_KEPT))
        times.append(took_s * key.batch / made)
        self._own[key] = times
        if has_shifted(times, _SHIFT_WINDOWS, _SHIFT_WINDOWS, _SHIFT):
            self._own = {key: deque(list(times)[-_SHIFT_WINDOWS:], maxlen=_KEPT)}
        while len(self._own) > _PASSES:
            del self._own[next(iter(self._own))]

    def _forget_what_was_timed_meanwhile(self) -> None:
        """A host in use turned out slow: until that was known, the wrong speed was noted."""
        world = (self._allocation.hosts, self._allocation.slots)
        self._times = {k: v for k, v in self._times.items() if (k.hosts, k.ranks) != world}
        self._own = {}
        self._measured = 0
        self.news = True

    def _forget_what_is_out_of_date(self, key: _Configuration) -> None:
        """Steps of one configuration take another time than they did: what else changed with it?

        Where several hosts train, most likely the link between them: times on one host stand.
        """
        recent = list(self._times[key])[-_SHIFT_WINDOWS:]
        kept = {
            other: times
            for other, times in self._times.items()
            if key.hosts > 1 and other.hosts == 1
        }
        self._times = {**kept, key: deque(recent, maxlen=_KEPT)}
        if key.hosts == 1:
            self._own = {}
        self._model = None
        self.news = True

    def distrust_what_is_old(self, now: float) -> None:
        """Other things changed too: times across hosts that are old may not hold any more."""
        for key in self._times:
            if key.hosts > 1:
                age_s = max(0.0, now - self._timed_at[key])
                self._drift[key] = min(_DRIFT_PER_S * age_s, _MOST_DRIFT)
        self._model = None

    # -- what is known ---------------------------------------------------------------------

    @property
    def allocation(self) -> Allocation:
        """Slots that train now."""
        return self._allocation

    @property
    def worlds(self) -> set[tuple[int, int]]:
        """Numbers of (hosts, slots) that trained together and were timed."""
        return {(key.hosts, key.ranks) for key in self._times}

    def sharing(self, counts: Iterable[tuple[str, int]]) -> Sharing | None:
        """The machine whose cores the most ranks would share; None: no host is known.

        Several hosts that are parts of one machine share its cores. Where all that are known are,
        hosts that are not known count as further parts of it; else as machines like the others.

        Args:
            counts: host and number of ranks on it.
        """
        if not self._machines:
            return None
        known = list(self._machines.values())
        machines = {machine for machine, _ in known}
        common = max((cores for _, cores in known), key=[c for _, c in known].count)
        one = known[0] if len(machines) == 1 < len(known) else None
        ranks: dict[str, int] = {}
        cores_of: dict[str, int] = {}
        for number, (host, slots) in enumerate(counts):
            machine, cores = self._machines.get(host) or one or (f"machine {number}", common)
            ranks[machine] = ranks.get(machine, 0) + slots
            cores_of[machine] = cores
        found = [Sharing(ranks[machine], cores_of[machine]) for machine in ranks]
        return max(found, key=_density, default=None)

    @property
    def measured(self) -> int:
        """Timed windows since the allocation began to train."""
        return self._measured

    @property
    def present(self) -> Observation | None:
        """The step time of what trains now; None where it was not timed yet."""
        key = self._present
        if key is None or key not in self._times:
            return None
        times = self._times[key]
        return _observed(key, median(times), len(times), 0.0)

    @property
    def pause_s(self) -> float:
        """Typical pause of a rescale [s]; a guess before the first."""
        return median(self._pauses) if self._pauses else _FIRST_PAUSE_S

    def silent_s(self, now: float) -> float:
        """Since the last measurement [s]."""
        return now - self._measured_at

    def slowness(self, host: str) -> float:
        """Of a host against the fastest; 1 where it was not measured."""
        return self._slowness.get(host, 1.0)

    @property
    def noise(self) -> float:
        """Noise scale to decide with; NaN: wait for it.

        A fixed batch needs none. Where the batch adapts and, for long enough, no finite noise
        scale was told, gradients are so noisy that every example counts.
        """
        if not self._adaptive:
            return math.inf
        if math.isnan(self.noise_scale) and self._windows >= _NOISE_PATIENCE:
            return math.inf
        return self.noise_scale

    def noise_moved(self) -> bool:
        """Whether the noise scale changed since this said so, enough to matter."""
        now, then = self.noise_scale, self._noise_looked_at
        moved = not math.isnan(now) and not abs(math.log((now + 1) / (then + 1))) <= 2 * _MOVED
        if moved:
            self._noise_looked_at = now
        return moved

    def model(self) -> StepTimeModel | None:
        """Fitted to all that is not out of date; the same object while nothing changes much."""
        middle = {key: median(times) for key, times in self._times.items()}
        if not middle:
            return None
        own = {key: median(times) for key, times in self._own.items()}
        if self._model is None or _moved(middle, self._fitted) or _moved(own, self._fitted_own):
            self._drop_what_is_contradicted(middle)
            self._model = self._fit(middle)
            self._fitted = {key: middle[key] for key in self._times}
            self._fitted_own = own
        return self._model

    def _fit(
        self, middle: Mapping[_Configuration, float], but: Container[Any] = ()
    ) -> StepTimeModel:
        steps = [
            _observed(key, middle[key], len(times), self._drift.get(key, 0.0))
            for key, times in self._times.items()
            for _ in range(min(len(times), 4))
            if key not in but
        ]
        own = [
            _observed(key, median(times), len(times), _OWN_DRIFT)
            for key, times in self._own.items()
        ]
        return fit_step_time(steps + own)

    def _drop_what_is_contradicted(self, middle: Mapping[_Configuration, float]) -> None:
        """Old times across hosts that do not go with new ones: the link is not what it was."""
        old = [key for key in self._drift if key in self._times]
        new = [len(t) for key, t in self._times.items() if key.hosts > 1 and key not in old]
        if not old or sum(new) < _SHIFT_WINDOWS:
            return
        model = self._fit(middle, but=old)
        for key in old:
            atomic = key.batch / key.ranks / (key.extra + 1)
            told = model.predict(key.hosts, key.ranks, atomic, key.extra, key.slowness)
            off = abs(math.log(middle[key] / float(told.step_s)))
            if off > math.log(_SHIFT) + 2 * float(told.uncertainty):
                del self._times[key], self._drift[key]

    @property
    def constant_examples(self) -> float:
        """So many take a rank as long as what is constant in a pass; 0 where it is not known."""
        return self._constant.examples

    @property
    def steps_slowness(self) -> float:
        """The slowness at which equal shares would take as long as those that there are."""
        ranks = zip(self._ranks, self._loads(), strict=True)
        return round(max((self.slowness(host) * load for host, load in ranks), default=1.0), 1)

    @property
    def _planned_passes(self) -> float:
        return 1.0 if self.plan is None else self.plan.accumulation_steps + 1.0

    def _examples(self, plan: BatchPlan) -> Sequence[float]:
        """Of each rank in a full step."""
        return self._shares or [plan.global_batch_size / len(self._ranks)] * len(self._ranks)

    def _loads(self) -> list[float]:
        """The time that a rank's share takes, relative to an equal one."""
        if not self._shares:
            return [1.0] * len(self._ranks)
        extra = self.plan.accumulation_steps if self.plan else 0
        constant = (extra + 1) * self.constant_examples
        equal = constant + sum(self._shares) / len(self._shares)
        return [(constant + share) / equal for share in self._shares]

    def _efficiency(self) -> float:
        if self.plan is None or self.limits is None or not math.isfinite(self.noise):
            return 1.0
        initial = self.limits.initial_batch_size
        size = max(self.plan.global_batch_size, initial)
        return float(statistical_efficiency(self.noise, initial, size))


def _density(sharing: Sharing | None) -> float:
    return 0.0 if sharing is None else sharing.ranks_per_core


def _observed(key: _Configuration, step_s: float, windows: int, drift: float) -> Observation:
    atomic = key.batch / key.ranks / (key.extra + 1)
    return Observation(
        key.hosts, key.ranks, atomic, key.extra, step_s, key.slowness, steps=windows, drift=drift
    )


def _moved(now: Mapping[_Configuration, float], fitted: Mapping[_Configuration, float]) -> bool:
    return now.keys() != fitted.keys() or any(
        abs(math.log(now[key] / fitted[key])) > _MOVED / 2 for key in now
    )


def _limits(told: Any) -> BatchLimits | None:
    if not isinstance(told, Mapping):
        return None
    names = {f.name for f in dataclasses.fields(BatchLimits)}
    found = {name: told[name] for name in names if name in told}
    initial, most = (_whole(found.get(n), 1) for n in ("initial_batch_size", "max_batch_size"))
    optional = found.get("max_atomic_batch_size")
    rest = [found.get("min_atomic_batch_size", 1), found.get("max_accumulation_steps", 0)]
    if initial is None or most is None or most < initial:
        return None
    if any(_whole(value, 0) is None for value in rest):
        return None
    if optional is not None and _whole(optional, 1) is None:
        return None
    return BatchLimits(**found)


def _number(value: Any, least: float = 0.0) -> float | None:
    """A number from ``least`` to what a run can come to; else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if least <= value <= _MOST else None


def _whole(value: Any, least: int) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
        return None
    return value

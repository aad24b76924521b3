"""Keep the measured step times of a run: recent windows by configuration, shifts, and the fit.

The leader and the rank that reviews the batch plan each hold a :class:`StepTimings`, with
:data:`LEADER_RULES` and :data:`RANK_RULES`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from hvd_elastic.model.step_time import Observation, StepTimeModel, fit_step_time

_REFIT_CHANGE = 0.025
"""Change of a median in logarithms that leads to a new fit: half of the 5 % by which single windows
scatter."""
_TYPICAL_SCATTER, _LEAST_WINDOWS = 0.05, 4
"""Scatter of single windows, and number of windows from which it is measured."""
_FIT_WEIGHT = 4
"""Windows of one configuration that count in a fit. Further ones have errors in common."""
_ALONE_DRIFT = 0.05
"""Part of a single-rank step that compute times on a GPU may lack: that of the optimizer."""
_SCALED_DRIFT = 0.1
"""Drift of times that are taken to have shifted with those of another configuration."""
_DRIFT_PER_S = 0.4 / 3600
_MOST_DRIFT = 0.5
"""Growth and limit of the drift of step times across hosts. Links are shared and change unnoticed
while nothing is timed on them; after an hour, times are uncertain by 40 %."""


class Configuration(NamedTuple):
    """Key of a step time; see :class:`~hvd_elastic.model.step_time.Observation`."""

    hosts: int
    ranks: int
    atomic_batch_size: float
    accumulation_steps: float
    slowness: float = 1.0


@dataclass(frozen=True)
class TimingRules:
    """Constants by which an instance of :class:`StepTimings` treats its measurements.

    Attributes:
        windows: number of recent windows kept for each configuration.
        shift: factor by which times must be longer, or shorter, than before to have shifted.
        shift_windows: number of consecutive windows that must show a shift, and number of windows
            needed before them.
        refits: number of first windows of a configuration, each of which leads to a new fit.
        keep_others: whether times of other configurations are kept after a shift: those on one host
            if it was seen across hosts, and all, as much longer or shorter, if on one host.
        configurations: number of configurations kept; the least recently timed one is dropped.
    """

    windows: int
    shift: float
    shift_windows: int
    refits: int
    keep_others: bool
    configurations: int = 48


LEADER_RULES = TimingRules(
    # A window is the mean over at least a second, which scatters by a few per cent.
    windows=12,
    shift=1.25,
    shift_windows=4,
    # After each fit the leader scores all allocations again, so fit rarely.
    refits=1,
    # Most likely the link has changed, or a host has other work, which other numbers of ranks feel
    # too; measuring other worlds again would take rescales.
    keep_others=True,
)
RANK_RULES = TimingRules(
    # A window is the median of the steps since the last review. These may be ten short steps, all
    # of which a busy moment makes longer.
    windows=8,
    shift=1.5,
    # A false alarm costs little: the next reviews time the same configuration again.
    shift_windows=3,
    # The first reviews choose the batch, so they use each new time.
    refits=4,
    # Only the present world matters for the batch, and with old times the fit would take slower
    # compute for a slower all-reduce.
    keep_others=False,
)

_MOST_ALONE = 16
"""Configurations of a single rank whose compute times are kept."""


class StepTimings:
    """Step times by configuration, and the step-time model fitted to them.

    Args:
        rules: how measurements are treated.

    Attributes:
        fitted: last result of :meth:`model`; None: there is none, or the windows have shifted.

    >>> timings = StepTimings(RANK_RULES)
    >>> for step_s in [0.1, 0.1, 0.1, 0.2, 0.2, 0.2]:
    ...     shifted = timings.add_window(Configuration(1, 2, 16.0, 0), step_s)
    >>> shifted, round(float(timings.model().step_s(1, 2, 16, 0)), 3)
    (True, 0.2)
    """

    def __init__(self, rules: TimingRules) -> None:
        self.rules = rules
        self._steps: dict[Configuration, _Windows] = {}
        self._alone: dict[Configuration, _Windows] = {}
        """Compute times of one rank, which are the times of steps on a single rank."""
        self.fitted: StepTimeModel | None = None
        self._fitted_to: dict[tuple[bool, Configuration], tuple[int, float]] = {}

    def add_window(
        self, where: Configuration, step_s: float, compute_s: float = math.nan, now: float = 0.0
    ) -> bool:
        """Add a window; if its configuration has shifted, drop times that are out of date.

        Args:
            step_s: time of a step [s].
            compute_s: compute time of the slowest rank in all passes [s]; NaN: unknown.
            now: time of the measurement [s]; needed by :meth:`distrust_old` only.

        Returns:
            Whether the times have shifted.

        A machine that has other work slows all numbers of ranks on it. So they are taken to have
        shifted as much; else the priors would make a job that is as fast on one rank as on two look
        worth growing again and again. How much a link slows depends on their number.
        """
        returns = bool(self._steps) and next(reversed(self._steps)) != where
        windows = self._append(self._steps, where, self.rules.configurations)
        if returns:
            windows.left_at, windows.since_return = windows.timed_at, 0
        windows.since_return += 1
        windows.times.append((step_s, compute_s))
        windows.timed_at, windows.drift = now, None
        if not self._has_shifted(windows, self.rules.shift_windows):
            return False
        factor = windows.keep_last(self.rules.shift_windows)
        if where.hosts > 1 or not self.rules.keep_others:
            self._steps = {
                other: kept
                for other, kept in self._steps.items()
                if other == where or (self.rules.keep_others and other.hosts == 1)
            }
        # If it has shifted while others were timed, nobody knows which of their times are newer.
        is_here = windows.since_return > self.rules.shift_windows
        until = now if is_here else windows.left_at
        if where.hosts == 1:
            self._alone = {}
            for other, kept in self._steps.items():
                if other != where and kept.timed_at <= until:
                    kept.scale(factor)
        self.fitted = None
        return True

    def add_alone(self, where: Configuration, compute_s: float) -> None:
        """Add the compute time of one of several ranks [s] as the time of a single-rank step.

        The fit then attributes the rest of a step of several ranks to the all-reduce.
        """
        windows = self._append(self._alone, where, _MOST_ALONE)
        windows.times.append((compute_s, math.nan))
        if self._has_shifted(windows, self.rules.shift_windows):
            windows.keep_last(self.rules.shift_windows)
            self._alone = {where: windows}

    def may_have_shifted(self, where: Configuration) -> bool:
        """Return whether the last window of a configuration differs much from those before."""
        return where in self._steps and self._has_shifted(self._steps[where], 1)

    def forget_world(self, hosts: int, ranks: int) -> None:
        """Drop the step times on this number of hosts and ranks, and all compute times."""
        self._steps = {
            where: windows
            for where, windows in self._steps.items()
            if (where.hosts, where.ranks) != (hosts, ranks)
        }
        self._alone = {}

    def distrust_old(self, now: float) -> None:
        """Make times across hosts more uncertain with their age: links may have changed."""
        for where, windows in self._steps.items():
            if where.hosts > 1:
                age_s = max(0.0, now - windows.timed_at)
                windows.drift = min(_DRIFT_PER_S * age_s, _MOST_DRIFT)
        self.fitted = None

    @property
    def worlds(self) -> set[tuple[int, int]]:
        """Pairs (number of hosts, number of ranks) that were timed."""
        return {(where.hosts, where.ranks) for where in self._steps}

    @property
    def error(self) -> float:
        """Relative standard error of a ratio of two step times."""
        times = [step_s for step_s, _ in [*self._steps.values()][-1].times] if self._steps else []
        scatter = _TYPICAL_SCATTER
        if len(times) >= _LEAST_WINDOWS:
            middle = median(times)
            # The median deviation of a normal distribution is 0.67 of its standard deviation.
            scatter = 1.48 * median(abs(step_s / middle - 1) for step_s in times)
        # The error of a median is 1.25 times that of a mean.
        error = 1.25 * scatter / math.sqrt(min(max(len(times), 1), _FIT_WEIGHT))
        fit = 0.0 if self.fitted is None else self.fitted.noise
        return max(error, fit, *(windows.drift or 0.0 for windows in self._steps.values()))

    def observation(self, where: Configuration | None) -> Observation | None:
        """Return the typical step time of a configuration; None: it was not timed."""
        windows = None if where is None else self._steps.get(where)
        return None if where is None or windows is None else windows.observation(where)

    def model(self) -> StepTimeModel | None:
        """Return the model fitted to all windows; None if there are none.

        It is the same object until the windows have changed noticeably.
        """
        if not self._steps:
            return None
        if self.fitted is None or self._is_outdated(self._summary()):
            self._drop_contradicted()
            self.fitted = self._fit()
            self._fitted_to = self._summary()
        return self.fitted

    def state_dict(self) -> list[Any]:
        """Return step times as plain data, for a broadcast or a checkpoint."""
        return [
            [list(where), [list(each) for each in windows.times]]
            for where, windows in self._steps.items()
        ]

    def load_state_dict(self, state: Iterable[Any]) -> None:
        self._steps = {}
        for where, times in state:
            windows = self._append(self._steps, Configuration(*where), self.rules.configurations)
            windows.times.extend((step_s, compute_s) for step_s, compute_s in times)

    # ------------------------------------------------------------------------------------------

    def _append(
        self, windows: dict[Configuration, _Windows], where: Configuration, most: int
    ) -> _Windows:
        """Return the windows of a configuration and make it the most recent one."""
        found = windows.pop(where, None) or _Windows(deque(maxlen=self.rules.windows))
        windows[where] = found
        if len(windows) > most:
            del windows[next(iter(windows))]
        return found

    def _has_shifted(self, windows: _Windows, last: int) -> bool:
        times = [step_s for step_s, _ in windows.times]
        return has_shifted(times, last, self.rules.shift_windows, self.rules.shift)

    def _summary(self) -> dict[tuple[bool, Configuration], tuple[int, float]]:
        found = {
            (True, where): (min(len(windows.times), self.rules.refits), windows.step_s)
            for where, windows in self._steps.items()
        }
        alone = {(False, where): (1, windows.step_s) for where, windows in self._alone.items()}
        return found | alone

    def _is_outdated(self, summary: dict[tuple[bool, Configuration], tuple[int, float]]) -> bool:
        before = self._fitted_to
        return summary.keys() != before.keys() or any(
            count != before[key][0] or abs(math.log(step_s / before[key][1])) > _REFIT_CHANGE
            for key, (count, step_s) in summary.items()
        )

    def _fit(self, without: Collection[Configuration] = ()) -> StepTimeModel:
        seen = [
            windows.observation(where)
            for where, windows in self._steps.items()
            for _ in range(min(len(windows.times), _FIT_WEIGHT))
            if where not in without
        ]
        seen += [windows.observation(where, _ALONE_DRIFT) for where, windows in self._alone.items()]
        return fit_step_time(seen)

    def _drop_contradicted(self) -> None:
        """Drop old times across hosts that contradict new ones: the link has changed."""
        old = [w for w, windows in self._steps.items() if w.hosts > 1 and windows.drift is not None]
        new = [
            len(windows.times)
            for where, windows in self._steps.items()
            if where.hosts > 1 and where not in old
        ]
        if not old or sum(new) < self.rules.shift_windows:
            return
        model = self._fit(without=old)
        for where in old:
            predicted = model.predict(*where)
            off = abs(math.log(self._steps[where].step_s / float(predicted.step_s)))
            if off > math.log(self.rules.shift) + 2 * float(predicted.uncertainty):
                del self._steps[where]


@dataclass
class _Windows:
    """Windows of one configuration.

    Attributes:
        times: step time and compute time of each window, the oldest first [s].
        timed_at: time of the last measurement [s].
        drift: relative standard deviation of what may have changed since; None: nothing.
        left_at: time of the last measurement before others were timed [s].
        since_return: number of windows since then.
    """

    times: deque[tuple[float, float]]
    timed_at: float = 0.0
    drift: float | None = None
    left_at: float = 0.0
    since_return: int = 0

    @property
    def step_s(self) -> float:
        return median(step_s for step_s, _ in self.times)

    def keep_last(self, number: int) -> float:
        """Drop all but the last windows; return how much longer those are."""
        before = median(step_s for step_s, _ in [*self.times][:-number])
        self.times = deque([*self.times][-number:], maxlen=self.times.maxlen)
        return self.step_s / before

    def scale(self, factor: float) -> None:
        """Take the windows to have changed by a factor, with some doubt."""
        scaled = [(step_s * factor, compute_s * factor) for step_s, compute_s in self.times]
        self.times = deque(scaled, maxlen=self.times.maxlen)
        self.drift = math.hypot(self.drift or 0.0, _SCALED_DRIFT)

    def observation(self, where: Configuration, drift: float = 0.0) -> Observation:
        computed = [compute_s for _, compute_s in self.times if compute_s > 0]
        return Observation(
            *where[:4],
            step_s=self.step_s,
            slowness=where.slowness,
            steps=len(self.times),
            drift=self.drift or drift,
            own_s=median(computed) if computed else None,
        )


def has_shifted(times: Sequence[float], last: int, before: int, factor: float) -> bool:
    """Return whether the last times differ much from those before.

    Args:
        times: step times of one configuration, the oldest first [s].
        last: number of times that must lie on one side of the median of those before.
        before: number of times before them that are needed for a comparison.
        factor: factor by which each of the last must be longer, or each shorter.

    >>> [has_shifted(times, 2, 2, 1.5) for times in ([1, 1, 2, 2], [1, 1, 2, 1], [1, 2, 2])]
    [True, False, False]
    """
    earlier, recent = list(times)[:-last], list(times)[-last:]
    if len(earlier) < before:
        return False
    middle = median(earlier)
    return min(recent) > factor * middle or max(recent) * factor < middle

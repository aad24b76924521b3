"""Sampling of gradient statistics: in which steps, and the noise scale that the samples show."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from hvd_elastic.model.noise_scale import NoiseTracker
from hvd_elastic.model.step_time import StepTimeModel

__all__ = ["GradientNoise", "GradientSampling"]

_FIRST_STEPS = 200
"""Samples until which every step is sampled that can be."""
_UNCERTAIN_STEPS = 400
"""The same while the noise scale is known less well than to ``_UNCERTAIN``."""
_UNCERTAIN = 0.05
"""Relative standard error."""
_CHANGING = 0.2
"""Relative standard error above which the noise is taken to change, if it was known better."""
_SAMPLE_EVERY = (4, 64)
_SAMPLING_SHARE = 0.003
"""Share of the time that all ranks spend on sampling once the noise is known."""
_SAMPLES_AFTER_CHANGE = 100
"""Samples taken as often as possible when the noise has become uncertain."""
_PROBE_EVERY = (2, 8)
_PROBING_SHARE = 0.1
"""Share of the time that one rank alone spends on seeing the noise."""
_EVIDENCE = 20
"""Samples before the batch plan follows the noise."""


class GradientSampling:
    """Decides which steps are sampled.

    One rank that makes one pass of a step sees no noise, so it *probes*: it makes two passes of
    some steps.

    Attributes:
        every: one of so many steps is sampled.
        probe_every: one of so many steps is made in two passes by one rank alone.
    """

    def __init__(self) -> None:
        self.every = self.probe_every = 1
        self._certain_at = 0
        """Samples taken when the noise scale was last known well."""

    def sampled(self, step: int, *, probing: bool) -> bool:
        """Return whether the step after ``step`` is sampled."""
        return step % (self.probe_every if probing else self.every) == 0

    def schedule(
        self,
        tracker: NoiseTracker,
        step_s: Sequence[float],
        cost_s: float,
        *,
        bad_steps: bool,
        model: StepTimeModel | None,
        batch: int,
    ) -> None:
        """Decide how often to sample and probe from now on.

        Args:
            tracker: of the noise scale.
            step_s: times of steps since the last call [s].
            cost_s: what sampling a step takes [s]; NaN: not known.
            bad_steps: whether the last gradients were not finite.
            model: of the step time, where it is known.
            batch: global batch size.
        """
        self.every = self._next_every(tracker, step_s, cost_s, bad_steps)
        self.probe_every = 1 if self.every == 1 else _affordable_probes(model, batch)

    def _next_every(
        self, tracker: NoiseTracker, step_s: Sequence[float], cost_s: float, bad_steps: bool
    ) -> int:
        if tracker.steps < _FIRST_STEPS:
            return 1
        uncertainty = tracker.uncertainty()
        if tracker.steps < _UNCERTAIN_STEPS and uncertainty > _UNCERTAIN:
            return 1
        certain = uncertainty <= _CHANGING
        if certain:
            self._certain_at = tracker.steps
        often, seldom = _SAMPLE_EVERY
        changing = not certain and tracker.steps < self._certain_at + _SAMPLES_AFTER_CHANGE
        if changing or bad_steps:
            return often
        if not step_s or math.isnan(cost_s):
            return max(self.every, often)
        return min(max(math.ceil(cost_s / (_SAMPLING_SHARE * median(step_s))), often), seldom)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, for a broadcast or a checkpoint."""
        return {
            "sample_every": self.every,
            "certain_at": self._certain_at,
            "probe_every": self.probe_every,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what :meth:`state_dict` gave, here or in an earlier version."""
        self.every = state["sample_every"]
        self._certain_at = state.get("certain_at", 0)
        self.probe_every = state["probe_every"]


def _affordable_probes(model: StepTimeModel | None, batch: int) -> int:
    """Return how often one rank probes: a step in two passes costs their fixed part once more."""
    often, seldom = _PROBE_EVERY
    if model is None:
        return seldom
    cost = model.alpha_c / float(model.predict(1, 1, batch, 0).step_s)
    return min(max(math.ceil(cost / _PROBING_SHARE), often), seldom)


class GradientNoise:
    """The gradient noise scale, from what the ranks have sampled.

    Args:
        groups: parameter groups of the optimizer.
        initial_batch_size: that the user tuned for [examples].
        examples: in the data set.

    Attributes:
        tracker: smooths the samples.
        norms: squared norms of the gradient and variances of one example's, for each group and
            for all together; both relative to one unknown factor.
        scale: gradient noise scale [examples]; NaN: not known.
    """

    def __init__(self, groups: int, initial_batch_size: int, examples: int) -> None:
        self.tracker = NoiseTracker(groups, initial_batch_size, examples)
        self.norms = ([0.0] * (groups + 1), [0.0] * (groups + 1))
        self.scale = math.nan

    def add(self, reports: Sequence[np.ndarray]) -> list[bool]:
        """Add the samples of all ranks.

        Args:
            reports: of each rank, one row for each step that it has sampled: step, examples of
                the step, own passes, own weighted squared norms by group, squared norms of its
                part of the mean gradient by group. Steps that not all ranks have are left out.

        Returns:
            For each step that was added, in order, whether its gradients were finite.
        """
        tracker = self.tracker
        steps: dict[float, list[np.ndarray]] = defaultdict(list)
        for report in reports:
            for row in report.reshape(-1, 3 + 2 * tracker.quantities):
                steps[row[0]].append(row)
        finite = []
        for number, rows in sorted(steps.items()):
            passes = sum(row[2] for row in rows)
            if len(rows) < len(reports) or passes < 2:
                continue
            local, total = np.sum([row[3:] for row in rows], axis=0).reshape(2, -1)
            skipped = tracker.skipped
            tracker.add(local, total, rows[0][1], passes, int(number))
            finite.append(tracker.skipped == skipped)
        if tracker.steps:
            self.norms = (tracker.squared_norm().tolist(), tracker.variance().tolist())
            self.scale = tracker.noise_scale()
        return finite

    @property
    def cautious_scale(self) -> float:
        """The noise scale to choose a batch by [examples]; NaN: too few samples."""
        if self.tracker.steps < _EVIDENCE:
            return math.nan
        return self.tracker.cautious_noise_scale()

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, for a broadcast or a checkpoint."""
        return {
            "tracker": self.tracker.state_dict(),
            "norms": [list(values) for values in self.norms],
            "noise_scale": self.scale,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what :meth:`state_dict` gave; norms of other parameter groups are left out."""
        if state["tracker"] is not None:
            self.tracker.load_state_dict(state["tracker"])
        if len(state["norms"][0]) == len(self.norms[0]):
            self.norms = (list(state["norms"][0]), list(state["norms"][1]))
        self.scale = state["noise_scale"]

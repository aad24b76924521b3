"""Decide in which steps to sample gradient statistics, and estimate the noise scale from them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from hvd_elastic.model.noise_scale import NoiseTracker
from hvd_elastic.model.step_time import StepTimeModel

_FIRST_SAMPLES = 50
"""Number of first samples for which every step is sampled: the batch grows fastest by them."""
_LEARNING_SAMPLES = 200
"""Number of samples until the noise counts as known."""
_UNCERTAIN_SAMPLES = 400
"""The same while the relative standard error of the noise is above ``_UNCERTAIN``."""
_UNCERTAIN = 0.05
_LEARNING_SHARE = 0.01
"""Part of the time to spend on sampling until then, if that is a sample in 4 steps or more."""
_CHANGING = 0.2
"""Relative standard error above which the noise is assumed to change, if it was smaller before."""
_SAMPLE_EVERY = (4, 64)
"""Least and most steps between samples after that."""
_SAMPLING_SHARE = 0.003
"""Part of the time to spend on sampling once the noise is known."""
_SAMPLES_AFTER_CHANGE = 100
"""Number of samples taken at the least distance when the noise has become uncertain."""
_PROBE_EVERY = (2, 8)
"""Least and most steps between probes."""
_PROBING_SHARE = 0.1
"""Part of the time that a single rank may spend on probes."""
_EVIDENCE = 20
"""Number of samples needed before the batch plan depends on the noise."""


class GradientSampling:
    """Decides which steps are sampled.

    The noise shows only between passes. A single rank that takes a step in one pass therefore
    *probes*: it takes some steps in two passes.
    """

    def __init__(self) -> None:
        self.every = self.probe_every = 1
        self._certain_at = 0
        """Number of samples when the noise was last certain."""

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
            step_s: times of the steps since the last call [s].
            cost_s: time for sampling one step [s]; NaN: not known.
            model: step-time model; None: not known.
        """
        uncertainty = tracker.uncertainty()
        few = _UNCERTAIN_SAMPLES if uncertainty > _UNCERTAIN else _LEARNING_SAMPLES
        cost = cost_s / median(step_s) if step_s else math.nan
        often, seldom = _SAMPLE_EVERY
        if tracker.steps < few:
            is_first = tracker.steps < _FIRST_SAMPLES or math.isnan(cost)
            self.every = 1 if is_first else min(max(math.ceil(cost / _LEARNING_SHARE), 1), often)
            self.probe_every = 1
            return
        self.probe_every = _affordable_probes(model, batch)
        certain = uncertainty <= _CHANGING
        if certain:
            self._certain_at = tracker.steps
        changing = not certain and tracker.steps < self._certain_at + _SAMPLES_AFTER_CHANGE
        if changing or bad_steps:
            self.every = often
        elif math.isnan(cost):
            self.every = max(self.every, often)
        else:
            self.every = min(max(math.ceil(cost / _SAMPLING_SHARE), often), seldom)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data, for a broadcast or a checkpoint."""
        return {
            "sample_every": self.every,
            "certain_at": self._certain_at,
            "probe_every": self.probe_every,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.every = state["sample_every"]
        self._certain_at = state["certain_at"]
        self.probe_every = state["probe_every"]


def _affordable_probes(model: StepTimeModel | None, batch: int) -> int:
    """Return the steps between probes; a probe costs the fixed cost of one more pass."""
    often, seldom = _PROBE_EVERY
    if model is None:
        return seldom
    cost = model.alpha_c / float(model.predict(1, 1, batch, 0).step_s)
    return min(max(math.ceil(cost / _PROBING_SHARE), often), seldom)


class GradientNoise:
    """The gradient noise scale, estimated from the samples of all ranks.

    Args:
        initial_batch_size: global batch size that the user tuned for [examples].

    Attributes:
        norms: squared norms of the gradient and variances of one example's gradient, for each group
            and for all together; both relative to one unknown factor.
        scale: gradient noise scale [examples]; NaN: not known.
    """

    def __init__(self, groups: int, initial_batch_size: int, examples: int) -> None:
        self.tracker = NoiseTracker(groups, initial_batch_size, examples)
        self.norms = ([0.0] * (groups + 1), [0.0] * (groups + 1))
        self.scale = math.nan

    def add_samples(self, reports: Sequence[np.ndarray]) -> list[bool]:
        """Add the samples of all ranks.

        Args:
            reports: one array for each rank with one row for each step that it sampled: number of
                the step, its number of examples, the rank's number of passes, the rank's weighted
                squared norms by group, squared norms of its part of the mean gradient by group.
                Steps that not all ranks sampled are ignored.

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
            tracker.add_norms(local, total, rows[0][1], passes, int(number))
            finite.append(tracker.skipped == skipped)
        if tracker.steps:
            self.norms = (tracker.squared_norm().tolist(), tracker.variance().tolist())
            self.scale = tracker.noise_scale()
        return finite

    @property
    def cautious_scale(self) -> float:
        """Noise scale for the choice of a batch [examples]; NaN: there are too few samples."""
        if self.tracker.steps < _EVIDENCE:
            return math.nan
        return self.tracker.cautious_noise_scale()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data, for a broadcast or a checkpoint."""
        return {
            "tracker": self.tracker.state_dict(),
            "norms": [list(values) for values in self.norms],
            "noise_scale": self.scale,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a :meth:`state_dict`; norms of other parameter groups are ignored."""
        if state["tracker"] is not None:
            self.tracker.load_state_dict(state["tracker"])
        if len(state["norms"][0]) == len(self.norms[0]):
            self.norms = (list(state["norms"][0]), list(state["norms"][1]))
        self.scale = state["noise_scale"]

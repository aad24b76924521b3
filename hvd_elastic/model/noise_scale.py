"""How noisy gradients are: the gradient noise scale, estimated from norms that training has anyway.

A step takes the mean gradient of C passes, one for each rank and accumulation step. The mean of
fewer examples is longer than that of more, by an amount that says how much single examples differ.
All here is a pure function of a few norms, and the smoothing of their noisy results.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

__all__ = ["NoiseTracker", "gradient_noise_scale", "squared_norm_and_variance"]

_SIZE_STEPS = 4
_OUTLIER = 10.0
"""A step whose squared gradient is more than this many times those before counts as if it were."""
_FEWEST = 8
"""Steps before the filters begin: fewer that happen to agree prove nothing."""
_WANDERS = (0.001, 0.005, 0.02, 0.1)
"""How far the ratio may wander in a step of the initial batch size, by filter; relative."""
_TRENDS = (0.0, 0.0015)
"""How steady a growth in such a step may be, by filter; relative."""
_RESTLESS, _RESTLESS_BY = 3.0, 0.033
"""The prior probability of a filter falls with how far the ratio may wander, with this power of one
more than its multiple of the second number: mostly the noise of the norms looks like a change."""
_DAMPING = 0.995
"""Share of a trend that is left after such a step."""
_MEMORY = 0.995
"""Share of what a filter was right about that still counts after such a step."""
_NOISE_STEPS = 100
_VARIANCE_STEPS = 20
"""Steps that the noise of the norms, and the variance, are smoothed over."""
_FAR = 4.0
"""Standard deviations beyond which what a step says counts as if it were there."""
_LEAST_NOISE = 1e-6
"""Relative noise of the norms where they seem to have none."""
_TINY = 1e-100


def squared_norm_and_variance(
    local: ArrayLike,
    total: ArrayLike,
    global_batch_size: ArrayLike,
    passes: ArrayLike,
    population: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The squared norm of the true gradient, and the variance of one example's, from one step.

    Passes may have different numbers of examples, as those of ranks with unequal shares do. Let
    pass i have m_i of the step's M, ``w_i = m_i / M``, and g_i be its mean gradient. The mean of
    m_i examples varies by ``tr / m_i``, so ``E[|g_i|^2] = |G|^2 + tr / m_i``, and since
    ``w_i / m_i = 1 / M`` for a pass of any size, ``E[sum w_i |g_i|^2] = |G|^2 + C tr / M``. The
    gradient of the step is ``g = sum w_i g_i``, the mean of all M, so
    ``E[|g|^2] = |G|^2 + tr / M``. These two equations are solved. Equal passes are the case
    ``w_i = 1 / C``. Both results are unbiased and noisy: each can be negative. Smooth them
    separately, then divide.

    Args:
        local: sum over passes of w_i |g_i|^2; any shape S.
        total: |g|^2 of the mean gradient; shape S.
        global_batch_size: examples of the step, M; broadcastable to S.
        passes: C, at least 2; broadcastable to S.
        population: examples in the data set from which the step was drawn without replacement;
            the gradient sought is then that of this data set. None: drawn from a distribution.

    Returns:
        ``|G|^2`` and ``tr(Sigma)``, the latter for single examples; shape S, float64.

    Raises:
        ValueError: fewer than two passes: their difference is what is measured.

    Source: McCandlish et al. 2018, appendix A.1; weights and finite population: own derivation.

    >>> sqr, variance = squared_norm_and_variance(5.0, 3.0, global_batch_size=8, passes=2)
    >>> float(sqr), float(variance)
    (1.0, 16.0)
    """
    local, total = np.asarray(local, np.float64), np.asarray(total, np.float64)
    size, passes = np.asarray(global_batch_size, np.float64), np.asarray(passes, np.float64)
    if np.any(passes < 2):
        raise ValueError(f"passes is {passes.min():g}, the noise shows only between 2 or more")
    variance = (local - total) * size / (passes - 1)
    squared_norm = (passes * total - local) / (passes - 1)
    if population is not None:
        # Without replacement the mean of M of D examples varies by tr (1/M - 1/D): the same is
        # missing in local and total, so their difference holds and each is too small by tr/D.
        squared_norm = squared_norm + variance / population
    return squared_norm, variance


def gradient_noise_scale(squared_norm: ArrayLike, variance: ArrayLike) -> np.ndarray:
    """The batch size at which noise and gradient weigh the same, ``tr(Sigma) / |G|^2`` [examples].

    Args:
        squared_norm: smoothed ``|G|^2``; any shape S. Where it is not positive the gradient
            drowns in noise, and the result is infinite.
        variance: smoothed ``tr(Sigma)``; shape S. Where it is not positive the result is 0.

    Source: McCandlish et al. 2018, section 2.2 (B_simple).

    >>> gradient_noise_scale([2.0, -1.0, 1.0], [6.0, 6.0, -1.0]).tolist()
    [3.0, inf, 0.0]
    """
    squared_norm = np.asarray(squared_norm, np.float64)
    variance = np.asarray(variance, np.float64)
    noise = np.divide(
        variance, squared_norm, out=np.full(variance.shape, np.inf), where=squared_norm > 0
    )
    return np.where(variance > 0, noise, 0.0)


class _Filters:
    """Follows the ratio ``|G|^2 / tr`` of some quantities through time, each by several filters.

    A step's squared norm is the ratio times its variance, plus noise. A Kalman filter that takes
    the ratio to change by a trend that dies away (Gardner and McKenzie 1985), and to wander beside
    it, says what it is now and how sure that is. How much it changes nobody knows, so there is a
    filter for each of several beliefs, and their mean is told, weighted by how likely each has made
    what was seen, lately more than long ago (Magill 1965). So what lasts is averaged over all of
    the past, a trend is followed without delay, and after a change the filters that believe in
    changes take over.

    The gain of a step rests on steps before it alone: were its own noise in it, the ratio would be
    biased, since squared norm and variance of one step share theirs.

    Arrays have an axis of filters and one of quantities. Time and weights are in steps of the
    initial batch size.

    Source: Kalman 1960; Harvey 1989, sections 2.3 and 3.2 (trends); the rest as above.
    """

    def __init__(self, quantities: int) -> None:
        wanders, trends = (each.ravel()[:, None] for each in np.meshgrid(_WANDERS, _TRENDS))
        self._wander, self._trend = wanders**2, trends**2
        self._doubt = _RESTLESS * np.log1p(wanders / _RESTLESS_BY)
        shape = (len(wanders), quantities)
        self.first: list[list[list[float]]] = []
        self.level, self.slope = np.zeros(shape), np.zeros(shape)
        self.level_error, self.both_error = np.zeros(shape), np.zeros(shape)
        self.slope_error, self.likely = np.zeros(shape), np.zeros(shape)
        self.noise, self.variance = np.zeros(quantities), np.zeros(quantities)
        self.steps = 0

    def add(self, norm: np.ndarray, variance: np.ndarray, weight: float, age: float) -> None:
        """Take a step's squared norm and variance, ``age`` after the one before."""
        self.steps += 1
        if self.steps <= _FEWEST:
            weights = [weight] * len(norm)
            self.first.append([norm.tolist(), variance.tolist(), weights])
            if self.steps == _FEWEST:
                self._begin()
            return
        self._get_older(age)
        noise = self.noise / weight
        expected = self.level * variance
        spread = self.variance**2 * self.level_error + noise
        off = norm - expected
        mixed = (self.shares() * off).sum(0)
        self.likely *= _MEMORY**age
        self.likely -= (np.log(spread) + np.minimum(off**2 / spread, _FAR**2)) / 2
        reach = _FAR * np.sqrt(spread)
        off = np.clip(off, -reach, reach)
        gain = self.level_error * self.variance / spread
        slope_gain = self.both_error * self.variance / spread
        self.level += gain * off
        self.slope += slope_gain * off
        self.slope_error -= slope_gain * self.variance * self.both_error
        self.slope_error = np.maximum(self.slope_error, 0.0)  # rounding
        self.both_error *= noise / spread
        self.level_error *= noise / spread
        before = self.noise
        self.noise = before + (weight * mixed**2 - before) / min(self.steps, _NOISE_STEPS)
        self.noise = np.maximum(self.noise, self._least_noise())
        if self.steps < _NOISE_STEPS:
            # How sure a filter is was told in a noise that was not known yet.
            for errors in (self.level_error, self.both_error, self.slope_error):
                errors *= self.noise / before
        self.variance += (variance - self.variance) / min(self.steps, _VARIANCE_STEPS)

    def _begin(self) -> None:
        norms, variances, weights = np.moveaxis(np.array(self.first), 1, 0)
        ratio = self._first_ratio()
        whole = weights.sum(0)
        self.variance = (weights * variances).sum(0) / whole
        self.noise = (weights * (norms - ratio * variances) ** 2).mean(0)
        self.level[:] = ratio
        self.noise = np.maximum(self.noise, self._least_noise())
        square = np.maximum(self.variance**2, _TINY)
        self.level_error[:] = self.noise / whole / square
        self.slope_error[:] = self._trend * self._scale()
        self.first.clear()

    def _get_older(self, age: float) -> None:
        """What is believed, an ``age`` later."""
        scale, kept = self._scale(), _DAMPING**age
        ahead = (1 - kept) / (1 - _DAMPING)  # steps' worth of the trend
        self.level = self.level + ahead * self.slope
        self.slope = kept * self.slope
        self.level_error = self.level_error + self._wander * age * scale
        self.level_error += ahead * (2 * self.both_error + ahead * self.slope_error)
        self.level_error = np.maximum(self.level_error, 0.0)  # rounding
        self.both_error = kept * (self.both_error + ahead * self.slope_error)
        self.slope_error = kept**2 * self.slope_error + (1 - kept**2) * self._trend * scale

    def _scale(self) -> np.ndarray:
        """Squares that changes are relative to: a ratio that may be 0 is as large as its error."""
        found: np.ndarray = np.maximum(self.level**2, self.level_error)
        return found

    def _least_noise(self) -> np.ndarray:
        seen = np.abs(self.level).mean(0) * self.variance
        found: np.ndarray = np.maximum((_LEAST_NOISE * seen) ** 2, _TINY)
        return found

    def _first_ratio(self) -> np.ndarray:
        norms, variances, weights = np.moveaxis(np.array(self.first), 1, 0)
        return _ratio((weights * norms).sum(0), (weights * variances).sum(0))

    def shares(self) -> np.ndarray:
        """How likely each filter is right."""
        likely = self.likely - self._doubt
        shares = np.exp(likely - likely.max(0))
        found: np.ndarray = shares / shares.sum(0)
        return found

    def now(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The ratio, its standard error (infinite if unknown), and the variance; by quantity."""
        if not self.steps:
            nothing = np.zeros(len(self.noise))
            return nothing, np.full(len(nothing), np.inf), nothing
        if self.first:
            _, variances, weights = np.moveaxis(np.array(self.first), 1, 0)
            variance = (weights * variances).sum(0) / weights.sum(0)
            return self._first_ratio(), np.full(len(variance), np.inf), variance
        shares = self.shares()
        ratio = (shares * self.level).sum(0)
        square = (shares * (self.level_error + (self.level - ratio) ** 2)).sum(0)
        return ratio, np.sqrt(square), self.variance

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists."""
        return {
            name: value.tolist() if isinstance(value, np.ndarray) else value
            for name, value in vars(self).items()
            if not name.startswith("_")
        }

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """What :meth:`state_dict` gave; whether it is of as many quantities and filters."""
        if np.shape(state["level"]) != self.level.shape:
            return False
        for name, value in state.items():
            is_array = isinstance(getattr(self, name), np.ndarray)
            setattr(self, name, np.asarray(value) if is_array else value)
        return True


def _ratio(value: np.ndarray, by: np.ndarray) -> np.ndarray:
    """0 where there is nothing to divide by."""
    found: np.ndarray = np.divide(value, by, out=np.zeros(by.shape), where=by > _TINY)
    return found


@dataclass
class NoiseTracker:
    """Smooths what single steps say, over as long as their noise asks for and no longer.

    Gradients can shrink by orders of magnitude while their noise scale changes little. So each step
    is divided by how large the ones just before it were: squared norm and variance are relative to
    that, and only their ratio has a meaning. It is followed by :class:`_Filters`.

    Args:
        quantities: parameter groups; the statistics of all together are kept besides.
        initial_batch_size: what ages of steps are counted in [examples].
        population: see :func:`squared_norm_and_variance`.

    >>> tracker = NoiseTracker(quantities=1, initial_batch_size=8, population=None)
    >>> for _ in range(50):
    ...     tracker.add(local=[5.0], total=[3.0], global_batch_size=8, passes=2)
    >>> round(tracker.noise_scale(), 6), tracker.steps
    (16.0, 50)
    """

    quantities: int
    initial_batch_size: float
    population: int | None
    steps: int = 0
    skipped: int = 0
    _step: int | None = None
    _log_size: float | None = None
    _filters: _Filters = field(init=False)

    def __post_init__(self) -> None:
        self._filters = _Filters(self.quantities + 1)

    def add(
        self,
        local: ArrayLike,
        total: ArrayLike,
        global_batch_size: float,
        passes: float,
        step: int | None = None,
    ) -> None:
        """Take one step's norms; numbers that are not finite are skipped.

        Args:
            local, total: see :func:`squared_norm_and_variance`; shape (quantities,).
            global_batch_size, passes: of the step.
            step: its number. What lies between it and the one taken before makes that one older
                too, or a trend would be bent where fewer steps are sampled. None: the next one.
        """
        local, total = np.asarray(local, np.float64), np.asarray(total, np.float64)
        if not (np.isfinite(local).all() and np.isfinite(total).all()):
            self.skipped += 1
            return
        local, total = np.append(local, local.sum()), np.append(total, total.sum())
        found = squared_norm_and_variance(local, total, global_batch_size, passes, self.population)
        size = float(np.log(max(float(local[-1]), 1e-300)))
        # Its own size would bias a step: long gradients would count less.
        before = size if self._log_size is None else self._log_size
        self._log_size = before + (size - before) / _SIZE_STEPS
        # A gradient out of all proportion must not be all that is remembered.
        norm, variance = (each / np.exp(max(before, size - np.log(_OUTLIER))) for each in found)
        batch = global_batch_size / self.initial_batch_size
        passed = 1 if step is None or self._step is None else step - self._step
        self._filters.add(norm, variance, batch, batch * max(1, passed))
        self._step = step
        self.steps += 1

    def squared_norm(self) -> np.ndarray:
        """``|G|^2`` for each parameter group, and for all together at the end; relative."""
        ratio, _, variance = self._filters.now()
        return ratio * variance

    def variance(self) -> np.ndarray:
        """``tr(Sigma)`` of one example for each group, and for all together; relative."""
        return self._filters.now()[2]

    def noise_scale(self) -> float:
        """Of all parameters together [examples]; NaN before the first step."""
        if not self.steps:
            return float("nan")
        return float(gradient_noise_scale(self.squared_norm()[-1], self.variance()[-1]))

    def cautious_noise_scale(self) -> float:
        """As :meth:`noise_scale`, with a squared norm one standard error longer [examples].

        A batch that grows because noise passed for noise is harder to mend than one that waits.
        """
        if not self.steps:
            return float("nan")
        ratio, error, variance = (float(each[-1]) for each in self._filters.now())
        return float(gradient_noise_scale((max(ratio, 0.0) + error) * variance, variance))

    def uncertainty(self) -> float:
        """Standard error of the squared norm of all together, relative; infinite if unknown."""
        ratio, error, _ = (float(each[-1]) for each in self._filters.now())
        return error / ratio if ratio > 0 else math.inf

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists."""
        kept = {"steps": self.steps, "skipped": self.skipped, "step": self._step}
        return {**kept, "log_size": self._log_size, "filters": self._filters.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What :meth:`state_dict` gave; another number of groups begins anew."""
        # A checkpoint of before has sums instead.
        if "filters" not in state or not self._filters.load_state_dict(state["filters"]):
            return
        self.steps, self.skipped = state["steps"], state["skipped"]
        self._step, self._log_size = state["step"], state["log_size"]

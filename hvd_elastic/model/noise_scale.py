"""Estimate the gradient noise scale from squared norms of gradients.

A step averages the gradients of C passes, one for each rank and accumulation step. The gradient of
one pass has a larger expected squared norm than their average, and the difference shows how much
the gradients of single examples vary. Single steps give noisy estimates, which are smoothed here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

_SIZE_STEPS = 4
"""Steps over which the squared norm that later steps are divided by is smoothed."""
_OUTLIER = 10.0
"""Largest ratio of a step's squared norm to that of the steps before; more is scaled down to it."""
_FEWEST = 8
"""Steps before the filters begin: a few steps may agree by chance."""
_WANDERS = (0.001, 0.005, 0.02, 0.1)
"""Random walk of the ratio in a step of the initial batch size, by filter; relative."""
_TRENDS = (0.0, 0.0015)
"""Trend of the ratio in such a step, by filter; relative."""
_PRIOR_POWER, _PRIOR_WANDER = 3.0, 0.033
"""Prior probability of a filter: ``(1 + wander / _PRIOR_WANDER) ** -_PRIOR_POWER``, since what
looks like a change of the ratio is mostly noise of the norms."""
_DAMPING = 0.995
"""Part of a trend that is left after such a step."""
_MEMORY = 0.995
"""Weight of a filter's log-likelihood after such a step, so that recent steps count more."""
_NOISE_STEPS = 100
_VARIANCE_STEPS = 20
"""Steps over which the noise of the norms, and the variance, are smoothed."""
_FAR = 4.0
"""Standard deviations at which an innovation is clipped."""
_LEAST_NOISE = 1e-6
"""Least relative noise of the norms."""
_TINY = 1e-100


def squared_norm_and_variance(
    local: ArrayLike,
    total: ArrayLike,
    global_batch_size: ArrayLike,
    passes: ArrayLike,
    population: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Estimate the squared norm of the true gradient and the variance of one example's gradient.

    Passes may have different numbers of examples, as with unequal shares. Let pass i have m_i of
    the step's M examples, ``w_i = m_i / M``, and let g_i be its mean gradient. The mean over m_i
    examples has variance ``tr / m_i``, so ``E[|g_i|^2] = |G|^2 + tr / m_i``, and since
    ``w_i / m_i = 1 / M`` for a pass of any size, ``E[sum w_i |g_i|^2] = |G|^2 + C tr / M``. The
    gradient of the step is ``g = sum w_i g_i``, the mean over all M, so
    ``E[|g|^2] = |G|^2 + tr / M``. The function solves these two equations. With equal passes,
    ``w_i = 1 / C``. Both results are unbiased and noisy: each can be negative. Smooth them
    separately, then divide.

    Args:
        local: sum over passes of w_i |g_i|^2; any shape S.
        total: |g|^2 of the mean gradient; shape S.
        global_batch_size: M, the number of examples of the step; broadcastable to S.
        passes: C, the number of passes, at least 2; broadcastable to S.
        population: number of examples in the dataset from which the step was drawn without
            replacement; the true gradient is then that of this dataset. None: the step was drawn
            from a distribution.

    Returns:
        ``|G|^2``, and ``tr(Sigma)`` of single examples; shape S, float64.

    Raises:
        ValueError: there are fewer than two passes.

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
    """Return the gradient noise scale ``tr(Sigma) / |G|^2`` [examples].

    It is the batch size at which the noise of the mean gradient is as large as the gradient.

    Args:
        squared_norm: smoothed ``|G|^2``; any shape S. Where it is not positive the gradient cannot
            be told from noise, and the result is infinite.
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
    """Tracks the ratio ``|G|^2 / tr`` of several quantities, each by a bank of Kalman filters.

    The model of a filter: the squared norm of a step is the ratio times the variance, plus noise,
    and the ratio follows a damped trend (Gardner and McKenzie 1985) and a random walk. How fast the
    ratio changes is not known, so there is one filter for each of several assumptions. The estimate
    is their mean, weighted by the likelihood of the past steps, of which recent ones count more
    (Magill 1965). So a constant ratio is averaged over the whole past, a trend is followed without
    delay, and after a change the filters that assume fast changes dominate.

    The gain of a step depends only on earlier steps. Squared norm and variance of one step share
    their noise, so a gain that depended on them would bias the ratio.

    Arrays have one axis of filters and one of quantities. Time and weights are in steps of the
    initial batch size.

    Source: Kalman 1960; Harvey 1989, sections 2.3 and 3.2 (trends); the rest as above.
    """

    def __init__(self, quantities: int) -> None:
        wanders, trends = (each.ravel()[:, None] for each in np.meshgrid(_WANDERS, _TRENDS))
        self._wander, self._trend = wanders**2, trends**2
        self._log_prior = -_PRIOR_POWER * np.log1p(wanders / _PRIOR_WANDER)
        shape = (len(wanders), quantities)
        self.first: list[list[list[float]]] = []
        self.level, self.slope = np.zeros(shape), np.zeros(shape)
        self.level_error, self.both_error = np.zeros(shape), np.zeros(shape)
        self.slope_error, self.likely = np.zeros(shape), np.zeros(shape)
        self.noise, self.variance = np.zeros(quantities), np.zeros(quantities)
        self.steps = 0

    def add_step(self, norm: np.ndarray, variance: np.ndarray, weight: float, age: float) -> None:
        """Add a step's squared norm and variance, ``age`` after the step before."""
        self.steps += 1
        if self.steps <= _FEWEST:
            weights = [weight] * len(norm)
            self.first.append([norm.tolist(), variance.tolist(), weights])
            if self.steps == _FEWEST:
                self._begin()
            return
        self._predict(age)
        noise = self.noise / weight
        spread = self.variance**2 * self.level_error + noise
        innovation = norm - self.level * variance
        mean_innovation = (self.weights() * innovation).sum(0)
        self.likely *= _MEMORY**age
        self.likely -= (np.log(spread) + np.minimum(innovation**2 / spread, _FAR**2)) / 2
        limit = _FAR * np.sqrt(spread)
        innovation = np.clip(innovation, -limit, limit)
        gain = self.level_error * self.variance / spread
        slope_gain = self.both_error * self.variance / spread
        self.level += gain * innovation
        self.slope += slope_gain * innovation
        self.slope_error -= slope_gain * self.variance * self.both_error
        self.slope_error = np.maximum(self.slope_error, 0.0)  # rounding
        self.both_error *= noise / spread
        self.level_error *= noise / spread
        before = self.noise
        self.noise = before + (weight * mean_innovation**2 - before) / min(self.steps, _NOISE_STEPS)
        self.noise = np.maximum(self.noise, self._least_noise())
        if self.steps < _NOISE_STEPS:
            # The errors were computed with an earlier estimate of the noise.
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

    def _predict(self, age: float) -> None:
        """Advance the state of the filters by ``age``."""
        scale, kept = self._scale(), _DAMPING**age
        ahead = (1 - kept) / (1 - _DAMPING)  # sum of the damped trend over the steps
        self.level = self.level + ahead * self.slope
        self.slope = kept * self.slope
        self.level_error = self.level_error + self._wander * age * scale
        self.level_error += ahead * (2 * self.both_error + ahead * self.slope_error)
        self.level_error = np.maximum(self.level_error, 0.0)  # rounding
        self.both_error = kept * (self.both_error + ahead * self.slope_error)
        self.slope_error = kept**2 * self.slope_error + (1 - kept**2) * self._trend * scale

    def _scale(self) -> np.ndarray:
        """Return the squares that changes are relative to; for a ratio near 0 its error."""
        return np.asarray(np.maximum(self.level**2, self.level_error))

    def _least_noise(self) -> np.ndarray:
        norm = np.abs(self.level).mean(0) * self.variance
        return np.asarray(np.maximum((_LEAST_NOISE * norm) ** 2, _TINY))

    def _first_ratio(self) -> np.ndarray:
        norms, variances, weights = np.moveaxis(np.array(self.first), 1, 0)
        return _ratio((weights * norms).sum(0), (weights * variances).sum(0))

    def weights(self) -> np.ndarray:
        """Return the posterior probability of each filter."""
        log_posterior = self.likely + self._log_prior
        weights = np.exp(log_posterior - log_posterior.max(0))
        return np.asarray(weights / weights.sum(0))

    def estimate(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return ratio, its standard error (infinite: unknown) and variance, by quantity."""
        if not self.steps:
            nothing = np.zeros(len(self.noise))
            return nothing, np.full(len(nothing), np.inf), nothing
        if self.first:
            _, variances, weights = np.moveaxis(np.array(self.first), 1, 0)
            variance = (weights * variances).sum(0) / weights.sum(0)
            return self._first_ratio(), np.full(len(variance), np.inf), variance
        weights = self.weights()
        ratio = (weights * self.level).sum(0)
        square = (weights * (self.level_error + (self.level - ratio) ** 2)).sum(0)
        return ratio, np.sqrt(square), self.variance

    def state_dict(self) -> dict[str, Any]:
        """Return the state as numbers and lists."""
        return {
            name: value.tolist() if isinstance(value, np.ndarray) else value
            for name, value in vars(self).items()
            if not name.startswith("_")
        }

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Load a :meth:`state_dict`; return False if it has other numbers of filters."""
        if np.shape(state["level"]) != self.level.shape:
            return False
        for name, value in state.items():
            is_array = isinstance(getattr(self, name), np.ndarray)
            setattr(self, name, np.asarray(value) if is_array else value)
        return True


def _ratio(value: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Return ``value / by``; 0 where ``by`` is 0."""
    return np.asarray(np.divide(value, by, out=np.zeros(by.shape), where=by > _TINY))


@dataclass
class NoiseTracker:
    """Smooths the gradient statistics of single steps, by an amount that adapts to their noise.

    Gradients can shrink by orders of magnitude while their noise scale changes little. So the
    squared norms of a step are divided by those of the steps just before it. Squared norm and
    variance are relative to that, and only their ratio has a meaning; :class:`_Filters` tracks it.

    Args:
        quantities: number of parameter groups; statistics of all together are kept in addition.
        initial_batch_size: global batch size that the user tuned for [examples]; ages of steps are
            counted in steps of it.
        population: see :func:`squared_norm_and_variance`.

    Attributes:
        steps: number of steps added.
        skipped: number of steps whose norms were not finite.

    >>> tracker = NoiseTracker(quantities=1, initial_batch_size=8, population=None)
    >>> for _ in range(50):
    ...     tracker.add_norms(local=[5.0], total=[3.0], global_batch_size=8, passes=2)
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

    def add_norms(
        self,
        local: ArrayLike,
        total: ArrayLike,
        global_batch_size: float,
        passes: float,
        step: int | None = None,
    ) -> None:
        """Add the norms of one step; a step with norms that are not finite is skipped.

        Args:
            local, total: see :func:`squared_norm_and_variance`; shape (quantities,).
            global_batch_size, passes: batch size and number of passes of the step.
            step: number of the step, which tells how many steps were not sampled since the one
                added before. None: none.
        """
        local, total = np.asarray(local, np.float64), np.asarray(total, np.float64)
        if not (np.isfinite(local).all() and np.isfinite(total).all()):
            self.skipped += 1
            return
        local, total = np.append(local, local.sum()), np.append(total, total.sum())
        found = squared_norm_and_variance(local, total, global_batch_size, passes, self.population)
        size = float(np.log(max(float(local[-1]), 1e-300)))
        # Dividing by the step's own norm would bias it: long gradients would count less.
        before = size if self._log_size is None else self._log_size
        self._log_size = before + (size - before) / _SIZE_STEPS
        # One gradient of exceptional size must not outweigh all others.
        norm, variance = (each / np.exp(max(before, size - np.log(_OUTLIER))) for each in found)
        batch = global_batch_size / self.initial_batch_size
        passed = 1 if step is None or self._step is None else step - self._step
        self._filters.add_step(norm, variance, batch, batch * max(1, passed))
        self._step = step
        self.steps += 1

    def squared_norm(self) -> np.ndarray:
        """Return the relative ``|G|^2`` of each parameter group, and of all together at the end."""
        ratio, _, variance = self._filters.estimate()
        return ratio * variance

    def variance(self) -> np.ndarray:
        """Return the relative ``tr(Sigma)`` of one example, by group and of all at the end."""
        return self._filters.estimate()[2]

    def noise_scale(self) -> float:
        """Return the noise scale of all parameters [examples]; NaN before the first step."""
        if not self.steps:
            return float("nan")
        return float(gradient_noise_scale(self.squared_norm()[-1], self.variance()[-1]))

    def cautious_noise_scale(self) -> float:
        """Return :meth:`noise_scale` with the squared norm one standard error larger [examples].

        An underestimate only delays the growth of the batch; an overestimate harms training.
        """
        if not self.steps:
            return float("nan")
        ratio, error, variance = (float(each[-1]) for each in self._filters.estimate())
        return float(gradient_noise_scale((max(ratio, 0.0) + error) * variance, variance))

    def uncertainty(self) -> float:
        """Return the relative standard error of the squared norm of all parameters together.

        It is infinite if it is not known.
        """
        ratio, error, _ = (float(each[-1]) for each in self._filters.estimate())
        return error / ratio if ratio > 0 else math.inf

    def state_dict(self) -> dict[str, Any]:
        """Return the state as numbers and lists."""
        kept = {"steps": self.steps, "skipped": self.skipped, "step": self._step}
        return {**kept, "log_size": self._log_size, "filters": self._filters.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a :meth:`state_dict`; one of another number of groups is ignored."""
        if not self._filters.load_state_dict(state["filters"]):
            return
        self.steps, self.skipped = state["steps"], state["skipped"]
        self._step, self._log_size = state["step"], state["log_size"]

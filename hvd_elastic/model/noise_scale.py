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

_HORIZONS = 10
_PRECISION = 0.02
"""Relative standard error of the squared norm at which a horizon is long enough."""
_AGREEMENT = 1.5
"""Standard errors around the mean of a horizon in which the longer ones must lie."""
_SIZE_STEPS = 4
_OUTLIER = 10.0
"""A step whose gradient is this many times as large as those before counts for less."""
_FEWEST = 12
_SHRINK = 1.5
"""Standard errors up to which a trend is taken for noise altogether."""
_STEEPEST = 4.0
"""Change since the mean age that is believed; more is taken for noise."""
_POWERS = 3
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


@dataclass
class _Sums:
    """Decayed sums over steps, from which the ratio of squared norm and variance is told.

    Axes: power of a step's age [examples] 0 to 2, horizon, quantity. The last three are weighted
    by the square of the weight.
    """

    weight: np.ndarray
    norm: np.ndarray
    variance: np.ndarray
    weight2: np.ndarray
    norm2: np.ndarray
    both2: np.ndarray
    variance2: np.ndarray

    @classmethod
    def zeros(cls, quantities: int) -> _Sums:
        shape = (_POWERS, _HORIZONS, quantities)
        return cls(*(np.zeros(shape) for _ in range(7)))

    def add(
        self, norm: np.ndarray, variance: np.ndarray, weight: float, age: float, decay: np.ndarray
    ) -> None:
        """All steps before get older by ``age``, then the new one comes with age 0."""
        once, twice = decay[:, None], decay[:, None] ** 2
        square = weight**2
        for sums, keep, now in (
            (self.weight, once, weight),
            (self.norm, once, weight * norm),
            (self.variance, once, weight * variance),
            (self.weight2, twice, square),
            (self.norm2, twice, square * norm**2),
            (self.both2, twice, square * norm * variance),
            (self.variance2, twice, square * variance**2),
        ):
            sums[2] += age * (2 * sums[1] + age * sums[0])
            sums[1] += age * sums[0]
            sums *= keep
            sums[0] += now

    def mean(self) -> tuple[np.ndarray, np.ndarray]:
        """``|G|^2 / tr`` over the horizon, and its standard error."""
        ratio = _ratio(self.norm[0], self.variance[0])
        return ratio, self._error(ratio, 1.0, 0.0)

    def now(self) -> np.ndarray:
        """``|G|^2 / tr`` at age 0.

        With weights w and ages a the ratio ``r = sum w |G|^2 / sum w tr`` is as late as the mean
        age ``A = sum w a tr / sum w tr``. The one whose weights are multiplied by the age, r', is
        as late as ``A' = sum w a^2 tr / sum w a tr``. What grows by a constant factor for each
        example is ``r (r / r')^(A / (A' - A))`` now, to first order. With weights that decay for
        ever A' = 2 A, and this is Brown's double smoothing of the past. With equal weights, which
        is what a horizon longer than the history has, the exponent is 3: the end of the straight
        line of least squares. What changes |G|^2 and tr alike, as Adam's moments do in the first
        steps, changes neither ratio and is not taken for a trend.

        The exponent is shrunk as much as what the two differ by may be noise.

        Source: Brown 1959 (double smoothing); James and Stein 1961 (shrinking); ratios, and
        histories shorter than the horizon: own derivation.
        """
        ratio, _ = self.mean()
        older = _ratio(self.norm[1], self.variance[1])
        age = _ratio(self.variance[1], self.variance[0])
        older_age = _ratio(self.variance[2], self.variance[1])
        known = self.enough() & (older_age > age) & (age > 0)
        reach = np.divide(age, older_age - age, out=np.zeros(age.shape), where=known)
        limit = _SHRINK * self._error(ratio, 1.0, -1.0)
        off = np.abs(ratio - older)
        share = np.divide(limit, off, out=np.ones(off.shape), where=off > limit)
        reach *= 1 - share**2
        both = (ratio > 0) & (older > 0)
        trend = np.divide(ratio, older, out=np.ones(ratio.shape), where=both) ** reach
        value: np.ndarray = ratio * np.clip(trend, 1 / _STEEPEST, _STEEPEST)
        return value

    def enough(self) -> np.ndarray:
        """Whether there are so many steps that their agreement proves something (Kish 1965)."""
        alike = _ratio(self.weight[0] ** 2, self.weight2[0])
        found: np.ndarray = alike >= _FEWEST
        return found

    def _error(self, ratio: np.ndarray, share: ArrayLike, older: ArrayLike) -> np.ndarray:
        """Standard error of ``share`` times the ratio plus ``older`` times the older one."""
        spread = self.norm2 - 2 * ratio * self.both2 + ratio**2 * self.variance2
        first, second = _ratio(share, self.variance[0]), _ratio(older, self.variance[1])
        square = first**2 * spread[0] + 2 * first * second * spread[1] + second**2 * spread[2]
        found: np.ndarray = np.sqrt(np.maximum(square, 0.0))
        return found


def _ratio(value: ArrayLike, by: np.ndarray) -> np.ndarray:
    """0 where there is nothing to divide by."""
    value = np.broadcast_to(np.asarray(value, np.float64), by.shape)
    found: np.ndarray = np.divide(value, by, out=np.zeros(by.shape), where=by > _TINY)
    return found


@dataclass
class NoiseTracker:
    """Smooths what single steps say, over as few examples as give a precise result.

    Squared norm and variance are averaged separately, each step weighted by its examples, with
    weights that halve every ``half_life`` examples, for several half-lives at once. Sums of weights
    are kept beside, so the means have no bias towards the start. The shortest half-life is used
    whose squared norm is known to 2 %, or the longest that agrees with all shorter ones: while much
    changes the estimate follows quickly, and where noise outweighs the gradient it is averaged for
    longer. A mean over the past is late, and one that weighs old steps more is later; what they
    differ by takes the delay out.

    Gradients can shrink by orders of magnitude while their noise scale changes little, and a mean
    would only see those of long ago. So each step is divided by how large the ones just before it
    were: squared norm and variance are relative to that, and only their ratio has a meaning.

    Args:
        quantities: parameter groups; the statistics of all together are kept besides.
        half_life: the shortest [examples]; each of the ten is twice the one before.
        population: see :func:`squared_norm_and_variance`.

    >>> tracker = NoiseTracker(quantities=1, half_life=320, population=None)
    >>> for _ in range(50):
    ...     tracker.add(local=[5.0], total=[3.0], global_batch_size=8, passes=2)
    >>> float(tracker.noise_scale()), tracker.steps
    (16.0, 50)
    """

    quantities: int
    half_life: float
    population: int | None
    steps: int = 0
    skipped: int = 0
    _step: int | None = None
    _log_size: float | None = None
    _sums: _Sums = field(init=False)

    def __post_init__(self) -> None:
        self._sums = _Sums.zeros(self.quantities + 1)

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
                too, or a trend would be bent where fewer steps are looked at. None: the next one.
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
        norm, variance = (each / np.exp(before) for each in found)
        # A gradient out of all proportion must not be all that is remembered.
        weight = global_batch_size * min(1.0, _OUTLIER * float(np.exp(before - size)))
        half_lives = self.half_life * 2.0 ** np.arange(_HORIZONS)
        passed = 1 if step is None or self._step is None else step - self._step
        age = global_batch_size * max(1, passed)
        self._sums.add(norm, variance, weight, age, 0.5 ** (age / half_lives))
        self._step = step
        self.steps += 1

    def squared_norm(self) -> np.ndarray:
        """``|G|^2`` for each parameter group, and for all together at the end; relative."""
        value: np.ndarray = self._sums.now()[self._horizon()] * self.variance()
        return value

    def variance(self) -> np.ndarray:
        """``tr(Sigma)`` of one example for each group, and for all together; relative."""
        chosen = self._horizon()
        return _ratio(self._sums.variance[0], self._sums.weight[0])[chosen]

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
        chosen = self._horizon()
        value, error = self._sums.now()[chosen, -1], self._sums.mean()[1][chosen, -1]
        variance = self.variance()[-1]
        return float(gradient_noise_scale((max(value, 0.0) + error) * variance, variance))

    def uncertainty(self) -> float:
        """Standard error of the squared norm of all together, relative; infinite if unknown."""
        chosen = self._horizon()
        mean, error = (float(each[chosen, -1]) for each in self._sums.mean())
        return error / mean if mean > 0 and self._sums.enough()[chosen, -1] else math.inf

    def _horizon(self) -> int:
        """The first that is precise, or the last that agrees with all shorter ones (Lepski)."""
        means, errors = (each[:, -1] for each in self._sums.mean())
        # Few steps that happen to agree prove nothing.
        enough = self._sums.enough()[:, -1]
        first = int(np.argmax(enough)) if enough.any() else _HORIZONS - 1
        low, high = -np.inf, np.inf
        for horizon in range(first, _HORIZONS):
            reach = _AGREEMENT * errors[horizon]
            low, high = max(low, means[horizon] - reach), min(high, means[horizon] + reach)
            if low > high:
                return horizon - 1
            if errors[horizon] <= _PRECISION * means[horizon]:
                return horizon
        return _HORIZONS - 1

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists."""
        sums = {name: values.tolist() for name, values in vars(self._sums).items()}
        kept = {"steps": self.steps, "skipped": self.skipped, "step": self._step}
        return {**kept, "log_size": self._log_size, "sums": sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What :meth:`state_dict` gave; another number of groups begins anew."""
        if "sums" not in state:  # a checkpoint of before has means without ages
            return
        sums = _Sums(**{name: np.asarray(values) for name, values in state["sums"].items()})
        if sums.weight.shape != self._sums.weight.shape:
            return
        self.steps, self.skipped = state["steps"], state["skipped"]
        self._step = state.get("step")  # not in checkpoints of before
        self._log_size = state["log_size"]
        self._sums = sums

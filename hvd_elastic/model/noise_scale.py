"""How noisy gradients are: the gradient noise scale, estimated from norms that training has anyway.

A step takes the mean gradient of C passes, one for each rank and accumulation step. The mean of
fewer examples is longer than that of more, by an amount that says how much single examples differ.
All here is a pure function of a few norms, and the smoothing of their noisy results.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

__all__ = ["NoiseTracker", "gradient_noise_scale", "squared_norm_and_variance"]

_HORIZONS = 10
_PRECISION = 0.02
"""Relative standard error of the squared norm at which a horizon is long enough."""
_AGREEMENT = 1.0
"""Standard errors around the mean of a horizon in which the longer ones must lie."""
_SIZE_STEPS = 8
_OUTLIER = 10.0
"""A step whose gradient is this many times as large as those before counts for less."""
_FEWEST = 12
_SHRINK = 0.7
"""Standard errors up to which a trend is taken for noise altogether."""
_STEEPEST = 1.5
"""Change over one delay that is believed; more is taken for noise."""


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
    """Decayed sums for weighted means and their standard errors; axis 0 is the horizon."""

    weight: np.ndarray
    weight2: np.ndarray
    value: np.ndarray
    value2: np.ndarray
    square2: np.ndarray

    @classmethod
    def zeros(cls, quantities: int) -> _Sums:
        shape = (_HORIZONS, quantities)
        return cls(*(np.zeros(shape) for _ in range(5)))

    def add(self, values: np.ndarray, weight: float, decay: np.ndarray) -> None:
        keep = decay[:, None]
        self.weight = keep * self.weight + weight
        self.value = keep * self.value + weight * values
        self.weight2 = keep**2 * self.weight2 + weight**2
        self.value2 = keep**2 * self.value2 + weight**2 * values
        self.square2 = keep**2 * self.square2 + weight**2 * values**2

    def mean(self) -> np.ndarray:
        return self.value / np.maximum(self.weight, 1e-300)

    def standard_error(self) -> np.ndarray:
        mean = self.mean()
        spread = self.square2 - 2 * mean * self.value2 + mean**2 * self.weight2
        return np.sqrt(np.maximum(spread, 0.0)) / np.maximum(self.weight, 1e-300)


@dataclass
class NoiseTracker:
    """Smooths what single steps say, over as few examples as give a precise result.

    Squared norm and variance are averaged separately, each step weighted by its examples, with
    weights that halve every ``half_life`` examples, for several half-lives at once. Sums of weights
    are kept beside, so the means have no bias towards the start. The shortest half-life is used
    whose squared norm is known to 8 %: while much changes the estimate follows quickly, and where
    noise outweighs the gradient it is averaged for longer. A mean over the past is late, and that
    over twice as long is twice as late; their ratio takes the delay out.

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
    _log_size: float | None = None
    _norm: _Sums = field(init=False)
    _variance: _Sums = field(init=False)

    def __post_init__(self) -> None:
        self._norm = _Sums.zeros(self.quantities + 1)
        self._variance = _Sums.zeros(self.quantities + 1)

    def add(
        self, local: ArrayLike, total: ArrayLike, global_batch_size: float, passes: float
    ) -> None:
        """Take one step's norms, shape (quantities,); numbers that are not finite are skipped."""
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
        found = (found[0] / np.exp(before), found[1] / np.exp(before))
        # A gradient out of all proportion must not be all that is remembered.
        weight = global_batch_size * min(1.0, _OUTLIER * float(np.exp(before - size)))
        half_lives = self.half_life * 2.0 ** np.arange(_HORIZONS)
        decay = 0.5 ** (global_batch_size / half_lives)
        for sums, values in zip((self._norm, self._variance), found, strict=True):
            sums.add(values, weight, decay)
        self.steps += 1

    def squared_norm(self) -> np.ndarray:
        """``|G|^2`` for each parameter group, and for all together at the end; relative."""
        return self._now(self._norm)

    def variance(self) -> np.ndarray:
        """``tr(Sigma)`` of one example for each group, and for all together; relative."""
        return self._now(self._variance)

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
        error = self._norm.standard_error()[self._horizon(), -1]
        norm = max(float(self.squared_norm()[-1]), 0.0) + error
        return float(gradient_noise_scale(norm, self.variance()[-1]))

    def _now(self, sums: _Sums) -> np.ndarray:
        means, chosen = sums.mean(), self._horizon()
        late, later = means[chosen], means[min(chosen + 1, _HORIZONS - 1)]
        trend = np.divide(late, later, out=np.ones(late.shape), where=(late > 0) & (later > 0))
        # As much of it as is not noise (James and Stein 1961).
        limit = _SHRINK * sums.standard_error()[chosen]
        share = np.divide(limit, np.abs(late - later), out=np.ones(late.shape), where=late != later)
        trend **= 1 - np.minimum(share, 1.0) ** 2
        result: np.ndarray = late * np.clip(trend, 1 / _STEEPEST, _STEEPEST)
        return result

    def _horizon(self) -> int:
        """The first that is precise, or the last that agrees with all shorter ones (Lepski)."""
        means, errors = self._norm.mean()[:, -1], self._norm.standard_error()[:, -1]
        # Few steps that happen to agree prove nothing.
        weight2 = np.maximum(self._norm.weight2[:, -1], 1e-300)
        enough = self._norm.weight[:, -1] ** 2 / weight2 >= _FEWEST
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
        sums = {
            name: {key: value.tolist() for key, value in vars(means).items()}
            for name, means in (("norm", self._norm), ("variance", self._variance))
        }
        kept = {"steps": self.steps, "skipped": self.skipped, "log_size": self._log_size}
        return {**kept, **sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What :meth:`state_dict` gave; another number of groups begins anew."""
        norm, variance = (
            _Sums(**{key: np.asarray(value) for key, value in state[name].items()})
            for name in ("norm", "variance")
        )
        if norm.weight.shape != self._norm.weight.shape:
            return
        self.steps, self.skipped = state["steps"], state["skipped"]
        self._log_size = state["log_size"]
        self._norm, self._variance = norm, variance

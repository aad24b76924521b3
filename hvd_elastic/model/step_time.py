"""Model the time of a training step with seven parameters, fitted to measured step times.

``T_grad = slowness (alpha_c + beta_c m)`` for one pass over m examples on the slowest rank,
``T_sync = alpha + beta (K - 2)`` for K > 1 ranks, with one pair for ranks on one host and another
across hosts, and ``T_step = s T_grad + (T_grad^gamma + T_sync^gamma)^(1/gamma)`` with s
accumulation passes before the pass that overlaps with the all-reduce.

Source: Pollux, OSDI 2021, section 3.2. Added here: the slowness of unequal hosts, priors as
distributions, and the uncertainty of each prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import ArrayLike

_ITERATIONS = 60
"""Most iterations of the fit."""
_TYPICAL_NOISE = 0.05
"""Typical relative noise of a measured step time."""
_NOISE_FLOOR = 0.02
"""Least relative noise that the fit assumes, so that much data does not make it overconfident."""
_WIDE = 1.0
"""Standard deviation of the priors in logarithms: a factor of e either way."""
_REACH = (0.5, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0)
"""Standard deviations from the fit at which the uncertainty is evaluated, by parameter. Less for
the two of a pass, which are correlated along a curve."""
_FURTHER_RANK, _FURTHER_WIDTH = 0.05, 1.5
"""Prior cost of a further rank relative to the all-reduce of two, and its standard deviation in
logarithms: from almost 0 if bandwidth is the limit to about 1 if latency is."""
_GAMMA_CENTRE, _GAMMA_WIDTH = -1.5, 1.5
"""Mean and standard deviation of the prior of ``logit((gamma - 1) / 9)``."""


@dataclass(frozen=True)
class Observation:
    """Measured step time of one configuration.

    Attributes:
        hosts, ranks: number of hosts and processes that trained together.
        atomic_batch_size: number of examples in one pass on one rank.
        accumulation_steps: number of extra passes before the all-reduce, averaged over the steps.
        step_s: mean time of a step [s].
        slowness: slowness of the slowest rank, relative to a reference rank of the run.
        steps: number of steps that were timed.
        drift: relative standard deviation of what may have changed since the measurement.
        own_s: compute time of the slowest rank in all passes of a step [s]; None: not known.
    """

    hosts: int
    ranks: int
    atomic_batch_size: float
    accumulation_steps: float
    step_s: float
    slowness: float = 1.0
    steps: int = 1
    drift: float = 0.0
    own_s: float | None = None

    def __post_init__(self) -> None:
        if min(self.hosts, self.ranks, self.steps) < 1 or self.accumulation_steps < 0:
            raise ValueError(f"{self}: hosts, ranks and steps start at 1, accumulation_steps at 0")
        if not (self.step_s > 0 and self.atomic_batch_size > 0 and self.slowness > 0):
            raise ValueError(f"{self}: step_s, atomic_batch_size and slowness must be above 0")
        if self.own_s is not None and not self.own_s > 0:
            raise ValueError(f"{self}: own_s must be above 0, or None")


@dataclass(frozen=True)
class StepTimes:
    """Predicted step times.

    Attributes:
        step_s: time of a step [s].
        uncertainty: standard deviation of ``log(step_s)``: 0.1 means about 10 %. It is large for
            configurations unlike those that were measured.
    """

    step_s: np.ndarray
    uncertainty: np.ndarray


@dataclass(frozen=True)
class StepTimeModel:
    """A fitted step-time model.

    Attributes:
        alpha_c, beta_c: time of a pass: fixed [s], and for each example [s].
        alpha_r, beta_r: time of the all-reduce on one host: fixed [s], and for each rank beyond the
            second [s].
        alpha_n, beta_n: the same across hosts.
        gamma: overlap of pass and all-reduce, from 1 (none) to 10 (perfect).
        covariance: covariance of the logarithms of the first six parameters and the logit of
            ``(gamma - 1) / 9``; shape (7, 7).
        noise: relative standard deviation of one observation.
    """

    alpha_c: float
    beta_c: float
    alpha_r: float
    beta_r: float
    alpha_n: float
    beta_n: float
    gamma: float
    covariance: np.ndarray
    noise: float

    def predict(
        self,
        hosts: ArrayLike,
        ranks: ArrayLike,
        atomic_batch_size: ArrayLike,
        accumulation_steps: ArrayLike,
        slowness: ArrayLike = 1.0,
        relative_to: int | None = None,
    ) -> StepTimes:
        """Predict the times of steps; the arguments broadcast to one shape S.

        Args:
            hosts, ranks, atomic_batch_size, accumulation_steps: see :class:`Observation`.
            slowness: slowness of the slowest rank, for which a synchronous step waits.
            relative_to: flat index into S; the uncertainty is then that of the ratio to the step
                time there, which is small for similar configurations.

        >>> model = fit_step_time([Observation(1, 1, 32, 0, 0.1), Observation(1, 1, 64, 0, 0.18)])
        >>> bool(abs(model.predict(1, 1, 128, 0).step_s - 0.34) < 0.01)
        True
        """
        where = _Configurations.of(hosts, ranks, atomic_batch_size, accumulation_steps, slowness)
        logs = self._logs()
        times = _means(logs, where)
        # The larger of both directions along each axis of the parameters' distribution. Gradients
        # at the fit would underestimate the uncertainty of configurations that were not measured.
        variance = np.zeros(times.shape)
        for reach, axis in zip(_REACH, np.linalg.cholesky(self.covariance).T, strict=True):
            moved = [_means(logs + sign * reach * axis, where) for sign in (1, -1)]
            logs_off = [np.log(time / times) for time in moved]
            if relative_to is not None:
                logs_off = [log - log.flat[relative_to] for log in logs_off]
            off = [log**2 for log in logs_off]
            variance += np.maximum(*off) / reach**2
        return StepTimes(times, np.sqrt(variance))

    def step_s(
        self,
        hosts: ArrayLike,
        ranks: ArrayLike,
        atomic_batch_size: ArrayLike,
        accumulation_steps: ArrayLike,
        slowness: ArrayLike = 1.0,
    ) -> np.ndarray:
        """Return the times of :meth:`predict` [s]; without the uncertainty this is much faster."""
        where = _Configurations.of(hosts, ranks, atomic_batch_size, accumulation_steps, slowness)
        return _means(self._logs(), where)

    def _logs(self) -> np.ndarray:
        first = [self.alpha_c, self.beta_c, self.alpha_r, self.beta_r, self.alpha_n, self.beta_n]
        share = (self.gamma - 1) / 9
        return np.append(np.log(first), np.log(share / (1 - share)))


@dataclass(frozen=True)
class _Configurations:
    hosts: np.ndarray
    ranks: np.ndarray
    atomic: np.ndarray
    accumulation: np.ndarray
    slowness: np.ndarray

    @classmethod
    def of(cls, *values: ArrayLike) -> _Configurations:
        return cls(*np.broadcast_arrays(*(np.asarray(v, np.float64) for v in values)))


def _means(logs: np.ndarray, at: _Configurations) -> np.ndarray:
    """Return the step times of :func:`_times` without the derivatives, which is faster."""
    alpha_c, beta_c, alpha_r, beta_r, alpha_n, beta_n = np.exp(logs[:6])
    gamma = 1 + 9 / (1 + np.exp(-logs[6]))
    grad = at.slowness * (alpha_c + beta_c * at.atomic)
    beyond = np.maximum(at.ranks - 2, 0)
    sync = np.where(at.hosts > 1, alpha_n + beta_n * beyond, alpha_r + beta_r * beyond)
    sync = sync * (at.ranks > 1)
    longer = np.maximum(grad, sync)
    ratio = np.minimum(grad, sync) / longer
    return at.accumulation * grad + longer * (1 + ratio**gamma) ** (1 / gamma)


def _times(logs: np.ndarray, at: _Configurations) -> tuple[np.ndarray, np.ndarray]:
    """Return step times, and the derivatives of their logarithms by the parameters (last axis)."""
    alpha_c, beta_c, alpha_r, beta_r, alpha_n, beta_n = np.exp(logs[:6])
    share = 1 / (1 + np.exp(-logs[6]))
    gamma = 1 + 9 * share
    constant, linear = at.slowness * alpha_c, at.slowness * beta_c * at.atomic
    grad = constant + linear
    across = at.hosts > 1
    beyond = np.maximum(at.ranks - 2, 0)
    together = at.ranks > 1
    sync = np.where(across, alpha_n + beta_n * beyond, alpha_r + beta_r * beyond) * together
    # Both are divided by the longer one, so that no power overflows.
    longer = np.maximum(grad, sync)
    u, v = grad / longer, sync / longer
    powers = u**gamma + v**gamma
    last = longer * powers ** (1 / gamma)
    times = at.accumulation * grad + last
    by_grad = at.accumulation + (last / longer) * u ** (gamma - 1) / powers
    by_sync = np.where(sync > 0, (last / longer) * v ** (gamma - 1) / powers, 0.0)
    logs_u, logs_v = (np.log(np.where(part > 0, part, 1.0)) for part in (u, v))
    by_gamma = last * (
        -np.log(powers) / gamma**2 + (u**gamma * logs_u + v**gamma * logs_v) / (gamma * powers)
    )
    slopes = np.stack(
        [
            by_grad * constant,
            by_grad * linear,
            by_sync * together * ~across * alpha_r,
            by_sync * together * ~across * beta_r * beyond,
            by_sync * together * across * alpha_n,
            by_sync * together * across * beta_n * beyond,
            by_gamma * 9 * share * (1 - share),
        ],
        axis=-1,
    )
    return times, slopes / times[..., None]


def fit_step_time(observations: Sequence[Observation]) -> StepTimeModel:
    """Fit the model by least squares on the logarithms of the times, with priors.

    The priors are optimistic, so that configurations that were never tried seem worth trying, and
    wide, so that their predictions are uncertain. A pass whose size was never varied is half fixed
    and half linear. The all-reduce takes as long as ranks waited in a step, or a twentieth of a
    pass; it takes 1.1 times as long across hosts as on one host. Each rank beyond the second adds a
    twentieth of it, which is the least certain prior. Waiting does not grow with the batch, so
    measurements at the first batch size already tell something about others.

    Args:
        observations: measured step times, at least one. Those of one configuration are merged.

    Raises:
        ValueError: there are no observations.

    Source: Pollux, OSDI 2021, sections 3.2 and 4.1 (form and priors); minimised by
    Levenberg-Marquardt (Moré 1978) in the logarithms, where all parameters are positive.
    """
    if not observations:
        raise ValueError("no observation to fit a step time model to; one is needed at least")
    where, logs_seen, weights = _merged(observations)
    half, alpha, alpha_n = _first_guess(observations)
    smallest = where.atomic.min()
    beta, beta_n = _FURTHER_RANK * alpha, _FURTHER_RANK * alpha_n
    times = [half, half / smallest, alpha, beta, alpha_n, beta_n]
    centre = np.append(np.log(times), _GAMMA_CENTRE)
    rows = np.diag([1 / _WIDE] * 6 + [1 / _GAMMA_WIDTH])
    # Priors of further ranks are relative to two ranks, and that across hosts to that on one host.
    for further, two in ((3, 2), (5, 4)):
        rows[further, further], rows[further, two] = 1 / _FURTHER_WIDTH, -1 / _FURTHER_WIDTH
    rows[4, 4], rows[4, 2] = 0.5, -0.5
    offset = rows @ centre

    noise = 0.05
    logs = centre
    precision = rows.T @ rows
    for _ in range(2):  # the second fit uses the noise that the first one found
        scale = np.sqrt(weights) / noise
        logs, precision = _minimize(logs, where, logs_seen, scale, rows, offset)
        residual = np.log(_times(logs, where)[0]) - logs_seen
        freedom = max(1.0, len(residual) - 2.0)
        # The prior of the noise counts as four residuals of 5 %.
        found = (np.sum(weights * residual**2) + 4 * 0.05**2) / (freedom * weights.mean() + 4)
        noise = max(_NOISE_FLOOR, float(np.sqrt(found)))
    alpha_c, beta_c, alpha_r, beta_r, alpha_n, beta_n = np.exp(logs[:6]).tolist()
    return StepTimeModel(
        alpha_c=alpha_c,
        beta_c=beta_c,
        alpha_r=alpha_r,
        beta_r=beta_r,
        alpha_n=alpha_n,
        beta_n=beta_n,
        gamma=float(1 + 9 / (1 + np.exp(-logs[6]))),
        covariance=np.linalg.inv(precision),
        noise=noise,
    )


def _first_guess(observations: Sequence[Observation]) -> tuple[float, float, float]:
    """Return the centres of the priors [s].

    They are half of a pass of the smallest size that was measured, the all-reduce on one host, and
    the all-reduce across hosts.
    """
    smallest = min(seen.atomic_batch_size for seen in observations)
    chosen = [seen for seen in observations if seen.atomic_batch_size == smallest]
    # Fewer passes hide less of the all-reduce.
    fewest = min(seen.accumulation_steps for seen in chosen)
    chosen = [seen for seen in chosen if seen.accumulation_steps == fewest]
    # A single rank does not wait, so its compute time tells nothing about the all-reduce.
    timed = [seen for seen in chosen if seen.own_s is not None and seen.ranks > 1]
    step_s = median(seen.step_s for seen in timed or chosen)
    slowness = median(seen.slowness for seen in timed or chosen)
    own_s = min(step_s, median(seen.own_s or step_s for seen in timed)) if timed else step_s
    last_s = own_s / (fewest + 1)
    half = last_s / slowness / 2
    # Solve for the all-reduce that extends the last pass by the time spent waiting.
    gamma = 1 + 9 / (1 + np.exp(-_GAMMA_CENTRE))
    beyond = max(0.0, (step_s - own_s + last_s) ** gamma - last_s**gamma)
    reduction_s = max(0.1 * half, float(beyond ** (1 / gamma)))
    on_one = all(seen.hosts == 1 for seen in chosen)
    alpha = reduction_s if on_one else reduction_s / 1.1
    return half, alpha, 1.1 * alpha


def _merged(
    observations: Sequence[Observation],
) -> tuple[_Configurations, np.ndarray, np.ndarray]:
    groups: dict[tuple[float, ...], list[Observation]] = {}
    for seen in observations:
        key = (seen.hosts, seen.ranks, seen.atomic_batch_size, seen.accumulation_steps)
        groups.setdefault((*key, seen.slowness), []).append(seen)
    where = _Configurations.of(*np.asarray(list(groups), np.float64).T)
    logs = [
        np.average([np.log(o.step_s) for o in group], weights=[o.steps for o in group])
        for group in groups.values()
    ]
    # Further repetitions have errors in common (a busy machine, a shared link).
    weights = [
        1 / (1 / min(len(group), 4.0) + (min(o.drift for o in group) / _TYPICAL_NOISE) ** 2)
        for group in groups.values()
    ]
    return where, np.asarray(logs), np.asarray(weights)


def _minimize(
    logs: np.ndarray,
    where: _Configurations,
    logs_seen: np.ndarray,
    scale: np.ndarray,
    rows: np.ndarray,
    offset: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Minimise by Levenberg-Marquardt; return the minimum and the second derivatives there."""

    def evaluate(at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        times, slopes = _times(at, where)
        residual = np.append(scale * (np.log(times) - logs_seen), rows @ at - offset)
        return residual, np.vstack([scale[:, None] * slopes, rows])

    damping = 1e-2
    residual, slopes = evaluate(logs)
    for _ in range(_ITERATIONS):
        curvature, downhill = slopes.T @ slopes, slopes.T @ residual
        step = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), -downhill)
        tried = logs + np.clip(step, -3.0, 3.0)
        new_residual, new_slopes = evaluate(tried)
        if new_residual @ new_residual < residual @ residual:
            gained = residual @ residual - new_residual @ new_residual
            small = gained < 1e-8 * (residual @ residual)
            logs, residual, slopes = tried, new_residual, new_slopes
            damping = max(damping / 5, 1e-9)
            if small:
                break
        else:
            damping *= 5
            if damping > 1e8:
                break
    return logs, slopes.T @ slopes

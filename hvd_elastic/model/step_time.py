"""How long a step takes: a model of few parameters, fitted to what was seen, sure of it or not.

``T_grad = slowness (alpha_c + beta_c m)`` for one pass over m examples on the slowest rank,
``T_sync = alpha + beta (K - 2)`` for K > 1 ranks, with one pair for ranks on one host and another
across hosts, and ``T_step = s T_grad + (T_grad^gamma + T_sync^gamma)^(1/gamma)`` with s
accumulation passes before the one that overlaps the reduction.

Source: Pollux, OSDI 2021, section 3.2. The slowness of unequal hosts, the priors as distributions
and the uncertainty of each prediction are added here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import ArrayLike

__all__ = ["Observation", "StepTimeModel", "StepTimes", "fit_step_time"]

_ITERATIONS = 60
_TYPICAL_NOISE = 0.05
_NOISE_FLOOR = 0.02
"""Relative noise that measured times have at the least; below it more data is not believed."""
_WIDE = 1.0
"""Standard deviation of the priors, in logarithms: a factor of e either way."""
_REACH = (0.5, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0)
"""Standard deviations from the fit at which predictions are looked at: less for a pass, whose two
parts replace each other along a curve."""
_FURTHER_RANK, _FURTHER_WIDTH = 0.05, 1.5
"""What a rank beyond two costs of what two do: from next to nothing, where links are the limit, to
as much, where it is the latency."""
_GAMMA_CENTRE, _GAMMA_WIDTH = -1.5, 1.5


@dataclass(frozen=True)
class Observation:
    """Steps of one configuration that were timed.

    Attributes:
        hosts, ranks: hosts and processes that trained together.
        atomic_batch_size: examples in one pass on one rank.
        accumulation_steps: extra passes before the reduction, on average over the steps.
        step_s: mean time of a step [s].
        slowness: of the slowest rank, relative to a reference rank of the run.
        steps: how many were timed.
        drift: relative standard deviation of what may have changed since they were timed.
        own_s: of that, the slowest rank's own work in all passes, without waiting [s]; None: not
            known.
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
    """Predictions.

    Attributes:
        step_s: time of a step [s].
        uncertainty: standard deviation of ``log(step_s)``: 0.1 means about 10 %. Large where
            nothing like it was seen.
    """

    step_s: np.ndarray
    uncertainty: np.ndarray


@dataclass(frozen=True)
class StepTimeModel:
    """The fitted model.

    Attributes:
        alpha_c, beta_c: of a pass: constant [s], for each example [s].
        alpha_r, beta_r: of the reduction on one host: constant [s], for each rank beyond 2 [s].
        alpha_n, beta_n: the same across hosts.
        gamma: overlap of pass and reduction, 1 (none) to 10 (perfect).
        covariance: (7, 7), of the logarithms of the first six and the logit of
            ``(gamma - 1) / 9``.
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
        """Times of steps in any configurations; the arguments broadcast to one shape S.

        Args:
            hosts, ranks, atomic_batch_size, accumulation_steps: see :class:`Observation`.
            slowness: of the slowest rank that takes part: a synchronous step waits for it.
            relative_to: index into S, flattened; the uncertainty is then that of the ratio to
                the step there. Two that are alike are uncertain together.

        >>> model = fit_step_time([Observation(1, 1, 32, 0, 0.1), Observation(1, 1, 64, 0, 0.18)])
        >>> bool(abs(model.predict(1, 1, 128, 0).step_s - 0.34) < 0.01)
        True
        """
        where = _Configurations.of(hosts, ranks, atomic_batch_size, accumulation_steps, slowness)
        logs = self._logs()
        times = _means(logs, where)
        # Along each axis of the parameters' distribution, the larger of the two directions: for
        # what was never seen, slopes at the fit say too little.
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
        """The times of :meth:`predict` [s] without their uncertainty, which costs most of it."""
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
    """The first of what :func:`_times` returns, in a fraction of the time."""
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
    """Step times, and the derivatives of their logarithms by the seven parameters (last axis)."""
    alpha_c, beta_c, alpha_r, beta_r, alpha_n, beta_n = np.exp(logs[:6])
    share = 1 / (1 + np.exp(-logs[6]))
    gamma = 1 + 9 * share
    constant, linear = at.slowness * alpha_c, at.slowness * beta_c * at.atomic
    grad = constant + linear
    across = at.hosts > 1
    beyond = np.maximum(at.ranks - 2, 0)
    together = at.ranks > 1
    sync = np.where(across, alpha_n + beta_n * beyond, alpha_r + beta_r * beyond) * together
    # The longer of the two is taken out, so that no power overflows.
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
    """Least squares on the logarithms of the times, with priors for what was not observed.

    The priors are optimistic, so that what was never tried looks worth trying, and wide, which
    the uncertainty of its predictions says: a pass whose size was never varied is half constant
    and half linear; the reduction costs what ranks waited in a step, or a twentieth of a pass;
    hosts apart reduce 1.1 times as slowly as ranks on one host; a rank beyond two costs a twentieth
    of what two do, which is the least certain of all. What is waited for does not grow with the
    batch: so the first batch size already says something of others.

    Args:
        observations: at least one. Those of one configuration are merged first.

    Raises:
        ValueError: there are none.

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
    # What further ranks cost is judged by what two do; across hosts that by what it is on one.
    for further, two in ((3, 2), (5, 4)):
        rows[further, further], rows[further, two] = 1 / _FURTHER_WIDTH, -1 / _FURTHER_WIDTH
    rows[4, 4], rows[4, 2] = 0.5, -0.5
    offset = rows @ centre

    noise = 0.05
    logs = centre
    precision = rows.T @ rows
    for _ in range(2):  # the second time with the noise that the first one found
        scale = np.sqrt(weights) / noise
        logs, precision = _minimize(logs, where, logs_seen, scale, rows, offset)
        residual = np.log(_times(logs, where)[0]) - logs_seen
        freedom = max(1.0, len(residual) - 2.0)
        # A prior worth four residuals of 5 %: few observations that fit prove nothing.
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
    """Half of a pass of the smallest size seen, and the reductions on one host and across [s]."""
    smallest = min(seen.atomic_batch_size for seen in observations)
    mine = [seen for seen in observations if seen.atomic_batch_size == smallest]
    # The fewest passes overlap least with the reduction.
    fewest = min(seen.accumulation_steps for seen in mine)
    mine = [seen for seen in mine if seen.accumulation_steps == fewest]
    # A rank alone waits for nobody.
    told = [seen for seen in mine if seen.own_s is not None and seen.ranks > 1]
    step_s = median(seen.step_s for seen in told or mine)
    slowness = median(seen.slowness for seen in told or mine)
    own_s = min(step_s, median(seen.own_s or step_s for seen in told)) if told else step_s
    last_s = own_s / (fewest + 1)
    half = last_s / slowness / 2
    # The reduction that makes the last pass longer by what was waited.
    gamma = 1 + 9 / (1 + np.exp(-_GAMMA_CENTRE))
    beyond = max(0.0, (step_s - own_s + last_s) ** gamma - last_s**gamma)
    reduction_s = max(0.1 * half, float(beyond ** (1 / gamma)))
    on_one = all(seen.hosts == 1 for seen in mine)
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
    # Beyond a few, repetitions share what makes them wrong (a busy machine, a shared link).
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
    """Levenberg-Marquardt; returns the minimum and the matrix of second derivatives there."""

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

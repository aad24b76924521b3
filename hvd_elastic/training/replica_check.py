"""Checks from time to time that all ranks hold the same parameters.

Each check compares some numbers of some tensors, different ones each time, with one small
reduction. Values are compared within a tolerance and not bit by bit, since processors of different
kinds round differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TypeVar

import numpy as np

from hvd_elastic.errors import ScriptError
from hvd_elastic.training.frontend import TrainedSums
from hvd_elastic.training.worker import Worker

Parameter = TypeVar("Parameter")
_PERIOD_STEPS = 1024
"""A check takes 1 to 2 ms, so less than 0.1 % of the time where a step takes 2 ms or more."""
_NUMBERS = 4096
"""Numbers of each tensor that one check compares: 32 KiB of float64."""
_PARAMETERS = 16
"""Number of parameters in one check: bounds its time."""
_LEAST_TOLERANCE = 1e-10
"""Least squared relative difference: below it, rounding of the float64 sums matters."""
_NAMES_SHOWN = 3  # the others are counted, to keep the message short


def check_replicas(worker: Worker) -> None:
    """Compare parameters with the other ranks if a check is due; called in each step on all ranks.

    Checks are due in steps 1, 2, 4, ... and every 1024th step. Ranks differ if the norm of the
    difference, relative to that of the parameter, is above the square root of the type's machine
    epsilon: 3e-4 in float32. The norm is estimated from sums with random signs, which differ by
    about that norm (Alon, Matias and Szegedy, STOC 1996, section 2.2).

    Raises:
        ScriptError: parameters differ; names the first of them, and the ranks.
    """
    number = _number_of_check(worker.progress.step)
    communicator, state = worker.communicator, worker.state
    if number is None or communicator.size == 1 or state is None:
        return
    own = state.trained_sums(_signs(), number)
    if not own.names:
        return
    told = np.column_stack([own.sums, np.square(own.sums[:, 0])])
    told = communicator.wait(communicator.reduce_async(told, "hvd_elastic.replicas"))
    signed, squares, signed_squares = told.T
    with np.errstate(all="ignore"):
        differ = signed_squares - np.square(signed) > _tolerances(own) * squares
    if differ.any():
        _refuse_difference(worker)


def _number_of_check(step: int) -> int | None:
    """Return the number of the check that is due after ``step`` steps, or None."""
    if step >= _PERIOD_STEPS:
        return None if step % _PERIOD_STEPS else step // _PERIOD_STEPS + 9
    return step.bit_length() - 1 if step and not step & (step - 1) else None


def parameters_of_check(parameters: Sequence[Parameter], number: int | None) -> Sequence[Parameter]:
    """Return the parameters that a check compares, different ones each time; None: all."""
    if number is None or not parameters:
        return parameters
    first, count = number * _PARAMETERS, min(_PARAMETERS, len(parameters))
    return [parameters[place % len(parameters)] for place in range(first, first + count)]


def sums_of(flat: np.ndarray, signs: np.ndarray, number: int | None) -> tuple[float, float]:
    """Return what a check compares of an array: the sum with random signs, and that of squares.

    Args:
        flat: numbers of a parameter, of shape (n,).
        signs: random signs; so many numbers at a time.
        number: number of the check, which chooses some of the numbers; None: all.
    """
    length = len(signs)
    starts = range(0, len(flat), length)
    if number is not None:
        start = number * length % max(1, len(flat))
        starts = range(start, start + 1)
    signed = squares = 0.0
    for start in starts:
        piece = flat[start : start + length].astype(np.float64)
        signed += float(piece @ signs[: len(piece)])
        squares += float(piece @ piece)
    return signed, squares


def _refuse_difference(worker: Worker) -> None:
    """Compare all numbers of all parameters; raise ScriptError that names those that differ."""
    assert worker.state is not None
    own = worker.state.trained_sums(_signs(), None)
    rows = worker.communicator.gather(own.sums[np.newaxis], "hvd_elastic.replicas_whole")
    signed, squares = rows[:, :, 0], rows[0, :, 1]
    with np.errstate(all="ignore"):
        apart = np.square(signed - signed[0]) > _tolerances(own) * squares
    names = [name for name, differs in zip(own.names, apart.any(axis=0), strict=True) if differs]
    ranks = [f"rank {rank}" for rank in np.flatnonzero(apart.any(axis=1))]
    if not names:  # over the whole parameter the difference is within the tolerance
        return
    shown = ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
    raise ScriptError(
        f"after step {worker.progress.step} the ranks hold different parameters: "
        f"{', '.join(ranks)} {'differs' if len(ranks) == 1 else 'differ'} from rank 0 in {shown} "
        f"({len(names)} of {own.known} parameters in the State). Parameters have to change "
        "alike on all ranks: in the step of the optimizer given to hvd.DistributedOptimizer, or by "
        "code that does the same on each of them. Look for another optimizer, for a scheduler "
        "that is not in the State, for gradients that a rank changes before they are averaged, and "
        "for a condition, a random number or a learning rate that differs between ranks"
    )


@cache
def _signs() -> np.ndarray:
    bits = np.random.PCG64(0).random_raw(_NUMBERS) & np.uint64(1)  # the same in any NumPy
    return bits.astype(np.float64) * 2 - 1


def _tolerances(sums: TrainedSums) -> np.ndarray:
    return np.maximum(sums.epsilons, _LEAST_TOLERANCE)

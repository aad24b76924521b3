"""Checks from time to time, and at the end of training, that all ranks hold the same parameters.

A check during training compares some numbers of some tensors, different ones each time, with one
small reduction. The last one compares all of them. Values are compared within a tolerance and not
bit by bit, since processors of different kinds round differently.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from functools import cache
from typing import TypeVar

import numpy as np

from hvd_elastic.communicator.interface import END_NAME
from hvd_elastic.errors import ScriptError
from hvd_elastic.worker.frontend import State, TrainedSums
from hvd_elastic.worker.worker import Worker

Parameter = TypeVar("Parameter")
_PERIOD_S = 10.0
"""A check takes 1 to 2 ms, so 0.02 % of the time."""
_NUMBERS = 4096
"""Numbers of each tensor that one check compares: 32 KiB of float64."""
_PARAMETERS = 16
"""Number of parameters in one check: bounds its time."""
_LEAST_TOLERANCE = 1e-10
"""Least squared relative difference: below it, rounding of the float64 sums matters."""
_NAMES_SHOWN = 3  # the others are counted, to keep the message short
_CHANGE_ALIKE = (
    "Parameters have to change alike on all ranks: in the step of the optimizer given to "
    "hvd.DistributedOptimizer, or by code that does the same on each of them. Look for another "
    "optimizer, for a scheduler that is not in the State, for gradients that a rank changes before "
    "they are averaged, for code that only some ranks run, such as loading weights on rank 0, and "
    "for a condition, a random number or a learning rate that differs between ranks"
)
_CHANGE_AT_THE_END = (
    "With hvd.LocalOptimizer the ranks hold the same weights only when a period ends, so what "
    "follows from them, such as an average (EMA), changes there: "
    "outer.register_step_post_hook(lambda *_: ema.update_parameters(model)); with fragments or a "
    "delay, after the loop over the loader. "
)


class ReplicaCheck:
    """Compares this rank's parameters with those of the other ranks.

    Ranks differ if the norm of the difference, relative to that of the parameter, is above the
    square root of the type's machine epsilon: 3e-4 in float32. The norm is estimated from sums with
    random signs, which differ by about that norm (Alon, Matias and Szegedy, STOC 1996, section
    2.2).
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._last = time.monotonic()

    @property
    def is_due(self) -> bool:
        """Return whether this rank wants a check in the next step; the ranks agree on it."""
        return time.monotonic() >= self._last + _PERIOD_S

    def step_exchanged(self, *, is_due: bool) -> None:
        """Compare some parameters in steps 1, 2, 4, ..., and where one is due; on all ranks.

        Raises:
            ScriptError: parameters differ; names the first of them, and the ranks.
        """
        step = self._worker.progress.step
        number = _number_of_check(step, is_due=is_due)
        communicator, state = self._worker.communicator, self._worker.state
        if number is None or communicator.size == 1 or state is None:
            return
        self._last = time.monotonic()
        own = state.trained_sums(_signs(), number)
        if not own.names:
            return
        told = np.column_stack([own.sums, np.square(own.sums[:, 0])])
        told = communicator.wait(communicator.reduce_async(told, "hvd_elastic.replicas"))
        signed, squares, signed_squares = told.T
        with np.errstate(all="ignore"):  # what is not finite on a rank is not known to be the same
            alike = signed_squares - np.square(signed) <= _tolerances(own) * squares
        if not alike.all():
            self._compare_all(state, f"after step {step}", "hvd_elastic.replicas_whole")

    def training_ends(self) -> None:
        """Compare all numbers of all parameters; all ranks call this before they end.

        Raises:
            ScriptError: parameters differ; names the first of them, and the ranks.
        """
        if self._worker.communicator.size > 1 and self._worker.state is not None:
            self._compare_all(self._worker.state, "at the end of training", END_NAME)

    def _compare_all(self, state: State, when: str, name: str) -> None:
        own = state.trained_sums(_signs(), None)
        rows = self._worker.communicator.gather(own.sums[np.newaxis], name)
        signed, squares = rows[:, :, 0], rows[0, :, 1]
        with np.errstate(all="ignore"):
            alike = np.square(signed - signed[0]) <= _tolerances(own) * squares
        apart = ~alike & ~(np.isnan(signed) & np.isnan(signed[0]))
        differs = apart.any(axis=0)
        names = [name for name, each in zip(own.names, differs, strict=True) if each]
        ranks = [f"rank {rank}" for rank in np.flatnonzero(apart.any(axis=1))]
        if not names:  # over the whole parameter the difference is within the tolerance
            return
        remedy = _CHANGE_AT_THE_END if self._worker.averagers.local else ""
        shown = ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
        raise ScriptError(
            f"{when} the ranks hold different parameters: {', '.join(ranks)} "
            f"{'differs' if len(ranks) == 1 else 'differ'} from rank 0 in {shown} "
            f"({len(names)} of {own.known} parameters in the State). {remedy}{_CHANGE_ALIKE}"
        )


def _number_of_check(step: int, *, is_due: bool) -> int | None:
    """Return the number of the check that is due after ``step`` steps, or None."""
    if step and not step & (step - 1):
        return step.bit_length() - 1
    # A hash, since regular steps might come back to the same parameters again and again.
    return zlib.crc32(b"%d" % step) if is_due else None


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


@cache
def _signs() -> np.ndarray:
    bits = np.random.PCG64(0).random_raw(_NUMBERS) & np.uint64(1)  # the same in any NumPy
    return bits.astype(np.float64) * 2 - 1


def _tolerances(sums: TrainedSums) -> np.ndarray:
    return np.maximum(sums.epsilons, _LEAST_TOLERANCE)

"""Sums over the variables of a model, used to compare ranks."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from hvd_elastic.tensorflow.variables import LiveVariable
from hvd_elastic.training.frontend import TrainedSums
from hvd_elastic.training.replica_check import parameters_of_check


def trained_sums(
    named: Mapping[str, tf.Variable], signs: np.ndarray, number: int | None
) -> TrainedSums:
    """See :meth:`~hvd_elastic.training.frontend.State.trained_sums`."""
    variables = [each for each in named.items() if each[1].dtype.is_floating]
    chosen = parameters_of_check(variables, number)
    sums = [_sums(LiveVariable(each).view().reshape(-1), signs, number) for _, each in chosen]
    epsilons = [float(np.array(tf.experimental.numpy.finfo(v.dtype).eps)) for _, v in chosen]
    names = [name for name, _ in chosen]
    return TrainedSums(names, np.array(sums).reshape(-1, 2), np.array(epsilons), len(variables))


def _sums(flat: np.ndarray, signs: np.ndarray, number: int | None) -> tuple[float, float]:
    """Return the sum with random signs, and the sum of squares."""
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

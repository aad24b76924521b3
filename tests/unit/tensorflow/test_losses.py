"""Losses that are sums or vectors give the gradient of the whole batch at any number of ranks."""

from __future__ import annotations

from tests.paths import skip_module_without_tensorflow

skip_module_without_tensorflow()

from collections.abc import Iterator
from typing import Any

import keras
import pytest
import tensorflow as tf

import hvd_elastic.tensorflow as hvd
from hvd_elastic.tensorflow.adaptive_rates import Control
from hvd_elastic.tensorflow.losses import losses_watched
from hvd_elastic.tensorflow.optimizer import averager_of
from hvd_elastic.worker.context import Context
from hvd_elastic.worker.pass_counts import PassCounts

VALUES = tf.constant([1.0, 2.0, 3.0])
KINDS = {kind: keras.losses.MeanSquaredError(reduction=kind) for kind in ("sum", None)}


@pytest.fixture
def told(alone: Context, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Watched losses on a rank with a quarter of the examples, one of two; their warnings."""
    warnings: list[str] = []
    monkeypatch.setattr(alone.worker, "warn_once", warnings.append)
    averager: Any = averager_of(hvd.DistributedOptimizer(keras.optimizers.SGD()))
    averager.controls.set(Control(factor=0.5, ranks=2, examples=3))
    plain = tf.GradientTape.gradient, keras.losses.Loss.__call__
    with losses_watched(lambda: [KINDS["sum"]]):
        yield warnings
    assert (tf.GradientTape.gradient, keras.losses.Loss.__call__) == plain


def gradient(loss: Any, *, of_input: bool = False) -> float:
    variable = tf.Variable(1.0)

    @tf.function
    def step(values: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(values)
            found = loss(values * variable)
        return tf.reduce_sum(tape.gradient(found, values if of_input else variable))

    return float(step(VALUES))


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (tf.reduce_mean, 2),
        (lambda values: values, 4 * 6),  # a value for each example
        (lambda values: values[:2], 3),  # for two tasks
        (lambda values: KINDS[None](tf.zeros((3, 1)), values[:, None]), 4 * 2 * 14),
        (lambda values: KINDS["sum"](tf.zeros((3, 1)), values[:, None]), 4 * 2 * 14),
    ],
    ids=["mean", "vector", "tasks", "none", "sum"],
)
def test_the_average_over_the_ranks_is_the_gradient_of_the_whole_sum(
    told: list[str], loss: Any, expected: float
) -> None:
    assert gradient(loss) == pytest.approx(expected)
    assert told == []


def test_a_gradient_penalty_is_left_alone(told: list[str]) -> None:
    assert gradient(lambda values: values, of_input=True) == 3


@pytest.mark.parametrize("eagerly", [False, True])
def test_a_sum_is_warned_of_unless_it_is_divided(told: list[str], eagerly: bool) -> None:
    """As a batch's sum over the number of its examples, or one of all ranks."""
    own = keras.losses.MeanSquaredError(reduction="sum")
    tf.config.run_functions_eagerly(eagerly)
    try:
        gradient(lambda values: own(tf.zeros((3, 1)), values[:, None]) / 3)
        gradient(lambda values: own(tf.zeros((3, 1)), values[:, None]) * (1 / 3))
        gradient(lambda values: own(tf.zeros((3, 1)), values) / tf.cast(tf.size(values), "float32"))
        assert told == []
        gradient(lambda values: own(tf.zeros((3, 1)), values[:, None]))
        if not eagerly:  # only graphs know what a loss adds
            gradient(lambda values: values[0] + own(tf.zeros((3, 1)), values[:, None]))
    finally:
        tf.config.run_functions_eagerly(False)
    assert ["reduction='sum' in a step" in each for each in told] == [True] * (1 + (not eagerly))


def test_a_mean_over_a_mask_is_not_warned_of_where_the_script_counts(
    told: list[str], alone: Context
) -> None:
    alone.step.counts = PassCounts(alone.worker.communicator)
    weighted = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    gradient(lambda values: weighted(tf.zeros((3, 1)), values[:, None], VALUES))
    assert told == []


def test_what_cannot_be_made_right_is_warned_of(told: list[str]) -> None:
    own = keras.losses.MeanSquaredError(reduction="sum")
    assert gradient(lambda values: own(tf.zeros((3, 1)), values[:, None])) == pytest.approx(2 * 14)
    own(tf.zeros((3, 1)), VALUES[:, None])  # an evaluation takes no gradient
    weighted = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    gradient(lambda values: weighted(tf.zeros((3, 1)), values[:, None], VALUES))
    assert ["reduction='sum' in a step" in told[0], "mask or sample weights" in told[1]] == [1, 1]
    assert len(told) == 2

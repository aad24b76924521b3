"""Steps whose averaged gradients are not finite: left out, or what the user asks for."""

from __future__ import annotations

from tests.paths import skip_module_without_tensorflow

skip_module_without_tensorflow()

import math
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_elastic.tensorflow as hvd
from hvd_elastic.errors import ScriptError
from hvd_elastic.tensorflow import gradients
from hvd_elastic.tensorflow.adaptive_rates import Control
from hvd_elastic.tensorflow.frontend import choose_optimizers, optimizers_watched
from hvd_elastic.tensorflow.optimizer import averager_of, tape_averager
from hvd_elastic.worker.context import Context
from hvd_elastic.worker.step import Pass


class Training:
    """Variables in two buckets, and a step whose gradients are factors that the test gives."""

    def __init__(self, ctx: Context, *, compiled: bool = True, tape: bool = False) -> None:
        self.ctx, self.tape = ctx, tape
        self.variables = [tf.Variable(tf.ones(n), name=f"v{n}") for n in (1, 2, 5)]
        adam = keras.optimizers.Adam(0.1)
        self.optimizer = adam if tape else hvd.DistributedOptimizer(adam)
        self.optimizer.build(self.variables)
        self.averager = tape_averager() if tape else averager_of(self.optimizer)
        self.step = tf.function(self._step) if compiled else self._step

    def _step(self, *factors: tf.Tensor) -> None:
        with hvd.DistributedGradientTape() if self.tape else tf.GradientTape() as tape:
            each = zip(self.variables, factors, strict=True)
            loss = tf.add_n([tf.reduce_sum(variable * factor) for variable, factor in each])
        self.optimizer.apply(tape.gradient(loss, self.variables), self.variables)

    def take(self, *factors: Any) -> None:
        """Take a step; a factor of 1 for each number of the variables that are not given."""
        self.ctx.hand_out(Pass(step_examples=8, weight=1.0, examples=4, start=16))
        given = [*factors, *map(np.ones, (1, 2, 5)[len(factors) :])]
        self.step(*(tf.cast(factor, tf.float32) for factor in given))
        self.averager.collect()  # type: ignore[union-attr]

    def values(self) -> list[np.ndarray]:
        return [each.numpy() for each in (*self.variables, *self.optimizer.variables)]


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "BUCKET_BYTES", 12)


def watched(training: Training) -> AbstractContextManager[None]:
    """Give the optimizer and the variables to a State, as at the beginning of training."""
    named = {f"v{number}": each for number, each in enumerate(training.variables)}
    state = hvd.State(optimizer=training.optimizer, **named)
    choose_optimizers(state)
    return optimizers_watched(state)


def same(found: list[np.ndarray], expected: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("compiled", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("tape", [False, True], ids=["optimizer", "tape"])
def test_a_step_is_left_out_of_which_one_number_is_not_finite(
    alone: Context, *, tape: bool, compiled: bool
) -> None:
    """In any bucket; the optimizer's moments and count of steps stay as they are."""
    training = Training(alone, compiled=compiled, tape=tape)
    with watched(training):
        training.take()
        before = training.values()
        for factor in (math.nan, math.inf, -math.inf):
            training.take(factor)
            training.take(1.0, [1.0, factor])
            training.take(1.0, [1.0, 1.0], [1.0, 1.0, 1.0, 1.0, factor])
        assert same(training.values(), before)
        training.take()
    progress = alone.worker.progress
    assert (progress.step, progress.examples, progress.skipped) == (11, 88, 9)
    assert int(training.optimizer.iterations) == 2
    assert not same(training.values(), before)


@pytest.mark.parametrize("tape", [False, True], ids=["optimizer", "tape"])
def test_a_step_of_which_nothing_counts_is_left_out(alone: Context, *, tape: bool) -> None:
    """See hvd.step_weight."""
    training = Training(alone, tape=tape)
    with watched(training):
        training.take()
        before = training.values()
        alone.hand_out(Pass(step_examples=8, weight=1.0, examples=4))
        hvd.step_weight(0)
        training.step(*map(tf.ones, (1, 2, 5)))
        training.averager.collect()  # type: ignore[union-attr]
        assert same(training.values(), before)
        training.take()
    assert int(training.optimizer.iterations) == 2
    assert alone.worker.progress.skipped == 0


def test_a_gradient_that_is_not_finite_on_another_rank_is_seen(
    alone: Context, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bad = [""]

    def reduce(tensor: tf.Tensor, name: str, *, average: bool = False) -> tf.Tensor:
        def other(values: np.ndarray) -> np.ndarray:
            return values * np.float32(math.nan if name == bad[0] else 1)

        return tf.numpy_function(other, [tensor], tensor.dtype)

    monkeypatch.setattr(gradients, "reduce_in_graph", reduce)
    training = Training(alone)
    training.averager._in_ring = True  # type: ignore[union-attr]
    training.averager.controls.set(Control(alone=False))  # type: ignore[union-attr]
    training.take()
    before = training.values()
    for bad[0] in ("gradient.0", "gradient.1"):
        training.take()
        assert same(training.values(), before)
    assert alone.worker.progress.skipped == 2
    assert "step 2, of epoch 0 at example 8, is left out" in caplog.text
    assert "gradients of rank" not in caplog.text


def test_large_numbers_are_finite(alone: Context) -> None:
    """Though their squares are not."""
    training = Training(alone)
    training.take(2e38, [2e38, -2e38])
    assert alone.worker.progress.skipped == 0


@pytest.mark.parametrize(
    ("factors", "whose"),
    [
        ([1.0, [1.0, math.nan]], "from 'v2' backward, but not all parameters' gradients"),
        ([math.nan, math.nan, [math.nan] * 5], "all parameters' gradients"),
    ],
)
def test_it_is_said_whose_gradients_and_examples_they_were(
    alone: Context, caplog: pytest.LogCaptureFixture, factors: list[Any], whose: str
) -> None:
    Training(alone).take(*factors)
    words = "step 1: gradients of rank 0 are not finite, which had the examples 16 to 19: "
    assert words + whose in caplog.text


def test_ten_in_a_row_end_the_run(alone: Context) -> None:
    training = Training(alone)
    for factor in [math.nan] * 9 + [1.0] + [math.nan] * 9:
        training.take(factor)
    with pytest.raises(
        ScriptError, match=r"in 10 steps running, up to step 20: .* data and the loss, .* scale"
    ):
        training.take(math.nan)


def test_such_a_step_ends_the_run_where_the_user_says_so(alone: Context) -> None:
    alone.worker.on_not_finite = "stop"
    training = Training(alone)
    training.take()
    with pytest.raises(ScriptError, match="the gradients of step 2, of epoch 0 at example 8"):
        training.take(math.nan)


def test_such_a_step_is_taken_where_the_user_says_so(alone: Context) -> None:
    alone.worker.on_not_finite = "ignore"
    training = Training(alone)
    training.take(math.nan)
    assert math.isnan(training.variables[0].numpy()[0])
    assert alone.worker.progress.skipped == 0


def test_a_body_of_several_optimizers_counts_once(alone: Context) -> None:
    """That is left out whose gradients are not finite."""
    alone.worker.in_train = False
    good, bad = Training(alone), Training(alone)
    alone.worker.in_train = True
    before = good.values(), bad.values()
    alone.hand_out(Pass(step_examples=8, weight=1.0))
    for training, factor in ((good, 1.0), (bad, math.nan)):
        training.step(*map(tf.constant, (factor, [1.0, 1.0], [1.0] * 5)))
    alone.worker.averagers.collect()
    alone.mark_consumed()
    assert alone.worker.progress.step == alone.worker.progress.skipped == 1
    assert not same(good.values(), before[0])
    assert same(bad.values(), before[1])

"""Gradients are averaged in the graph, and variables change only if all reductions succeed."""

from __future__ import annotations

from tests.paths import skip_module_without_tensorflow

skip_module_without_tensorflow()

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_elastic.tensorflow as hvd
from hvd_elastic.communicator.interface import GenerationBrokenError
from hvd_elastic.errors import ScriptError
from hvd_elastic.tensorflow import gradients
from hvd_elastic.tensorflow.adaptive_rates import Control
from hvd_elastic.tensorflow.frontend import choose_optimizers
from hvd_elastic.tensorflow.optimizer import averager_of
from hvd_elastic.worker.context import Context
from hvd_elastic.worker.launch import Mode
from hvd_elastic.worker.planning.planner import Planner
from hvd_elastic.worker.step import Pass


class Training:
    """Two variables, each in a bucket of its own, and a compiled step that trains them."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, own: Any = None, *, in_ring: bool = False
    ) -> None:
        monkeypatch.setattr(gradients, "BUCKET_BYTES", 8)
        self.variables = [tf.Variable([1.0, 2.0]), tf.Variable([3.0, 4.0])]
        self.optimizer = hvd.DistributedOptimizer(own or keras.optimizers.SGD(1.0))
        self.optimizer.build(self.variables)
        found = averager_of(self.optimizer)
        assert found is not None
        self.averager = found
        self.traces = 0
        if in_ring:
            found._in_ring = True
            found.controls.set(Control(alone=False))
        self.step = tf.function(self._step, reduce_retracing=True)

    def _step(self, factor: tf.Tensor) -> None:
        self.traces += 1
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(variable) for variable in self.variables]) * factor
        self.optimizer.apply(tape.gradient(loss, self.variables), self.variables)

    @property
    def values(self) -> list[list[float]]:
        return [variable.numpy().tolist() for variable in self.variables]


def test_a_step_alone_is_that_of_the_optimizer(
    alone: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(monkeypatch)
    training.step(tf.constant(1.0))
    assert training.values == [[0.0, 1.0], [2.0, 3.0]]
    assert training.averager.steps == 0
    training.averager.collect()
    assert training.averager.steps == 1


@pytest.mark.parametrize(
    "own",
    [
        lambda: keras.optimizers.SGD(1.0),
        lambda: keras.optimizers.SGD(1.0, momentum=0.9, nesterov=True, clipnorm=1.0),
        lambda: keras.optimizers.AdamW(1.0, amsgrad=True, use_ema=True, ema_overwrite_frequency=1),
        lambda: keras.optimizers.Ftrl(1.0, weight_decay=0.1),
    ],
    ids=["SGD", "momentum", "AdamW", "Ftrl"],
)
def test_no_variable_changes_if_one_reduction_fails(
    alone: Context, monkeypatch: pytest.MonkeyPatch, own: Callable[[], Any]
) -> None:
    failing = [""]

    def reduce(tensor: tf.Tensor, name: str, *, average: bool = False) -> tf.Tensor:
        def fail(values: np.ndarray) -> np.ndarray:
            if name == failing[0]:
                raise RuntimeError(f"node {name}: Connection closed by peer")
            return values

        return tf.numpy_function(fail, [tensor], tensor.dtype)

    monkeypatch.setattr(gradients, "reduce_in_graph", reduce)
    training = Training(monkeypatch, own(), in_ring=True)
    every = [*training.variables, *training.optimizer.variables]
    before = [each.numpy() for each in every]
    for failing[0] in ("gradient.0", "gradient.1"):
        training.averager.controls.set(Control(alone=False))
        with pytest.raises(tf.errors.OpError) as failed:
            training.step(tf.constant(1.0))
        for variable, value in zip(every, before, strict=True):
            np.testing.assert_array_equal(variable.numpy(), value)
        raised = alone.worker.frontend.failed_collective(failed.value)
        assert isinstance(raised, GenerationBrokenError)
        training.averager.collect()
        training.averager.reset()
        assert training.averager.steps == 0
    failing[0] = ""
    training.step(tf.constant(1.0))
    assert int(training.optimizer.iterations) == 1
    reference, alone_values = own(), [tf.Variable([1.0, 2.0]), tf.Variable([3.0, 4.0])]
    reference.build(alone_values)
    reference.apply([tf.ones(2), tf.ones(2)], alone_values)
    for variable, value in zip(training.variables, alone_values, strict=True):
        np.testing.assert_allclose(variable.numpy(), value.numpy(), rtol=1e-6)


def test_a_commit_before_the_step_does_not_end_it(
    alone: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the batch counts twice, and the next one is skipped."""
    training = Training(monkeypatch)
    alone.register_data(64, 0, Planner(8))
    for step in (1, 2):
        alone.hand_out(Pass(8, 1.0))
        training.averager.prepare()
        alone.commit({})
        training.step(tf.constant(1.0))
        training.averager.collect()
        alone.mark_consumed()
        progress = alone.worker.progress
        assert (progress.step, progress.position) == (step, 8 * step)


def test_helpers_of_the_state_are_compared_before_variables_change(
    alone: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients, "reduce_in_graph", lambda tensor, name, average: tensor)
    training, seen = Training(monkeypatch, in_ring=True), []
    monkeypatch.setattr(alone.rollback, "step_begins", lambda: seen.append(training.values))
    training.step(tf.constant(1.0))
    assert seen == [[[1.0, 2.0], [3.0, 4.0]]]
    assert training.values == [[0.0, 1.0], [2.0, 3.0]]


def test_a_body_with_several_optimizers_is_undone_as_a_whole(
    alone: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second optimizer's reduction fails after the first one has taken its step."""
    worker, failing = alone.worker, [""]
    worker.in_train, worker.mode = False, Mode.AGENT
    worker.communicator.size = 2
    told = worker.communicator

    def reduce(tensor: tf.Tensor, name: str, *, average: bool = False) -> tf.Tensor:
        def run(values: np.ndarray) -> np.ndarray:
            if name == failing[0]:
                raise RuntimeError(f"node {name}: Connection closed by peer")
            return values

        return tf.numpy_function(run, [tensor], tensor.dtype)

    monkeypatch.setattr(gradients, "reduce_in_graph", reduce)
    monkeypatch.setattr(told, "reduce_async", lambda array, *_, **__: array)
    monkeypatch.setattr(told, "wait", lambda array: array)
    values = [tf.Variable(1.0), tf.Variable(2.0)]
    optimizers = [hvd.DistributedOptimizer(keras.optimizers.Adam(0.1)) for _ in values]
    for optimizer, value in zip(optimizers, values, strict=True):
        optimizer.build([value])
    state = hvd.State(**{f"v{n}": v for n, v in enumerate((*values, *optimizers))})
    choose_optimizers(state)
    alone.has_trained = worker.in_train = True
    averagers: Any = list(worker.averagers)

    @tf.function
    def step() -> None:
        for value, optimizer in zip(values, optimizers, strict=True):
            with tf.GradientTape() as tape:
                loss = value * values[0]
            optimizer.apply(tape.gradient(loss, [value]), [value])

    def body() -> list[float]:
        alone.hand_out(Pass(step_examples=8, weight=1.0))
        worker.averagers.prepare()
        step()
        worker.averagers.collect()
        alone.mark_consumed()
        alone.rollback.body_ended(voided=False)
        return [float(each) for each in [*values, *averagers[0].optimizer.variables]]

    alone.register_data(64, 0, alone.planner)
    alone.rollback.save()
    before = body()
    failing[0] = averagers[1]._names[0]
    assert failing[0] != averagers[0]._names[0]
    with pytest.raises(tf.errors.OpError) as failed:
        body()
    assert isinstance(worker.frontend.failed_collective(failed.value), GenerationBrokenError)
    assert float(values[0]) != before[0], "the first optimizer has taken its step"
    worker.averagers.collect(collectives=False)
    alone.step_failed()
    alone.rollback.fail()
    assert [float(each) for each in [*values, *averagers[0].optimizer.variables]] == before
    failing[0] = ""
    body()
    assert worker.progress.step == 2
    assert [int(each.iterations) for each in optimizers] == [2, 2]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda model, one, two: hvd.State(model=model), "the SGD that was given to .* not in the"),
        (lambda model, one, two: hvd.State(model=model, a=one, b=two), "each has to know which"),
    ],
)
def test_what_the_state_lacks_is_an_error_at_the_start(
    alone: Context, make: Callable[..., Any], said: str
) -> None:
    alone.worker.in_train = False
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    optimizers = [hvd.DistributedOptimizer(keras.optimizers.SGD()) for _ in range(2)]
    with pytest.raises(ScriptError, match=said):
        hvd.run(lambda state: None)(make(model, *optimizers))


def test_an_optimizer_that_nobody_averages_is_refused(alone: Context) -> None:
    alone.worker.in_train = False
    variables = [tf.Variable(1.0)]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD())
    optimizer.build(variables)
    other, late = keras.optimizers.Adam(), hvd.DistributedOptimizer(keras.optimizers.SGD())

    def train(state: hvd.State, apart: Any) -> None:
        apart.apply([tf.constant(1.0)], variables)

    state = hvd.State(value=variables[0], optimizer=optimizer)
    with pytest.raises(ScriptError, match="this Adam applies gradients that are not averaged"):
        hvd.run(train)(state, other)
    other.apply([tf.constant(1.0)], variables)  # outside of training it is the script's
    alone.has_trained = False
    with pytest.raises(ScriptError, match="this SGD does not train, since it is not in the State"):
        hvd.run(train)(state, late)


def test_a_count_weights_a_rank_in_place_of_its_examples(
    alone: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(monkeypatch)
    alone.worker.communicator.size = 2
    monkeypatch.setattr(alone.worker.communicator, "sum_async", lambda array, _: array + 9)
    alone.hand_out(Pass(step_examples=8, weight=1.0, examples=4))
    alone.worker.averagers.prepare()
    hvd.step_weight(tf.constant(3))
    assert training.averager.controls.now.factor == 2 * 3 / (3 + 9)
    training.averager.step.begun = True
    with pytest.raises(ScriptError, match="after the gradients of the batch were applied"):
        hvd.step_weight(3)


def test_another_world_traces_nothing_anew(alone: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    communicator = alone.worker.communicator

    def reduce(tensor: tf.Tensor, name: str, *, average: bool) -> tf.Tensor:
        """Average with ranks whose gradients are 0."""
        assert average
        return tf.numpy_function(
            lambda own: own / np.float32(communicator.size), [tensor], tensor.dtype
        )

    monkeypatch.setattr(gradients, "reduce_in_graph", reduce)
    training = Training(monkeypatch, in_ring=True)
    seen = []
    for communicator.size in (1, 2, 4):
        before = training.values[0][0]
        training.averager.prepare()
        training.step(tf.constant(1.0))
        training.averager.collect(collectives=False)
        seen.append(before - training.values[0][0])
    assert seen == [1.0, 0.5, 0.25]
    assert training.traces == 1


def test_an_error_of_the_script_is_none_of_ours(
    alone: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    Training(monkeypatch)
    error = tf.errors.InvalidArgumentError(None, None, "the script's own")
    assert alone.worker.frontend.failed_collective(error) is None


def test_a_step_compiled_by_xla_is_refused(alone: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(monkeypatch)
    compiled = tf.function(training._step, jit_compile=True)
    with pytest.raises(ScriptError, match="jit_compile"):
        compiled(tf.constant(1.0))


def test_a_padding_rank_adds_nothing_even_if_its_gradient_is_not_finite() -> None:
    gradient = tf.constant([float("nan"), 1.0])
    flat = gradients._flat([gradient], tf.constant(0.0), tf.constant(False))
    assert flat.numpy().tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: hvd.DistributedOptimizer(object()), "wraps an optimizer of Keras 3"),
        (
            lambda: hvd.DistributedOptimizer(hvd.DistributedOptimizer(keras.optimizers.SGD())),
            "averaged already",
        ),
        (
            lambda: hvd.DistributedOptimizer(
                keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
            ),
            "LossScaleOptimizer",
        ),
    ],
)
def test_wrong_optimizers_are_refused(alone: Context, made: object, said: str) -> None:
    assert callable(made)
    with pytest.raises(ScriptError, match=said):
        made()


def test_a_collective_in_a_graph_is_refused(alone: Context) -> None:
    with pytest.raises(ScriptError, match=r"in a tf\.function"):
        tf.function(lambda x: hvd.allreduce(x, "x"), autograph=False)(tf.constant(1.0))


def test_the_bucket_of_the_first_variable_is_known_as_the_last_to_be_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gradients, "BUCKET_BYTES", 8)
    computed = [tf.fill([elements], float(number)) for number, elements in enumerate((1, 2, 1))]
    variables = [tf.Variable(each) for each in computed]
    packed = gradients._Packed(computed, variables, tf.constant(1.0))
    contents = [sorted(flat.numpy()) for flat in packed.flats]
    assert contents == [[0, 2], [1, 1]]  # the large gradient has a bucket of its own, at the end
    assert packed.last == 0

"""`model.fit` with ElasticCallback: one line, and clear errors for what cannot be elastic."""

from __future__ import annotations

from tests.paths import WORKER_PYTHONPATH, skip_module_without_tensorflow

skip_module_without_tensorflow()

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_elastic.keras as hvd
from hvd_elastic.errors import ScriptError
from hvd_elastic.keras.checks import first_layer
from hvd_elastic.keras.monitors import Monitors
from hvd_elastic.model.lr_rules import Adjustment
from hvd_elastic.worker.context import Context
from hvd_elastic.worker.metrics import average_by_examples, average_over_ranks

pytestmark = pytest.mark.filterwarnings("ignore:__array__ impl:DeprecationWarning:keras")
"""Keras reads variables in a way that NumPy will no longer have."""
INPUTS, TARGETS = np.ones((10, 2), np.float32), np.ones((10, 1), np.float32)


def model_of(optimizer: Any = None, *, built: bool = True, **options: Any) -> Any:
    layers = [keras.Input((2,))] if built else []
    model = keras.Sequential([*layers, keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(
        optimizer or hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", **options
    )
    return model


def fit(model: Any, dataset: Any = None, *more: Any, **options: Any) -> Any:
    if dataset is None:
        dataset = hvd.dataset((INPUTS, TARGETS), 4)
    callbacks = [hvd.ElasticCallback(), *more]
    return model.fit(dataset, callbacks=callbacks, verbose=0, **options)


def test_fit_trains_each_batch_once_and_traces_at_most_twice(alone: Context) -> None:
    class Count(keras.callbacks.Callback):
        batches = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.batches += 1

    traces = []

    class Traced(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            traces.append(data[0].shape)
            return super().train_step(data)

    model = Traced([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    count = Count()
    history = fit(model, None, count, epochs=2)
    assert count.batches == 2 * 3
    assert alone.worker.progress.step == 6
    assert int(model.optimizer.iterations) == 6
    assert history.history["loss"][1] < history.history["loss"][0]
    assert len(traces) <= 2, "the shares of the last step have another size"


def test_a_model_that_never_applies_gradients_is_told(
    alone: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Idle(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            return {"loss": tf.reduce_sum(self(data[0]))}

    warnings: list[str] = []
    monkeypatch.setattr(alone.worker, "warn", warnings.append)
    model = Idle([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    fit(model)
    (warning,) = warnings
    assert warning.startswith("3 steps of training, and nothing was trained: optimizer.apply")


def test_a_callback_that_stops_training_ends_it(alone: Context) -> None:
    stop = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: hvd.stop("enough"))
    fit(model_of(), None, stop, epochs=5)
    assert alone.worker.progress.step == 4, "it ends after the next step"


def test_the_last_checkpoint_has_the_best_weights_that_early_stopping_restores(
    alone: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, kept = model_of(), list[Any]()
    monkeypatch.setattr(
        alone.checkpoints, "take_checkpoint", lambda **_: kept.append(model.get_weights())
    )
    best = keras.callbacks.EarlyStopping("loss", mode="max", patience=2, restore_best_weights=True)
    end = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: kept.append(model.get_weights()))
    fit(model, None, best, end, epochs=9)
    first, *_, last, saved = kept
    assert len(kept) == 4, "three epochs, and the end"
    assert not np.allclose(first[0], last[0])
    np.testing.assert_array_equal(saved[0], first[0])
    np.testing.assert_array_equal(model.get_weights()[0], first[0])


def test_metrics_are_averaged_by_examples() -> None:
    rows: list[Any] = [(30, {"loss": 1.0, "lr": 0.1}), (10, {"loss": 2.0}), (0, {"loss": 9.0})]
    assert average_by_examples(rows) == {"loss": 1.25, "lr": 0.1}
    assert average_by_examples([(0, {})]) == {}


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: model_of(keras.optimizers.SGD()), "not given to hvd_elastic.keras.Distributed"),
        (lambda: model_of(built=False), "not built"),
        (lambda: model_of(jit_compile=True), "XLA"),
        (lambda: model_of(steps_per_execution=2), "steps_per_execution=2"),
    ],
)
def test_models_that_cannot_be_elastic_are_refused(alone: Context, model: Any, said: str) -> None:
    with pytest.raises(ScriptError, match=said):
        fit(model())


def test_what_restores_training_or_comes_too_early_is_refused(
    alone: Context, tmp_path: Path
) -> None:
    with pytest.raises(ScriptError, match="BackupAndRestore"):
        fit(model_of(), None, keras.callbacks.BackupAndRestore(tmp_path))
    stopping = keras.callbacks.EarlyStopping("loss")
    dataset = hvd.dataset((INPUTS, TARGETS), 4)
    with pytest.raises(ScriptError, match="comes first in callbacks"):
        model_of().fit(dataset, callbacks=[stopping, hvd.ElasticCallback()], verbose=0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda data: {"steps_per_epoch": 3}, "steps_per_epoch=3"),  # the number of an epoch's
        (lambda data: {"validation_data": data}, "gives the shares of training"),
        (lambda data: {"x": data.examples}, "has to come from hvd.dataset"),
    ],
)
def test_arguments_of_fit_are_refused_before_the_first_batch(
    alone: Context, given: Any, said: str
) -> None:
    model, data = model_of(), hvd.dataset((INPUTS, TARGETS), 4)
    plain = tf.data.Dataset.from_tensor_slices((INPUTS, TARGETS)).batch(4)
    options = {"x": data, **given(data)}
    options["x"] = data if options["x"] is data else plain
    with pytest.raises(ScriptError, match=said):
        model.fit(**options, callbacks=[hvd.ElasticCallback()], verbose=0)
    assert int(model.optimizer.iterations) == 0


def test_evaluate_of_a_wrong_kind_is_refused(alone: Context) -> None:
    for wrong, said in ((0.5, "must be a function"), (hvd.evaluate, "without arguments")):
        with pytest.raises(ScriptError, match=said):
            hvd.ElasticCallback(evaluate=wrong)  # type: ignore[arg-type]
    number: Any = lambda: 0.5  # noqa: E731
    callbacks = [hvd.ElasticCallback(evaluate=number)]
    with pytest.raises(ScriptError, match="has returned a float"):
        model_of().fit(hvd.dataset((INPUTS, TARGETS), 4), callbacks=callbacks, verbose=0)


def test_a_callback_that_stops_after_a_batch_stops_all_ranks(alone: Context) -> None:
    """The ranks agree on it in the next step; another one would have gone on alone."""
    inputs = INPUTS.copy()
    inputs[0] = np.nan
    end = keras.callbacks.TerminateOnNaN()
    fit(model_of(), hvd.dataset((inputs, TARGETS), 2), end, epochs=5)
    assert (alone.worker.progress.step, alone.worker.progress.epoch) == (2, 0)
    assert "stop_training after batch 0" in alone.worker.stop_reason


@pytest.mark.parametrize("kind", ["ragged", "sparse"])
def test_fit_trains_on_tensors_without_a_length(alone: Context, kind: str) -> None:
    class Bag(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.out = keras.layers.Embedding(8, 4), keras.layers.Dense(1)

        def call(self, ids: Any) -> Any:
            return self.out(tf.reduce_mean(self.embedding(ids.to_tensor()), 1))

    if kind == "sparse":
        layers = [keras.Input((2,), sparse=True), keras.layers.Dense(1)]
        model, to = keras.Sequential(layers), tf.sparse.from_dense
    else:
        model, to = Bag(), lambda x: tf.RaggedTensor.from_tensor(tf.cast(x, tf.int32))
        model(to(INPUTS))
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", metrics=["mae"])
    data = hvd.dataset((INPUTS, TARGETS), 4).map(lambda x, y: (to(x), y))
    history = fit(model, data, epochs=2)
    assert alone.worker.progress.step == 6
    assert len(history.history["mae"]) == 2


def test_adapt_is_told_to_take_the_arrays(alone: Context) -> None:
    layer = keras.layers.Normalization()
    with pytest.raises(ScriptError, match=r"adapt of a layer.*give the arrays"):
        layer.adapt(hvd.dataset(INPUTS, 4))


def test_loss_scaling_is_refused(alone: Context) -> None:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        with pytest.raises(ScriptError, match="mixed_bfloat16"):
            fit(model_of())
    finally:
        keras.config.set_dtype_policy(before)


def test_a_strategy_around_the_model_is_refused_without_a_traceback(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import keras, numpy as np, tensorflow as tf\n"
        "import hvd_elastic.keras as hvd\n"
        "hvd.init()\n"
        "optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))\n"
        "with tf.distribute.MirroredStrategy(['CPU:0']).scope():\n"
        "    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])\n"
        "    model.compile(optimizer, 'mse')\n"
        "dataset = hvd.dataset((np.ones((8, 2)), np.ones((8, 1))), 4)\n"
        "model.fit(dataset, callbacks=[hvd.ElasticCallback()], verbose=0)\n"
    )
    quiet = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": WORKER_PYTHONPATH}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, cwd=tmp_path, env=quiet
    )
    assert done.returncode == 1
    error = done.stderr[done.stderr.index("error: ") :]
    assert error.startswith(f"error: {script}, line 9: A pipeline of your own, or a tf.distribute")
    assert "Traceback" not in error


@pytest.mark.parametrize("where", ["on_epoch_begin", "on_train_batch_end"])
def test_fit_that_raises_leaves_the_dataset_alone(alone: Context, where: str) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    dataset = hvd.dataset((INPUTS, TARGETS), 4)
    with pytest.raises(ZeroDivisionError):
        fit(model_of(), dataset, keras.callbacks.LambdaCallback(**{where: fail}))
    alone.worker.in_train = False
    shapes = [inputs.shape for inputs, _ in itertools.islice(dataset, 2)]
    assert shapes == [(4, 2), (2, 2)], "examples, as outside of training"


def test_two_steps_for_a_batch_are_refused(alone: Context) -> None:
    class Twice(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            super().train_step(data)
            return super().train_step(data)

    model = Twice([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    with pytest.raises(ScriptError, match="twice in one step"):
        fit(model)


class Gan(keras.Model):
    """Two parts and two optimizers, of which `compile` of Keras knows none."""

    def __init__(self, *optimizers: Any) -> None:
        super().__init__()
        self.parts = [
            keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="zeros")])
            for _ in optimizers
        ]
        self.built = True
        self.compile()
        self.optimizers = list(optimizers)

    def train_step(self, data: Any) -> Any:
        losses = {}
        for number, (part, optimizer) in enumerate(zip(self.parts, self.optimizers, strict=True)):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((part(data[0]) - data[1]) ** 2)
            variables = part.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)
            losses[f"loss_{number}"] = loss
        return losses


def test_a_train_step_may_return_the_results_of_its_metrics_by_name(alone: Context) -> None:
    """Those of ``compile(metrics=...)`` are a dict then, which Keras flattens."""

    class Custom(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            super().train_step(data)
            return {metric.name: metric.result() for metric in self.metrics}

    model = Custom([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", metrics=["mae"])
    assert set(fit(model).history) == {"loss", "mae"}


def test_a_train_step_with_several_optimizers_trains_as_each_would_alone(alone: Context) -> None:
    adam = keras.optimizers.Adam
    both = [hvd.DistributedOptimizer(kind(0.1)) for kind in (keras.optimizers.SGD, adam)]
    gan = Gan(*both)
    fit(gan, epochs=2)
    assert alone.worker.progress.step == 6
    assert [int(each.iterations) for each in both] == [6, 6]
    for part, optimizer in zip(gan.parts, (keras.optimizers.SGD(0.1), adam(0.1)), strict=True):
        plain = Gan(optimizer)
        plain.fit(INPUTS, TARGETS, 4, shuffle=False, verbose=0, epochs=2)
        for own, theirs in zip(part.get_weights(), plain.parts[0].get_weights(), strict=True):
            assert own == pytest.approx(theirs, abs=1e-5)


def test_a_second_optimizer_that_is_not_averaged_is_refused_before_the_first_step(
    alone: Context,
) -> None:
    gan = Gan(hvd.DistributedOptimizer(keras.optimizers.SGD()), keras.optimizers.Adam())
    with pytest.raises(ScriptError, match="this Adam applies gradients that are not averaged"):
        fit(gan)
    assert int(gan.optimizers[0].iterations) == 0


class Biggest(keras.metrics.Metric):
    def __init__(self) -> None:
        super().__init__(name="biggest")
        self.value = self.add_weight(shape=(), initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.value.assign(tf.maximum(self.value, tf.reduce_max(y_true)))

    def result(self) -> Any:
        return tf.identity(self.value)


def test_metrics_are_those_of_the_examples_of_all_ranks_and_of_a_worker_that_has_left(
    alone: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank has told its share in the steps, and has one batch more to tell at the end."""
    warnings: list[str] = []
    monkeypatch.setattr(alone.worker, "warn", warnings.append)

    def metrics() -> list[Any]:
        of = keras.metrics
        return [of.TruePositives(name="positives"), of.AUC(name="auc"), of.F1Score(name="f1")]

    ours = hvd.ElasticCallback()
    communicator = alone.worker.communicator
    other: dict[str, np.ndarray] = {}

    class Other(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            metrics = ours._metrics
            own = metrics.own()
            if batch == 0:
                metrics.sums.assign_add(own)  # as if it had had the same first batch
                other["told"] = own
            other["untold"] = own - other["told"]

    monkeypatch.setattr(communicator, "sum_async", lambda array, name: array + other["untold"])
    model = model_of(metrics=[*metrics(), Biggest()])
    validation = (INPUTS, 1 - TARGETS)
    dataset = hvd.dataset((INPUTS, TARGETS), 5)
    callbacks = [ours, Other()]
    history = model.fit(
        dataset, epochs=2, callbacks=callbacks, verbose=0, validation_data=validation
    ).history
    plain = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    plain.compile(keras.optimizers.SGD(0.1), "mse", metrics=metrics())
    expected = plain.fit(INPUTS, TARGETS, 5, shuffle=False, verbose=0, epochs=2).history
    # Two ranks with the same examples: counts are twice those of one, and means the same.
    assert history["positives"] == [2 * each for each in expected["positives"]] != [0, 0]
    for name in ("loss", "auc"):
        assert history[name] == pytest.approx(expected[name], rel=1e-5)
    np.testing.assert_allclose(history["f1"], expected["f1"], rtol=1e-5)
    assert history["val_positives"] == [0, 0]
    assert history["biggest"] == [1, 1]
    (told,) = warnings
    assert "metric 'biggest': Biggest sets its variables" in told


def test_callbacks_that_follow_a_metric_go_on_in_another_worker(alone: Context) -> None:
    class Epochs:
        """What `fit` of a worker has done when another one joins."""

        def __init__(self) -> None:
            self.callbacks = [
                hvd.ElasticCallback(),
                keras.callbacks.EarlyStopping("loss", patience=9),
                keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=3),
                keras.callbacks.History(),
            ]
            # A list that is not referred to is gone, and the callbacks with it.
            self.list = keras.callbacks.CallbackList(self.callbacks, model=model_of())
            self.monitors = Monitors(self.callbacks[0])
            for callback in self.callbacks[1:]:
                callback.on_train_begin()

        def end(self, loss: float) -> list[float]:
            found = []
            for callback in self.callbacks[1:]:
                callback.on_epoch_end(1, {"loss": loss})
            found += [callback.wait for callback in self.callbacks[1:3]]
            return [*found, float(self.list.model.optimizer.learning_rate)]

    here = Epochs()
    for loss in (1.0, 2.0, 2.0):
        here.end(loss)
    there = Epochs()
    there.monitors.load_state_dict(here.monitors.state_dict())
    for callback in there.callbacks[1:]:
        callback.on_train_begin()
    there.monitors.set_again()
    here.monitors.roll_back(here.monitors.snapshot())
    assert here.end(3.0) == there.end(3.0) == [3, 0, pytest.approx(0.05)]
    assert here.end(0.5) == there.end(0.5) == [0, 0, pytest.approx(0.05)]
    for each in (here, there):  # what `fit` returns is of the run, and not of its last process
        history: Any = each.callbacks[3]
        assert history.history == {"loss": [1.0, 2.0, 2.0, 3.0, 0.5]}
        assert history.epoch == [1] * 5


class Ranks:
    """A communicator of two ranks; the other one tells what it is given."""

    def __init__(self, other: list[Any]) -> None:
        self.other = other

    def gather(self, own: np.ndarray, name: str) -> np.ndarray:
        told = np.frombuffer((json.dumps(self.other) + "\n").encode(), np.uint8)
        return np.concatenate([own, told])


@pytest.mark.parametrize("earlier", [None, {"loss": 3.0}])
def test_metrics_that_a_rank_has_used_before_a_failure_are_those_of_all(earlier: Any) -> None:
    ranks: Any = Ranks([1, {"loss": 5.0}, earlier])
    found = average_over_ranks(ranks, 1, {"loss": 2.0}, None)
    assert found == (({"loss": 3.0}, True) if earlier else ({"loss": 3.5}, False))
    lost: Any = Ranks([1, {"loss": 5.0}, None])
    assert average_over_ranks(lost, 1, {"loss": 1.0}, {"loss": 2.0}) == ({"loss": 2.0}, True)


def test_data_of_another_kind_is_refused(alone: Context) -> None:
    own = tf.data.Dataset.from_tensor_slices((INPUTS, TARGETS)).batch(4)
    with pytest.raises(ScriptError, match=r"has to come from hvd\.dataset"):
        fit(model_of(), own)


def test_a_second_fit_is_refused(alone: Context) -> None:
    model = model_of()
    fit(model)
    with pytest.raises(ScriptError, match="second training"):
        fit(model)


def adaptive(**options: Any) -> Any:
    return hvd.dataset((INPUTS, TARGETS), 4, **{"max_batch_size": 4, **options})


def test_fit_takes_a_step_after_the_last_of_its_passes(alone: Context) -> None:
    seen: list[tuple[int, int]] = []
    model = model_of()
    look = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(
            (alone.step.passes[-1].examples, int(model.optimizer.iterations))
        )
    )
    history = fit(model, adaptive(), look)
    assert seen == [(2, 0), (2, 1), (2, 1), (2, 2), (2, 3)]
    assert alone.worker.progress.step == 3
    plain = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    plain.compile(keras.optimizers.SGD(0.1), "mse")
    expected = plain.fit(INPUTS, TARGETS, 4, shuffle=False, verbose=0)
    assert history.history["loss"] == pytest.approx(expected.history["loss"])
    for own, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
        assert own == pytest.approx(theirs)


def test_an_epoch_may_have_more_passes_than_the_first_one(alone: Context) -> None:
    """Keras learns how many there are from the first, which is short in a worker that joins."""
    alone.worker.progress.position = 8
    fit(model_of(), adaptive(), epochs=2)
    assert alone.worker.progress.step == 1 + 3


def test_a_rate_set_for_a_batch_that_does_not_come_is_undone(alone: Context) -> None:
    """In an epoch that is short on a worker Keras begins one batch more than there are."""
    alone.worker.progress.position = 8
    model = model_of()

    class Halve(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            model.optimizer.learning_rate = float(model.optimizer.learning_rate) / 2

    fit(model, None, Halve(), epochs=2)
    assert float(model.optimizer.learning_rate) == pytest.approx(0.1 / 2 ** (1 + 3))


def test_fit_ends_with_the_progress_that_is_asked_for(alone: Context) -> None:
    def half(_: Any) -> Adjustment:
        return Adjustment(1.0, gain=0.5)

    model = model_of(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), lr_rule=half))
    callbacks = [hvd.ElasticCallback(epochs=2)]
    history = model.fit(adaptive(), epochs=9, callbacks=callbacks, verbose=0)
    assert len(history.history["loss"]) == 4


def test_fit_warns_if_its_passes_are_worth_less(
    alone: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(alone.worker, "warn_once", told.append)
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1), lr_rule=lambda _: Adjustment(1.0, gain=0.5)
    )
    fit(model_of(optimizer), adaptive(), epochs=2)
    assert [text[: text.index(",")] for text in told] == [
        "model.fit(epochs=2) ends after 2 passes over the data"
    ]
    with pytest.raises(ScriptError, match=r"epochs=0"):
        hvd.ElasticCallback(epochs=0)


@pytest.mark.parametrize(
    ("inputs", "weight", "said"),
    [
        (math.nan, 1.0, "the inputs of 'first' (Dense) are not finite already"),
        (3e38, 1.0, "the first outputs that are not finite come from 'first' (Dense)"),
        (1.0, math.inf, "'second' (Dense) has parameters or buffers that are not finite"),
        (1.0, 1.0, "the outputs of all layers are finite"),
    ],
)
def test_the_first_layer_is_found_whose_outputs_are_not_finite(
    inputs: float, weight: float, said: str
) -> None:
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((2,)),
            layers.Dense(3, kernel_initializer="ones", name="first"),
            layers.Dense(1, kernel_initializer=keras.initializers.Constant(weight), name="second"),
        ]
    )
    call = keras.Layer.__call__
    assert first_layer(model, (np.full((4, 2), inputs, np.float32), np.ones(4))).startswith(said)
    assert keras.Layer.__call__ is call


def test_a_step_that_is_left_out_changes_nothing_and_no_metric(
    alone: Context, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither does the forward pass that finds the layer, nor the statistics of batches."""
    layers = keras.layers
    parts = [layers.BatchNormalization(name="norm"), layers.Dropout(0.5), layers.Dense(1)]
    model = keras.Sequential([keras.Input((2,)), *parts])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", metrics=["mae"])
    inputs = np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32)
    inputs[3] = np.nan
    dataset = hvd.dataset((inputs, inputs[:, :1]), 8, shuffle=True)
    history = model.fit(dataset, epochs=2, verbose=0, callbacks=[hvd.ElasticCallback()])
    assert alone.worker.progress.skipped == 2
    assert np.isfinite([*history.history["loss"], *history.history["mae"]]).all()
    assert all(np.isfinite(each).all() for each in model.get_weights())
    assert "all parameters' gradients" in caplog.text
    assert "the inputs of 'norm' (BatchNormalization) are not finite already" in caplog.text

"""The state is the variables of its objects; a checkpoint of it loads again."""

from __future__ import annotations

from tests.paths import ROOT, skip_module_without_tensorflow

skip_module_without_tensorflow()

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_elastic.tensorflow as hvd
from hvd_elastic.checkpoint.manifests import complete_checkpoint, newest_valid
from hvd_elastic.checkpoint.stream import new_shard
from hvd_elastic.checkpoint.writer import CheckpointWriter
from hvd_elastic.communicator.local import LocalCommunicator
from hvd_elastic.errors import CheckpointError, ScriptError
from hvd_elastic.script.helper_copies import HelperCopies
from hvd_elastic.tensorflow.collectives import to_gather, to_reduce
from hvd_elastic.tensorflow.content import load_checkpoint
from hvd_elastic.tensorflow.metrics import MetricSums
from hvd_elastic.worker import context
from hvd_elastic.worker.context import Context


def model_of(width: int) -> keras.Model:
    layers = [keras.layers.Dense(width, name="one"), keras.layers.BatchNormalization(name="norm")]
    return keras.Sequential([keras.Input((2,)), *layers])


def state_of(width: int = 3) -> hvd.State:
    context.current().worker.in_train = False  # the optimizer is made before the training function
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.1))
    return hvd.State(model=model_of(width), optimizer=optimizer, seen=[1], table=np.arange(3))


def write(state: hvd.State, context: Context, folder: Path) -> str:
    content = state.content()
    shard = new_shard(content, context.worker.progress, 0, 1)
    assert shard is not None
    writer = CheckpointWriter(
        str(folder),
        finish=lambda done: complete_checkpoint(done.path.parent, [done], 1),
        on_done=lambda *_: None,
        on_error=lambda error: pytest.fail(str(error)),
    )
    writer.start_shard(content, context.worker.progress, shard, state.lasting(), 0.0)
    # The writer copies while training goes on.
    for variable in state.model.trainable_variables:
        variable.assign(tf.zeros_like(variable))
    writer.flush()
    newest = newest_valid(folder)
    assert newest is not None
    return str(newest.path)


def test_a_checkpoint_holds_the_state_at_its_step(alone: Context, tmp_path: Path) -> None:
    state = state_of()
    before = [variable.numpy() for variable in state.model.weights]
    path = write(state, alone, tmp_path)
    other = state_of()
    other.seen = []
    other.load(load_checkpoint(path), path)
    for expected, variable in zip(before, other.model.weights, strict=True):
        assert (variable.numpy() == expected).all()
    assert other.seen == [1]
    assert other.table.tolist() == [0, 1, 2]


def test_a_checkpoint_of_another_model_is_refused(alone: Context, tmp_path: Path) -> None:
    path = write(state_of(3), alone, tmp_path)
    with pytest.raises(CheckpointError, match=r"model.one.kernel is \(2, 3\) in the checkpoint"):
        state_of(4).load(load_checkpoint(path), path)


def test_a_model_that_is_not_built_is_refused(alone: Context) -> None:
    with pytest.raises(ScriptError, match="not built"):
        hvd.State(model=keras.Sequential([keras.layers.Dense(1)]))


def test_a_rehearsal_changes_nothing(alone: Context) -> None:
    state = state_of()
    before = [variable.numpy().copy() for variable in state.model.weights]
    with state.unchanged():
        for variable in state.model.weights:
            variable.assign_add(tf.ones_like(variable))
        state.seen.append(2)
    for expected, variable in zip(before, state.model.weights, strict=True):
        assert (variable.numpy() == expected).all()
    assert state.seen == [1]


def test_what_a_script_changes_is_rolled_back_and_the_trained_is_not(alone: Context) -> None:
    state = state_of()
    state.save_values()
    state.seen.append(2)
    state.model.weights[0].assign_add(tf.ones_like(state.model.weights[0]))
    changed = state.model.weights[0].numpy()
    state.roll_back()
    assert state.seen == [1]
    assert (state.model.weights[0].numpy() == changed).all()


def test_rates_and_variables_that_a_script_sets_are_rolled_back(alone: Context) -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5))
    state = hvd.State(model=model_of(3), optimizer=optimizer, count=tf.Variable(1))
    state.save_values()
    optimizer.learning_rate = 0.25
    state.count.assign_add(1)
    state.roll_back()
    assert float(optimizer.learning_rate) == 0.5
    assert int(state.count) == 1


class Buffer:
    """A helper object of more than 1 MiB."""

    def __init__(self) -> None:
        self.values = np.zeros(200_000)

    def state_dict(self) -> dict[str, np.ndarray]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        self.values = state["values"]


def test_large_helpers_are_copied_as_long_as_that_takes_little_time(alone: Context) -> None:
    """As with PyTorch: then a change before the step is refused, and one after it is none."""
    buffer, now = Buffer(), itertools.count()
    state = hvd.State(buffer=buffer)
    state._helpers = HelperCopies(clock=lambda: next(now) * 1e-3)
    buffer.values[0] = 1.0
    state.roll_back()
    assert buffer.values[0] == 0.0
    for step in range(100):
        state.step_begins()
        buffer.values[step] = 1.0  # after the step
        state.save_values()
    assert "buffer" not in state._saved.dumped
    now = itertools.count(10_000)  # it is compared again
    state.save_values()
    buffer.values[0] = 2.0
    with pytest.raises(
        ScriptError, match=r"State\(buffer=...\): this Buffer changes in the loop body"
    ):
        state.step_begins()


@pytest.mark.parametrize("kind", [tf.constant, tf.Variable, keras.Variable, np.float32, float])
def test_sums_over_ranks_are_of_numbers_and_tensors(alone: Context, kind: Any) -> None:
    alone.worker.in_train = False
    totals = hvd.Accumulator()
    alone.worker.in_train = True
    totals.add(4, loss=kind(2.0))
    totals.add(4, loss=kind(4.0))
    totals.synchronize()
    assert (totals["loss"], totals.mean("loss")) == (6.0, 0.75)
    with pytest.raises(ScriptError, match=r"shape \(2,\) and type <dtype: 'float32'> is no number"):
        totals.add(loss=tf.zeros(2))
    with pytest.raises(ScriptError, match=r"is called in a tf\.function"):
        tf.function(lambda: totals.add(loss=tf.zeros(())))()


_REDUCED = (tf.float32, tf.float64, tf.int32, tf.int64)
"""Types that Horovod adds up exactly enough; it gathers these and those of 8 and 16 bits."""
_KINDS = (*_REDUCED, tf.bool, tf.uint8, tf.int8, tf.float16, tf.bfloat16, tf.complex64)


@pytest.mark.parametrize("kind", _KINDS, ids=lambda kind: str(kind.name))
def test_horovod_is_given_types_that_it_takes(kind: tf.DType) -> None:
    given = tf.cast([[0, 1, 1], [1, 0, 1]], kind)
    own = kind if kind.is_floating or kind.is_complex else None
    for average, whole in ((False, tf.int64), (True, tf.float64)):
        sent, received = to_reduce(given, average=average)
        assert sent.dtype in _REDUCED
        assert received(sent).dtype == (own or whole)
        assert np.array_equal(tf.cast(received(sent), kind), given)
    sent, received = to_gather(given)
    assert sent.dtype in (*_REDUCED, tf.float16, tf.bool, tf.uint8, tf.int8, tf.uint16)
    assert np.array_equal(received(tf.concat([sent, sent], 0)), tf.concat([given, given], 0))
    assert received(to_gather(given[0, 0])[0]).shape == (1,)


def test_a_mean_of_whole_numbers_is_no_whole_number(alone: Context) -> None:
    class Two(LocalCommunicator):
        size = 2

        def reduce_async(self, array: Any, name: str, *, sent_as: str = "") -> Any:
            return (array + tf.zeros_like(array)) / 2  # those of the other rank are 0

    alone.worker.communicator = Two()
    assert hvd.allreduce(tf.constant([1, 3]), "mean").numpy().tolist() == [0.5, 1.5]
    assert hvd.allreduce(tf.constant(True), "share").numpy() == 0.5


def test_counts_of_metrics_are_rounded(alone: Context) -> None:
    """What ranks tell each other is a mean in float32, times their number."""

    class Count(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__()
            self.seen = self.add_variable((2,), "zeros", dtype="int32", name="seen")

        def update_state(self, *_: Any) -> None:
            self.seen.assign_add([1, 1])

        def result(self) -> Any:
            return self.seen

    count = Count()
    found = MetricSums([count]).results(
        np.array([4.9999998, 3.0000002]), lambda: {"seen": count.seen.numpy()}
    )
    assert found["seen"].tolist() == [5, 3]


def test_tensorflow_scripts_import_no_pytorch_and_run_no_operation() -> None:
    """An operation would start threads, and the agent's template could not be forked.

    A single thread for operations becomes two: an audited step waits in TensorFlow for a
    collective, which needs a thread of its own.
    """
    program = (
        "import sys, hvd_elastic.keras, hvd_elastic.tensorflow as hvd, tensorflow as tf\n"
        "import horovod.tensorflow, hvd_elastic.records.tensorboard as tensorboard\n"
        "tensorboard.check_tensorboard('a test')\n"
        "from tensorflow.python.eager import context\n"
        "assert context.context()._context_handle is None\n"
        "assert 'torch' not in sys.modules\n"
        "hvd.init()\n"
        "print(tf.config.threading.get_inter_op_parallelism_threads())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "TF_NUM_INTEROP_THREADS": "1"},
    )
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


@pytest.mark.parametrize("name", ["one.kernel", "norm.moving_mean"])
def test_a_checkpoint_names_a_variable_that_is_not_finite(
    alone: Context, tmp_path: Path, name: str
) -> None:
    state = hvd.State(model=model_of(3), best=tf.Variable(np.inf), bound=np.array([np.inf]))
    write(state, alone, tmp_path)
    found = newest_valid(tmp_path)
    assert found is not None
    assert found.not_finite == ""
    layer, key = name.split(".")
    variable = getattr(state.model.get_layer(layer), key)
    variable.assign(variable * np.nan)
    content = state.content()
    data = np.empty(content.total, np.uint8)
    content.begin_copy(0, content.total, data, set())()
    assert content.not_finite(0, content.total, data, own=True) == f"model.{name}"


@pytest.mark.usefixtures("alone")
def test_what_no_newcomer_could_receive_is_refused_at_the_assignment() -> None:
    state = state_of()
    state.best = np.float64(0.5)
    state.table = np.ones(2)
    with pytest.raises(ScriptError, match=r"state.best is a \w+, which is neither plain data"):
        state.best = tf.constant(0.5)

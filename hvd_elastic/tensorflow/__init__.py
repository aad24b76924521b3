"""The module that a TensorFlow training script with a loop of its own imports.

Outline of a script::

    import hvd_elastic.tensorflow as hvd

    hvd.init()
    model = keras.Sequential([keras.Input((8, 8, 1)), ...])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    dataset = hvd.dataset((images, labels), batch_size=64, shuffle=True)

    @tf.function(reduce_retracing=True)
    def train_step(images, labels):
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    @hvd.run
    def train(state):
        for epoch in hvd.epochs(10):
            for images, labels in dataset:
                state.commit(loss=train_step(images, labels))

    train(hvd.State(model=model, optimizer=optimizer))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvd_elastic.frameworks import check_tensorflow, refuse_triton_after_tensorflow
from hvd_elastic.worker.debugging.uncaught import tell_uncaught

tell_uncaught()
check_tensorflow()
refuse_triton_after_tensorflow()

import tensorflow as tf

from hvd_elastic.script.accumulator import Accumulator
from hvd_elastic.script.collectives import allgather, allreduce
from hvd_elastic.script.evaluation import evaluate
from hvd_elastic.script.export import export
from hvd_elastic.script.horovod_names import missing_name
from hvd_elastic.script.prediction import predict
from hvd_elastic.script.ranks import local_rank, rank, report, size
from hvd_elastic.script.run import epochs, run, steps, stop
from hvd_elastic.script.saving import save
from hvd_elastic.script.step_weight import step_weight
from hvd_elastic.tensorflow.data import dataset
from hvd_elastic.tensorflow.frontend import TensorFlowFrontend, let_two_operations_run
from hvd_elastic.tensorflow.metrics import metric_results
from hvd_elastic.tensorflow.optimizer import DistributedGradientTape, DistributedOptimizer
from hvd_elastic.tensorflow.saving import load_model
from hvd_elastic.tensorflow.schedule import follow_progress
from hvd_elastic.tensorflow.state import State
from hvd_elastic.worker import context as _context

__all__ = [
    "Accumulator",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "State",
    "allgather",
    "allreduce",
    "dataset",
    "epochs",
    "evaluate",
    "export",
    "follow_progress",
    "init",
    "load_model",
    "local_rank",
    "metric_results",
    "predict",
    "rank",
    "report",
    "run",
    "save",
    "size",
    "step_weight",
    "steps",
    "stop",
]

if not TYPE_CHECKING:  # else mypy would take any name for one of this module
    __getattr__ = missing_name(__name__)


def init(*, own_data: bool = False) -> None:
    """Initialise the library for the launcher of this process. Call it first.

    Args:
        own_data: the training data does not come from hvd.dataset, and this is meant: each
            rank reads its own, or all of it. Without it that causes a warning.
    """
    worker = _context.initialize(TensorFlowFrontend(), own_data=own_data).worker
    devices = tf.config.list_physical_devices("GPU")
    if devices:
        worker.communicator.check_device(local_rank(), len(devices))
        tf.config.set_visible_devices(devices[local_rank() % len(devices)], "GPU")
    let_two_operations_run()

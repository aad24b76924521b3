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

from typing import Any

from hvd_elastic.frameworks import check_tensorflow
from hvd_elastic.training.uncaught import tell_uncaught

tell_uncaught()
check_tensorflow()

import tensorflow as tf

from hvd_elastic.errors import ScriptError
from hvd_elastic.tensorflow.data import dataset
from hvd_elastic.tensorflow.elastic import run
from hvd_elastic.tensorflow.evaluation import evaluate
from hvd_elastic.tensorflow.export import export
from hvd_elastic.tensorflow.frontend import TensorFlowFrontend
from hvd_elastic.tensorflow.optimizer import DistributedGradientTape, DistributedOptimizer
from hvd_elastic.tensorflow.prediction import predict
from hvd_elastic.tensorflow.saving import load_model, save
from hvd_elastic.tensorflow.schedule import follow_progress
from hvd_elastic.tensorflow.state import State
from hvd_elastic.training import context as _context
from hvd_elastic.training.elastic import epochs, steps, stop
from hvd_elastic.training.script_collectives import script_collective
from hvd_elastic.training.script_ranks import local_rank, rank, report, size

__all__ = [
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
    "predict",
    "rank",
    "report",
    "run",
    "save",
    "size",
    "steps",
    "stop",
]


def init() -> None:
    """Initialise the library for the launcher of this process. Call it first."""
    worker = _context.initialize(TensorFlowFrontend()).worker
    devices = tf.config.list_physical_devices("GPU")
    if devices:
        worker.communicator.check_device(local_rank(), len(devices))
        tf.config.set_visible_devices(devices[local_rank() % len(devices)], "GPU")


def allreduce(tensor: Any, name: str, *, average: bool = True) -> tf.Tensor:
    """Return the mean (or sum) of ``tensor`` over all ranks; all ranks must call it."""
    value = _outside("allreduce", tensor, name)
    with script_collective("allreduce", name) as communicator:
        begin = communicator.reduce_async if average else communicator.sum_async
        return communicator.wait(begin(value, f"user.{name}"))


def allgather(tensor: Any, name: str) -> tf.Tensor:
    """Return the tensors of all ranks, concatenated along the first dimension in rank order."""
    value = _outside("allgather", tensor, name)
    with script_collective("allgather", name) as communicator:
        return communicator.gather(value, f"user.{name}")


def _outside(kind: str, tensor: Any, name: str) -> tf.Tensor:
    """Return a tensor outside of a graph.

    Raises:
        ScriptError: the call is in a ``tf.function``.
    """
    if not tf.executing_eagerly():
        raise ScriptError(
            f"hvd.{kind}(..., {name!r}) is called in a tf.function. If it failed there, variables "
            "could be left between two steps: return the tensor from the function, and call "
            f"hvd.{kind} on what it returns"
        )
    return tf.convert_to_tensor(tensor)

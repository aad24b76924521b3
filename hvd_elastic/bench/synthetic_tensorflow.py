"""Trains a model of ``keras.applications`` on random data; see ``synthetic_torch.py``."""

from __future__ import annotations

import argparse
import functools
import importlib
from typing import Any

import keras
import tensorflow as tf

import hvd_elastic.tensorflow as hvd
from hvd_elastic.bench.memory import refuse_too_large
from hvd_elastic.bench.step_timer import StepTimer
from hvd_elastic.errors import ScriptError

IMAGE, CLASSES = 224, 1000
NAMES = {"resnet50": "ResNet50"}


def made(name: str, batch_size: int) -> tuple[Any, Any]:
    """Return the model that ``--model`` names, and a function that returns its loss."""
    if ":" in name:
        module, _, function = name.partition(":")
        model, loss = getattr(importlib.import_module(module), function)(batch_size)
        return model, loss
    model = getattr(keras.applications, NAMES.get(name, name), None)
    if model is None:
        raise ScriptError(
            f"--model {name}: keras.applications has no such model; give one of its names, such as "
            "ResNet50, or module:function"
        )
    network = model(weights=None, classes=CLASSES)
    images = tf.random.normal((batch_size, *network.input_shape[1:]))
    labels = tf.random.uniform((batch_size,), maxval=CLASSES, dtype=tf.int32)
    crossentropy = keras.losses.SparseCategoricalCrossentropy()
    return network, lambda: crossentropy(labels, network(images, training=True))


def is_too_large(error: Exception) -> bool:
    """Return whether an error means that memory was short."""
    return isinstance(error, tf.errors.ResourceExhaustedError)


def try_step(name: str, batch_size: int) -> None:
    """Make a model, and run its passes, eagerly: a graph would take longer to trace than to run."""
    model, loss = made(name, batch_size)
    with tf.GradientTape() as tape:
        value = loss()
    tape.gradient(value, model.trainable_variables)


def main() -> None:
    """Train until the run is ended, and report the times of each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--ranks", type=int, default=1, help="most ranks on a host")
    args = parser.parse_args()
    hvd.init()
    keras.utils.set_random_seed(0)
    if args.precision == "bf16":
        keras.mixed_precision.set_global_policy("mixed_bfloat16")
    on_gpu = bool(tf.config.list_physical_devices("GPU"))
    ranks = None if on_gpu else args.ranks
    refuse_too_large(
        args.model, args.batch_size, functools.partial(try_step, args.model), is_too_large, ranks
    )
    model, loss = made(args.model, args.batch_size)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1e-4, momentum=0.9))
    timer = StepTimer(args.seconds)
    parameters = model.count_params()

    @tf.function
    def train_step() -> Any:
        with tf.GradientTape() as tape:
            value = loss()
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return value

    def train(state: Any) -> None:
        while True:
            timer.begin_step(hvd.size())
            train_step().numpy()
            figures = timer.end_step()
            state.commit(**figures, **({"bench_parameters": parameters} if figures else {}))

    hvd.run(train, warmup=train_step)(hvd.State(model=model, optimizer=optimizer))


if __name__ == "__main__":
    main()

"""A model of TensorFlow on all ranks, not in training: ``hvd.evaluate`` and ``hvd.predict``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvd_elastic.tensorflow.data import DatasetSource
from hvd_elastic.tensorflow.data import dataset as shares_of
from hvd_elastic.tensorflow.saving import load_model
from hvd_elastic.tensorflow.state import State
from hvd_elastic.tensorflow.variables import LiveVariable, keep_values, trainable_of, variables_of
from hvd_elastic.training import prediction
from hvd_elastic.training.evaluation import evaluate_on_ranks, pair_of


def evaluate(
    model: Any,
    source: Any,
    metrics: Mapping[str, Callable[[Any, Any], Any]],
    *,
    batch_size: int = 64,
    forward: Callable[[Any], tuple[Any, Any]] | None = None,
) -> dict[str, float]:
    """Return the mean of each metric over a data set, computed by all ranks together.

    Each example is read once, by one rank, and all ranks return the same numbers. These do not
    depend on the number of ranks: the batches are the same, and their sums are added exactly. All
    ranks must call it: in the function under ``hvd.run`` between two steps, in the function given
    to ``ElasticCallback(evaluate=...)`` of ``model.fit`` (in a callback of your own it would not be
    repeated after a failure), or after training. Meanwhile the model has the variables of rank 0
    that are not trained (the moving averages of batch norm). Nothing of it is changed.

    Args:
        model: model of Keras, or what is called with ``(inputs, training=False)``.
        source: arrays or an object read by index, as for :func:`hvd_elastic.tensorflow.dataset`,
            the same on all ranks; for other batches than (inputs, targets) give ``forward``.
        metrics: functions by name. As those of Keras they are called with the targets and the
            outputs of a batch, and return one number for each example, of shape (examples,):
            ``keras.losses.sparse_categorical_crossentropy``, for example.
        batch_size: examples in a forward pass of a rank, >= 1. The batches are divided over the
            ranks, so with fewer of them than ranks some have none.
        forward: returns (outputs, targets) of a batch of arrays, in place of the model's outputs.

    Raises:
        ScriptError: an argument is not valid, a metric does not return one number for each example,
            or the data set has other lengths on other ranks.
    """
    here = DatasetSource(source)

    def predict(batch: Any) -> tuple[Any, Any]:
        inputs, targets = pair_of(batch)
        return _outputs_of(model, inputs), targets

    def compute(batches: Sequence[range]) -> Iterator[Mapping[str, Any]]:
        for batch in batches:
            outputs, targets = (forward or predict)(here.read(batch))
            yield {name: metric(targets, outputs) for name, metric in metrics.items()}

    trained = {id(each) for each in trainable_of(model)}
    others = [each for each in variables_of(model).values() if id(each) not in trained]
    restore = keep_values(others)
    try:
        differing = [*map(LiveVariable, others)]
        return evaluate_on_ranks(here.examples, batch_size, metrics, compute, differing)
    finally:
        restore()


def predict(
    model: Any,
    data: Any,
    *,
    forward: Callable[[Any], Any | Mapping[str, Any]] | None = None,
    batch_size: int = 256,
) -> None:
    """Compute the outputs of a model for all examples of a data set, on all hosts together.

    It is the whole work of a script that ``hvd-elastic predict`` starts: it loads the weights, and
    saves the outputs of every batch as a file. Hosts may join, leave and die meanwhile; each
    example counts once.

    Args:
        model: model that is built.
        data: arrays or an object read by index, as for :func:`hvd_elastic.tensorflow.dataset`, or a
            function that makes one of the folder given with ``--data``.
        forward: returns the outputs of a batch of tensors: one tensor, or a dict of tensors by
            name, each with a row for each example. By default the model is given the batch, or its
            first part where there are several (inputs and label).
        batch_size: examples of a batch over all ranks together, and of a file of outputs, >= 1.

    Raises:
        ScriptError: the data cannot be read by index, or outputs do not have one row for each
            example.
        CheckpointError: no host has the weights, or they are of another model.
    """
    asked = prediction.asked_prediction()
    source = DatasetSource(prediction.data_of(data, asked))
    missing = prediction.Missing(source, source.examples, asked.done)
    batches = shares_of(missing, batch_size)

    compute = forward or (lambda batch: _outputs_of(model, prediction.inputs_of(batch)))
    prediction.predict_missing(
        State(model=model), asked, missing, batches, batch_size, load_model, compute, _array
    )


def _outputs_of(model: Any, inputs: Any) -> Any:
    """Return what a model computes of a batch of arrays, not in training mode."""
    if isinstance(model, keras.Model):
        return model.predict_on_batch(inputs)  # its graph is traced once
    return model(tf.nest.map_structure(tf.convert_to_tensor, inputs), training=False)


def _array(tensor: Any) -> np.ndarray:
    return np.asarray(tf.cast(tensor, tf.float32) if tensor.dtype == tf.bfloat16 else tensor)

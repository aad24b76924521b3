"""Batch prediction with a model of TensorFlow on all ranks: ``hvd.predict``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_elastic.tensorflow.data import dataset as shares_of
from hvd_elastic.tensorflow.evaluation import outputs_of
from hvd_elastic.tensorflow.input_source import DatasetSource
from hvd_elastic.tensorflow.saving import load_model
from hvd_elastic.tensorflow.state import State
from hvd_elastic.training import prediction
from hvd_elastic.training.elastic import run


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

    def load(path: str) -> None:
        load_model(path, model, share=True)

    def compute(batch: Any) -> Any:
        return outputs_of(model, prediction.inputs_of(batch))

    def go(_: State) -> None:
        prediction.predict_missing(
            asked, missing, batches, batch_size, load, forward or compute, _array
        )

    run(go)(State(model=model))


def _array(tensor: Any) -> np.ndarray:
    return np.asarray(tf.cast(tensor, tf.float32) if tensor.dtype == tf.bfloat16 else tensor)

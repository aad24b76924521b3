"""A model of TensorFlow on all ranks, not in training: for ``hvd.evaluate`` and ``hvd.predict``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvd_elastic.errors import ScriptError, SkippedExampleError
from hvd_elastic.input.skipped import whole
from hvd_elastic.tensorflow.data import DatasetSource
from hvd_elastic.tensorflow.data import dataset as shares_of
from hvd_elastic.tensorflow.saving import load_model
from hvd_elastic.tensorflow.state import State
from hvd_elastic.tensorflow.variables import LiveVariable, keep_values, trainable_of, variables_of
from hvd_elastic.worker.inference import Inference


class TensorFlowInference(Inference):
    """See the base class; a data set is what :func:`hvd_elastic.tensorflow.dataset` takes."""

    state = State
    load_model = staticmethod(load_model)

    def __init__(
        self, model: Any, dataset: Any, called: str, num_workers: int, collate_fn: Any
    ) -> None:
        if num_workers or collate_fn is not None:
            raise ScriptError(
                f"{called}: num_workers and collate_fn are those of PyTorch's loader; TensorFlow "
                "reads what hvd.dataset takes, in this process: leave them out"
            )
        self.model, self.dataset = model, DatasetSource(dataset)
        self.examples = self.dataset.examples

    def batches(self, indices: Sequence[range]) -> Iterator[Any]:
        return map(self._read, indices)

    def _read(self, indices: range) -> Any:
        batch, skipped = whole(self.dataset.read(indices))
        if skipped:  # PyTorch's loader raises it too
            raise SkippedExampleError(skipped[0].example, skipped[0].reason)
        return batch

    def shared(self, dataset: Any, batch_size: int) -> tf.data.Dataset:
        return shares_of(dataset, batch_size)

    def outputs(self, inputs: Any) -> Any:
        if isinstance(self.model, keras.Model):
            return self.model.predict_on_batch(inputs)  # its graph is traced once
        tensors = tf.nest.map_structure(tf.convert_to_tensor, inputs)
        return self.model(tensors, **({"training": False} if _has_modes(self.model) else {}))

    def values(self, metric: Callable[[Any, Any], Any], outputs: Any, targets: Any) -> Any:
        return metric(targets, outputs)

    def array(self, output: Any) -> np.ndarray:
        return np.asarray(tf.cast(output, tf.float32) if output.dtype == tf.bfloat16 else output)

    def untrained(self) -> tuple[list[Any], Callable[[], None]]:
        trained = {id(each) for each in trainable_of(self.model)}
        others = [each for each in variables_of(self.model).values() if id(each) not in trained]
        return [*map(LiveVariable, others)], keep_values(others)


def _has_modes(model: Any) -> bool:
    """Return whether a model is called with ``training``; those of Keras all are."""
    parameters = inspect.signature(model).parameters.values()
    return any(each.name == "training" or each.kind is each.VAR_KEYWORD for each in parameters)

"""``hvd.evaluate`` in one process with models of TensorFlow, whatever arguments they take."""

from __future__ import annotations

from tests.paths import skip_module_without_tensorflow

skip_module_without_tensorflow()

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_elastic.tensorflow as hvd
from hvd_elastic.errors import ScriptError
from hvd_elastic.worker.context import Context

INPUTS = np.arange(14, dtype=np.float32).reshape(7, 2)
TARGETS = np.arange(7)


class Doubling(tf.Module):
    """Has no modes, as most modules."""

    def __call__(self, inputs: tf.Tensor) -> tf.Tensor:
        return 2 * inputs


class Traced(Doubling):
    @tf.function
    def __call__(self, inputs: tf.Tensor) -> tf.Tensor:
        return 2 * inputs


class WithModes(Doubling):
    def __call__(self, inputs: tf.Tensor, training: bool = True) -> tf.Tensor:
        return inputs if training else 2 * inputs


class TracedWithModes(Doubling):
    @tf.function
    def __call__(self, inputs: tf.Tensor, training: bool = True) -> tf.Tensor:
        return inputs if training else 2 * inputs


def first(targets: Any, outputs: Any) -> Any:
    return outputs[:, 0]


MODELS = [Doubling, Traced, WithModes, TracedWithModes, lambda: keras.layers.Rescaling(2.0)]


@pytest.mark.parametrize("made", MODELS)
def test_a_model_is_called_with_the_arguments_that_it_takes(alone: Context, made: Any) -> None:
    found = hvd.evaluate(made(), (INPUTS, TARGETS), {"first": first}, batch_size=3)
    assert found == {"first": 12.0}


def test_options_of_another_loader_are_refused(alone: Context) -> None:
    with pytest.raises(ScriptError, match="PyTorch's loader"):
        hvd.evaluate(Doubling(), (INPUTS, TARGETS), {"first": first}, num_workers=2)

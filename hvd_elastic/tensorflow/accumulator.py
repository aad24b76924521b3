"""Sums of numbers over all ranks, of tensors of TensorFlow."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvd_elastic.errors import ScriptError
from hvd_elastic.script import accumulator
from hvd_elastic.tensorflow.variables import VARIABLES


class Accumulator(accumulator.Accumulator):
    """Sums numbers by name; see :class:`hvd_elastic.script.accumulator.Accumulator`."""

    @staticmethod
    def _element(name: str, value: Any) -> Any:
        if not isinstance(value, (tf.Tensor, *VARIABLES)):
            return None
        if not tf.executing_eagerly():
            raise ScriptError(
                f"Accumulator.add({name}=...) is called in a tf.function, where it is traced once: "
                "return the tensor from the function, and add what it returns"
            )
        tensor = tf.convert_to_tensor(value)
        if tensor.shape.num_elements() != 1 or tensor.dtype.is_complex:
            Accumulator._refuse(name, tensor)
        return tf.cast(tf.reshape(tensor, ()), tf.float64)

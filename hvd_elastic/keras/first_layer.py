"""Finds the first layer of a model whose outputs are not finite."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from hvd_elastic.worker.planning.skipped_steps import ALL_FINITE, layer_words


def first_layer(model: keras.Model, data: Any) -> str:
    """Return in words which layer it is, by a forward pass outside of a graph; "": not known.

    Args:
        model: the model.
        data: a batch, as ``train_step`` gets it.
    """
    found: list[str] = []
    call = keras.Layer.__call__

    def watched(self: Any, *args: Any, **options: Any) -> Any:
        output = call(self, *args, **options)
        if not found and not _are_finite(output):
            called = f"{self.name!r} ({type(self).__name__})"
            own = [] if self._layers else [each.value for each in self.weights]
            found.append(layer_words(called, _are_finite([args, options]), _are_finite(own)))
        return output

    keras.Layer.__call__ = watched
    try:
        model(keras.utils.unpack_x_y_sample_weight(data)[0], training=True)
    except (RuntimeError, TypeError, ValueError, tf.errors.OpError):
        return ""  # a model that is called in another way by its own train_step
    finally:
        keras.Layer.__call__ = call
    return found[0] if found else ALL_FINITE


def _are_finite(value: Any) -> bool:
    tensors = [each for each in tf.nest.flatten(value) if tf.is_tensor(each)]
    dense = [getattr(each, "flat_values", getattr(each, "values", each)) for each in tensors]
    return all(
        bool(tf.reduce_all(tf.math.is_finite(each))) for each in dense if each.dtype.is_floating
    )

"""Checks of a model, of the arguments of ``model.fit``, and of a step that is left out."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hvd_elastic.checkpoint.header import unused_name
from hvd_elastic.errors import ScriptError
from hvd_elastic.frameworks import check_keras_model
from hvd_elastic.tensorflow.data import ElasticDataset
from hvd_elastic.tensorflow.optimizer import averager_of
from hvd_elastic.tensorflow.variables import check_built, check_no_loss_scaling
from hvd_elastic.worker.planning.skipped_steps import ALL_FINITE, layer_words


def check_model(model: Any) -> None:
    """Raise ScriptError for a model whose ``fit`` cannot be made elastic; say why."""
    optimizer = model.optimizer
    check_keras_model(model)
    check_built(model, "model.fit")
    check_no_loss_scaling(optimizer, "model.fit")
    if not optimizers_of(model):
        raise ScriptError(
            f"model.compile(optimizer): this {type(optimizer).__name__} was not given to "
            "hvd_elastic.keras.DistributedOptimizer, so its gradients are not averaged; write "
            "model.compile(hvd.DistributedOptimizer(optimizer), ...)"
        )
    if model.steps_per_execution != 1:
        raise ScriptError(
            f"model.compile(steps_per_execution={model.steps_per_execution}): hosts join and leave "
            "between two steps, and a failure repeats one; leave it at 1"
        )
    options = getattr(model, "_compile_config", None)
    if options is not None and options.config.get("jit_compile") is True:
        raise ScriptError(
            "model.compile(jit_compile=True): XLA cannot run Horovod's reductions. Leave it out"
        )


def takes_nothing(function: Callable[..., Any]) -> bool:
    """Return whether a function can be called without arguments, as far as it says."""
    with contextlib.suppress(ValueError):  # it has no signature
        try:
            inspect.signature(function).bind()
        except TypeError:
            return False
    return True


def check_call(model: Any) -> None:
    """Raise ScriptError for arguments of the running ``model.fit`` that do not fit; say why.

    Keras tells callbacks nothing of them, and most errors of the data come late.
    """
    frame = inspect.currentframe()
    while frame is not None and not (
        frame.f_locals.get("self") is model and "epoch_iterator" in frame.f_locals
    ):
        frame = frame.f_back
    if frame is None:
        return
    given = frame.f_locals
    data, steps = given.get("x"), given.get("steps_per_epoch")
    if not isinstance(data, ElasticDataset):
        raise ScriptError(
            "model.fit(x): with ElasticCallback the data has to come from hvd.dataset(source, "
            "batch_size, shuffle=True), which gives each rank its share; map and prefetch may "
            f"follow it. This is a {type(data).__name__}"
        )
    if steps is not None:
        raise ScriptError(
            f"model.fit(steps_per_epoch={steps}): an epoch is a pass over the data, in which each "
            "example is used once; leave steps_per_epoch out"
        )
    if isinstance(given.get("validation_data"), ElasticDataset):
        raise ScriptError(
            "model.fit(validation_data=hvd.dataset(...)): hvd.dataset gives the shares of training "
            "steps. Give the arrays, or a tf.data.Dataset of your own, which each rank evaluates; "
            "or have the ranks share the work: hvd.ElasticCallback(evaluate=lambda: "
            "hvd.evaluate(model, (images, labels), metrics))"
        )


def optimizers_of(model: Any) -> dict[str, Any]:
    """Return by name the optimizers of a model whose gradients are averaged: its attributes."""
    found: dict[str, Any] = {}
    for layer in model._flatten_layers():
        for name, value in vars(layer).items():
            each = value if isinstance(value, (list, tuple)) else [value]
            for number, item in enumerate(each):
                averaged = isinstance(item, keras.optimizers.Optimizer) and averager_of(item)
                if averaged and not any(item is known for known in found.values()):
                    own = name.lstrip("_") + (f"_{number}" if len(each) > 1 else "")
                    found[unused_name(own, found)] = item
    return found


def first_layer(model: keras.Model, data: Any) -> str:
    """Return in words which layer it is, by a forward pass outside of a graph; "": not known.

    Args:
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

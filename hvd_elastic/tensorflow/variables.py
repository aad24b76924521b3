"""The variables of a script's objects, by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.optimizers import Optimizer

from hvd_elastic.checkpoint.header import unused_name
from hvd_elastic.errors import ScriptError

VARIABLES = (tf.Variable, keras.Variable)


def variable_of(variable: Any) -> tf.Variable:
    """Return the variable of TensorFlow behind one of Keras, or itself."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def has_variables(item: Any) -> bool:
    """Return whether an object's state is its variables."""
    return isinstance(item, (keras.Layer, Optimizer, tf.Module, *VARIABLES))


def variables_of(item: Any) -> dict[str, tf.Variable]:
    """Return the variables that are an object's state, by names that are the same on all ranks.

    States of random number generators are not among them: each rank has its own.
    """
    if isinstance(item, VARIABLES):
        return {"value": variable_of(item)}
    if isinstance(item, Optimizer):  # whose names contain those that Keras numbers models by
        return {str(number): variable_of(each) for number, each in enumerate(item.variables)}
    found = item.weights if isinstance(item, keras.Layer) else item.variables
    named: dict[str, tf.Variable] = {}
    root = f"{getattr(item, 'name', '')}/"
    for variable in found:
        path = getattr(variable, "path", None) or variable.name.partition(":")[0]
        base = path.removeprefix(root).replace("/", ".") or "value"
        named[unused_name(base, named)] = variable_of(variable)
    return named


def rates_of(optimizer: Any) -> list[tf.Variable]:
    """Return the variable of an optimizer's learning rate; none where it is a schedule."""
    rate = getattr(optimizer, "_learning_rate", None)
    return [variable_of(rate)] if isinstance(rate, keras.Variable) else []


def moving_of(models: Iterable[Any]) -> list[Any]:
    """Return the variables of models that forward passes may change, such as moving averages."""
    found: list[Any] = []
    for model in models:
        if isinstance(model, keras.Layer):
            for layer in model._flatten_layers():
                found += layer._non_trainable_variables
        else:
            found += [each for each in model.variables if not each.trainable]
    return found


def trainable_of(item: Any) -> list[tf.Variable]:
    """Return the variables of a model that an optimizer may train."""
    return [variable_of(each) for each in getattr(item, "trainable_variables", ())]


def check_built(model: Any, call: str) -> None:
    """Raise ScriptError for a model that is not built; ``call``: what it was given to."""
    if not model.built:
        raise ScriptError(
            f"{call}: this {type(model).__name__} is not built, so it has no variables yet that a "
            "worker that joins could receive. Give it its input shape (keras.Input), or call it "
            "once, or model.build(shape), before"
        )


def check_no_loss_scaling(optimizer: Any, call: str) -> None:
    """Raise ScriptError for an optimizer that scales the loss; ``call``: what it was given to."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ScriptError(
            f"{call}: LossScaleOptimizer, which the policy mixed_float16 puts around an optimizer, "
            "looks at the gradients of one rank before they are averaged. Use the policy "
            "mixed_bfloat16, which needs no loss scaling, or float32"
        )


class LiveVariable:
    """A variable as memory that is read and overwritten."""

    def __init__(self, variable: tf.Variable) -> None:
        self.variable = variable
        self.dtype: np.dtype[Any] = np.dtype(variable.dtype.as_numpy_dtype)
        self.shape = tuple(variable.shape)
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize

    def view(self) -> np.ndarray:
        """Return the present value; it does not change when the variable does.

        On a CPU this copies nothing: TensorFlow writes the next value elsewhere while it is used.
        """
        handle, kind = self.variable.handle, self.variable.dtype
        array: np.ndarray = tf.raw_ops.ReadVariableOp(resource=handle, dtype=kind)._numpy()
        return np.ascontiguousarray(array).reshape(self.shape)


def keep_values(variables: Iterable[tf.Variable]) -> Callable[[], None]:
    """Return a function that sets variables back to their present values."""
    read = tf.raw_ops.ReadVariableOp  # on its device, and nothing is copied
    kept = [(each, read(resource=each.handle, dtype=each.dtype)) for each in variables]

    def restore() -> None:
        for variable, value in kept:
            variable.assign(value)

    return restore


def assign(variables: Mapping[str, tf.Variable], values: Mapping[str, Any]) -> None:
    """Set variables to arrays, or to the live variables that hold the values already."""
    for name, variable in variables.items():
        value = values[name]
        if not isinstance(value, LiveVariable):
            variable.assign(value)
        elif value.variable is not variable:
            variable.assign(value.view())

"""Losses that are no means over the examples, whose gradients would depend on the number of ranks.

Ranks are averaged by their examples. That is right for a mean over the examples of a rank. A sum,
and a vector with a loss for each example, which TensorFlow adds up, is scaled where it is seen.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.eager import record

from hvd_elastic.errors import ScriptError
from hvd_elastic.tensorflow.variables import VARIABLES
from hvd_elastic.worker import context

_ADDING = frozenset({"AddV2", "AddN", "Sub", "Neg", "Identity", "Cast"})
_LARGEST = 64
"""Most operations of a graph that are looked at."""
_KEPT_SUMS = 16
"""Most sums of losses that one gradient is of."""
_SUM = (
    "{} has reduction='sum' in a step of training: a rank's sum is over its share of the batch, "
    "and the ranks are averaged, so the step depends on their number. Use a mean (the default, "
    "with a larger learning rate), or divide the sum by the number of examples of the rank's batch"
)
_VALID = (
    "{} is a mean over what a mask or sample weights leave of a rank's batch, and the ranks are "
    "averaged by their examples: where they have different shares of it, the step depends on their "
    "number. In a loop of your own hvd.step_weight(count) averages by what counts"
)


@contextlib.contextmanager
def losses_watched(compiled: Callable[[], Sequence[Any]] = lambda: ()) -> Iterator[None]:
    """Scale sums and vectors, where gradients of them are taken in the block, or warn of them.

    Args:
        compiled: returns the losses that ``model.fit`` itself adds up for its gradients.
    """
    ctx, loss, tape = context.current(), keras.losses.Loss, tf.GradientTape
    plain_call, plain_gradient = loss.__call__, tape.gradient
    sums: deque[tuple[Any, str]] = deque(maxlen=_KEPT_SUMS)

    def call(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        value = plain_call(self, y_true, y_pred, sample_weight)
        if context.current() is not ctx or not record.could_possibly_record():
            return value
        name = f"{type(self).__name__} {self.name!r}"
        if self.reduction == "sum":
            if any(self is each for each in compiled()):
                return value * tf.cast(_sum_scale(name), value.dtype)
            sums.append((value, name))
            return value
        masked = getattr(y_pred, "_keras_mask", None) is not None and self.reduction is not None
        weighted = self.reduction == "mean_with_sample_weight" and sample_weight is not None
        if (masked or weighted) and ctx.step.counts is None:
            ctx.worker.warn_once(_VALID.format(name))
        return value

    def gradient(
        self: Any, target: Any, sources: Any, output_gradients: Any = None, *args: Any, **more: Any
    ) -> Any:
        ours = context.current() is ctx and output_gradients is None
        variables = all(isinstance(each, VARIABLES) for each in tf.nest.flatten(sources))
        targets = tf.nest.flatten(target)
        if ours and variables:
            undivided = [name for value, name in sums if any(_adds(t, value) for t in targets)]
            sums.clear()
            for name in undivided:
                ctx.worker.warn_once(_SUM.format(name))
        if ours and variables and any(each.shape.rank != 0 for each in targets):
            output_gradients = tf.nest.pack_sequence_as(target, [*map(_ones_scaled, targets)])
        return plain_gradient(self, target, sources, output_gradients, *args, **more)

    loss.__call__, tape.gradient = call, gradient
    try:
        yield
    finally:
        loss.__call__, tape.gradient = plain_call, plain_gradient


def _adds(target: tf.Tensor, value: tf.Tensor) -> bool:
    """Return whether a loss is a value, or adds it undivided, where that can be seen."""
    if target is value:
        return True
    open_tensors = [target]
    for _ in range(_LARGEST if isinstance(target, tf.__internal__.SymbolicTensor) else 0):
        if not open_tensors:
            break
        tensor = open_tensors.pop()
        if tensor is value:
            return True
        if tensor.op.type in _ADDING:
            open_tensors += tensor.op.inputs
    return False


def _ones_scaled(target: tf.Tensor) -> tf.Tensor:
    """Return ones like a target, scaled if it has a loss for each example of the pass."""
    if target.shape.rank == 0:
        return tf.ones_like(target)
    examples = tf.cast(tf.shape(target)[0], tf.float64)
    is_batch = tf.equal(examples, _controls().examples)
    scale = tf.cond(is_batch, lambda: _sum_scale("a loss with a value for each example"), _one)
    return tf.fill(tf.shape(target), tf.cast(scale, target.dtype))


def _one() -> tf.Tensor:
    return tf.ones((), tf.float64)


def _sum_scale(name: str) -> tf.Tensor:
    """Return the factor by which a rank's sum becomes its part in the sum over all ranks."""
    if context.current().planner.adapts:
        raise ScriptError(
            f"{name} is a sum over a batch that adapts (max_batch_size): the rules for its "
            "learning rate are those of a mean. Use a mean over the examples"
        )
    now = _controls()
    return tf.math.divide_no_nan(now.ranks, now.factor)


def _controls() -> Any:
    averagers: Any = context.current().worker.averagers
    return next(iter(averagers)).controls.read()

"""Wraps optimizers and gradient tapes so that gradients are averaged over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import keras
import tensorflow as tf
from typing_extensions import Self

from hvd_elastic.errors import ScriptError
from hvd_elastic.model.lr_rules import Rule
from hvd_elastic.script.horovod_names import explain_arguments
from hvd_elastic.tensorflow.adaptive_rates import Adaptation
from hvd_elastic.tensorflow.gradients import GradientAverager
from hvd_elastic.tensorflow.schedule import follows_progress
from hvd_elastic.tensorflow.variables import check_no_loss_scaling, variable_of
from hvd_elastic.worker import context

Optimizer = TypeVar("Optimizer", bound=Any)
_AVERAGER = "_hvd_elastic_averager"
_AVERAGED_TWICE = (
    "DistributedGradientTape and DistributedOptimizer are both used, so gradients would be "
    "averaged twice; use one of them"
)


def averager_of(optimizer: Any) -> GradientAverager | None:
    """Return the averager of an optimizer that was given to :func:`DistributedOptimizer`."""
    found = optimizer.__dict__.get(_AVERAGER)
    return found if isinstance(found, GradientAverager) else None


@explain_arguments
def DistributedOptimizer(  # noqa: N802  (Horovod's name)
    optimizer: Optimizer, *, lr_rule: str | Rule | None = None, several_steps: bool = False
) -> Optimizer:
    """Average the gradients of an optimizer over all ranks in its ``apply``.

    The object stays the same; its class becomes a subclass, of the same name. So ``model.compile``,
    schedules of the learning rate, and a ``tf.function`` work with it as before.

    Args:
        optimizer: an optimizer of Keras 3, with the TensorFlow backend.
        lr_rule: how the learning rate follows an adaptive batch: ``"adascale"``, ``"linear"``,
            ``"sqrt"``, ``"adam_sqrt"``, ``"none"``, or a function as in
            :mod:`hvd_elastic.model.lr_rules`. By default ``"adam_sqrt"`` for Adam and related
            optimizers, and ``"adascale"`` for all others.
        several_steps: whether ``apply`` is called several times in a loop body. Then a body that
            fails between two of them is undone as a whole, as with several optimizers.

    Returns:
        The same object.

    Raises:
        ScriptError: it is another kind of object, its gradients are averaged already, or
            ``lr_rule`` is none of these.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ScriptError(
            f"DistributedOptimizer() wraps an optimizer of Keras 3 (keras.optimizers), not a "
            f"{type(optimizer).__module__}.{type(optimizer).__name__}"
        )
    check_no_loss_scaling(optimizer, "DistributedOptimizer()")
    if averager_of(optimizer) is not None:
        raise ScriptError(
            "DistributedOptimizer() was given an optimizer whose gradients are averaged already, "
            "by an earlier call; give it the one of Keras, once"
        )
    if tf.distribute.has_strategy():
        raise ScriptError(
            f"DistributedOptimizer() within a tf.distribute strategy "
            f"({type(tf.distribute.get_strategy()).__name__}): both would average the gradients. "
            "Leave the strategy out; hvd_elastic starts one process for each device"
        )
    adaptation = Adaptation(context.current(), optimizer, lr_rule)
    averager = GradientAverager(adaptation, optimizer, several_steps=several_steps)
    kind = type(optimizer)

    def apply(self: Any, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        known = self._trainable_variables if trainable_variables is None else trainable_variables
        known = list(known)
        if not self.built:
            with tf.init_scope():
                self.build(known)
                averager.built()
        averager.apply(list(grads), known, lambda mean: kind.apply(self, mean, known))

    def current_rate(self: Any) -> Any:
        progress = averager.progress() if follows_progress(self) else None
        if progress is None:
            return kind._get_current_learning_rate(self)
        return self._learning_rate(progress)

    members = {
        "apply": apply,
        "assign_add": staticmethod(_assign_sum),
        "assign_sub": staticmethod(_assign_difference),
        "_get_current_learning_rate": current_rate,
        "__doc__": kind.__doc__,
        "__module__": kind.__module__,  # by which a saved model is loaded, without this library
    }
    optimizer.__class__ = type(kind.__name__, (kind,), members)
    optimizer.__dict__[_AVERAGER] = averager
    return optimizer


# What they assign is computed while other gradients are being reduced, and takes the place of the
# old value. In place it could only be added after the last reduction.
def _assign_sum(variable: Any, value: Any) -> None:
    variable = variable_of(variable)
    variable.assign(variable + tf.cast(value, variable.dtype))


def _assign_difference(variable: Any, value: Any) -> None:
    variable = variable_of(variable)
    variable.assign(variable - tf.cast(value, variable.dtype))


class DistributedGradientTape:
    """A gradient tape whose gradients are averaged over all ranks.

    ``gradient()`` may be called once in a step, for all variables that are trained, by an optimizer
    of any kind that is not given to :func:`DistributedOptimizer`.

    Args:
        tape: a ``tf.GradientTape``; None makes one.
    """

    _averager: GradientAverager | None = None

    @explain_arguments
    def __init__(self, tape: tf.GradientTape | None = None) -> None:
        self._tape = tf.GradientTape() if tape is None else tape

    def __enter__(self) -> Self:
        self._tape.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._tape.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    def gradient(self, target: Any, sources: Any, *args: Any, **options: Any) -> Any:
        """Return the gradients of ``target``, averaged over the ranks, structured as ``sources``.

        Raises:
            ScriptError: the gradients are averaged by ``DistributedOptimizer`` as well.
        """
        gradients = self._tape.gradient(target, sources, *args, **options)
        variables = tf.nest.flatten(sources)
        averaged = tape_averager().average(tf.nest.flatten(gradients), variables)
        return tf.nest.pack_sequence_as(sources, averaged)


def tape_averager(otherwise: str = _AVERAGED_TWICE) -> GradientAverager:
    """Return the averager of all gradient tapes of this process; the first call makes it.

    Raises:
        ScriptError: ``otherwise``: an optimizer was given to :func:`DistributedOptimizer`.
    """
    ctx, made = context.current(), DistributedGradientTape._averager
    averagers = list(ctx.worker.averagers)
    if any(averager is not made for averager in averagers):
        raise ScriptError(otherwise)
    if made is None or not averagers:
        with tf.init_scope():
            made = GradientAverager(Adaptation(ctx))
        DistributedGradientTape._averager = made
    return made

"""Squared norms of gradients, computed in the compiled step, for the gradient noise scale.

Keras has one group of parameters for each optimizer. All ranks have the same mean gradient, and
each reports an equal fraction of its squared norm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_elastic.training.planning.samples import MOMENT_STEPS, Samples


class GradientStatistics:
    """Collects the squared norms of one optimizer's gradients.

    For Adam and related optimizers, gradients are first divided by the square root of the second
    moment, as the optimizer does (Pollux, OSDI 2021, section 3.1), with the moments of the step
    before.

    Args:
        optimizer: optimizer of Keras.

    Attributes:
        has_betas: whether the optimizer is Adam or a relative of it.
        groups: number of parameter groups.
        samples: what was measured.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.has_betas = hasattr(optimizer, "beta_1") and hasattr(optimizer, "beta_2")
        self.groups = 1
        self.samples = Samples()
        self._ready = False

    @property
    def _preconditioned(self) -> bool:
        return self.has_betas and hasattr(self._optimizer, "_velocities")

    @property
    def ready(self) -> bool:
        """Whether a step can be sampled: Adam's moments need some gradients first."""
        if not self._ready:
            known = self._optimizer.built and int(self._optimizer.iterations) >= MOMENT_STEPS
            self._ready = known or not self.has_betas
        return self._ready

    def drain(self) -> np.ndarray:
        """See :meth:`Samples.drain`."""
        return self.samples.drain(self.groups)

    def measure(
        self, sampled: tf.Tensor, gradients: Mapping[int, tf.Tensor], variables: Sequence[Any]
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the squared norm of gradients, and the time for it [s]; both 0 if not sampled.

        Args:
            sampled: whether the step is sampled.
            gradients: gradients by the number of their variable.
            variables: all variables.
        """
        zero = tf.zeros((), tf.float64)

        def squared() -> tuple[tf.Tensor, tf.Tensor]:
            with tf.control_dependencies([*gradients.values()]):
                began = tf.timestamp()
            with tf.control_dependencies([began]):
                norms = [
                    self._squared_norm(gradient, variables[number])
                    for number, gradient in gradients.items()
                ]
                norm = tf.add_n(norms)
            with tf.control_dependencies([norm]):
                return norm, tf.timestamp() - began

        found: tuple[tf.Tensor, tf.Tensor] = tf.cond(sampled, squared, lambda: (zero, zero))
        return found

    def _squared_norm(self, gradient: tf.Tensor, variable: Any) -> tf.Tensor:
        if gradient.dtype not in (tf.float32, tf.float64):
            gradient = tf.cast(gradient, tf.float32)
        if self._preconditioned:
            gradient = gradient / tf.cast(self._divisor(variable), gradient.dtype)
        return tf.cast(2 * tf.nn.l2_loss(gradient), tf.float64)

    def _divisor(self, variable: Any) -> tf.Tensor:
        optimizer = self._optimizer
        moment = optimizer._velocities[optimizer._get_variable_index(variable)].value
        steps = tf.cast(tf.convert_to_tensor(optimizer.iterations), tf.float64)
        correction = 1 - tf.cast(optimizer.beta_2, tf.float64) ** steps
        return tf.sqrt(moment / tf.cast(correction, moment.dtype)) + optimizer.epsilon

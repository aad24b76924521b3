"""Squared norms of gradients, computed in the compiled step, for the gradient noise scale.

Keras has one group of parameters for each optimizer. All ranks have the same mean gradient, and
each reports an equal fraction of its squared norm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_elastic.worker.planning.samples import MOMENT_STEPS, Samples


class GradientStatistics:
    """Collects the squared norms of one optimizer's gradients.

    For Adam and related optimizers, gradients are first divided by the square root of the second
    moment, as the optimizer does (Pollux, OSDI 2021, section 3.1), with the moments of the step
    before.

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
        self._ready = not self.has_betas

    @property
    def ready(self) -> bool:
        """Whether a step can be sampled: Adam's moments need some gradients first."""
        if not self._ready and self._optimizer.built:
            self._ready = int(self._optimizer.iterations) >= MOMENT_STEPS
        return self._ready

    def drain(self) -> np.ndarray:
        """See :meth:`Samples.drain`."""
        return self.samples.drain(self.groups)

    def measure(
        self, sampled: tf.Tensor, gradients: Mapping[int, tf.Tensor], variables: Sequence[Any]
    ) -> tf.Tensor:
        """Return the squared norm of gradients and the time for it [s]; zeros if not sampled.

        The gradients are by the number of their variable.
        """

        def squared() -> tf.Tensor:
            with tf.control_dependencies([*gradients.values()]):
                began = tf.timestamp()
            with tf.control_dependencies([began]):
                norm = tf.add_n([self._squared_norm(g, variables[n]) for n, g in gradients.items()])
            with tf.control_dependencies([norm]):
                return tf.stack([norm, tf.timestamp() - began])

        return tf.cond(sampled, squared, lambda: tf.zeros(2, tf.float64))

    def _squared_norm(self, gradient: tf.Tensor, variable: Any) -> tf.Tensor:
        if gradient.dtype not in (tf.float32, tf.float64):
            gradient = tf.cast(gradient, tf.float32)
        if self.has_betas and hasattr(self._optimizer, "_velocities"):
            gradient = gradient / tf.cast(self._divisor(variable), gradient.dtype)
        return tf.cast(2 * tf.nn.l2_loss(gradient), tf.float64)

    def _divisor(self, variable: Any) -> tf.Tensor:
        optimizer = self._optimizer
        moment = optimizer._velocities[optimizer._get_variable_index(variable)].value
        steps = tf.cast(tf.convert_to_tensor(optimizer.iterations), tf.float64)
        correction = 1 - tf.cast(optimizer.beta_2, tf.float64) ** steps
        return tf.sqrt(moment / tf.cast(correction, moment.dtype)) + optimizer.epsilon

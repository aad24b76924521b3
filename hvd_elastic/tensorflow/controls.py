"""What changes from step to step in a compiled step, as a variable that the graph reads."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf


class Control(NamedTuple):
    """Numbers outside of graphs, and tensors in them.

    Attributes:
        factor: factor on the gradients of this pass before the average over the ranks.
        alone: whether there is one rank.
        last: whether the pass is the last of its step.
        sampled: whether the gradients of the step are sampled.
        rate: factor on the learning rate.
        beta_1, beta_2, epsilon: those of Adam.
        progress: scale-invariant progress [whole steps at the initial batch size]; 0 where no
            schedule follows it.
        ranks: number of ranks.
        examples: number of examples of this pass on this rank.
    """

    factor: Any = 1.0
    alone: Any = True
    last: Any = True
    sampled: Any = False
    rate: Any = 1.0
    beta_1: Any = 0.0
    beta_2: Any = 0.0
    epsilon: Any = 0.0
    progress: Any = 0
    ranks: Any = 1
    examples: Any = 0


class Controls:
    """A variable with the numbers of the present pass; a change of them traces nothing anew."""

    def __init__(self) -> None:
        self.now = Control()
        # Conditions are decided on the CPU.
        with tf.device("CPU:0"):
            self._variable = tf.Variable(
                np.array(self.now, np.float64), trainable=False, name="hvd_elastic_controls"
            )

    def set(self, control: Control) -> None:
        """Set the numbers of the next pass."""
        if control != self.now:
            self._variable.assign(np.array(control, np.float64), read_value=False)
            self.now = control

    def read(self) -> Control:
        """Return the numbers as tensors of the graph that is traced."""
        with tf.device("CPU:0"):
            found = Control(*tf.unstack(self._variable.read_value()))
            return found._replace(
                alone=found.alone > 0, last=found.last > 0, sampled=found.sampled > 0
            )

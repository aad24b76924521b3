"""Steps of an optimizer with an adaptive batch: statistics of gradients, scaled learning rates.

Gradients of a step's passes are added up, in variables that belong to no object of the script, and
the learning rate follows the batch. The graph reads all that changes from :class:`Controls`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from hvd_elastic.errors import ScriptError
from hvd_elastic.model.lr_rules import (
    Adjustment,
    Rule,
    chosen_rule,
    scaled_betas,
    scaled_epsilon,
    whole_steps,
)
from hvd_elastic.tensorflow.schedule import follows_progress
from hvd_elastic.worker.context import Context
from hvd_elastic.worker.planning.adaptive import AdaptivePlanner
from hvd_elastic.worker.planning.samples import MOMENT_STEPS, Samples


class GradientStatistics(Samples):
    """Collects the squared norms of one optimizer's gradients.

    For Adam and related optimizers, gradients are first divided by the square root of the second
    moment, as the optimizer does (Pollux, OSDI 2021, section 3.1), with the moments of the step
    before.

    Attributes:
        has_betas: whether the optimizer is Adam or a relative of it.
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__(1)
        self._optimizer = optimizer
        self.has_betas = hasattr(optimizer, "beta_1") and hasattr(optimizer, "beta_2")
        self._ready = not self.has_betas

    @property
    def ready(self) -> bool:
        if not self._ready and self._optimizer.built:
            self._ready = int(self._optimizer.iterations) >= MOMENT_STEPS
        return self._ready

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
    """A variable with the numbers of the present pass; a change of them traces nothing again."""

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


class Adaptation:
    """Adds up passes, samples gradients and scales the learning rate of one optimizer.

    Args:
        ctx: training process.
        optimizer: optimizer of Keras; None: gradients are averaged for others, and cannot adapt.
        rule: learning-rate rule that the script asks for; None: the default.

    Attributes:
        active: whether the batch adapts.
        statistics: squared norms of the gradients.
    """

    def __init__(self, ctx: Context, optimizer: Any = None, rule: str | Rule | None = None) -> None:
        self._context = ctx
        self._optimizer = optimizer
        self.statistics = GradientStatistics(optimizer)
        self._rule = chosen_rule(rule, has_betas=self.statistics.has_betas)
        self.active = False
        self._sums: list[tf.Variable] = []
        self._sampling = self._added = False
        self._gain = 1.0

    def attach_planner(self) -> None:
        """Have the planner learn from this optimizer's gradients.

        Raises:
            ScriptError: it is unknown, or accumulates gradients itself.
        """
        if self._optimizer is None:
            raise ScriptError(
                "hvd.dataset(max_batch_size=...) with DistributedGradientTape: where the batch "
                "adapts, the optimizer takes a step after the last of several passes, at a "
                "learning rate that follows the batch. Use an optimizer of Keras, given to "
                "hvd.DistributedOptimizer, or leave max_batch_size out"
            )
        if getattr(self._optimizer, "gradient_accumulation_steps", None):
            raise ScriptError(
                f"{type(self._optimizer).__name__}(gradient_accumulation_steps="
                f"{self._optimizer.gradient_accumulation_steps}) with a batch that adapts, which "
                "chooses the number of passes of a step itself: leave it out"
            )
        planner = self._context.planner
        assert isinstance(planner, AdaptivePlanner)
        self._planner, self.active = planner, True
        planner.attach(self.statistics, self._rule)

    # -- between steps ---------------------------------------------------------------------

    def control(self, control: Control) -> Control:
        """Return the numbers of the pass that begins, and note what it depends on."""
        step, planner = self._context.step, self._planner
        if len(step.passes) <= 1:
            self._sampling = self._context.is_sampled()
        self._added |= step.accumulating
        adjustment, whole = planner.adjustments()
        self._gain = whole.gain
        return self.undisturbed(adjustment)._replace(
            factor=control.factor,
            alone=control.alone,
            ranks=control.ranks,
            examples=control.examples,
            last=not step.accumulating,
            sampled=self._sampling,
            progress=whole_steps(planner.progress) if follows_progress(self._optimizer) else 0,
        )

    def undisturbed(self, adjustment: Adjustment | None = None) -> Control:
        """Return the numbers of a rank alone, with an adjustment of the learning rate."""
        optimizer, adjustment = self._optimizer, adjustment or Adjustment(1.0)
        if not self.statistics.has_betas:
            return Control(rate=adjustment.factor)
        betas = scaled_betas((optimizer.beta_1, optimizer.beta_2), adjustment.rate)
        epsilon = scaled_epsilon(getattr(optimizer, "epsilon", 0.0), adjustment.rate)
        return Control(rate=adjustment.factor, beta_1=betas[0], beta_2=betas[1], epsilon=epsilon)

    def pass_ended(self, own: np.ndarray) -> None:
        """Note the squared norm of the gradients of a pass of this rank, and the time for it."""
        if self._sampling:
            if len(self._context.step.passes) == 1:
                self._planner.sampling_cost.step_begins()
            self._planner.sampling_cost.add_piece(float(own[1]))
            share = self._context.step.weight / self._context.worker.communicator.size
            self.statistics.add_pass(share, own[:1])

    def step_ended(self, own: np.ndarray, mean: np.ndarray, *, taken: bool) -> float:
        """Note how a step has ended on all ranks; return its gain.

        Args:
            own: squared norm of the gradient of this rank's last pass, and the time for it [s].
            mean: the same of the mean gradient.
            taken: whether the optimizer has taken it, since its gradients were finite.
        """
        planner, step = self._planner, self._context.worker.progress.step
        self._free()
        self.pass_ended(own)
        if self._sampling and taken:
            planner.sampling_cost.add_piece(float(mean[1]))
            planner.sampling_cost.step_ends()
            part = mean[:1] / self._context.worker.communicator.size
            self.statistics.add_step(step, self._context.step.examples, part)
        self.statistics.drop_step()
        return self._gain

    def drop(self) -> None:
        """Drop the passes of a step that was not taken."""
        self.statistics.drop_step()
        self._free()

    def _free(self) -> None:
        """Drop what the graph has added up."""
        if self._added:
            self._added = False
            for each in self._sums:
                each.assign(tf.zeros([0], each.dtype))

    # -- in the graph ----------------------------------------------------------------------

    def added(self, flats: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the gradients of a pass with those of the step's earlier ones added."""
        sums = self._sums_like(flats)
        holds = tf.raw_ops.VariableShape(input=sums[0].handle)[0] > 0  # reading would copy

        def more() -> list[tf.Tensor]:
            return [flat + each.read_value() for each, flat in zip(sums, flats, strict=True)]

        found = tf.cond(holds, more, lambda: [tf.identity(flat) for flat in flats])
        for each, flat in zip(found, flats, strict=True):
            each.set_shape(flat.shape)
        return list(found)

    def keep(self, added: Sequence[tf.Tensor]) -> list[tf.Operation]:
        """Keep what :meth:`added` has returned for the step's next pass."""
        sums = zip(self._sums, added, strict=True)
        return [each.assign(flat, read_value=False) for each, flat in sums]

    def _sums_like(self, flats: Sequence[tf.Tensor]) -> list[tf.Variable]:
        """Return a variable for each flat tensor, empty until a step has a second pass."""
        kinds = [flat.dtype for flat in flats]
        if [each.dtype for each in self._sums] != kinds:
            with tf.init_scope():
                # A tf.Variable would count as one of the script's function, which is traced again.
                self._sums = [
                    ResourceVariable(
                        tf.zeros([0], kind),
                        trainable=False,
                        shape=tf.TensorShape([None]),
                        name=f"hvd_elastic_sum_{number}",
                    )
                    for number, kind in enumerate(kinds)
                ]
        return self._sums

    @contextlib.contextmanager
    def rates_scaled(self, control: Control) -> Iterator[None]:
        """Trace the optimizer's step with the learning rate, betas and epsilon of the step."""
        own, rate = vars(self._optimizer), tf.convert_to_tensor(self._optimizer.learning_rate)
        scaled = rate * tf.cast(control.rate, rate.dtype)
        names = ("beta_1", "beta_2", "epsilon") if self.statistics.has_betas else ()
        before = {name: own[name] for name in names if name in own}
        kind = keras.config.floatx()
        own.update({name: tf.cast(getattr(control, name), kind) for name in before})
        own["_get_current_learning_rate"] = lambda: scaled
        try:
            yield
        finally:
            own.update(before)
            del own["_get_current_learning_rate"]

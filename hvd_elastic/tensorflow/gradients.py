"""Averages gradients over the ranks inside the script's compiled training step.

The reductions are nodes of the script's graph. Nothing in it depends on the number of ranks or on
this rank's share when it is traced: both are in variables, which are set before each step. So a
change of the world traces nothing anew. All variables that the step changes depend on all
reductions, so if one of them fails nothing has changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from hvd_elastic.communicator.buckets import divide
from hvd_elastic.communicator.interface import FLAGS_NAME, gradient_prefix
from hvd_elastic.errors import ScriptError
from hvd_elastic.tensorflow.collectives import reduce_in_graph
from hvd_elastic.training import context
from hvd_elastic.training.launch import Mode

BUCKET_BYTES = 4 << 20
"""Largest bucket; a larger gradient is reduced where it is."""
_REDUCED_AS = {tf.bfloat16: tf.float32}
"""Types that Horovod's TensorFlow binding lacks, with those that they are reduced as."""


class GradientAverager:
    """Averages the gradients of the script's optimizer; a script has one.

    Args:
        rate: returns the optimizer's learning rate.

    Attributes:
        rate: returns the optimizer's learning rate.
        steps: number of steps that have ended on this rank.
        several_steps: False: a loop body has one step.
        raised: error of this library in the step's graph; None: there was none.
    """

    def __init__(self, rate: Any) -> None:
        self._context = context.current()
        self.rate = rate
        self._in_ring = self._context.worker.mode is not Mode.ALONE
        self._factor = tf.Variable(
            1.0, trainable=False, dtype=tf.float64, name="hvd_elastic_factor"
        )
        self._alone = tf.Variable(True, trainable=False, name="hvd_elastic_alone")
        self._set: tuple[float, bool] = (1.0, True)
        self._told: np.ndarray | None = None
        self._names: list[str] = []
        self._retired = ""
        self._waits = self._rehearses = False
        self.steps = 0
        self.several_steps = False
        self.raised: BaseException | None = None
        self._context.register_averager(self)

    # -- in the script's graph -------------------------------------------------------------

    @tf.autograph.experimental.do_not_convert
    def average(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the gradients averaged over the ranks by examples; None stays None.

        Called while the training step is traced, or outside of a graph in each step.

        Args:
            gradients: gradient of each variable; sparse ones become dense.
            variables: variables of TensorFlow or Keras.

        Raises:
            ScriptError: the graph is compiled by XLA, or another optimizer trains.
        """
        self._check_graph()
        dense = {
            number: tf.ensure_shape(tf.convert_to_tensor(gradient), variable.shape)
            for number, (gradient, variable) in enumerate(zip(gradients, variables, strict=True))
            if gradient is not None
        }
        order = [*reversed(dense)]
        kinds = [_reduced_type(dense[number]) for number in order]
        sizes = [_bytes(dense[number]) for number in order]
        buckets = [[order[at] for at in each] for each in divide(kinds, sizes, BUCKET_BYTES)]
        factor = self._factor.read_value()
        flats = [_flat([dense[number] for number in bucket], factor) for bucket in buckets]
        prefix = gradient_prefix(0)
        self._names = [f"{prefix}{number}" for number in range(len(flats))]
        alone = self._alone.read_value()
        sums = [
            self._reduced(flat, name, alone) for flat, name in zip(flats, self._names, strict=True)
        ]
        with tf.control_dependencies(flats):
            flags = tf.numpy_function(self._begin, [], tf.float32)
        told = self._reduced(flags, FLAGS_NAME, alone, average=True)
        with tf.control_dependencies(sums):
            ended = tf.numpy_function(self._end, [told], tf.bool)
        result = [*gradients]
        with tf.control_dependencies([ended]):
            for bucket, flat in zip(buckets, sums, strict=True):
                some = [dense[number] for number in bucket]
                parts = _parts(tf.identity(flat), some)
                for number, part in zip(bucket, parts, strict=True):
                    result[number] = part
        return result

    def _check_graph(self) -> None:
        if self._retired:
            raise ScriptError(f"this optimizer does not train, since {self._retired}")
        graph = tf.compat.v1.get_default_graph()
        if not tf.executing_eagerly() and control_flow_util.GraphOrParentsInXlaContext(graph):
            raise ScriptError(
                "the training step is compiled by XLA (jit_compile=True), which cannot run "
                "Horovod's reductions. Leave jit_compile out of the tf.function that applies the "
                "gradients (Keras: model.compile(..., jit_compile=False)); functions that it "
                "calls, such as the model itself, may have it"
            )

    def _reduced(
        self, tensor: tf.Tensor, name: str, alone: tf.Tensor, *, average: bool = False
    ) -> tf.Tensor:
        """Return the sum over the ranks; the tensor itself where there is only one."""
        if not self._in_ring:
            return tensor
        found = tf.cond(
            alone, lambda: tensor, lambda: reduce_in_graph(tensor, name, average=average)
        )
        found.set_shape(tensor.shape)
        return found

    @tf.autograph.experimental.do_not_convert
    def _begin(self) -> np.ndarray:
        """Return this rank's flags; all gradients of the step are computed."""
        if self._rehearses:
            return np.zeros(1, np.float32)
        try:
            flags = self._context.own_flags()
        except BaseException as error:
            self.raised = error
            raise
        self._context.planner.work_ends()
        self._waits = True
        self._context.worker.communicator.graph_waits(self._names)
        return flags

    @tf.autograph.experimental.do_not_convert
    def _end(self, told: np.ndarray) -> bool:
        """Note that all reductions have succeeded: the step will be taken."""
        if self._rehearses:
            return True
        self._context.worker.communicator.graph_ends()
        self._waits = False
        self._told = np.array(told)
        return True

    def reduces(self, error: BaseException) -> bool:
        """Return whether a TensorFlow error is that of a reduction of this optimizer."""
        text = str(error)
        return self._waits or FLAGS_NAME in text or any(name in text for name in self._names)

    # -- between steps ---------------------------------------------------------------------

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Run a step on this rank alone, without counting it."""
        self._rehearses = True
        self._alone.assign(True)
        try:
            yield
        finally:
            self._rehearses = False
            self._set = (1.0, True)
            self._factor.assign(1.0)

    def prepare(self) -> None:
        """Set what the step's graph depends on: this rank's weight, and the number of ranks."""
        size = self._context.worker.communicator.size
        now = (self._context.step.weight / size, size == 1)
        if now != self._set:
            self._factor.assign(now[0])
            self._alone.assign(now[1])
            self._set = now

    def collect(self, *, collectives: bool = True) -> None:
        """Count the step that the graph has taken, if it has.

        Args:
            collectives: whether the other ranks do so too, at the same place.
        """
        told, self._told = self._told, None
        if told is not None:
            self.steps += 1
            self._context.planner.advance(1.0, self._context.step.examples)
            self._context.graph_stepped(told, collectives=collectives)

    def learning_rate(self) -> float:
        """Return the learning rate of the optimizer."""
        return float(self.rate())

    def adapt(self) -> None:
        """Refuse a batch that adapts."""
        raise ScriptError(
            "hvd.dataset(max_batch_size=...): the batch does not adapt with TensorFlow yet; leave "
            "max_batch_size out"
        )

    def shared_with(self, other: Any) -> str:
        """Return a text: a script has one optimizer, so a later one replaces this one."""
        return "of the model"

    def engage(self, number: int) -> None:
        """Average gradients from now on."""
        self._retired = ""

    def retire(self, reason: str) -> None:
        """Stop averaging; a later step is refused for this reason."""
        self._retired = reason

    def restore(self) -> None:
        """Do nothing: with one optimizer a step is never undone."""

    def drop_copy(self) -> None:
        """Do nothing: with one optimizer a step is never undone."""

    def forget(self) -> None:
        """Do nothing: a step ends when the loop body does."""

    def absorb(self) -> None:
        """Do nothing: a step has one pass."""

    def leave_out(self, *, over: bool) -> None:
        """Check that all ranks leave out the step; another one fails by the different shape."""
        communicator = self._context.worker.communicator
        if communicator.size > 1:
            try:
                number = np.zeros((1, 1, 1), np.float32)
                communicator.wait(communicator.sum_async(number, f"{gradient_prefix(0)}0"))
            except ScriptError:
                self._context.step.refuse_left_out(self._context.worker)
                raise

    def give_up(self) -> None:
        """Do nothing: no step is called off."""

    def reset(self) -> None:
        """Drop a step that failed, and follow the world."""
        self._told = self.raised = None
        self._waits = False
        self.prepare()


def _reduced_type(tensor: tf.Tensor) -> tf.DType:
    return _REDUCED_AS.get(tensor.dtype, tensor.dtype)


def _bytes(tensor: tf.Tensor) -> int:
    return int(tensor.shape.num_elements() or 0) * tensor.dtype.size


def _flat(tensors: Sequence[tf.Tensor], factor: tf.Tensor) -> tf.Tensor:
    """Return gradients as one flat tensor, times a factor; 0 times NaN is 0."""
    kind = _reduced_type(tensors[0])
    pieces = [tf.cast(tf.reshape(tensor, [-1]), kind) for tensor in tensors]
    flat = pieces[0] if len(pieces) == 1 else tf.concat(pieces, 0)
    return tf.math.multiply_no_nan(flat, tf.cast(factor, kind))


def _parts(flat: tf.Tensor, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    sizes = [int(tensor.shape.num_elements() or 0) for tensor in like]
    pieces = [flat] if len(like) == 1 else tf.split(flat, sizes)
    return [
        tf.cast(tf.reshape(piece, tensor.shape), tensor.dtype)
        for piece, tensor in zip(pieces, like, strict=True)
    ]

"""Averages gradients over the ranks inside the script's compiled training step.

The reductions are nodes of the script's graph. Nothing in it depends on the number of ranks or on
this rank's share when it is traced: both are in variables, which are set before each step. So a
change of the world traces nothing again. Whatever the optimizer's step changes waits for all
reductions, and keeps its value unless the averages are finite. So if one fails nothing has changed.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_util
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable, ResourceVariable

from hvd_elastic.communicator.buckets import divide
from hvd_elastic.communicator.interface import FLAGS_NAME, gradient_prefix
from hvd_elastic.errors import ScriptError
from hvd_elastic.tensorflow.adaptive_rates import Adaptation, Control, Controls
from hvd_elastic.tensorflow.collectives import node_name, reduce_in_graph
from hvd_elastic.tensorflow.metrics import MetricSums
from hvd_elastic.tensorflow.variables import keep_values, variable_of
from hvd_elastic.worker import context
from hvd_elastic.worker.debugging.uncaught import show_instead
from hvd_elastic.worker.frontend import GraphAverager
from hvd_elastic.worker.launch import Mode
from hvd_elastic.worker.planning.skipped_steps import whose_words

METRICS_NAME = "hvd_elastic.metrics_of_step"
BUCKET_BYTES = 4 << 20
"""Largest bucket; a larger gradient is reduced where it is."""
_REDUCED_AS = {tf.bfloat16: tf.float32}
"""Types that Horovod's TensorFlow binding lacks, with those that they are reduced as."""


@dataclass
class StepInGraph:
    """Results of the graph of a step in flight.

    Attributes:
        begun: whether its gradients are computed.
        waits: whether it waits for its reductions.
        told: the average of the ranks' flags, and norms of the gradients; None: it has not ended.
        left_out: whose gradients are not finite here, so that it is left out; None: it is not.
        raised: error of this library in it.
    """

    begun: bool = False
    waits: bool = False
    told: list[np.ndarray] | None = None
    left_out: str | None = None
    raised: BaseException | None = None


class GradientAverager(GraphAverager):
    """Averages the gradients of one optimizer of the script.

    With several, a loop body is one step of training, as with PyTorch: the ranks exchange their
    flags before the first gradients of a body, and each optimizer's variables are kept before its
    first step in it. TensorFlow writes new values elsewhere, so that copies nothing.

    Args:
        adaptation: what a batch that adapts adds to the steps.
        several_steps: whether the optimizer takes several steps in a loop body.

    Attributes:
        optimizer: the optimizer; None: not known.
        step: what the graph of the step in flight has told.
        controls: what the graph of the step depends on.
        metrics: metrics that the ranks tell each other in each step; None: there are none.
        find_layer: tells which layer was the first in the last step whose outputs were not finite.
    """

    def __init__(
        self, adaptation: Adaptation, optimizer: Any = None, *, several_steps: bool = False
    ) -> None:
        self.several_steps = several_steps
        self._context = context.current()
        self._adaptation = adaptation
        self.optimizer = optimizer
        self._in_ring = self._context.worker.mode is not Mode.ALONE
        self.controls = Controls()
        self._names: list[str] = []
        self.metrics: MetricSums | None = None
        self.find_layer: Callable[[], str] | None = None
        self._trained: dict[int, Any] = {}
        """Variables that the optimizer was seen to train."""
        self._kept: Callable[[], None] | None = None
        """Sets its variables back to their values before its first step in the loop body."""
        self._unbuilt: Callable[[], None] | None = None
        """Sets variables that were made in a rehearsal back to their first values."""
        self._rehearses = False
        self._is_taken = tf.Variable(True, trainable=False, name="hvd_elastic_is_taken")
        self.step = StepInGraph()
        self._context.register_averager(self)

    @property
    def _checks(self) -> bool:
        """Return whether it is looked at whether gradients are finite."""
        return self._context.worker.on_not_finite != "ignore"

    # -- in the script's graph -------------------------------------------------------------

    @tf.autograph.experimental.do_not_convert
    def average(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the gradients of variables, averaged over the ranks by examples, and dense.

        Called while the training step is traced, or outside of a graph in each step.

        Raises:
            ScriptError: the graph is compiled by XLA, or another optimizer trains.
        """
        packed, control = self._packed(gradients, variables)
        sums, told = self._exchanged(packed, control)
        taken = self._ended(packed, sums, told, control)
        # An optimizer that is not of Keras takes its step all the same.
        averaged = tf.cond(taken, lambda: [*sums], lambda: [tf.zeros_like(each) for each in sums])
        self._is_taken.assign(taken)
        return packed.unpacked(averaged if isinstance(averaged, list) else [averaged])

    @tf.autograph.experimental.do_not_convert
    def if_taken(self, take_step: Callable[[], object]) -> None:
        """Call ``take_step`` unless the averages of :meth:`average` were not finite."""
        _if(self._is_taken.read_value(), take_step)

    @tf.autograph.experimental.do_not_convert
    def apply(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        take_step: Callable[[list[Any]], object],
    ) -> None:
        """Average gradients and call ``take_step`` with them, in the last pass of a step.

        It is not called if the averages are not finite, unless the user says so.
        """
        adaptation = self._adaptation
        self._note_trained(variables)
        packed, control = self._packed(gradients, variables)
        if not adaptation.active or not packed.flats:
            sums, told = self._exchanged(packed, control)
            taken = self._ended(packed, sums, told, control)
            if tf.executing_eagerly() or not type(self.optimizer).__module__.startswith("keras."):
                _if(taken, lambda: take_step(packed.unpacked(sums)))
                return
            with _changes_if(taken):
                take_step(packed.unpacked(sums))
            return
        own = adaptation.statistics.measure(control.sampled, packed.dense, variables)

        # Each branch reads the sums itself: read before both, they would make a reduction wait for
        # all gradients.
        def add_pass() -> tf.Tensor:
            with tf.control_dependencies(adaptation.keep(adaptation.added(packed.flats))):
                return tf.numpy_function(self._end_pass, [own], tf.bool)

        def end_step() -> tf.Tensor:
            whole = copy.copy(packed)
            whole.flats = adaptation.added(packed.flats)
            sums, told = self._exchanged(whole, control)
            with tf.control_dependencies(sums):
                averaged = packed.unpacked([tf.identity(flat) for flat in sums])
            dense = {number: averaged[number] for number in packed.dense}
            mean = adaptation.statistics.measure(control.sampled, dense, variables)
            taken = self._ended(whole, sums, told, control, own, mean)

            def take() -> None:
                with adaptation.rates_scaled(control):
                    take_step(averaged)

            return _if(taken, take)

        tf.cond(control.last, end_step, add_pass)

    def _packed(
        self, gradients: Sequence[Any], variables: Sequence[Any]
    ) -> tuple[_Packed, Control]:
        """Return gradients in buckets, and what the graph that is traced depends on."""
        control = self._begin_graph()
        return _Packed(gradients, variables, control.factor), control

    def _exchanged(
        self, packed: _Packed, control: Control
    ) -> tuple[list[tf.Tensor], tuple[tf.Tensor, ...]]:
        """Return the averages of flat gradients over the ranks, and what the ranks have told.

        That is the average of their flags and, in ``model.fit``, metrics (see `MetricSums`).

        The flags are exchanged just before the flat gradient that is computed last. Earlier, while
        threads of this machine compute, each message waits for a processor, and the gradients wait
        behind it.
        """
        if self._checks:
            packed.mark_not_finite()
        flats, last = packed.flats, packed.last
        prefix, several = gradient_prefix(self.number), self._context.worker.averagers.several
        self._names = [f"{prefix}{number}" for number in range(len(flats))]
        with tf.control_dependencies(flats):
            flags = tf.numpy_function(self._computed, [], tf.float32)
        told: tuple[tf.Tensor, ...] = (flags,)
        if self.metrics is not None:
            own, more = self.metrics.tell()
            name = METRICS_NAME if several else FLAGS_NAME
            both = self._reduced(tf.concat([flags, more], 0), name, control.alone)
            told = both[: -self.metrics.size], own, both[-self.metrics.size :]
        elif not several:
            told = (self._reduced(flags, FLAGS_NAME, control.alone),)
        sums = []
        for number, (flat, name) in enumerate(zip(flats, self._names, strict=True)):
            with tf.control_dependencies([flags] if several or number == last else []):
                sums.append(self._reduced(tf.identity(flat), name, control.alone))
        return sums, told

    def _ended(
        self,
        packed: _Packed,
        sums: Sequence[tf.Tensor],
        told: tuple[tf.Tensor, ...],
        control: Control,
        *measured: tf.Tensor,
    ) -> tf.Tensor:
        """Return whether the step is taken; the tensor is there once all reductions succeeded."""
        flags, *more = told
        firsts = [tf.cast(each[:1], tf.float64) for each in sums] if self._checks else []
        finite = tf.reduce_all(tf.math.is_finite(tf.concat(firsts, 0))) if firsts else True

        def end(told: np.ndarray, taken: bool, bad: np.ndarray, *measured: Any) -> bool:
            words = whose_words(packed.names[bad].tolist(), len(packed.names))
            return self._end(told, words if not taken else None, measured)

        with tf.control_dependencies([*sums, *told]):
            taken = tf.numpy_function(end, [flags, finite, packed.bad, *measured], tf.bool)
        taken.set_shape(())
        if self.metrics is not None and more:
            own, mean = more
            metrics = self.metrics
            with tf.control_dependencies([taken]):
                finite = tf.reduce_all(tf.math.is_finite(mean))
            _if(finite, lambda: metrics.add_received(own, mean, control.ranks))
        return taken

    def _begin_graph(self) -> Control:
        """Return what the graph that is traced depends on."""
        if self.retired:
            kind = type(self.optimizer).__name__
            raise ScriptError(f"this {kind} does not train, since {self.retired}")
        graph = tf.compat.v1.get_default_graph()
        if not tf.executing_eagerly() and control_flow_util.GraphOrParentsInXlaContext(graph):
            raise ScriptError(
                "the training step is compiled by XLA (jit_compile=True), which cannot run "
                "Horovod's reductions. Leave jit_compile out of the tf.function that applies the "
                "gradients (Keras: model.compile(..., jit_compile=False)); functions that it "
                "calls, such as the model itself, may have it"
            )
        return self.controls.read()

    def _reduced(self, tensor: tf.Tensor, name: str, alone: tf.Tensor) -> tf.Tensor:
        """Return the average over the ranks; the tensor itself where there is only one."""
        if not self._in_ring:
            return tensor
        found = tf.cond(alone, lambda: tensor, lambda: reduce_in_graph(tensor, name, average=True))
        found.set_shape(tensor.shape)
        return found

    def _computed(self) -> np.ndarray:
        """Return this rank's flags; all gradients are computed, what follows is waiting.

        With several optimizers the ranks exchange them here, once in a loop body.
        """
        if self._rehearses:
            return np.zeros(1, np.float32)
        try:
            several = self._context.worker.averagers.several
            again = not several and (self.step.begun or self.step.told is not None)
            led = self._context.worker.mode is Mode.AGENT
            if (again or led) and not self._context.has_trained:
                early = ScriptError(
                    "gradients are applied, and training has not begun, so no rank knows of the "
                    "others: give model.fit callbacks=[hvd.ElasticCallback()], or put a loop of "
                    "your own into a function under @hvd.run"
                )
                show_instead(early)
                raise early
            if again:
                raise ScriptError(
                    "optimizer.apply, or tape.gradient of DistributedGradientTape, is called twice "
                    "in one step. A step applies the gradients of all variables at once: add the "
                    "losses up, or give DistributedOptimizer(..., several_steps=True). In a loop "
                    "that does not iterate over hvd.dataset, each step ends with state.commit()"
                )
            self.step.begun = True
            self._context.rollback.step_begins()
            self._context.planner.work_ends()
            if several:
                self._context.exchange()
                if self._kept is None and self._context.rollback.keeps_aside:
                    every = [*self._trained.values(), *self.optimizer.variables]
                    self._kept = keep_values(map(variable_of, every))
                flags = np.zeros(1, np.float32)
            else:
                flags = self._context.own_flags()
            self.step.waits = True
            self._context.worker.communicator.graph_waits(self._names)
            return flags
        except BaseException as error:
            self.step.raised = error
            raise

    def _end_pass(self, own: np.ndarray) -> bool:
        """Note that the gradients of a pass are added up."""
        if not self._rehearses:
            self._adaptation.pass_ended(own)
        return True

    def _end(self, told: np.ndarray, left_out: str | None, measured: Sequence[Any]) -> bool:
        """Note that all reductions have succeeded; return whether the step is taken.

        Args:
            told: average of all ranks' flags.
            left_out: whose gradients on this rank are not finite, if the averages are not; else
                None, or if nobody asks.
            measured: norms of the gradients, where the batch adapts.
        """
        if self._rehearses:
            return True
        self._context.worker.communicator.graph_ends()
        self.step.waits = False
        self.step.told = [*map(np.array, (told, *measured))]
        if left_out is not None:
            self.step.left_out = left_out
        return left_out is None and not self._context.step.is_empty

    def reduces(self, error: BaseException) -> bool:
        """Return whether a TensorFlow error is that of a reduction of this optimizer."""
        text = str(error)
        names = map(node_name, self._names)
        return self.step.waits or FLAGS_NAME in text or any(name in text for name in names)

    # -- between steps ---------------------------------------------------------------------

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Run a step on this rank alone, without counting it."""
        self._rehearses = True
        self.controls.set(self._adaptation.undisturbed())
        try:
            yield
        finally:
            self._rehearses = False
            if self._unbuilt is not None:
                self._unbuilt()

    def built(self) -> None:
        """Note that a step builds the optimizer's variables, which a rehearsal is not to change."""
        if self._rehearses:
            self._unbuilt = keep_values(map(variable_of, self.optimizer.variables))

    def _note_trained(self, variables: Sequence[Any]) -> None:
        """Note what the optimizer trains.

        Raises:
            ScriptError: another one trains a variable too, or it is not in the State.
        """
        self._trained.update((id(each), each) for each in map(variable_of, variables))
        others: Any = self._context.worker.averagers
        state: Any = self._context.worker.state
        kind = type(self.optimizer).__name__
        for other in others:
            shared = other is not self and self._trained.keys() & other._trained.keys()
            if shared:
                raise ScriptError(
                    f"the {kind} and the {type(other.optimizer).__name__} both train "
                    f"{self._trained[shared.pop()].name}, and a variable has one optimizer: the "
                    "two would change it against each other. Leave it out of one of them"
                )
        unknown = state and self._trained.keys() - state.trainable()
        if unknown:
            raise ScriptError(
                f"the {kind} trains {self._trained[unknown.pop()].name}, which is in no model or "
                "value of the State, so a worker that joins would begin with a value of its own. "
                "Put the model, or the variable itself, there: hvd.State(..., generator=generator)"
            )

    def prepare(self) -> None:
        self.step.begun = False
        ranks = self._context.worker.communicator.size
        step = self._context.step
        examples = step.passes[-1].examples if step.passes else 0
        now = Control(step.weight, ranks == 1, ranks=ranks, examples=examples)
        self.controls.set(self._adaptation.control(now) if self._adaptation.active else now)

    def check_not_begun(self, call: str) -> None:
        if self.step.begun or self.step.told is not None:
            raise ScriptError(
                f"{call} after the gradients of the batch were applied; call it before, outside of "
                "the tf.function that applies them"
            )

    def collect(self, *, collectives: bool = True) -> None:
        ended, self.step.told, self.step.begun = self.step.told, None, False
        if ended is None:
            return
        told, *measured = ended
        words, self.step.left_out = self.step.left_out, None
        gain = self._adaptation.step_ended(*measured, taken=words is None) if measured else 1.0
        if words is not None:
            gain = 0.0
            self._context.step_skipped(words, self.find_layer)
        elif self._checks and not self._context.worker.averagers.several:
            self._context.planner.skipped.note_step(finite=True)
        self.steps += 1
        self._context.planner.advance(gain, self._context.step.examples)
        if self._context.worker.averagers.several:
            self._context.optimizer_stepped()
        else:
            self._context.graph_stepped(told, collectives=collectives)

    def progress(self) -> tf.Tensor | None:
        """Return progress in whole steps at the initial batch size; None: the batch is fixed."""
        if not self._adaptation.active:
            return None
        return tf.cast(self.controls.read().progress, tf.int64)

    @property
    def idle(self) -> str:
        if self.steps:
            return ""
        return "optimizer.apply(gradients, variables) was never called; call it for each batch"

    def learning_rate(self) -> float:
        return float("nan") if self.optimizer is None else float(self.optimizer.learning_rate)

    def adapt(self) -> None:
        """See :meth:`Averager.adapt`.

        Raises:
            ScriptError: the step was traced already, or the optimizer cannot adapt.
        """
        if self._names and not self._adaptation.active:
            raise ScriptError(
                "hvd.dataset(max_batch_size=...) is called after the training step was traced for "
                "a batch that does not adapt; make the dataset before the first step"
            )
        self._adaptation.attach_planner()

    def restore(self) -> None:
        if self._kept is not None:
            self._kept()
        self.drop_copy()

    def drop_copy(self) -> None:
        self._kept = None

    def forget(self) -> None:
        self._adaptation.drop()

    def leave_out(self) -> None:
        communicator = self._context.worker.communicator
        if communicator.size > 1:
            # The graph of a rank that takes the step waits for all that it has begun.
            told = None
            if self.metrics is None:
                self._context.begin_exchange()
            else:
                length = self._context.number_of_flags() + self.metrics.size
                told = communicator.reduce_async(np.zeros(length, np.float32), FLAGS_NAME)
            number = np.zeros((1, 1, 1), np.float32)
            begun = communicator.reduce_async(number, f"{gradient_prefix(0)}0")
            self._context.check_left_out(begun)
            if told is not None:
                communicator.wait(told)

    def reset(self) -> None:
        self.step = StepInGraph()
        self.forget()
        self.prepare()


@contextlib.contextmanager
def _changes_if(taken: tf.Tensor) -> Iterator[None]:
    """Have the variables that the block assigns keep their values if a step is not taken.

    What they are set to may be computed before that is known: while gradients are being reduced.
    """
    plain = {
        (kind, name): getattr(kind, name)
        for kind in (ResourceVariable, BaseResourceVariable)
        for name in ("assign", "assign_add", "assign_sub")
    }

    def conditional(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def change(self: Any, value: Any, *args: Any, **options: Any) -> Any:
            new = tf.convert_to_tensor(value, self.dtype)
            old = self.read_value() if name == "assign" else tf.zeros_like(new)
            return method(self, _either(taken, new, old), *args, **options)

        return change

    for (kind, name), method in plain.items():
        setattr(kind, name, conditional(name, method))
    try:
        yield
    finally:
        for (kind, name), method in plain.items():
            setattr(kind, name, method)


def _either(chosen: tf.Tensor, one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """Return one of two tensors of a graph, without a copy.

    That is ``tf.cond`` without its two functions, of which each would take milliseconds to trace.
    """
    taken = tf.raw_ops.Switch(data=one, pred=chosen).output_true
    left = tf.raw_ops.Switch(data=other, pred=chosen).output_false
    found = tf.raw_ops.Merge(inputs=[left, taken]).output
    found.set_shape(one.shape)
    return found


def _if(taken: tf.Tensor, take_step: Callable[[], object]) -> tf.Tensor:
    """Have a step be a branch of the graph; return whether it is taken."""

    def take() -> tf.Tensor:
        take_step()
        return tf.constant(True)

    return tf.cond(taken, take, lambda: tf.constant(False))


def _reduced_type(tensor: tf.Tensor) -> tf.DType:
    return _REDUCED_AS.get(tensor.dtype, tensor.dtype)


def _elements(tensor: tf.Tensor) -> int:
    return int(tensor.shape.num_elements() or 0)


class _Packed:
    """The gradients of a step in flat buckets, times this rank's factor.

    Attributes:
        dense: the gradients that are there, dense, by the number of their variable.
        flats: a flat tensor for each bucket.
        names: names of their variables, bucket after bucket.
        bad: which of them :meth:`mark_not_finite` has seen not to be finite; shape (names,).
        last: number of that with the gradient that is computed last in most models.
    """

    def __init__(
        self, gradients: Sequence[Any], variables: Sequence[Any], factor: tf.Tensor
    ) -> None:
        self.dense = {
            number: tf.ensure_shape(tf.convert_to_tensor(gradient), variable.shape)
            for number, (gradient, variable) in enumerate(zip(gradients, variables, strict=True))
            if gradient is not None
        }
        order = [*reversed(self.dense)]
        kinds = [_reduced_type(self.dense[number]) for number in order]
        sizes = [_elements(self.dense[number]) * self.dense[number].dtype.size for number in order]
        self._buckets = [[order[at] for at in each] for each in divide(kinds, sizes, BUCKET_BYTES)]
        self.last = next((n for n, each in enumerate(self._buckets) if order[-1] in each), 0)
        self._count = len(gradients)
        with tf.device("CPU:0"):
            is_one = tf.equal(factor, 1)
        self.flats = [
            _flat([self.dense[number] for number in bucket], factor, is_one)
            for bucket in self._buckets
        ]
        paths = [getattr(each, "path", "") or each.name.partition(":")[0] for each in variables]
        self.names = np.array([paths[number] for bucket in self._buckets for number in bucket])
        self.bad = tf.zeros(len(self.names), tf.bool)

    def mark_not_finite(self) -> None:
        """Make flat gradients NaN that are not finite, so that their averages tell of all ranks."""
        sizes = [[_elements(self.dense[number]) for number in each] for each in self._buckets]
        looked = [*map(_looked_at, self.flats, sizes)]
        self.flats = [flat for flat, _ in looked]
        self.bad = tf.concat([bad for _, bad in looked], 0) if looked else self.bad

    def unpacked(self, flats: Sequence[tf.Tensor]) -> list[Any]:
        """Return the gradients of flat tensors like :attr:`flats`; None stays None."""
        found: list[Any] = [None] * self._count
        for bucket, flat in zip(self._buckets, flats, strict=True):
            sizes = [_elements(self.dense[number]) for number in bucket]
            pieces = [flat] if len(sizes) == 1 else tf.split(flat, sizes)
            for number, piece in zip(bucket, pieces, strict=True):
                like = self.dense[number]
                found[number] = tf.cast(tf.reshape(piece, like.shape), like.dtype)
        return found


def _flat(tensors: Sequence[tf.Tensor], factor: tf.Tensor, is_one: tf.Tensor) -> tf.Tensor:
    """Return gradients as one flat tensor, times a factor; 0 times NaN is 0.

    The factor is 1 where all ranks have equal shares: then nothing is multiplied.
    """
    kind = _reduced_type(tensors[0])
    pieces = [tf.cast(tf.reshape(tensor, [-1]), kind) for tensor in tensors]
    flat = pieces[0] if len(pieces) == 1 else tf.concat(pieces, 0)
    return tf.cond(
        is_one, lambda: flat, lambda: tf.math.multiply_no_nan(flat, tf.cast(factor, kind))
    )


def _looked_at(flat: tf.Tensor, sizes: Sequence[int]) -> tuple[tf.Tensor, tf.Tensor]:
    """Return a flat tensor, NaN if a number of it is not finite, and which pieces have one."""

    def find_not_finite() -> tuple[
        tf.Tensor, tf.Tensor
    ]:  # the sum of squares may only have been too large
        pieces = tf.split(flat, sizes)
        bad = tf.stack([~tf.reduce_all(tf.math.is_finite(piece)) for piece in pieces])
        return flat + tf.cast(tf.where(tf.reduce_any(bad), np.nan, 0.0), flat.dtype), bad

    finite = tf.math.is_finite(tf.nn.l2_loss(flat))  # one pass over memory
    return tf.cond(finite, lambda: (flat, tf.zeros(len(sizes), tf.bool)), find_not_finite)

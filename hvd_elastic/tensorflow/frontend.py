"""The frontend for TensorFlow."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.optimizers import Optimizer

from hvd_elastic.errors import ScriptError, SkippedExampleError
from hvd_elastic.input.skipped import whole
from hvd_elastic.tensorflow.collectives import (
    TensorFlowCollectives,
    reason_of,
    to_gather,
    to_reduce,
)
from hvd_elastic.tensorflow.content import load_checkpoint
from hvd_elastic.tensorflow.data import DatasetSource
from hvd_elastic.tensorflow.data import dataset as shares_of
from hvd_elastic.tensorflow.losses import losses_watched
from hvd_elastic.tensorflow.optimizer import averager_of, tape_averager
from hvd_elastic.tensorflow.saving import exported, load_model, write_object
from hvd_elastic.tensorflow.state import State
from hvd_elastic.tensorflow.variables import (
    VARIABLES,
    LiveVariable,
    keep_values,
    trainable_of,
    variables_of,
)
from hvd_elastic.worker import context
from hvd_elastic.worker.frontend import Frontend, require_number
from hvd_elastic.worker.inference import Inference

_WHERE = (
    "to the State: hvd.State(..., second_optimizer=second_optimizer). With model.fit it is an "
    "attribute of the model, or hvd.ElasticCallback(second_optimizer=second_optimizer)"
)
"""Where an optimizer has to be, for messages."""


class TensorFlowInference(Inference):
    """See the base class; a dataset is what :func:`hvd_elastic.tensorflow.dataset` takes."""

    state = State
    load_model = staticmethod(load_model)

    def __init__(
        self, model: Any, dataset: Any, called: str, num_workers: int, collate_fn: Any
    ) -> None:
        if num_workers or collate_fn is not None:
            raise ScriptError(
                f"{called}: num_workers and collate_fn belong to PyTorch's loader; TensorFlow "
                "reads what hvd.dataset takes, in this process: leave them out"
            )
        self.model, self.dataset = model, DatasetSource(dataset)
        self.examples = self.dataset.examples

    def batches(self, indices: Sequence[range]) -> Iterator[Any]:
        return map(self._read, indices)

    def _read(self, indices: range) -> Any:
        batch, skipped = whole(self.dataset.read(indices))
        if skipped:  # PyTorch's loader raises it too
            raise SkippedExampleError(skipped[0].example, skipped[0].reason)
        return batch

    def shared(self, dataset: Any, batch_size: int) -> tf.data.Dataset:
        return shares_of(dataset, batch_size)

    def outputs(self, inputs: Any) -> Any:
        if isinstance(self.model, keras.Model):
            return self.model.predict_on_batch(inputs)  # its graph is traced once
        tensors = tf.nest.map_structure(tf.convert_to_tensor, inputs)
        return self.model(tensors, **({"training": False} if _has_modes(self.model) else {}))

    def values(self, metric: Callable[[Any, Any], Any], outputs: Any, targets: Any) -> Any:
        return metric(targets, outputs)

    def array(self, output: Any) -> np.ndarray:
        return np.asarray(tf.cast(output, tf.float32) if output.dtype == tf.bfloat16 else output)

    def untrained(self) -> tuple[list[Any], Callable[[], None]]:
        trained = {id(each) for each in trainable_of(self.model)}
        others = [each for each in variables_of(self.model).values() if id(each) not in trained]
        return [*map(LiveVariable, others)], keep_values(others)


def _has_modes(model: Any) -> bool:
    """Return whether a model is called with ``training``; those of Keras all are."""
    parameters = inspect.signature(model).parameters.values()
    return any(each.name == "training" or each.kind is each.VAR_KEYWORD for each in parameters)


class TensorFlowFrontend(Frontend):
    """The part of TensorFlow that the training context needs."""

    module = "hvd_elastic.tensorflow"
    horovod = "tensorflow"
    loader = "hvd_elastic.tensorflow.dataset"
    other_loader = "a tf.data.Dataset of your own"
    takes_step = "optimizer.apply()"

    def collectives(self) -> TensorFlowCollectives:
        return TensorFlowCollectives()

    def plain(self, value: Any) -> Any:
        return value.numpy().item() if hasattr(value, "numpy") else value

    def element(self, name: str, value: Any) -> tf.Tensor | None:
        if not isinstance(value, (tf.Tensor, *VARIABLES)):
            return None
        if not tf.executing_eagerly():
            raise ScriptError(
                f"Accumulator.add({name}=...) is called in a tf.function, where it is traced once: "
                "return the tensor from the function, and add what it returns"
            )
        tensor = tf.convert_to_tensor(value)
        is_number = tensor.shape.num_elements() == 1 and not tensor.dtype.is_complex
        require_number(name, tensor, is_number=is_number)
        return tf.cast(tf.reshape(tensor, ()), tf.float64)

    def failed_collective(self, error: BaseException) -> BaseException | None:
        if not isinstance(error, tf.errors.OpError):
            return None
        worker = context.current().worker
        averagers: Any = worker.averagers
        for averager in averagers:
            if averager.step.raised is not None:
                return averager.step.raised
            if averager.reduces(error):
                worker.communicator.graph_ends(failed=True)
                found = worker.communicator.translated(reason_of(error))
                if isinstance(found, ScriptError):
                    # A rank that leaves the step out alone asks the others in the same way.
                    context.current().step.refuse_left_out(worker)
                return found
        return None

    @contextlib.contextmanager
    def training(self, state: Any, warmup: Callable[[], object] | None) -> Iterator[None]:
        choose_optimizers(state)
        with optimizers_watched(state), losses_watched():
            if warmup is not None:
                rehearse(state, warmup)
            check_built(state)
            yield

    def script_tensor(
        self, kind: str, tensor: Any, name: str, *, average: bool = False
    ) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        if not tf.executing_eagerly():
            raise ScriptError(
                f"hvd.{kind}(..., {name!r}) is called in a tf.function. If it failed there, "
                "variables could be left between two steps: return the tensor from the function, "
                f"and call hvd.{kind} on what it returns"
            )
        value = tf.convert_to_tensor(tensor)
        return to_gather(value) if kind == "allgather" else to_reduce(value, average=average)

    inference = staticmethod(TensorFlowInference)
    load_checkpoint = staticmethod(load_checkpoint)
    write_object = staticmethod(write_object)
    exported = staticmethod(exported)


def let_two_operations_run() -> None:
    """Have TensorFlow run two operations at a time at least; an audited step waits for another."""
    threading, wanted = tf.config.threading, os.environ.get("TF_NUM_INTEROP_THREADS", "")
    number = threading.get_inter_op_parallelism_threads()
    number = number or (int(wanted) if wanted.isdecimal() else 0) or len(os.sched_getaffinity(0))
    if number == 1:
        with contextlib.suppress(RuntimeError):  # the script has run an operation already
            threading.set_inter_op_parallelism_threads(2)


def rehearse(state: State, steps: Callable[[], object]) -> None:
    """Take steps on this rank alone, so that they are traced, and undo them."""
    averagers: Any = context.current().worker.averagers
    with contextlib.ExitStack() as stack:
        stack.enter_context(state.unchanged())
        for averager in averagers:
            stack.enter_context(averager.rehearsal())
        steps()


def choose_optimizers(state: State) -> None:
    """Have the optimizers of the State train, and no others; refuse those that do not fit.

    Raises:
        ScriptError: the gradients of one are not averaged, or the State lacks one whose are.
    """
    ctx = context.current()
    made: list[Any] = list(ctx.worker.averagers)
    optimizers = {n: i for n, i in state.named_objects().items() if isinstance(i, Optimizer)}
    chosen = []
    for name, optimizer in optimizers.items():
        averager = averager_of(optimizer)
        if averager is None:
            # The script then averages with DistributedGradientTape, whose averager is made early,
            # since variables cannot be made in its graph.
            averager = tape_averager(
                f"State({name}=...): this {type(optimizer).__name__} was not given to "
                "hvd_elastic.tensorflow.DistributedOptimizer, and another one was; write "
                f"{name} = hvd.DistributedOptimizer({name})"
            )
            averager.optimizer = optimizer
        if averager not in chosen:
            chosen.append(averager)
    if not optimizers:
        for averager in made:
            if averager.optimizer is not None:
                raise ScriptError(
                    f"State(...): the {type(averager.optimizer).__name__} that was given to "
                    "hvd.DistributedOptimizer is not in the State, so a worker that joins, or a "
                    "run that is resumed, would begin with a new one. Give it to the State: "
                    "hvd.State(model=model, optimizer=optimizer)"
                )
        chosen = made
    others = [averager for averager in made if averager not in chosen]
    ctx.choose_averagers(chosen)
    for averager in others:
        why = "it is not in the State, and a worker that joins would lack it"
        averager.retire(f"{why}. Give it {_WHERE}")


def check_built(state: State) -> None:
    """Raise ScriptError for one of several optimizers whose variables are not known yet."""
    for name, optimizer in state.named_objects().items():
        if isinstance(optimizer, Optimizer) and not optimizer.built:
            raise ScriptError(
                f"State({name}=...): with several optimizers, each has to know which variables it "
                f"trains before training begins: {name}.build(part.trainable_variables), or take "
                "a step on each rank alone by hvd.run(train, warmup=...)"
            )


@contextlib.contextmanager
def optimizers_watched(state: State) -> Iterator[None]:
    """Refuse optimizers that apply gradients in the block and are not known to the library."""
    ctx, before, plain = context.current(), vars(Optimizer).get("apply"), Optimizer.apply

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        own = averager_of(self) is not None or context.current() is not ctx
        known = own or any(self is each for each in state.named_objects().values())
        if not known:
            raise ScriptError(
                f"this {type(self).__name__} applies gradients that are not averaged over the "
                "ranks, and a worker that joins would not have its state. Give it to "
                f"hvd.DistributedOptimizer, and {_WHERE}"
            )
        if own:
            return plain(self, grads, trainable_variables)
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            if not self.built:  # variables are not made in a branch of a graph
                with tf.init_scope():
                    self.build(trainable_variables)
        averager = tape_averager()
        return averager.if_taken(lambda: plain(self, grads, trainable_variables))

    Optimizer.apply = apply
    try:
        yield
    finally:
        del Optimizer.apply
        if before is not None:
            Optimizer.apply = before

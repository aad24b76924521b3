"""The frontend for TensorFlow."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from keras.optimizers import Optimizer

from hvd_elastic.errors import ScriptError
from hvd_elastic.tensorflow.collectives import TensorFlowCollectives, reason_of
from hvd_elastic.tensorflow.content import load_checkpoint
from hvd_elastic.tensorflow.inference import TensorFlowInference
from hvd_elastic.tensorflow.optimizer import averager_of, tape_averager
from hvd_elastic.tensorflow.saving import exported, write_object
from hvd_elastic.tensorflow.state import State
from hvd_elastic.training import context
from hvd_elastic.training.frontend import Frontend


class TensorFlowFrontend(Frontend):
    """The part of TensorFlow that the training context needs."""

    module = "hvd_elastic.tensorflow"
    horovod = "tensorflow"
    loader = "hvd_elastic.tensorflow.dataset"
    other_loader = "a tf.data.Dataset of your own"

    def collectives(self) -> TensorFlowCollectives:
        return TensorFlowCollectives()

    def plain(self, value: Any) -> Any:
        return value.numpy().item() if hasattr(value, "numpy") else value

    def failed_collective(self, error: BaseException) -> BaseException | None:
        if not isinstance(error, tf.errors.OpError):
            return None
        worker = context.current().worker
        averagers: Any = worker.averagers
        for averager in averagers:
            if averager.raised is not None:
                return averager.raised
            if averager.reduces(error):
                worker.communicator.graph_ends(failed=True)
                return worker.communicator.translated(reason_of(error))
        return None

    @contextlib.contextmanager
    def training(self, state: Any, warmup: Callable[[], object] | None) -> Iterator[None]:
        check_optimizer(state)
        if warmup is not None:
            rehearse(state, warmup)
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
        if kind == "allgather" and not value.shape.rank:
            value = tf.reshape(value, [1])  # a number is a row
        return value, lambda result: result

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


def check_optimizer(state: State) -> None:
    """Raise ScriptError unless the gradients of the State's only optimizer are averaged."""
    optimizers = {n: i for n, i in state.named_objects().items() if isinstance(i, Optimizer)}
    if len(optimizers) > 1:
        raise ScriptError(
            f"State({'=..., '.join(optimizers)}=...): a script has one optimizer with TensorFlow; "
            "train all variables with one, or use hvd_elastic.torch, which takes several"
        )
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
        context.current().choose_averagers([averager])

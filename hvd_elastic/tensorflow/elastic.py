"""Prepares training: which optimizer trains, and steps that are taken before it to be traced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from hvd_elastic.errors import ScriptError
from hvd_elastic.tensorflow.optimizer import averager_of, tape_averager
from hvd_elastic.tensorflow.state import State
from hvd_elastic.tensorflow.variables import is_optimizer
from hvd_elastic.training import context


@contextlib.contextmanager
def training(state: State, warmup: Callable[[], object] | None) -> Iterator[None]:
    """See :meth:`Frontend.training`."""
    check_optimizer(state)
    if warmup is not None:
        rehearse(state, warmup)
    yield


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
    optimizers = {n: i for n, i in state.named_objects().items() if is_optimizer(i)}
    if len(optimizers) > 1:
        raise ScriptError(
            f"State({'=..., '.join(optimizers)}=...): a script has one optimizer with TensorFlow; "
            "train all variables with one, or use hvd_elastic.torch, which takes several"
        )
    ctx = context.current()
    averagers: Any = list(ctx.worker.averagers)
    for name, optimizer in optimizers.items():
        averager = averager_of(optimizer)
        if averager is None:
            # The script then averages with DistributedGradientTape, whose averager is made early,
            # since variables cannot be made in its graph.
            if averagers and averagers[0] is not tape_averager():
                raise ScriptError(
                    f"State({name}=...): this {type(optimizer).__name__} was not given to "
                    "hvd_elastic.tensorflow.DistributedOptimizer, and another one was; write "
                    f"{name} = hvd.DistributedOptimizer({name})"
                )
            averager = tape_averager()
            averager.rate = lambda kept=optimizer: kept.learning_rate
        ctx.choose_averagers([averager])

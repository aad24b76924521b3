"""The decorator ``run``, which makes a training function elastic."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar

from hvd_elastic.errors import ScriptError
from hvd_elastic.tensorflow.optimizer import averager_of, tape_averager
from hvd_elastic.tensorflow.state import State
from hvd_elastic.tensorflow.variables import is_optimizer
from hvd_elastic.training import context
from hvd_elastic.training.elastic import run_training

Result = TypeVar("Result")
TrainFunction = Callable[..., Result]


def run(
    function: TrainFunction[Result], *, warmup: Callable[[], object] | None = None
) -> TrainFunction[Result]:
    """Make a training function elastic; use it as a decorator.

    The function takes the :class:`State` as its first argument. It is called again after a failure,
    and ``epochs()`` and the dataset continue from the progress of the state. A planned change of
    the world happens where the dataset is iterated, between two steps, without leaving the
    function.

    Args:
        function: training function, called as ``function(state, ...)``.
        warmup: called once before this worker reports ready, while the other workers train, to
            have the step traced: ``lambda: train_step(*next(iter(dataset)))``. The steps that it
            takes are on this rank alone, and undone.
    """

    @functools.wraps(function)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Result:
        if not isinstance(state, State):
            raise ScriptError(
                f"{function.__name__}() must be called with a hvd_elastic.tensorflow.State first, "
                f"not with a {type(state).__name__}"
            )
        check_optimizer(state)
        if warmup is not None and not context.current().worker.reads:
            rehearse(state, warmup)
        call = functools.partial(function, state, *args, **kwargs)
        return run_training(context.current(), call, function.__name__)

    return wrapper


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

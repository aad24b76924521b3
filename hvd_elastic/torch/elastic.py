"""The decorator ``run``, which makes a training function elastic."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from hvd_elastic.errors import ScriptError
from hvd_elastic.formatting import count
from hvd_elastic.torch.state import State
from hvd_elastic.training import context
from hvd_elastic.training.elastic import run_training
from hvd_elastic.training.uncaught import script_line
from hvd_elastic.training.worker import Worker

Result = TypeVar("Result")
TrainFunction = Callable[..., Result]


def run(
    function: TrainFunction[Result], *, warmup: Callable[[], object] | None = None
) -> TrainFunction[Result]:
    """Make a training function elastic; use it as a decorator.

    The function takes the :class:`State` as its first argument. It is called again after a failure,
    and ``epochs()`` and the ``DataLoader`` continue from the progress of the state. A planned
    change of the world happens inside the data loader, between two steps, without leaving the
    function.

    Args:
        function: training function, called as ``function(state, ...)``.
        warmup: called once before this worker reports ready, while the other workers train; for
            work that is slow the first time (compilation, a dummy step). It must not change the
            state.
    """

    @functools.wraps(function)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Result:
        if not isinstance(state, State):
            raise ScriptError(
                f"{function.__name__}() must be called with a hvd_elastic.torch.State first, "
                f"not with a {type(state).__name__}"
            )
        ctx = context.current()
        _refuse_unwrapped(ctx.worker, state)
        if warmup is not None:
            warmup()
        watched = register_optimizer_step_post_hook(_OptimizerWatch(ctx.worker))
        try:
            return run_training(ctx, functools.partial(function, state, *args, **kwargs))
        finally:
            watched.remove()

    return wrapper


def _refuse_unwrapped(worker: Worker, state: State) -> None:
    """Raise ScriptError for optimizers whose gradients are not averaged over the ranks."""
    averager: Any = worker.averager
    for name, optimizer in state.named_optimizers().items():
        if averager is not None and averager.owns(optimizer):
            continue
        kind = type(optimizer).__name__
        if averager is not None:
            raise ScriptError(
                f"State({name}=...): this {kind} is not the optimizer given to "
                "hvd_elastic.torch.DistributedOptimizer last, so its gradients are not averaged, "
                "and the ranks would go apart. Scripts with several optimizers (GANs, "
                "actor-critic) are not supported yet"
            )
        raise ScriptError(
            f"State({name}=...): this {kind} was not given to "
            "hvd_elastic.torch.DistributedOptimizer, so its gradients are not averaged, and the "
            f"ranks would go apart; write {name} = hvd.DistributedOptimizer({name}, model)"
        )


class _OptimizerWatch:
    """Finds optimizers that take steps in training and whose gradients are not averaged."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._told: set[str] = set()

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Warn once of each kind; raise ScriptError if the run is audited."""
        worker, kind = self._worker, type(optimizer).__name__
        averager: Any = worker.averager
        if worker.communicator.size == 1 or kind in self._told:
            return
        if averager is not None and (averager.stepping or averager.owns(optimizer)):
            return
        self._told.add(kind)
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        shape = f", the first of shape {tuple(parameters[0].shape)}" if parameters else ""
        problem = (
            f"the {kind} that takes a step at {script_line()} was not given to "
            "hvd.DistributedOptimizer and is not in the State: gradients of its "
            f"{count(len(parameters), 'parameter')}{shape}, are not averaged, so every rank trains "
            "values of its own, and those of rank 0 are no better than the others. Train them with "
            "the one DistributedOptimizer, in a parameter group of their own; scripts with several "
            "optimizers (GANs, actor-critic) are not supported yet"
        )
        if worker.audit:
            raise ScriptError(problem)
        worker.warn_once(problem)

"""Prepares training: which optimizers train, and a watch for others that take steps."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hvd_elastic.errors import ScriptError
from hvd_elastic.formatting import count
from hvd_elastic.script.horovod_names import missing_name
from hvd_elastic.script.instances import instances_of
from hvd_elastic.torch.optimizer import GradientAverager, averager_of
from hvd_elastic.torch.schedule import held_by
from hvd_elastic.torch.state import State
from hvd_elastic.torch.summed_losses import summed_losses_are_added
from hvd_elastic.worker import context
from hvd_elastic.worker.debugging.uncaught import script_line
from hvd_elastic.worker.frontend import Averager
from hvd_elastic.worker.worker import Worker

if not TYPE_CHECKING:  # hvd.elastic is this module, and another one in Horovod
    __getattr__ = missing_name(__name__)

_BOTH = "Give it model and optimizer: hvd.State(model=model, optimizer=optimizer)"


@contextlib.contextmanager
def training(state: State, warmup: Callable[[], object] | None) -> Iterator[None]:
    """See :meth:`Frontend.training`."""
    ctx = context.current()
    ctx.choose_averagers(_averagers_of(ctx.worker, state))
    if warmup is not None:
        warmup()
    watched = register_optimizer_step_pre_hook(_OptimizerWatch(ctx.worker, state))
    try:
        with summed_losses_are_added(ctx):
            yield
    finally:
        watched.remove()


def _averagers_of(worker: Worker, state: State) -> list[Averager]:
    """Return the averagers of the State's optimizers, or the only one if it has none.

    Raises:
        ScriptError: the gradients of an optimizer are not averaged over the ranks, the State lacks
            one of its parameters, two optimizers have a parameter in common, or there are several
            and none is in the State.
    """
    found: dict[str, GradientAverager] = {}
    storages = state.storages()
    for name, optimizer in state.named_optimizers().items():
        averager, kind = averager_of(optimizer), type(optimizer).__name__
        if averager is None:
            raise ScriptError(
                f"State({name}=...): this {kind} was not given to "
                "hvd_elastic.torch.DistributedOptimizer, so its gradients are not averaged, and "
                f"the ranks would go apart; write {name} = hvd.DistributedOptimizer({name}, model)"
            )
        for other, earlier in found.items():
            shared = earlier.shared_with(averager)
            if shared:
                raise ScriptError(
                    f"State({other}=..., {name}=...): both optimizers have the parameter "
                    f"{shared!r}, and a parameter has one: the two would change it against each "
                    "other. Leave it out of one of them"
                )
        _check_is_held(
            averager,
            storages,
            f"State({name}=...): this {kind}",
            "Put the module, or the tensor itself, there: hvd.State(..., log_alpha=log_alpha)",
        )
        found[name] = averager
    if not found and worker.averagers.several:
        raise ScriptError(
            f"{len(worker.averagers)} optimizers were given to DistributedOptimizer(...), and none "
            "is in the State, so a worker that joins would not have their state; put them there: "
            "hvd.State(model=..., optimizer=..., second_optimizer=...)"
        )
    if not found:
        kept = {id(each) for item in state.named_objects().values() for each in held_by(item)}
        for each in worker.averagers:
            if isinstance(each, GradientAverager):
                each.check_is_kept(kept)
                _check_is_held(each, storages, "State(...): the optimizer", _BOTH)
    return list(found.values() or worker.averagers)


def _check_is_held(averager: GradientAverager, storages: set[int], which: str, way: str) -> None:
    """Raise ScriptError if the State lacks a parameter of an optimizer; ``way`` says what to do."""
    unknown = averager.first_not_in(storages)
    if unknown:
        raise ScriptError(
            f"{which} trains {unknown}, which is in no module or value of the State, so a worker "
            f"that joins would begin with a value of its own. {way}"
        )


class _OptimizerWatch:
    """Finds optimizers that take steps in training and whose gradients are not averaged.

    One that is there before the training function, or that trains what is in the State, is an
    error. One that a loop body makes for values of its own, such as an adversarial example, is
    warned of once.
    """

    def __init__(self, worker: Worker, state: State) -> None:
        self._worker = worker
        self._state = state
        self._early = weakref.WeakSet(instances_of(torch.optim.Optimizer))
        self._told: set[str] = set()

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Raise ScriptError, or warn once of each kind; called before each step."""
        worker, kind = self._worker, type(optimizer).__name__
        averagers: Any = worker.averagers
        if averager_of(optimizer) or any(averager.stepping for averager in averagers):
            return
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        storages = self._state.storages()
        lasts = optimizer in self._early or any(
            each.untyped_storage().data_ptr() in storages for each in parameters if each.numel()
        )
        if not lasts and (worker.communicator.size == 1 or kind in self._told):
            return
        self._told.add(kind)
        shape = f", the first of shape {tuple(parameters[0].shape)}" if parameters else ""
        problem = (
            f"the {kind} that takes a step at {script_line()} was not given to "
            "hvd.DistributedOptimizer and is not in the State: gradients of its "
            f"{count(len(parameters), 'parameter')}{shape}, are not averaged, so every rank trains "
            "values of its own, and those of rank 0 are no better than the others. Give it to "
            "hvd.DistributedOptimizer(...), and put it into the State"
        )
        if worker.audit or lasts:
            raise ScriptError(problem)
        worker.warn_once(problem)

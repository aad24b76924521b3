"""``run`` and ``epochs``: the two places where a training script meets elasticity."""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from hvd_elastic.communicator.interface import GenerationBrokenError
from hvd_elastic.control.progress import Position
from hvd_elastic.errors import RunError, ScriptError
from hvd_elastic.torch import context
from hvd_elastic.torch.context import Context, Mode
from hvd_elastic.torch.rollback import StepVoidedError
from hvd_elastic.torch.state import State
from hvd_elastic.training.progress import Phase
from hvd_elastic.wire import messages as msg

__all__ = ["epochs", "run"]

Result = TypeVar("Result")
_AFTER_A_FAILURE = (
    "The function was entered in the middle of training, after a failure or in a resumed run: "
    "where no batch of the epoch is left, the loop over the loader runs zero times; a variable "
    "that is used after the loop has to be set before it"
)
TrainFunction = Callable[..., Result]


def run(
    function: TrainFunction[Result], *, warmup: Callable[[], object] | None = None
) -> TrainFunction[Result]:
    """Make a training function elastic; use it as a decorator.

    The function takes the :class:`State` first. It may be entered several times: after a failure
    it is called again, and ``epochs()`` and the ``DataLoader`` go on where the state stands.
    A planned change of the world happens inside the data loader, between two steps, without
    leaving the function.

    Args:
        function: trains; called as ``function(state, ...)``.
        warmup: called once before the worker is announced, while the others train on, for what
            is slow the first time (compilation, a dummy step). It must leave the state alone.
    """

    @functools.wraps(function)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Result:
        if not isinstance(state, State):
            raise ScriptError(
                f"{function.__name__}() must be called with a hvd_elastic.torch.State first, "
                f"not with a {type(state).__name__}"
            )
        ctx = context.current()
        _refuse_unwrapped(ctx, state)
        if warmup is not None:
            warmup()

        def train() -> Result:
            while True:
                ctx.in_train = True
                ctx.rollback.function_entered()
                begun = ctx.progress.step > 0
                try:
                    result = function(state, *args, **kwargs)
                    ctx.function_returned()
                    return result
                except StepVoidedError:
                    pass
                except UnboundLocalError as error:
                    if begun:
                        error.args = (f"{error}. {_AFTER_A_FAILURE}",)
                    raise
                except (MemoryError, RuntimeError) as error:
                    if not _out_of_memory(error):
                        raise
                    if not ctx.out_of_memory():
                        raise
                finally:
                    ctx.in_train = False
                # The error is gone by now, and with it what its frames held.
                gc.collect()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()

        watched = register_optimizer_step_post_hook(ctx.optimizer_stepped)
        try:
            if ctx.mode is Mode.AGENT:
                return _run_with_agent(ctx, train)
            if ctx.mode is Mode.HOROVOD_ELASTIC:
                return _run_with_horovod_elastic(ctx, state, train)
            return _run_static(ctx, state, train)
        finally:
            watched.remove()

    return wrapper


def _refuse_unwrapped(ctx: Context, state: State) -> None:
    """Refuse optimizers whose gradients nobody averages: the ranks' weights would differ."""
    for name, optimizer in state.named_optimizers().items():
        if ctx.averager is not None and ctx.averager.owns(optimizer):
            continue
        kind = type(optimizer).__name__
        if ctx.averager is not None:
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


def _enough(ctx: Context, count: int) -> bool:
    if ctx.progress.phase is Phase.DONE:
        return True
    if ctx.adaptation is not None:
        return ctx.adaptation.enough(ctx.progress.epoch, count) or count <= 0
    return ctx.progress.epoch >= count


def _out_of_memory(error: BaseException) -> bool:
    # On the CPU PyTorch has no type for it.
    return isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def epochs(count: int) -> Iterator[int]:
    """The epochs still to do, from where training stands, up to ``count``.

    Where the batch adapts, ``count`` is that of the initial batch size: larger batches make less
    progress with an example, so there are more passes over the data, until the scale-invariant
    progress is that of ``count`` epochs, to the nearest pass. With learning-rate rules that keep
    the number of examples (all but AdaScale), the two are the same.

    >>> for epoch in epochs(10):      # doctest: +SKIP
    ...     for inputs, targets in loader:
    ...         ...
    """
    ctx = context.current()
    ctx.rollback.epochs_begin()
    while not _enough(ctx, count):
        epoch = ctx.progress.epoch
        yield epoch
        ctx.rollback.epoch_turns(epoch)


def _run_with_agent(ctx: Context, train: Callable[[], Result]) -> Result:
    ctx.ready()
    returned: list[Result] = []
    phase = Phase.HEAD
    pending = True
    while True:
        try:
            if pending:
                ctx.follow()
                pending = False
            if not _all_returned(ctx, bool(returned)):
                returned = [train()]
                phase = ctx.rollback.function_returned()
            ctx.engine.barrier()  # nobody leaves while another may still need it
        except GenerationBrokenError as error:
            ctx.broken(error)
            pending = True
            continue
        ctx.progress.phase = phase
        ended = msg.Finished(Position(**ctx.progress.as_dict()))
        _end_tail(ctx)
        ctx.checkpoint(wait=True)
        ctx.close()
        ctx.sink.send(ended)
        return returned[0]


def _all_returned(ctx: Context, returned: bool) -> bool:
    """Whether the function has returned on all ranks, and only the end of training failed."""
    if ctx.progress.phase is not Phase.DONE:
        return False
    told = ctx.engine.gather(torch.tensor([int(returned)]), "hvd_elastic.returned")
    return bool(told.all())


def _end_tail(ctx: Context) -> None:
    """A function that returned in the tail of an epoch has run it; a later start does not again."""
    if ctx.progress.phase is Phase.TAIL:
        ctx.progress.next_epoch()


def _run_static(ctx: Context, state: State, train: Callable[[], Result]) -> Result:
    _restore_newest(ctx)
    ctx.progress = state.sync(ctx.engine, 0, ctx.progress)
    ctx.rollback.synchronized()
    ctx.start_alone()
    try:
        result = train()
    except GenerationBrokenError as error:
        raise RunError(
            f"rank {ctx.engine.rank} cannot go on, since another rank has ended or cannot be "
            f"reached ({error}). What that one said before tells why; with ranks that stay the "
            "same the job ends with it"
        ) from error
    _end_tail(ctx)
    ctx.checkpoint(wait=True)
    ctx.close()
    return result


def _run_with_horovod_elastic(ctx: Context, state: State, train: Callable[[], Result]) -> Result:
    """Let Horovod's own driver change the ranks; our state and data stay exactly-once."""
    import horovod.torch as horovod
    from horovod.common.elastic import State as HorovodState
    from horovod.common.exceptions import HostsUpdatedInterrupt

    class Adapter(HorovodState):
        def save(self) -> None:
            ctx.rollback.save()

        def restore(self) -> None:
            ctx.step_failed()
            ctx.rollback.fail()

        def sync(self) -> None:
            ctx.ranks_changed()
            if ctx.generation == 1:
                _restore_newest(ctx)
            ctx.progress = state.sync(ctx.engine, 0, ctx.progress)
            ctx.rollback.synchronized()

        def reset(self) -> None:
            ctx.ranks_changed()

    adapter = Adapter(bcast_object=horovod.broadcast_object, get_rank=horovod.rank)

    def check_host_updates() -> None:
        try:
            adapter.check_host_updates()
        except HostsUpdatedInterrupt:  # on all ranks, since rank 0 has told them
            ctx.prepare_change()
            raise

    ctx.check_host_updates = check_host_updates

    @horovod.elastic.run
    def again(_: Any) -> Result:
        try:
            return train()
        except GenerationBrokenError as error:
            raise error.__cause__ or error from None  # Horovod's wrapper knows its own kind only

    result: Result = again(adapter)
    return result


def _restore_newest(ctx: Context) -> None:
    folder = ctx.sink.checkpoint_folder
    if ctx.engine.rank == 0 and folder and Path(folder).is_dir():
        from hvd_elastic.checkpoint.files import newest_valid

        newest = newest_valid(
            folder, on_skip=lambda path, why: warnings.warn(f"skipped {path}: {why}", stacklevel=2)
        )
        if newest is not None:
            ctx.restore_checkpoint(str(newest.path))

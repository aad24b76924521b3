"""Runs a training function under any launcher, again after each failure."""

from __future__ import annotations

import functools
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from numbers import Real
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

import numpy as np

from hvd_elastic.checkpoint.manifests import newest_valid
from hvd_elastic.communicator.interface import GenerationBrokenError
from hvd_elastic.communicator.ring import load_horovod
from hvd_elastic.errors import RunError, ScriptError
from hvd_elastic.formatting import as_whole
from hvd_elastic.input.input_host import serve_ranks
from hvd_elastic.script.state import ScriptState
from hvd_elastic.wire import messages as msg
from hvd_elastic.worker import context
from hvd_elastic.worker.context import Context
from hvd_elastic.worker.launch import Mode, refuse_to_train_beside_worker
from hvd_elastic.worker.progress import Phase
from hvd_elastic.worker.rollback import StepVoidedError
from hvd_elastic.worker.worker import RunRank, Worker

Result = TypeVar("Result")
TrainFunction = Callable[..., Result]
Batch = TypeVar("Batch")
_Batch_co = TypeVar("_Batch_co", covariant=True)
_IN_THE_MIDDLE = (
    "The function was entered in the middle of training, by a worker that joins, after a failure "
    "or in a resumed run: "
)
_EXPLAINED = {
    UnboundLocalError: "where no batch of the epoch is left, the loop over the loader runs zero "
    "times; a variable that is used after the loop has to be set before it",
    StopIteration: "the epoch has fewer batches left than len(loader); in place of next() write "
    "`for batch in loader`",
}


def run(
    function: TrainFunction[Result], *, warmup: Callable[[], object] | None = None
) -> TrainFunction[Result]:
    """Make a training function elastic; use it as a decorator.

    The function takes the ``State`` as its first argument. It is called again after a failure, and
    ``epochs()`` and the loader continue from the progress of the state. A planned change of the
    world happens where the loader is iterated, between two steps, without leaving the function.

    Args:
        function: training function, called as ``function(state, ...)``.
        warmup: called once before this worker reports ready, while the other workers train; for
            work that is slow the first time. With PyTorch it must not change the state. With
            TensorFlow it has the step traced, ``lambda: train_step(*next(iter(dataset)))``: the
            steps that it takes are on this rank alone, and undone.
    """

    @functools.wraps(function)
    def wrapper(state: Any, *args: Any, **kwargs: Any) -> Result:
        ctx = context.current()
        name = getattr(function, "__name__", type(function).__name__)  # a partial() has none
        frontend = ctx.worker.frontend
        if not isinstance(state, ScriptState):
            raise ScriptError(
                f"{name}() must be called with a {frontend.module}.State first, "
                f"not with a {type(state).__name__}"
            )
        with frontend.training(state, None if ctx.worker.reads else warmup):
            return run_training(ctx, functools.partial(function, state, *args, **kwargs), name)

    return wrapper


def run_training(ctx: Context, function: Callable[[], Result], name: str) -> Result:
    """Call a training function, again after each failure, until it returns.

    How failures are handled and ranks change depends on the launcher of this process.

    Args:
        ctx: training process, in which no function was trained before.
        name: its name, for messages.

    Raises:
        ScriptError: this is the second training of the script.
    """
    if ctx.worker.reads:
        serve_ranks(ctx)
    if ctx.has_trained:
        raise ScriptError(
            f"{name}() is a second training in this script, which has one: it is where hosts join, "
            "a failure is undone, and a resumed run continues. Put all phases into one function "
            "under @hvd.run, one loop after the other: `for epoch in hvd.epochs(10)` and then "
            "`for epoch in hvd.epochs(15)` for five epochs more, or with hvd.steps. For a new "
            "State or another data set start another script, which begins with "
            f"{ctx.worker.frontend.module}.load_model(run, model)"
        )
    ctx.has_trained = True

    def train() -> Result:
        frontend, worker = ctx.worker.frontend, ctx.worker
        while True:
            worker.in_train = True
            ctx.rollback.function_entered()
            begun = worker.progress.step > 0
            try:
                result = function()
                ctx.end_uncommitted()
                ctx.count_committed()
                ctx.refuse_open_period()
                ctx.idle_check.training_ends()
                if ctx.nothing_to_do:
                    worker.warn_once(ctx.nothing_to_do)
                return result
            except StepVoidedError:
                pass
            except (UnboundLocalError, StopIteration) as error:
                if begun:
                    said = f"{error}. " if str(error) else ""
                    error.args = (f"{said}{_IN_THE_MIDDLE}{_EXPLAINED[type(error)]}",)
                raise
            except Exception as error:
                killed = frontend.killed_reader(error)
                if killed and worker.mode is Mode.AGENT:
                    _end_as_killed(worker, killed)
                failed = frontend.failed_collective(error)
                if failed is not None:
                    raise failed from error
                if not (frontend.is_out_of_memory(error) and ctx.out_of_memory()):
                    raise
            finally:
                worker.in_train = False
            # Only here, after the except clauses, is the error gone that kept tensors alive.
            frontend.free_memory()

    match ctx.worker.mode:
        case Mode.AGENT:
            return _run_with_agent(ctx, train)
        case Mode.HOROVOD_ELASTIC:
            return _run_with_horovod_elastic(ctx, train)
        case _:
            return _run_static(ctx, train)


def _end_as_killed(worker: Worker, killed: str) -> NoReturn:
    """End this process as if it had been killed itself: the others continue, and it is replaced.

    Else its error would count as one of the script, and end the run on all hosts.
    """
    worker.warn(
        f"{killed}. The kernel does that where a host is out of memory, the largest process first: "
        "then lower num_workers. Its rank is replaced"
    )
    sys.stdout.flush()
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a killed process continues")


def epochs(count: int, *until: object) -> Iterator[int]:
    """Yield the numbers of the epochs still to do, from the current one up to ``count - 1``.

    Where the batch adapts, ``count`` is the number of epochs at the initial batch size. A larger
    batch makes less progress per example, so there are more passes over the data, until the
    scale-invariant progress equals that of ``count`` epochs, to the nearest pass. With
    learning-rate rules that keep the number of examples (all but AdaScale), the two are the same.

    >>> for epoch in epochs(10):      # doctest: +SKIP
    ...     for inputs, targets in loader:
    ...         ...
    """
    ctx = context.current()
    worker = ctx.worker
    if until:
        raise ScriptError(
            f"hvd.epochs({', '.join(map(repr, (count, *until)))}): epochs count from 0, and a run "
            "that continues begins with a later one by itself. Give their number alone, as "
            "hvd.epochs(10), and add 1 where you print them"
        )
    if not isinstance(count, Real):
        raise ScriptError(f"hvd.epochs({count!r}): give the number of epochs, as hvd.epochs(10)")
    ctx.aim(count, "epoch")
    ctx.rollback.epochs_begin()
    while worker.progress.phase is not Phase.DONE:
        epoch = ctx.reading.epoch
        if ctx.planner.is_enough(epoch, count):
            ctx.warn_of_open_step()
            return
        if worker.progress.stopped and worker.progress.phase is Phase.HEAD:
            ctx.rollback.training_stopped()
            return
        yield epoch
        ctx.turn_epoch(epoch)
        if worker.progress.stopped:
            return


class Loader(Protocol[_Batch_co]):
    """Our loader of a framework."""

    def batches(self, enough: Callable[[], bool] | None = None) -> Iterator[_Batch_co]:
        """Yield the remaining batches of the epoch; ``enough``: of all epochs until it is true."""


def steps(count: int, loader: Loader[Batch]) -> Iterator[Batch]:
    """Yield batches until training has taken ``count`` steps, in as many epochs as that takes.

    Steps are those of the optimizer, counted from the beginning of training: after a failure, and
    in a resumed run, it continues where training stands. So several loops may follow each other,
    ``steps(1000, loader)`` and then ``steps(5000, loader)`` for the next 4000.

    Where the batch adapts, ``count`` is the number of steps at the initial batch size. A larger
    batch makes more progress in a step, so there are fewer, until the scale-invariant progress
    equals that of ``count`` steps, to the nearest step.

    Args:
        count: number of steps, >= 0.
        loader: our loader.

    Raises:
        ScriptError: the count is not a whole number, or the loader is another one.

    >>> for inputs, targets in steps(20_000, loader):      # doctest: +SKIP
    ...     ...
    """
    frontend = context.current().worker.frontend
    count = as_whole(count)
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise ScriptError(
            f"hvd.steps({count!r}, loader): the number of steps comes first and must be a whole "
            "number, 0 or more, such as hvd.steps(20_000, loader)"
        )
    if not hasattr(loader, "batches"):
        raise ScriptError(
            f"hvd.steps({count}, loader): the loader is a {type(loader).__name__}; give it a "
            f"{frontend.loader}(dataset, batch_size, shuffle=True)"
        )
    return _steps(count, loader)


def _steps(count: int, loader: Loader[Batch]) -> Iterator[Batch]:
    ctx = context.current()
    worker = ctx.worker

    def enough() -> bool:
        return ctx.planner.is_enough(worker.progress.step, count, "step")

    ctx.nothing_to_do = ""
    ctx.aim(count, "step")
    if enough():
        ctx.rollback.epochs_begin()
        stands = int(ctx.planner.progress_in("step") or worker.progress.step)
        if stands > count:
            ctx.nothing_to_do = (
                f"training stands at step {stands} already, so hvd.steps({count}, loader) has "
                "nothing to do: it counts from the beginning of training. Give it a larger number "
                "to train on, or start a new run"
            )
    elif worker.progress.stopped or worker.progress.phase is Phase.DONE:
        ctx.rollback.epochs_begin()
        ctx.rollback.training_stopped()
    else:
        ctx.rollback.steps_begin()
        yield from loader.batches(enough)


def stop(reason: str) -> None:
    """End training early, on all ranks after the same step; any rank may call it.

    The call returns at once, and the script continues as before. The ranks learn of it with the
    gradients of a step, at the latest the next one, or where ``epochs()`` turns to the next epoch.
    Then the loops over the loader, ``epochs()`` and ``steps()`` end on all of them, and the code
    after the loops runs. The run has succeeded; its records tell the reason.

    Args:
        reason: why training ends, for the records of the run.

    Raises:
        ScriptError: the reason is not a text, or the training function is not running.

    >>> if patience.exhausted:      # doctest: +SKIP
    ...     stop(f"no better loss in {patience.epochs} epochs")
    """
    if not isinstance(reason, str) or not reason.strip():
        raise ScriptError(
            f"hvd.stop({reason!r}): give the reason in words, for the records of the run: "
            'hvd.stop("the validation loss has not fallen for 5 epochs")'
        )
    worker = context.current().worker
    if not worker.in_train:
        raise ScriptError(
            "hvd.stop() was called outside of the training function, where there is no training to "
            "end; call it in the function under @hvd.run"
        )
    worker.stop_reason = worker.stop_reason or " ".join(reason.split())


def _run_with_agent(ctx: Context, train: Callable[[], Result]) -> Result:
    worker = ctx.worker
    ctx.ready()
    returned: list[Result] = []
    phase = Phase.HEAD
    pending = True
    while True:
        try:
            if pending:
                ctx.rescaling.follow()
                pending = False
            if not all_returned(ctx, bool(returned)):
                returned = [train()]
                phase = ctx.rollback.function_returned()
            ctx.replica_check.training_ends()
            worker.communicator.barrier()  # no rank exits while another may still need it
        except GenerationBrokenError as error:
            ctx.broken(error)
            pending = True
            continue
        worker.progress.phase = phase
        ended = msg.Finished(worker.position)
        end_training(ctx)
        worker.sink.send(ended)
        return returned[0]


def all_returned(ctx: Context, returned: bool) -> bool:
    """Return whether the function has returned on all ranks: only what follows it failed."""
    if ctx.worker.progress.phase is not Phase.DONE:
        return False
    own = np.array([int(returned)])
    return bool(ctx.worker.communicator.gather(own, "hvd_elastic.returned").all())


def end_training(ctx: Context) -> None:
    """Write the last checkpoint, so that a resumed run does not repeat the end of the epoch.

    A resumed run continues a training that was stopped, in the middle of the epoch.
    """
    ctx.training_ends()  # before the epoch is over, to which the last values belong
    progress = ctx.worker.progress
    if progress.phase is Phase.TAIL:
        progress.next_epoch()
    elif progress.phase is Phase.PAUSE:
        progress.phase = Phase.LOOP
    progress.stopped = False
    ctx.checkpoints.take_checkpoint(wait=True)
    ctx.checkpoints.close()


def start_static(ctx: Context) -> None:
    """Begin training on ranks that stay the same, from the newest checkpoint if there is one.

    Raises:
        ScriptError: a worker's script has started this process.
    """
    refuse_to_train_beside_worker()
    _restore_newest(ctx)
    ctx.rescaling.synchronize_state(RunRank(0))
    ctx.rescaling.start_alone()


def _run_static(ctx: Context, train: Callable[[], Result]) -> Result:
    start_static(ctx)
    try:
        result = train()
        ctx.replica_check.training_ends()
    except GenerationBrokenError as error:
        raise static_rank_lost(ctx, error) from error
    end_training(ctx)
    return result


def static_rank_lost(ctx: Context, error: Exception) -> RunError:
    """Return the error of a training whose ranks stay the same, after one of them is lost."""
    return RunError(
        f"rank {ctx.worker.rank} cannot continue, since another rank has ended or "
        f"cannot be reached ({error}). What that one said before tells why; with ranks that stay "
        "the same the job ends with it"
    )


def _run_with_horovod_elastic(ctx: Context, train: Callable[[], Result]) -> Result:
    """Train under Horovod's own elastic driver, which changes the ranks; data stay exactly-once."""
    from horovod.common.elastic import State as HorovodState
    from horovod.common.exceptions import HostsUpdatedInterrupt

    horovod = load_horovod(ctx.worker.frontend.horovod)

    class Adapter(HorovodState):
        def save(self) -> None:
            ctx.rollback.save()

        def restore(self) -> None:
            ctx.checkpoints.settle()
            ctx.step_failed()
            ctx.rollback.fail()

        def sync(self) -> None:
            ctx.rescaling.ranks_changed()
            if ctx.worker.generation == 1:
                _restore_newest(ctx)
            ctx.rescaling.synchronize_state(RunRank(0))

        def reset(self) -> None:
            ctx.rescaling.ranks_changed()

    adapter = Adapter(bcast_object=horovod.broadcast_object, get_rank=horovod.rank)

    def check_host_updates() -> None:
        try:
            adapter.check_host_updates()
        except HostsUpdatedInterrupt:  # raised on all ranks: rank 0 broadcasts it
            ctx.rescaling.prepare_change()
            raise

    ctx.check_host_updates = check_host_updates

    @horovod.elastic.run
    def again(_: Any) -> Result:
        try:
            result = train()
            ctx.replica_check.training_ends()
            return result
        except GenerationBrokenError as error:
            raise error.__cause__ or error from None  # Horovod handles only its own error type

    result: Result = again(adapter)
    end_training(ctx)
    return result


def _restore_newest(ctx: Context) -> None:
    folder = ctx.worker.sink.checkpoint_folder
    if ctx.worker.rank == 0 and folder and Path(folder).is_dir():
        newest = newest_valid(
            folder, on_skip=lambda path, why: warnings.warn(f"skipped {path}: {why}", stacklevel=2)
        )
        if newest is not None:
            ctx.rescaling.restore_checkpoint(str(newest.path))

"""Training whose loop belongs to another library, which is told what happens in it.

:func:`hvd_elastic.script.run.run_training` calls the script's function again after a failure.
A loop that cannot be entered again, such as ``model.fit`` of Keras, instead calls
:meth:`join_ranks`, :meth:`recover` where something has failed, and :meth:`leave_ranks`.
"""

from __future__ import annotations

from collections.abc import Callable

from hvd_elastic.communicator.interface import GenerationBrokenError
from hvd_elastic.errors import ScriptError
from hvd_elastic.input.input_host import serve_ranks
from hvd_elastic.script.run import all_returned, end_training, start_static, static_rank_lost
from hvd_elastic.wire import messages as msg
from hvd_elastic.worker.context import Context
from hvd_elastic.worker.launch import Mode
from hvd_elastic.worker.progress import AFTER_LOOP, Phase


class Session:
    """The training of this process, from its beginning to its end.

    Args:
        ctx: training process.
        name: what trains, for messages.
        repeat_tail: does again what follows an epoch's batches, where it has failed on another
            rank; a part of it may be collective.
    """

    def __init__(self, ctx: Context, name: str, repeat_tail: Callable[[], object]) -> None:
        self._ctx = ctx
        self._name = name
        self._repeat_tail = repeat_tail

    def join_ranks(self) -> None:
        """Join the other ranks, and receive the state.

        Raises:
            ScriptError: this is the second training of the script, or the launcher does not fit.
        """
        ctx, worker = self._ctx, self._ctx.worker
        if worker.reads:
            serve_ranks(ctx)
        if ctx.has_trained:
            raise ScriptError(
                f"{self._name} is a second training in this script, which has one: it is where "
                "hosts join, a failure is undone, and a resumed run continues. Train in one call, "
                "with more epochs, and change the learning rate in it by a schedule or a callback. "
                "For another compile(), as after layers were unfrozen, start another script, which "
                f"begins with {ctx.worker.frontend.module}.load_model(run, model)"
            )
        if worker.mode is Mode.HOROVOD_ELASTIC:
            raise ScriptError(
                f"{self._name} under horovodrun --host-discovery-script: Horovod's elastic driver "
                "calls a function again after a change, which cannot be entered in the middle. "
                "Use hvd-elastic run, or a loop of your own under @hvd.run"
            )
        ctx.has_trained = True
        if worker.mode is Mode.AGENT:
            ctx.ready()
            self._join(None)
            if worker.progress.phase is Phase.DONE:
                all_returned(ctx, False)
        else:
            start_static(ctx)
        self._enter()

    def _enter(self) -> None:
        self._ctx.worker.in_train = True
        self._ctx.rollback.function_entered()

    def _join(self, error: GenerationBrokenError | None) -> None:
        while True:
            try:
                if error is not None:
                    self._ctx.broken(error)
                self._ctx.rescaling.follow()
                return
            except GenerationBrokenError as again:
                error = again

    def recover(self, error: Exception, *, in_tail: bool = False) -> None:
        """Go on in another generation after a failure; the state is before or after a step.

        Args:
            error: what was raised; raised again if it is no failure of another rank.
            in_tail: whether the caller itself repeats what follows the epoch's batches.
        """
        worker = self._ctx.worker
        failed: BaseException | None = error
        if not isinstance(error, GenerationBrokenError):
            failed = worker.frontend.failed_collective(error)
        if failed is None:
            raise error
        if not isinstance(failed, GenerationBrokenError):
            raise failed from error
        if worker.mode is not Mode.AGENT:
            raise static_rank_lost(self._ctx, failed) from error
        worker.in_train = False
        self._join(failed)
        if worker.progress.phase is Phase.DONE:
            all_returned(self._ctx, True)
        self._enter()
        if worker.progress.phase in AFTER_LOOP and not in_tail:
            self._repeat_tail()

    def leave_ranks(self) -> None:
        """Leave together with the other ranks."""
        ctx, worker = self._ctx, self._ctx.worker
        ctx.end_uncommitted()
        phase = ctx.rollback.function_returned()
        while True:
            try:
                ctx.replica_check.training_ends()
                if worker.mode is Mode.AGENT:
                    worker.communicator.barrier()  # no rank exits while another may still need it
                break
            except GenerationBrokenError as error:
                self.recover(error)
                ctx.rollback.function_returned()
        worker.in_train = False
        worker.progress.phase = phase
        ended = msg.Finished(worker.position)
        end_training(ctx)
        worker.sink.send(ended)

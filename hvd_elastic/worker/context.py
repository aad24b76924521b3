"""One process's part in a run: what frontends and loaders tell it, in each pass, step and epoch.

It holds the parts that act (``Step``, ``Rollback``, ``Checkpointing``, …) and decides which of them
does what at which moment; ``rescaling`` takes the process to the next generation.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hvd_elastic.errors import ScriptError
from hvd_elastic.formatting import count
from hvd_elastic.wire import messages as msg
from hvd_elastic.worker.checkpointing import Checkpointing
from hvd_elastic.worker.checks.audit import Audit
from hvd_elastic.worker.checks.idle_check import IdleCheck
from hvd_elastic.worker.checks.replica_check import ReplicaCheck
from hvd_elastic.worker.debugging.breakpoints import install_breakpoints
from hvd_elastic.worker.debugging.profiling import StepProfile
from hvd_elastic.worker.debugging.uncaught import tell_uncaught
from hvd_elastic.worker.frontend import Averager, Frontend, State
from hvd_elastic.worker.imported import installed_modules, script_digests
from hvd_elastic.worker.launch import (
    Mode,
    detect_mode,
    is_started_by_worker,
    refuse_other_launchers,
)
from hvd_elastic.worker.metrics import Metrics
from hvd_elastic.worker.planning.planner import Planner
from hvd_elastic.worker.progress import Phase, Progress
from hvd_elastic.worker.rescaling import Rescaling
from hvd_elastic.worker.rollback import Rollback
from hvd_elastic.worker.script_data import ScriptData
from hvd_elastic.worker.state_parts import StateParts
from hvd_elastic.worker.step import Pass, Stage, Step
from hvd_elastic.worker.worker import Worker


class Context:
    """One process's part in a training run, created by :func:`initialize`.

    Attributes:
        worker: this process: its communicator, its progress, and where its reports go.
        step: step in flight.
        planner: divides the examples of a step.
        rollback: undoes what the script changed when a step fails.
        checkpoints: takes this process's checkpoints.
        metrics: collects and sends the run's metrics.
        idle_check: warns if nothing is trained.
        replica_check: compares the parameters of the ranks.
        state_parts: objects of the library that are part of the script's state.
        data: what the script has told of its data.
        rescaling: takes this process to the next generation.
        own_data: whether the script means to read its data without our loader.
        nothing_to_do: why the last loop over ``steps()`` had no step to take; empty: it had.
        has_trained: whether the script has called its training function.
        check_host_updates: called between steps; under Horovod's own elastic driver it raises
            when the ranks are about to change.
    """

    def __init__(self, mode: Mode, frontend: Frontend) -> None:
        self.worker = Worker(mode, frontend)
        install_breakpoints(self.worker)
        self.step = Step()
        self.planner = Planner()
        self.rollback = Rollback(self.worker)
        self.checkpoints = Checkpointing(self.worker)
        self.metrics = Metrics(self.worker)
        self.idle_check = IdleCheck(self.worker)
        self.replica_check = ReplicaCheck(self.worker)
        self._profile = StepProfile(self.worker) if self.worker.options.profile >= 0 else None
        self.state_parts = StateParts()
        self.data = ScriptData()
        self.rescaling = Rescaling(
            self.worker,
            self.step,
            self.rollback,
            self.checkpoints,
            self.metrics,
            self.state_parts,
        )
        self.nothing_to_do = ""
        self.own_data = False
        self.has_trained = False
        self.check_host_updates: Callable[[], None] = lambda: None
        self._audit = Audit(self.worker)
        self._started = time.monotonic()
        if mode is Mode.STATIC or mode is Mode.HOROVOD_ELASTIC:
            self.worker.communicator.start({})

    # -- registration ----------------------------------------------------------------------

    def register_state(self, state: State) -> None:
        """Set the state to synchronise; a script has one."""
        self.worker.state = state
        self.state_parts.join(state)

    def keep(self, name: str, item: Any, before_change: Callable[[], None] | None = None) -> None:
        """Make an object of the library part of the script's state.

        Args:
            name: key in the state, the same on all ranks and when the run is resumed.
            item: object with ``state_dict()`` and ``load_state_dict()`` of plain values.
            before_change: called on all ranks before a planned change of the world.
        """
        self.state_parts.add_object(name, item, before_change)

    def register_averager(self, averager: Averager) -> None:
        """Add the averager of an optimizer; see :meth:`Averagers.add_averager`."""
        self.worker.averagers.add_averager(averager, in_train=self.worker.in_train)
        if self.planner.adapts:
            averager.adapt()

    def choose_averagers(self, chosen: Sequence[Averager]) -> None:
        """Have the optimizers of the State train, and no others.

        Raises:
            ScriptError: there are several, and the batch adapts.
        """
        self.worker.averagers.choose(chosen)
        self._adapt()

    def _adapt(self) -> None:
        averagers = self.worker.averagers
        if not self.planner.adapts:
            return
        if averagers.several:
            what = (
                f"{len(averagers)} optimizers given to DistributedOptimizer(...)"
                if len(averagers) > 1
                else "DistributedOptimizer(..., several_steps=True)"
            )
            raise ScriptError(
                f"{self.worker.frontend.loader}(max_batch_size=...) with {what}: noise scale and "
                "learning-rate rules are of one optimizer that steps once for each batch. Leave "
                "max_batch_size out (unequal_shares=True works with several), or train all "
                "parameters with one optimizer, in parameter groups of their own"
            )
        for averager in averagers:
            averager.adapt()

    def register_data(self, examples: int, dropped: int, planner: Planner) -> None:
        """Register the loader whose batches are the steps.

        Args:
            dropped: number of examples that an epoch leaves out.
            planner: divides its steps.

        Raises:
            ScriptError: the batch adapts, and the training function runs.
        """
        if planner.adapts and self.worker.in_train:
            raise ScriptError(
                f"{self.worker.frontend.loader}(max_batch_size=...) is called in the training "
                "function, which is called again after a failure: what the batch has adapted to, "
                "and the progress by which hvd.epochs and hvd.steps end, would begin again; make "
                "it before"
            )
        self.data.register(examples)
        worker = self.worker
        worker.data_sets.examples = examples
        if worker.audit:
            worker.sink.send(msg.Dataset(examples, dropped))
        if planner.reviews:
            self.planner = planner
        if planner.adapts:
            self.keep("_adaptation", planner)
            if not worker.averagers.several:  # else hvd.run chooses
                self._adapt()

    def aim(self, count: int, unit: str) -> None:
        """Note that the script trains until it has made ``count`` of ``unit``, step or epoch."""
        self.data.aim = (count, unit)

    def _planned(self) -> dict[str, Any]:
        """Return the planner's metrics, and what part of the training is done if that is known."""
        done = self.data.part_done(self.worker.progress, self.planner)
        return {**self.planner.metrics(), **({} if done is None else {"done": round(done, 6)})}

    # -- a step ----------------------------------------------------------------------------

    @property
    def reading(self) -> Progress:
        """Place of the current batch: that of training, or ahead of it within a step of several."""
        return self.step.ahead or self.worker.progress

    def hand_out(self, batch: Pass) -> None:
        """Note that the script is given a batch now, or the next pass of one."""
        if self.step.accumulating:
            self.step.passes.append(batch)
            self.step.continues = False
            self.worker.averagers.pass_begins()
            return
        self.end_uncommitted()
        self.step.begin_step(batch)
        self.worker.averagers.forget()
        self.worker.averagers.pass_begins()
        if self.worker.state is not None and self.worker.on_not_finite == "skip":
            self.worker.state.keep_moving()

    def is_sampled(self) -> bool:
        """Return whether the gradients of the step that begins are sampled."""
        alone = self.worker.communicator.size == 1 and not self.step.accumulating
        useful = not (alone or self.step.is_too_large)
        return useful and self.planner.sampled(self.worker.progress.step)

    def pass_ends(self) -> None:
        """Add up the gradients of a pass; the loop body asks for the next pass of the step."""
        if self.step.is_open:
            self.worker.averagers.absorb()

    def begin_exchange(self, *, carried: bool = False) -> np.ndarray | None:
        """Begin to send the other ranks what this one wishes; see :meth:`Step.begin_exchange`."""
        if self._exchanges_at_commit:
            return None
        self.end_uncommitted()
        worker, step = self.worker, self.step
        place = self.reading.place_hash() if step.passes else 0
        shared = worker.communicator.size > 1
        own = step.begin_exchange(worker, self._wishes, place=place, shared=shared, carried=carried)
        if own is not None and worker.audit and step.passes:
            self._audit.gather_indices(step.passes)
        return own

    @property
    def _exchanges_at_commit(self) -> bool:
        """Return whether the next exchange is that of the step after ``commit``, as in a loop body.

        So it is with several optimizers, and without our loader, after a step of one of them.
        """
        return self.step.stage is Stage.UNCOMMITTED and self.worker.averagers.several

    @property
    def _exchange_checks_steps(self) -> bool:
        """Return whether the exchange, and not the gradients, shows who leaves a step out."""
        return self.planner.adapts or self.worker.averagers.several

    def _wishes(self) -> list[bool]:
        worker, is_due = self.worker, self.replica_check.is_due
        return [worker.wants_change, worker.wants_stop, is_due, *self.checkpoints.wishes()]

    def exchange(self) -> None:
        """Wait for the exchange that :meth:`begin_exchange` began; once a step."""
        if self.step.is_exchanged or self._exchanges_at_commit:
            return
        worker, step = self.worker, self.step
        if worker.communicator.size == 1:
            worker.refuse_aborted()  # a single rank has no collective that would fail
        self.begin_exchange()
        self._audit.finish()
        stop, compare = self._finish_exchange()
        if step.stage is Stage.VOIDED:
            self.planner.want_review()
        elif stop:
            worker.agree_on_stop(worker.progress.step + 1)
        self.replica_check.step_exchanged(is_due=compare)

    def _finish_exchange(self) -> tuple[bool, bool]:
        """Note what the ranks wish at the next step boundary.

        Returns:
            Whether training is to end, and whether the ranks compare their parameters now.
        """
        told = self.step.finish_exchange(self.worker, self._exchange_checks_steps)
        change, stop, compare, *checkpoint = told
        self.rescaling.change_agreed |= change
        self.checkpoints.agree(checkpoint)
        return stop, compare

    def own_flags(self) -> np.ndarray:
        """Return what this rank tells the others in a step whose graph reduces it.

        Called while the graph runs, in a thread of the framework.
        """
        worker, step = self.worker, self.step
        if worker.communicator.size == 1:
            worker.refuse_aborted()  # a single rank has no collective that would fail
        if worker.audit and step.passes:
            self._audit.gather_indices(step.passes)
            self._audit.finish()
        return step.flags(self._wishes, place=self.reading.place_hash() if step.passes else 0)

    def number_of_flags(self) -> int:
        """Return the length of :meth:`own_flags`."""
        return len(self.step.flags(self._wishes, place=0))

    def graph_stepped(self, told: np.ndarray, *, collectives: bool = True) -> None:
        """Count a step that a graph has taken.

        It comes before anything that can fail, since parameters have changed already.

        Args:
            told: average of all ranks' :meth:`own_flags`.
            collectives: whether the other ranks call this too, so that they can be asked.
        """
        worker = self.worker
        self.end_uncommitted()
        self.step.receive(told, shared=worker.communicator.size > 1)
        stop, compare = self._finish_exchange()
        self.optimizer_stepped()
        if collectives:
            if stop:
                worker.agree_on_stop(worker.progress.step)
            self.replica_check.step_exchanged(is_due=compare)

    def optimizer_stepped(self) -> None:
        """Count the step that an optimizer has taken; with several, the body's end counts it."""
        if self.data.has_loader or self.rollback.commits:
            self.rollback.optimizer_stepped()
        if not self.step.passes and self.worker.in_train:
            self._step_without_loader()
        elif not self.worker.averagers.several:
            self.step_done()

    def calls_off_to_look(self) -> bool:
        """Call off a step whose averaged gradients are not finite, once; all ranks call this.

        It is repeated, while each rank looks where its own become so, and then left out. So it is
        with the first, second, fourth, … such step, as a repetition enters the function again.
        """
        worker, progress = self.worker, self.worker.progress
        is_next_power = not progress.skipped & (progress.skipped + 1)
        looks = is_next_power and progress.looked_at != progress.step
        repeats = worker.elastic and worker.in_train and bool(self.step.passes)
        if not (looks and repeats) or worker.averagers.several or self.planner.skipped.overflows:
            return False
        progress.looked_at = progress.step
        self._undo_moving()
        self.step.stage = Stage.VOIDED
        return True

    def step_skipped(self, origin: str = "", layer: Callable[[], str] | None = None) -> None:
        """Note that a step is left out on all ranks, since its averaged gradients are not finite.

        Args:
            origin: which gradients of this rank alone are not finite, in words; empty: none, or
                it is not known.
            layer: returns in words where they became so in the forward pass of this rank.

        Raises:
            ScriptError: such a step is to end the run.
        """
        worker, skipped = self.worker, self.planner.skipped
        progress, step = worker.progress, worker.progress.step + 1
        where = f"step {step}, of epoch {self.reading.epoch} at example {self.reading.position}"
        if not skipped.count_step(progress, self.step.steps):
            return  # a body is one step, even if some of its optimizers take theirs
        self._undo_moving()
        # Not of each: a gradient scaler causes them, and examples may come again in each epoch.
        tells = not (skipped.overflows or progress.skipped & (progress.skipped - 1))
        stops = worker.on_not_finite == "stop"
        if tells and not stops:
            worker.warn_once(
                f"{where}, is left out: its gradients are not finite. Its examples count as used "
                f"({count(progress.skipped, 'such step')} so far)"
            )
        if tells and origin:
            origin = "; ".join(filter(None, (origin, layer and layer())))
            worker.warn(
                f"step {step}: gradients of rank {worker.rank} are not "
                f"finite{self.step.examples_words}: {origin}"
            )
        if stops:
            self.training_ends()
            raise ScriptError(
                f"the gradients of {where} are not finite: the loss is NaN or infinite on at least "
                "one rank. Look at the data and the loss, lower the learning rate (or init_scale "
                "of a gradient scaler), or clip gradients; --on-not-finite skip leaves such steps "
                "out"
            )

    def _undo_moving(self) -> None:
        if self.worker.state is not None:
            self.worker.state.undo_moving()

    def step_done(self) -> None:
        """Count the step: its optimizers have taken it, or all ranks leave it out."""
        step, worker = self.step, self.worker
        if not step.is_open:
            return
        epoch, position = worker.progress.epoch, worker.progress.position
        worker.progress = step.count(worker.progress)
        if worker.audit:
            self._audit.record(epoch, position)
        self._step_counted()

    def _step_without_loader(self) -> None:
        """Note a step of the optimizer for examples that our loader did not hand out.

        Raises:
            ScriptError: the run is audited, and what the script read is unknown.
        """
        worker = self.worker
        first = worker.progress.step == 0 and self.step.stage is not Stage.UNCOMMITTED
        if first and worker.mode is not Mode.ALONE:
            loader, other = worker.frontend.loader, worker.frontend.other_loader
            call = worker.frontend.takes_step
            what = f"{call} was called for a batch that does not come from {loader}"
            remedy = (
                f"Read the training data with {loader}(dataset, batch_size, shuffle=True) in place "
                f"of {other}, with the batch size of all ranks together and without a "
                "DistributedSampler"
            )
            if worker.audit:
                raise ScriptError(
                    f"{what}, so no audit (--audit) can be made. {remedy}; a script without a data "
                    "set runs without --audit"
                )
            if not self.own_data:
                worker.warn_once(
                    f"{what}: examples are not shared out among the ranks, every rank trains on "
                    "what its own loader gives it; a worker that joins or is replaced begins with "
                    "the first batch of its own; and hosts join or leave only where the script "
                    f"calls state.commit(). {remedy}. If this is meant, as where each step trains "
                    "on all of the data: hvd.init(own_data=True)"
                )
        self.step.stage = Stage.UNCOMMITTED

    def end_uncommitted(self) -> None:
        """Count a step that was taken without our loader and that the script did not commit."""
        if self.step.stage is Stage.UNCOMMITTED:
            self._count_own_step()

    def _count_own_step(self) -> None:
        self.step.forget()
        self.worker.progress.advance(0)
        self._step_counted()

    def _step_counted(self) -> None:
        """Do what follows each step.

        Raises:
            ScriptError: it is the last of too many whose gradients were not finite.
        """
        self.metrics.step_finished(self._planned)
        self.idle_check.step_counted()
        if self._profile is not None:
            self._profile.step_counted()
        progress, skipped = self.worker.progress, self.planner.skipped
        if progress.skipped_at == progress.step - 1 and skipped.are_too_many:
            self.training_ends()
            skipped.refuse_many(progress.step, self.planner.rate_advice)

    def mark_consumed(self) -> None:
        """End the step in flight where the loop body ended without a step of our optimizer."""
        step = self.step
        if step.accumulating:  # the loop was left between two passes: no step was taken
            self.step_failed()
        if not step.is_open:
            return
        step.is_left_out = True
        try:
            self.worker.averagers.leave_out()
            self.exchange()
        finally:
            step.is_left_out = False
        if step.is_open:  # a step that was called off does not count
            self.step_done()

    def body_left(self) -> None:
        """Count the step of a loop body that was left by ``break`` after a step of an optimizer.

        Without a collective, since a generator may be closed at any time.
        """
        whole = self.worker.averagers.several and not self.worker.communicator.broken
        if whole and self.step.stage is Stage.EXCHANGED:
            self.step_done()

    def count_committed(self) -> None:
        """Count a step without our optimizer whose loop was left after ``commit``.

        All ranks call this, where the next loop over the loader begins and where training ends.
        """
        if self.step.is_committed and not (self.step.accumulating or self.worker.averagers):
            self.mark_consumed()

    def check_left_out(self, begun: Any) -> None:
        """Wait for a reduction in place of gradients, in a shape that they never have.

        Steps that are taken need nothing extra: if another rank reduces gradients under the same
        name, in this step or the next, Horovod reports the different shapes to all ranks.

        Raises:
            ScriptError: only some ranks leave the step out; names them.
        """
        try:
            self.worker.communicator.wait(begun)
        except ScriptError:
            self.step.refuse_left_out(self.worker)
            raise

    def turn_epoch(self, epoch: int) -> None:
        """End a turn of ``epochs()``, in which ``epoch`` was read; all ranks call this."""
        self.refuse_open_period()
        worker, step = self.worker, self.step
        if step.ahead is not None and step.ahead.epoch > epoch:
            return  # a step of several batches continues in the next epoch
        if step.ahead is not None:  # the loop was left within such a step
            self.step_failed()
        self.mark_consumed()
        if self.data.has_loader and not worker.progress.stopped:
            self._exchange_at_turn()
        if worker.progress.phase is not Phase.PAUSE:
            self.rollback.epoch_turns(epoch)

    def _exchange_at_turn(self) -> None:
        worker = self.worker
        stop = worker.wants_stop
        if worker.communicator.size > 1:
            # The same reduction as in a step, so that a rank that has left its loop alone is found.
            turn, place = Step(), worker.progress.place_hash(turn=True)
            sent_as = worker.averagers.flags_meet
            turn.begin_exchange(worker, self._wishes, place=place, shared=True, sent_as=sent_as)
            _, stop, *_ = turn.finish_exchange(worker, adapts=False, turn=True)
        if stop:
            worker.agree_on_stop(worker.progress.step)

    def refuse_open_period(self) -> None:
        """Raise ScriptError if the loop over the loader was left within a period."""
        step = self.step
        if step.is_period and step.is_open:
            raise ScriptError(
                f"the loop over the loader was left within a period of hvd.LocalOptimizer, after "
                f"{count(len(step.passes), 'batch')}: the ranks hold different weights "
                "until it ends, and what they have learnt in it would be lost. End the loop by "
                "hvd.steps(count, loader) or hvd.stop(reason) in place of break or return, which "
                "also end the period"
            )

    def warn_of_open_step(self) -> None:
        """Warn if training ends within a step of several batches, which is not taken."""
        step = self.step
        if step.ahead is not None:
            self.worker.warn_once(
                "training ends without an optimizer.step() after the last backward passes in "
                f"`with optimizer.no_sync():` ({len(step.passes)}), so nothing is learnt from "
                "them. hvd.steps(count, loader) ends after a step; with hvd.epochs take one after "
                "the last batch of an epoch too, where loader.steps_left() == 1"
            )

    def commit(self, metrics: Mapping[str, Any]) -> None:
        """Store metrics; end a step for examples that our loader did not hand out."""
        self.metrics.update(metrics)
        step = self.step
        if self.data.has_loader and step.stage is not Stage.UNCOMMITTED:
            step.is_committed = True
            return  # the optimizer's step may follow; if not, the end of the loop body counts it
        # A script that reads its data itself: this is where its steps end.
        if step.stage is not Stage.UNCOMMITTED:  # a step that was taken has exchanged already
            step.is_left_out = self.worker.averagers.several
            try:
                self.exchange()
            finally:
                step.is_left_out = False
        self._count_own_step()
        self.worker.averagers.forget()
        self.rollback.commits = True
        self.rollback.save()
        self.step_boundary()

    def training_ends(self) -> None:
        """Send metrics that nobody has been told yet."""
        self.metrics.training_ends(self._planned)
        if self._profile is not None:
            self._profile.training_ends()

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Add numbers to the metrics of the next step; outside of training, send them at once."""
        self.metrics.update(metrics)
        if not self.worker.in_train:
            self.metrics.send(self._planned)

    def out_of_memory(self) -> bool:
        """Call the step off on all ranks, since a pass did not fit into this rank's memory.

        Returns:
            Whether training can continue, with smaller passes.
        """
        averagers, step = self.worker.averagers, self.step
        if not averagers or step.stage is not Stage.BEGUN or step.has_told:
            return False
        if not self.planner.out_of_memory(step.passes[-1].examples):
            return False
        step.is_too_large = True
        try:
            for averager in averagers.eager:
                averager.give_up()
        finally:
            step.is_too_large = False
        return True

    def step_failed(self) -> None:
        """Forget the step in flight."""
        if self.step.stage is Stage.UNCOMMITTED and not self.worker.averagers.several:
            self.worker.progress.advance(0)  # it was taken, so newcomers must count it too
        self.step.forget()
        self.rescaling.change_agreed = False
        self.worker.averagers.reset()

    # -- generations -----------------------------------------------------------------------

    def step_boundary(self) -> None:
        """Take checkpoints between two steps, and follow the leader to another generation."""
        worker = self.worker
        if worker.mode is Mode.HOROVOD_ELASTIC and worker.in_train:
            self.check_host_updates()
        if self.rescaling.change_agreed and worker.in_train:
            self.rescaling.rescale()
        self.checkpoints.step_boundary()
        self.planner.review_if_due(worker)

    def broken(self, error: BaseException) -> None:
        """Leave the generation after a failed collective, and report this rank's progress."""
        worker = self.worker
        worker.communicator.stop(broken=True)
        self.checkpoints.settle()
        worker.averagers.collect(collectives=False)
        self.step_failed()
        self.rollback.fail()
        self._audit.send_again()
        self.checkpoints.broken()
        self.rescaling.report_broken(error)

    # -- life ------------------------------------------------------------------------------

    def ready(self) -> None:
        """Report to the leader that this worker is warm."""
        if not self.worker.reads:
            self.worker.communicator.warm()
            self.worker.data_sets.described()  # here, where nobody waits for it
        if self.worker.link is not None:
            self.worker.link.send(msg.Imported(installed_modules()))
        self.worker.sink.send(msg.Ready(time.monotonic() - self._started, script_digests()))

    def script_failed(self, text: str) -> bool:
        """Send the last metrics, then report the exception that ends the script."""
        with contextlib.suppress(OSError):  # the agent is gone
            self.metrics.script_failed(self._planned)
        return self.worker.script_failed(text)


_context: Context | None = None


def initialize(frontend: Frontend, *, own_data: bool = False) -> Context:
    """Return the context of this process; the first call creates it.

    Args:
        frontend: framework of the script.
        own_data: whether the script means to read its data without our loader.
    """
    global _context
    if _context is None:
        tell_uncaught()
        refuse_other_launchers(os.environ)
        # A process that reads for a worker may import its script.
        mode = Mode.ALONE if is_started_by_worker() else detect_mode(os.environ)
        _context = Context(mode, frontend)
        if _context.worker.mode is Mode.AGENT:
            tell_uncaught(_context.script_failed)
            atexit.register(gc.freeze)  # else the interpreter visits all objects again as it ends
    _context.own_data |= own_data
    return _context


def is_initialized() -> bool:
    """Return whether :func:`initialize` was called."""
    return _context is not None


def current() -> Context:
    """Return the context of this process.

    Raises:
        ScriptError: ``init()`` was not called.
    """
    if _context is None:
        tell_uncaught()
        raise ScriptError(
            "call hvd.init() first, before anything else of the library; hvd is hvd_elastic.torch, "
            "hvd_elastic.tensorflow or hvd_elastic.keras, as the script imports it"
        )
    return _context

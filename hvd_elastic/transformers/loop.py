"""Trainer's loop over the update steps, by parts that ``hvd.run`` runs, and runs again."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from transformers.trainer_callback import ProgressCallback

import hvd_elastic.torch as hvd
from hvd_elastic.errors import ScriptError
from hvd_elastic.script.loop_parts import train_by_parts
from hvd_elastic.transformers.accelerator import follow_rank, make_elastic, together
from hvd_elastic.transformers.loaders import Passes
from hvd_elastic.transformers.loop_state import LoopState
from hvd_elastic.worker import context

_SUMS = "user.transformers.sums"
"""Name of the reduction of the losses of a step."""


class ElasticLoop:
    """The library whose training runs by parts; see :class:`hvd_elastic.script.loop_parts.Library`.

    Args:
        trainer: Trainer whose parts it calls.
        given: arguments of its ``_run_epoch``.
    """

    def __init__(self, trainer: Any, given: dict[str, Any]) -> None:
        self._trainer = trainer
        self._given = given
        self._model = given["model"]
        self._loader = given["train_dataloader"]
        self.place = LoopState(trainer)
        self._started = False
        self._logged_rank = -1

    def run(self) -> None:
        """Train, together with the other ranks."""
        trainer = self._trainer
        make_elastic()
        state = hvd.State(
            model=trainer.model,
            optimizer=trainer.inner_optimizer,
            scheduler=trainer.lr_scheduler,
            transformers=self.place,
        )
        hvd.run(self._train)(state)

    def _train(self, _: Any) -> None:
        """Train until the end, also from where another rank stands."""
        ctx, trainer = context.current(), self._trainer
        if trainer.args.max_steps > 0:
            ctx.aim(trainer.args.max_steps, "step")
        else:
            ctx.aim(max(int(trainer.state.num_train_epochs), 1), "epoch")
        self._follow_rank()
        trainer.accelerator.rows = None
        if not self._started:
            self._started = True
            handler = trainer.callback_handler
            trainer.control = handler.on_train_begin(trainer.args, trainer.state, trainer.control)
            if ctx.worker.progress.step == 0 and hvd.rank() == 0:
                ctx.worker.warn_once(trainer.batch_words(self._loader))
        train_by_parts(self, self._loader)
        self._count_flos()
        if self.is_done():
            trainer.load_best(self.place)

    def _follow_rank(self) -> None:
        """Have rank 0 alone log, save and show the progress, whichever process it is."""
        trainer, rank = self._trainer, hvd.rank()
        follow_rank(context.current().worker)
        if rank == self._logged_rank:
            return
        before, self._logged_rank = self._logged_rank, rank
        trainer.state.is_world_process_zero = trainer.state.is_local_process_zero = rank == 0
        if rank or before < 0:
            return
        for bar in trainer.callback_handler.callbacks:
            if isinstance(bar, ProgressCallback):
                bar.on_train_begin(trainer.args, trainer.state, trainer.control)

    # -- parts -----------------------------------------------------------------------------

    def is_done(self) -> bool:
        """Return whether the limits of the arguments are reached, or a callback has stopped it."""
        trainer = self._trainer
        over = self.place.epochs >= trainer.state.num_train_epochs
        return bool(over or trainer.control.should_training_stop)

    def begin_epoch(self) -> None:
        """Call the callbacks at the beginning of an epoch."""
        self._call("on_epoch_begin")

    def train(self, batch: Passes) -> bool:
        """Take an update step; return whether an evaluation, a checkpoint or an end follows."""
        ctx, trainer, place = context.current(), self._trainer, self.place
        self._follow_rank()
        more = ctx.step.passes[-1].accumulating
        if len(ctx.step.passes) == 1:
            self._call("on_step_begin")
            self._sums = torch.zeros(2, dtype=torch.float64, device=trainer.args.device)
        self._compute(batch, more=more)
        if more:
            self._call("on_substep_end")
            return False
        place.last = self._loader.steps_left() <= 1
        self._step()
        state = trainer.state
        state.global_step += 1
        state.epoch = place.epochs + (1 if place.last else self._part_of_epoch())
        ends = place.last and place.epochs + 1 >= state.num_train_epochs
        if ends and trainer.args.max_steps <= 0:
            state.max_steps = state.global_step  # an epoch may be a step shorter than on one rank
        self._call("on_step_end")
        self._agree_on_stop(ctx)
        control = trainer.control
        if control.should_epoch_stop:
            raise ScriptError(
                "a callback has set control.should_epoch_stop, and each example of an epoch is "
                "used once. Set control.should_training_stop, or train on a part of the data set"
            )
        evaluates, saves = control.should_evaluate, control.should_save
        control.should_evaluate = control.should_save = False
        self._log_save_evaluate()  # logs alone, with numbers that all ranks have
        control = trainer.control
        control.should_evaluate |= evaluates
        control.should_save |= saves
        place.check = control.should_evaluate or control.should_save
        place.due = place.check or place.last or control.should_training_stop
        return bool(place.due)

    def _part_of_epoch(self) -> float:
        """Return how much of the epoch is over: as theirs, counted in passes of one rank."""
        loader, passes = self._loader, self._trainer.args.gradient_accumulation_steps
        size = 1 if context.current().planner.adapts else loader.batch_size // passes
        examples = len(loader.dataset)
        whole = examples // size if loader.drop_last else -(-examples // size)
        return min(loader.position / size / whole, 1)

    def follow(self) -> None:
        """Evaluate, write a checkpoint, and end the epoch."""
        trainer, place = self._trainer, self.place
        self._follow_rank()
        if place.first:
            ignored = self._given["ignore_keys_for_eval"]
            trainer._evaluate(self._given["trial"], ignored, skip_scheduler=True)
            place.first = False
            return
        if place.check:
            self._log_save_evaluate()
            place.check = False
        if place.last or trainer.control.should_training_stop:
            self._call("on_epoch_end")
            self._log_save_evaluate()
            place.last = place.begun = False
            place.epochs += 1

    # -- a step ----------------------------------------------------------------------------

    def _compute(self, batch: Passes, *, more: bool) -> None:
        """Add up the gradients of the passes of this rank's share, and their losses."""
        ctx, trainer, accelerator = context.current(), self._trainer, self._trainer.accelerator
        passes = [(examples, inputs, _count(trainer, inputs)) for examples, inputs in batch]
        weights = [float(examples) for examples, *_ in passes]
        if not ctx.planner.adapts:
            if all(count is not None for *_, count in passes):
                weights = [float(count) for *_, count in passes]
                hvd.step_weight(sum(weights))
            # A script's collectives in a pass need as many passes on each rank.
            lacking = trainer.passes_of_all(self._loader) - len(passes)
            passes += passes[:1] * lacking
            weights += [0.0] * lacking
        whole, own = sum(weights) or 1.0, torch.zeros_like(self._sums[0])
        trainer.current_gradient_accumulation_steps = 1
        for number, ((_, inputs, count), weight) in enumerate(zip(passes, weights, strict=True), 1):
            last = number == len(passes)
            accelerator.gradient_state._set_sync_gradients(last and not more)
            accelerator.loss_factor = weight / whole
            accelerator.rows = None if number <= len(batch) else 0
            with contextlib.nullcontext() if last else trainer.inner_optimizer.no_sync():
                loss = trainer.training_step(self._model, inputs, _divisor(trainer, count))
            if weight:
                own = own + loss.double() * accelerator.loss_factor
            if number <= len(batch):
                self._sums[1] += float(trainer.floating_point_ops(inputs))
            trainer._track_num_input_tokens(inputs)
            if not last:
                self._call("on_substep_end")
        accelerator.loss_factor, accelerator.rows = 1.0, None
        self._sums[0] += own * ctx.step.weight / ctx.worker.communicator.size

    def _step(self) -> None:
        """Average the gradients, and take the optimizer's step."""
        ctx, trainer = context.current(), self._trainer
        communicator, begun = ctx.worker.communicator, None
        if communicator.size > 1:
            begun = communicator.sum_async(self._sums, _SUMS)
        trainer.inner_optimizer.synchronize()
        sums = self._sums if begun is None else communicator.wait(begun)
        norm = trainer._clip_grad_norm(self._model) if trainer.args.max_grad_norm > 0 else None
        self.place.norm = trainer._get_grad_norm(self._model, grad_norm=norm)
        self._call("on_pre_optimizer_step")
        trainer.optimizer.step()
        self._call("on_optimizer_step")
        self.place.rate = trainer._get_learning_rate()
        scheduler = trainer.lr_scheduler
        if not (trainer.accelerator.optimizer_step_was_skipped or _follows_metric(scheduler)):
            scheduler.step()
        self._model.zero_grad()
        loss, steps = sums[0], 1 + trainer.state.global_step - trainer._globalstep_last_logged
        if trainer.args.logging_nan_inf_filter:
            loss = torch.where(torch.isfinite(loss), loss, trainer._tr_loss.double() / steps)
        trainer._tr_loss += loss.to(trainer._tr_loss)
        self.place.flos = self.place.flos + sums[1]

    def _agree_on_stop(self, ctx: Any) -> None:
        """Have all ranks stop after the same step: a callback of one of them may have said so."""
        state, control = self._trainer.state, self._trainer.control
        if ctx.worker.progress.stopped:
            control.should_training_stop = True
        elif control.should_training_stop and state.global_step < state.max_steps and together():
            control.should_training_stop = False
            hvd.stop(f"control.should_training_stop was set after step {state.global_step}")

    # -- their parts -----------------------------------------------------------------------

    def _call(self, event: str) -> None:
        trainer = self._trainer
        call = getattr(trainer.callback_handler, event)
        trainer.control = call(trainer.args, trainer.state, trainer.control)

    def _log_save_evaluate(self) -> None:
        given, place = self._given, self.place
        if self._trainer.control.should_log or self._trainer.control.should_save:
            self._count_flos()
        self._trainer._maybe_log_save_evaluate(
            self._trainer._tr_loss,
            place.norm,
            self._model,
            given["trial"],
            place.epochs,
            given["ignore_keys_for_eval"],
            given["start_time"],
            learning_rate=place.rate,
        )

    def _count_flos(self) -> None:
        """Have the Trainer know the operations since the last time; not each step, on a GPU."""
        self._trainer.current_flos += float(self.place.flos)
        self.place.flos = 0.0


def _count(trainer: Any, inputs: Any) -> Any:
    """Return the number of targets of a pass, on the CPU; None: its loss does not count them."""
    return trainer._get_num_items_in_batch([inputs], torch.device("cpu"))


def _divisor(trainer: Any, count: Any) -> Any:
    """Return what the loss of a pass is divided by; without a target not 0, which makes it NaN."""
    return count.clamp(min=1).to(trainer.args.device) if torch.is_tensor(count) else count


def _follows_metric(scheduler: Any) -> bool:
    """Return whether a schedule is stepped after an evaluation, by its metric."""
    name = type(scheduler).__name__
    return name == "GreedyLR" or isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)

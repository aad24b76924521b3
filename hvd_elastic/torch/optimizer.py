"""Averages gradients over the ranks during the backward pass.

The user's optimizer object is not replaced: hooks on its parameters count gradients and begin the
reduction of a bucket of them when it is full, a hook before ``step()`` waits for the reductions,
and a hook after it counts the step. So schedulers, clipping and ``isinstance`` checks work as
before. With several optimizers the reductions begin in ``step()``; see
:class:`hvd_elastic.worker.averagers.Averagers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from hvd_elastic.errors import ScriptError
from hvd_elastic.model.lr_rules import Rule
from hvd_elastic.script.horovod_names import explain_arguments
from hvd_elastic.torch.adaptive_rates import AdaptiveRates
from hvd_elastic.torch.batch_norm import synchronize_batch_norm
from hvd_elastic.torch.compression import Compression
from hvd_elastic.torch.copies import OptimizerCopy
from hvd_elastic.torch.finite_check import ForwardWatch
from hvd_elastic.torch.schedule import forgotten_schedulers
from hvd_elastic.torch.step_gradients import StepGradients
from hvd_elastic.torch.wrapped_optimizer import (
    NO_CLOSURE,
    check_optimizer,
    leave_as_it_is,
    refuse_other_scaler,
    replace_step,
)
from hvd_elastic.worker import context
from hvd_elastic.worker.frontend import EagerAverager
from hvd_elastic.worker.planning.adaptive import AdaptivePlanner
from hvd_elastic.worker.rollback import StepVoidedError
from hvd_elastic.worker.step import Stage

_CHANGED_BEFORE_STEP = (
    "the script changes {!r} in the loop body before optimizer.step(). If a rank fails before that "
    "step, the others continue with the changed values, and a checkpoint that is being copied is "
    "not written. Change parameters right after optimizer.step(). For gradients at other values, "
    "as in "
    "SAM, leave the parameters alone: torch.func.functional_call(model, changed_copies, inputs)"
)


class GradientAverager(EagerAverager):
    """Averages the gradients of one optimizer; see :func:`DistributedOptimizer`."""

    call = "DistributedOptimizer"
    """What the script calls to make one, for messages."""
    gradients_type: type[StepGradients] = StepGradients

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: dict[int, str],
        rule: str | Rule | None = None,
        compression: Compression = Compression.none,
        several_steps: bool = False,
    ) -> None:
        self.several_steps = several_steps
        self._context = context.current()
        self._optimizer = optimizer
        self._rates = AdaptiveRates(optimizer, rule)
        self.gradients = self.gradients_type(self._context, optimizer, names, compression)
        self._forget_scaling: set[Callable[[], None]] = set()
        """Called when the step is called off, by the scalers of its losses."""
        self._copy = OptimizerCopy(optimizer)
        self.forgotten: list[LRScheduler] = []
        """Schedulers of this optimizer that the State lacks; set on rank 0 in the first step."""
        self.stepping = False
        """Whether ``step()`` is running; a composed optimizer calls others in it."""
        self._watch: ForwardWatch | None = None
        """Looks at the layers in the repetition of a step whose gradients were not finite."""
        self._wrap_step()
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        self._context.register_averager(self)

    @property
    def flags_meet(self) -> str:
        return self.gradients.reductions.flags_meet

    @property
    def idle(self) -> str:
        """See :attr:`Averager.idle`."""
        if not self.steps:
            return "optimizer.step() was never called; call it after each loss.backward()"
        if self.gradients.are_known or not self.gradients.names:
            return ""
        return (
            "no parameter of the optimizer had a gradient in optimizer.step(); call backward() "
            "before it, on a loss that depends on them"
        )

    @property
    def held(self) -> torch.optim.Optimizer:
        """The optimizer that the script holds."""
        return self._optimizer

    def own_tensors(self) -> Iterator[torch.Tensor]:
        """Yield tensors of the optimizer and its parameters that differ from rank to rank."""
        return iter(())

    def shared_weights(self) -> dict[torch.Tensor, torch.Tensor]:
        """Return what is the same on all ranks in place of parameters that differ, by parameter."""
        return {}

    def learning_rate(self) -> float:
        return float(self.held.param_groups[0]["lr"])

    def shared_with(self, other: Any) -> str:
        assert isinstance(other, GradientAverager)
        return self.gradients.trained.shared_with(other.gradients.trained)

    def weight_sums(self) -> list[tuple[str, int]]:
        return self.gradients.trained.weight_sums()

    def first_not_in(self, storages: set[int]) -> str:
        """Return the name and shape of the first trained parameter at no such address, or ""."""
        for parameter, name in self.gradients.names.items():
            if parameter.numel() and parameter.untyped_storage().data_ptr() not in storages:
                return f"{name} of shape {tuple(parameter.shape)}"
        return ""

    def check_is_kept(self, kept: set[int]) -> None:
        """Raise ScriptError if the optimizer is none of the objects ``kept``, which are ids."""
        if id(self.held) not in kept:
            raise ScriptError(
                f"State(...): the {type(self.held).__name__} that was given to "
                f"hvd.{self.call} is not in the State, so what it gathers, such as "
                "momentum, and its learning rate would be lost in a worker that joins and in a "
                "run that is resumed. Give it to the State: "
                "hvd.State(model=model, optimizer=optimizer)"
            )

    def engage(self, number: int) -> None:
        super().engage(number)
        self.gradients.engage(number)

    def retire(self, reason: str) -> None:
        super().retire(reason)
        self.gradients.trained.unhook()

    def restore(self) -> None:
        self._copy.restore()

    def drop_copy(self) -> None:
        self._copy.drop()

    def scaled_by(self, forget: Callable[[], None], loss_scale: torch.Tensor) -> None:
        """Note that a gradient scaler multiplies the loss, and so the gradients, of this pass.

        Args:
            forget: called when the step is called off.
            loss_scale: factor of the loss.
        """
        self._forget_scaling.add(forget)
        self.gradients.sampling.loss_scale = loss_scale
        self._context.planner.skipped.expect_overflows()

    def skip(self) -> None:
        """Leave a step out because the averaged gradients are not finite; its examples count.

        Raises:
            ScriptError: it is one too many; see :meth:`Context.step_skipped`.
        """
        self.gradients.sampling.statistics.forget_step(self._context.worker.progress.step)
        layer = None if self._watch is None else self._watch.stop_watching
        self._context.step_skipped(self.gradients.where_not_finite(), layer)
        self._after_step(gain=0.0)

    def adapt(self) -> None:
        """Begin to add up passes, sample gradients, and scale the learning rate.

        Raises:
            ScriptError: no parameter of the optimizer requires a gradient.
        """
        if not self.gradients.names:
            raise ScriptError(
                "a batch that adapts needs gradients, and no parameter of the optimizer "
                "requires one; give it parameters with requires_grad=True"
            )
        planner = self._context.planner
        assert isinstance(planner, AdaptivePlanner)
        planner.attach(self.gradients.sampling.statistics, self._rates.rule)
        self._rates.adapts = True

    def _wrap_step(self) -> None:
        """Have ``optimizer.step()`` end in one of three ways: taken, left out, or voided."""
        take_step = self._optimizer.step

        def step(_: torch.optim.Optimizer, *args: Any, **options: Any) -> Any:
            self._refuse_what_is_not_averaged(*args, **options)
            if not self.steps:  # one step shows it
                refuse_other_scaler()
            planner = self._context.planner
            if planner.adapts and self._context.step.accumulating:
                self.gradients.absorb()
                return leave_as_it_is(self._optimizer)
            self.synchronize()
            if self._context.step.stage is Stage.VOIDED:
                self.reset()
                raise StepVoidedError
            if self._context.step.is_empty:
                self._after_step(gain=0.0)
                return leave_as_it_is(self._optimizer)
            if not self.gradients.are_finite():
                if self._context.calls_off_to_look():
                    self.reset()
                    state: Any = self._context.worker.state
                    self._watch = ForwardWatch(state.named_modules())
                    raise StepVoidedError
                self.skip()
                return leave_as_it_is(self._optimizer)
            if not self._rates.adapts:
                return take_step(*args, **options)
            assert isinstance(planner, AdaptivePlanner)
            with self._rates.scaled(planner):
                return take_step(*args, **options)

        replace_step(self._optimizer, step)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add up the gradients of the backward passes in this block, without averaging them.

        Put it around the passes of all batches of a step but the last. The batches of the loader
        from the first of them to the next ``step()`` are one step: progress counts it when it is
        taken, and a failure repeats it from its first batch.

        Raises:
            ScriptError: the batch adapts or is not of hvd.DataLoader, there are several optimizers,
                the step's gradients are being averaged already, or only some ranks enter the block,
                which is found when another one waits for gradients, after 32 passes at the latest.
        """
        step = self._context.step
        if self._context.worker.in_train and not step.passes:
            raise ScriptError(
                "optimizer.no_sync() for a batch that does not come from hvd.DataLoader: only with "
                "it the batches up to optimizer.step() are one step, in which no host joins or "
                "leaves. Read the data with hvd.DataLoader, or add the losses of several batches "
                "up before one backward()"
            )
        if self._context.worker.averagers.several:
            raise ScriptError(
                "optimizer.no_sync() with several optimizers given to DistributedOptimizer(...), "
                "or several_steps=True: a loop body is one step of training. Leave no_sync() out; "
                "the gradients of several backward passes in one body are added up and averaged in "
                "step()"
            )
        if self._context.planner.adapts:
            raise ScriptError(
                "optimizer.no_sync(): the batch adapts, so hvd.DataLoader chooses the number of "
                "passes of a step itself; leave no_sync() out and call optimizer.step() after each "
                "backward(), which takes a step after the last pass"
            )
        if self.gradients.reductions.are_begun or self.gradients.reductions.are_done:
            raise ScriptError(
                "optimizer.no_sync() after a backward pass outside of it: its gradients are being "
                "averaged over the ranks already. Put all passes before optimizer.step() but the "
                "last into `with optimizer.no_sync():`"
            )
        step.in_no_sync = True
        try:
            yield
        finally:
            step.in_no_sync = False
        step.continues = True
        self.gradients.end_block()

    def synchronize(self) -> None:
        """Wait until every gradient holds its average over the ranks.

        ``step()`` calls it too. Call it yourself before clipping or reading gradients.

        Raises:
            ScriptError: the last backward pass was in ``with optimizer.no_sync()``.
        """
        if self._context.step.continues or self._context.step.in_no_sync:
            raise ScriptError(
                "optimizer.step() or synchronize() in `with optimizer.no_sync():`, or after a "
                "backward pass in it, which leaves the gradients of each rank as they are, so "
                "the ranks would go apart; leave no_sync() out around the last pass before "
                "optimizer.step()"
            )
        if self._context.step.accumulating:
            self.gradients.absorb()
            return
        self.gradients.refuse_left()
        self.gradients.average()

    def absorb(self) -> None:
        self.gradients.absorb()

    def give_up(self) -> None:
        self.gradients.average(used=False)
        self.reset()

    def leave_out(self) -> None:
        if self._context.planner.adapts:
            self.synchronize()  # another rank may call the step off
        else:
            self.gradients.leave_out()

    def check_not_begun(self, call: str) -> None:
        self.gradients.check_not_begun(call)

    def reset(self) -> None:
        self._end_watch()  # else its hooks stay if a rank is lost in the repetition
        self.gradients.drop_step()
        self.stepping = False
        for forget in self._forget_scaling:
            forget()
        self._optimizer.zero_grad(set_to_none=True)

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.stop_watching()
            self._watch = None

    def forget(self) -> None:
        self.gradients.forget_step()  # a gradient scaler may have skipped it
        self.gradients.begin_body(self.steps)

    def _before_step(self, _: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._refuse_what_is_not_averaged(*args[1:], **options)
        self.synchronize()
        if name := self.gradients.trained.changed():
            self._context.worker.warn_once(_CHANGED_BEFORE_STEP.format(name))
        self._context.rollback.step_begins()
        self._context.checkpoints.settle()
        if self._context.rollback.keeps_aside:
            self._copy.copy_once()
        self.stepping = True

    def _refuse_what_is_not_averaged(self, closure: object = None, **_: Any) -> None:
        """Raise ScriptError if the step would use gradients that are not averaged."""
        if self.retired:
            kind = type(self._optimizer).__name__
            raise ScriptError(f"optimizer.step(): this {kind} does not train, since {self.retired}")
        if closure is not None:
            raise ScriptError(NO_CLOSURE)
        self.gradients.trained.refuse_new()

    def _after_step(self, *_: Any, gain: float | None = None) -> None:
        self.stepping = False
        self.steps += 1
        self._end_watch()
        if self.steps == 1:
            self.forgotten = forgotten_schedulers(self._context.worker, self.held)
        self.gradients.forget_step()
        gain = self._rates.gain if gain is None else gain
        self._context.planner.advance(gain, self._context.step.examples)
        self._context.optimizer_stepped()


def averager_of(optimizer: torch.optim.Optimizer) -> GradientAverager | None:
    """Return the averager of an optimizer that was given to :func:`DistributedOptimizer`."""
    owner = getattr(getattr(optimizer, "synchronize", None), "__self__", None)
    return owner if isinstance(owner, GradientAverager) else None


@explain_arguments
def DistributedOptimizer(  # noqa: N802  (the name every Horovod user knows)
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module | None = None,
    *,
    lr_rule: str | Rule | None = None,
    sync_batch_norm: bool = False,
    compression: Compression = Compression.none,
    several_steps: bool = False,
) -> torch.optim.Optimizer:
    """Make ``optimizer.step()`` use the gradient of the global batch.

    Each rank's mean gradient is weighted by its share of the examples and averaged over all ranks,
    so a step is the same at any number of ranks and with unequal shares.

    A script may have several, for different parameters; each is in the State. Then a loop body, or
    what lies between two calls of ``commit``, is one step of training, with any number of steps of
    each of them.

    Args:
        optimizer: any ``torch.optim`` optimizer whose ``step()`` needs no closure.
        model: module whose parameter names are used in messages; without it
            parameters are numbered.
        lr_rule: how the learning rate follows an adaptive batch: ``"adascale"``, ``"linear"``,
            ``"sqrt"``, ``"adam_sqrt"``, ``"none"``, or a function as in
            :mod:`hvd_elastic.model.lr_rules`. By default ``"adam_sqrt"`` for Adam and related
            optimizers, and ``"adascale"`` for all others.
        sync_batch_norm: whether the batch normalisation layers of ``model`` use the statistics of
            the global batch in training; see
            :func:`~hvd_elastic.torch.batch_norm.synchronize_batch_norm`.
        compression: ``hvd.Compression.fp16`` or ``hvd.Compression.bf16`` to send float32 and
            float64 gradients in 16 bits; they are summed in float32.
        several_steps: whether ``step()`` is called several times in a loop body. Then a body that
            fails between two of them is undone as a whole, as with several optimizers.

    Returns:
        The same object, with a method ``synchronize()`` to call before clipping, and one
        ``no_sync()`` for gradient accumulation (see :class:`GradientAverager`).

    Raises:
        ScriptError: the optimizer or a layer cannot be used, or ``lr_rule`` or ``compression`` is
            none of these.
    """
    check_optimizer("DistributedOptimizer", optimizer, model, compression)
    if sync_batch_norm:
        if model is None:
            raise ScriptError(
                "DistributedOptimizer(sync_batch_norm=True) needs the model whose layers are "
                "meant: DistributedOptimizer(optimizer, model, sync_batch_norm=True)"
            )
        synchronize_batch_norm(model)
    names = {} if model is None else {id(p): name for name, p in model.named_parameters()}
    averager = GradientAverager(optimizer, names, lr_rule, compression, several_steps)
    synchronize: Callable[[], None] = averager.synchronize
    optimizer.synchronize = synchronize  # type: ignore[attr-defined]
    optimizer.no_sync = averager.no_sync  # type: ignore[attr-defined]
    # Scripts for Horovod have it around a step() after synchronize(), which waits once here.
    optimizer.skip_synchronize = nullcontext  # type: ignore[attr-defined]
    return optimizer

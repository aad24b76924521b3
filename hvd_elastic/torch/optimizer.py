"""Averages gradients over the ranks during the backward pass.

The user's optimizer object is not replaced: hooks on its parameters count gradients and begin the
reduction of a bucket of them when it is full, a hook before ``step()`` waits for the reductions,
and a hook after it counts the step. So schedulers, clipping and ``isinstance`` checks work as
before. With several optimizers the reductions begin in ``step()``; see
:class:`hvd_elastic.worker.averagers.Averagers`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType, MethodType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from hvd_elastic.communicator.interface import Communicator
from hvd_elastic.errors import ScriptError
from hvd_elastic.model.lr_rules import Rule
from hvd_elastic.script.horovod_names import explain_arguments
from hvd_elastic.torch.adaptive_rates import AdaptiveRates, StepSampling
from hvd_elastic.torch.batch_norm import synchronize_batch_norm
from hvd_elastic.torch.compression import Compression
from hvd_elastic.torch.copies import OptimizerCopy
from hvd_elastic.torch.finite_check import ForwardWatch, GradientCheck, is_finite
from hvd_elastic.torch.gradient_buckets import Bucket
from hvd_elastic.torch.reductions import Reductions
from hvd_elastic.torch.schedule import forgotten_schedulers
from hvd_elastic.torch.trained_parameters import LeftGradients, TrainedParameters
from hvd_elastic.worker import context
from hvd_elastic.worker.frontend import EagerAverager
from hvd_elastic.worker.planning.adaptive import AdaptivePlanner
from hvd_elastic.worker.planning.skipped_steps import whose_words
from hvd_elastic.worker.rollback import StepVoidedError
from hvd_elastic.worker.step import Stage

_NO_CLOSURE = (
    "optimizer.step(closure): the gradients are averaged before a step is taken, so they have to "
    "be there; call backward() before step(). Optimizers that need a closure (LBFGS) cannot be used"
)
_CHANGED_BEFORE_STEP = (
    "the script changes {!r} in the loop body before optimizer.step(). If a rank fails before that "
    "step, the others go on with the changed values, and a checkpoint that is being copied is not "
    "written. Change parameters right after optimizer.step(). For gradients at other values, as in "
    "SAM, leave the parameters alone: torch.func.functional_call(model, changed_copies, inputs)"
)


class GradientAverager(EagerAverager):
    """Averages the gradients of one optimizer; see :func:`DistributedOptimizer`."""

    call = "DistributedOptimizer"
    """What the script calls to make one, for messages."""

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
        self._sampling = StepSampling(self._context, optimizer)
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        every = {p: names.get(id(p), f"parameter.{number}") for number, p in enumerate(parameters)}
        self._trained = TrainedParameters(optimizer, every)
        self._reductions = Reductions(
            self._context.worker, self._names, self._sampling.statistics.group_of, compression
        )
        self._absorbed = -1
        self._forget_scaling: Callable[[], None] = lambda: None
        self._copy = OptimizerCopy(optimizer)
        self._left = LeftGradients()
        self._computed: set[torch.Tensor] = set()
        """Parameters whose gradients the last pass of a single rank has computed."""
        self.forgotten: list[LRScheduler] = []
        """Schedulers of this optimizer that the State lacks; set on rank 0 in the first step."""
        self.stepping = False
        """Whether ``step()`` is running; a composed optimizer calls others in it."""
        self._had_gradient = False
        """Whether a parameter had a gradient in any step."""
        self._passing = False
        """Whether the end of the present backward pass will be noted; with several optimizers."""
        self._check = GradientCheck(self._names)
        self._watch: ForwardWatch | None = None
        """Looks at the layers in the repetition of a step whose gradients were not finite."""
        self._wrap_step()
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        self._context.register_averager(self)

    @property
    def _names(self) -> dict[torch.Tensor, str]:
        """The trained parameters, with their names."""
        return self._trained.names

    @property
    def _communicator(self) -> Communicator:
        return self._context.worker.communicator

    @property
    def flags_meet(self) -> str:
        return self._reductions.flags_meet

    @property
    def idle(self) -> str:
        """See :attr:`Averager.idle`."""
        if not self.steps:
            return "optimizer.step() was never called; call it after each loss.backward()"
        if self._had_gradient or not self._names:
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
        return self._trained.shared_with(other._trained)

    def first_not_in(self, storages: set[int]) -> str:
        """Return the name and shape of the first trained parameter at no such address, or ""."""
        for parameter, name in self._names.items():
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
        self._reductions.number(number)
        self._trained.unhook()
        self._add_hooks()

    def retire(self, reason: str) -> None:
        super().retire(reason)
        self._trained.unhook()

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
        self._forget_scaling, self._sampling.loss_scale = forget, loss_scale
        self._context.planner.skipped.expect_overflows()

    def skip(self) -> None:
        """Leave a step out because the averaged gradients are not finite; its examples count.

        Raises:
            ScriptError: it is one too many; see :meth:`Context.step_skipped`.
        """
        self._sampling.statistics.forget_step(self._context.worker.progress.step)
        layer = None if self._watch is None else self._watch.stop_watching
        self._context.step_skipped(self._origin(), layer)
        self._after_step(gain=0.0)

    def _origin(self) -> str:
        """Return in words where gradients of this rank alone are not finite; empty: nowhere."""
        bad = set(self._reductions.bad_here)
        if self._communicator.size == 1:
            known = ((each, each.grad) for each in self._names if each.grad is not None)
            bad = {each for each, grad in known if not grad.is_cuda and not is_finite(grad)}
        names = [name for parameter, name in self._names.items() if parameter in bad]
        return whose_words(names[::-1], len(self._names))

    def adapt(self) -> None:
        """Begin to add up passes, sample gradients, and scale the learning rate.

        Raises:
            ScriptError: no parameter of the optimizer requires a gradient.
        """
        if not self._names:
            raise ScriptError(
                "a batch that adapts needs gradients, and no parameter of the optimizer "
                "requires one; give it parameters with requires_grad=True"
            )
        planner = self._context.planner
        assert isinstance(planner, AdaptivePlanner)
        planner.attach(self._sampling.statistics, self._rates.rule)
        self._rates.adapts = True

    def _wrap_step(self) -> None:
        """Have ``optimizer.step()`` end in one of three ways: taken, left out, or voided."""
        take_step = self._optimizer.step

        # Schedulers expect ``step`` to be a bound method, and set an attribute on its function.
        def step(_: torch.optim.Optimizer, *args: Any, **options: Any) -> Any:
            self._refuse_what_is_not_averaged(*args, **options)
            if not self.steps:  # one step shows it
                self._refuse_other_scaler()
            planner = self._context.planner
            if planner.adapts and self._context.step.accumulating:
                self.absorb()
                return self._leave_as_it_is()
            self.synchronize()
            if self._context.step.stage is Stage.VOIDED:
                self.reset()
                raise StepVoidedError
            if self._context.step.is_empty:
                self._after_step(gain=0.0)
                return self._leave_as_it_is()
            if not self._is_finite():
                if self._context.calls_off_to_look():
                    state: Any = self._context.worker.state
                    self._watch = ForwardWatch(state.named_modules())
                    self.reset()
                    raise StepVoidedError
                self.skip()
                return self._leave_as_it_is()
            if not self._rates.adapts:
                return take_step(*args, **options)
            assert isinstance(planner, AdaptivePlanner)
            with self._rates.scaled(planner):
                return take_step(*args, **options)

        if hasattr(take_step, "_wrapped_by_lr_sched"):
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        self._optimizer.step = MethodType(step, self._optimizer)  # type: ignore[method-assign]

    def _refuse_other_scaler(self) -> None:
        """Raise ScriptError if a scaler of PyTorch takes the step, also at a single rank."""
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            caller, frame = frame.f_locals.get("self"), frame.f_back
            if isinstance(caller, torch.amp.GradScaler) and caller.is_enabled():
                if hasattr(caller, "forget"):  # ours
                    return
                raise ScriptError(
                    "torch.amp.GradScaler unscales the gradients of this rank before they are "
                    "averaged, and ranks take and skip different steps: use hvd.GradScaler(), with "
                    "the same methods"
                )

    def _leave_as_it_is(self) -> None:
        # Otherwise a scheduler stepped after this warns that no optimizer step was taken.
        self._optimizer._opt_called = True  # type: ignore[attr-defined]

    def _is_finite(self) -> bool:
        """Return whether the averaged gradients of the step are finite, the same on all ranks."""
        if not self._reductions.checks:
            return True
        alone = self._communicator.size == 1
        finite = self._check.are_finite() if alone else self._reductions.are_finite
        unknown = alone and self._check.unknown
        if finite and not (unknown or self._context.worker.averagers.several):
            self._context.planner.skipped.note_step(finite=True)
        return finite

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
        if self._reductions.are_begun or self._reductions.are_done:
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
        self._open()
        self._add_gradients()
        if step.is_long and self._communicator.size > 1 and self._names:
            self._context.check_left_out(self._reductions.begin_left_out(unaveraged=True))

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
            self.absorb()
            return
        if not self._reductions.are_done:
            self._refuse_left(self._left.held())
        self._synchronize()

    def _synchronize(self, *, used: bool = True) -> None:
        """Wait for the averages; ``used``: the script has not dropped them meanwhile."""
        if self._reductions.are_done:
            self._context.exchange()
            return
        self._note_gradients()
        if self._communicator.size == 1:
            if used:
                self._reductions.refuse_changed()
            self._end_alone()
            self._context.planner.work_ends()
            self._reductions.are_done = True
            self._context.exchange()
            return
        self._open_last()
        if self._context.step.is_too_large:
            self._sampling.leave_out()
        if used:
            self._reductions.refuse_changed()
        for bucket in self._reductions.waiting:
            self._reduce_bucket(bucket)
        self._trained.drop_late()
        self._sampling.end_pass(self._factor)
        self._context.begin_exchange()
        self._context.planner.work_ends()
        if self._context.worker.averagers.several:
            # A rank that leaves the body out is found before gradients are awaited.
            self._context.exchange()
        try:
            told = self._reductions.wait(self._sampling.see_mean)
        except ScriptError:
            self._context.step.refuse_left_out(self._context.worker)
            self._reductions.refuse_differences()
            raise
        if told is not None:
            self._context.step.receive(told, shared=True)
        self._reductions.are_done = True
        self._context.exchange()
        self._sampling.end_step(self._names)

    def _note_gradients(self) -> None:
        self._had_gradient = (
            self._had_gradient
            or self._reductions.are_begun
            or any(parameter.grad is not None for parameter in self._names)
        )

    def leave_out(self, *, over: bool) -> None:
        if over and self._context.planner.adapts:
            self.synchronize()  # another rank may call the step off
            return
        if self._communicator.size == 1:
            return
        if self._reductions.are_done or self._reductions.are_begun:
            if not over:
                return
            cleared = [parameter for parameter in self._names if parameter.grad is None]
            # The other ranks take the step, or get here in the same way.
            self._synchronize(used=False)
            for parameter in cleared:
                parameter.grad = None
            self._reductions.are_done = False
        self._context.check_left_out(self._reductions.begin_left_out())

    def absorb(self) -> None:
        step = self._context.step
        if self._absorbed == len(step.passes):
            return
        self._absorbed = len(step.passes)
        self._open()
        self._sampling.see(self._names)
        self._sampling.end_pass(self._factor)
        self._add_gradients()

    def give_up(self) -> None:
        self._synchronize(used=False)
        self.reset()

    @property
    def _factor(self) -> float:
        """Factor on this rank's mean gradient in the sum over ranks and passes."""
        return self._context.step.weight / self._communicator.size

    def check_not_begun(self, call: str) -> None:
        if self._reductions.are_begun or self._reductions.are_done or self._computed:
            raise ScriptError(
                f"{call} after a backward pass of the batch, whose gradients are being averaged "
                "already: call it before backward()"
            )

    def _open(self) -> None:
        """Begin a step with the first of its gradients, unless it has begun."""
        if self._reductions.is_open:
            return
        self._follow()
        self._sampling.begin_step()
        self._reductions.open()

    def _open_last(self) -> None:
        """Begin the last pass of a step with the first of its gradients."""
        self._open()
        if self._context.step.counts is not None:
            self._reductions.scale(self._context.step.counts.take_scale_of_earlier())

    def _follow(self) -> None:
        """Follow what the script has done to its parameters since the last step."""
        if self._trained.follow():
            self._add_hooks()
            self._sampling.statistics.forget_parts()
            self._reductions.divide_again()
            self._check = GradientCheck(self._names)

    def _add_gradients(self) -> None:
        for bucket in self._reductions.waiting:
            bucket.add_gradients(self._factor)

    def _reduce_bucket(self, bucket: Bucket, *, later: bool = False) -> None:
        """Sample, add and reduce the gradients of a bucket in the last pass."""
        self._sampling.move(bucket, self._factor, checks=self._reductions.checks)
        carries = bucket is self._reductions.carrier and self._may_carry
        flags = self._context.begin_exchange(carried=True) if carries else None
        self._reductions.reduce_bucket(bucket, flags, later=later)

    def _add_hooks(self) -> None:
        several = self._context.worker.averagers.several
        self._trained.hook(self._note_pass if several else self._ready)

    def _end_alone(self) -> None:
        """Sample the gradients of the last pass of a single rank, and add those of earlier ones."""
        step = self._context.step
        if len(step.passes) == 1:
            self._sampling.leave_out()
        self._sampling.see(self._names)
        if self._reductions.is_open or step.weight != 1:
            self._open_last()
            self._add_gradients()
            for bucket in self._reductions.waiting:
                bucket.give(absent=False)
            self._trained.drop_late()
            self._reductions.clear()
        else:
            self._follow()
        for parameter in self._names:
            gradient = parameter.grad
            if gradient is not None and gradient.layout is not torch.strided:
                parameter.grad = gradient.to_dense()  # as with more ranks
        self._sampling.end_pass(step.weight)
        self._sampling.end_step(self._names)

    def reset(self) -> None:
        self._reductions.clear()
        self._forget_step()
        self.stepping = False
        self._sampling.drop_step()
        self._forget_scaling()
        self._optimizer.zero_grad(set_to_none=True)

    def forget(self) -> None:
        # A gradient scaler may have skipped the step.
        self._forget_step()
        # Where the batch adapts, a step that is left out leaves averages.
        if self._left.begin_body(self.steps) and not self._context.planner.adapts:
            self._left.note_left(self._names)
        if self._context.worker.elastic and not self.steps & (self.steps - 1):
            self._trained.watch()

    def _forget_step(self) -> None:
        self._passing = False
        self._reductions.begin_step()
        self._computed.clear()
        self._absorbed = -1

    def _ready(self, parameter: torch.Tensor) -> None:
        # Called for each gradient: what holds for all of a pass is looked at with the first one.
        if not (self._reductions.is_filling or self._is_to_be_averaged(parameter)):
            return
        bucket = self._reductions.arrived(parameter)
        if bucket is not None:
            self._reduce_bucket(bucket, later=self._reductions.looks)

    def _is_to_be_averaged(self, parameter: torch.Tensor) -> bool:
        """Return whether a gradient that has arrived is one of the last pass; begin that pass.

        Raises:
            ScriptError: it was averaged already, or holds that of an earlier body.
        """
        if self._left.added(parameter):
            self._refuse_left(parameter)
        step = self._context.step
        if step.in_no_sync:
            return False
        step.continues = False
        if step.accumulating:
            return False
        if self._communicator.size == 1:
            if parameter in self._computed:
                self._reductions.refuse_twice(parameter)
            if not self._computed and self._reductions.looks:
                engine: Any = torch.autograd.Variable._execution_engine
                engine.queue_callback(self._reductions.note_all)
            self._computed.add(parameter)
            return False
        if self._reductions.are_done:
            self._reductions.refuse_if_reduced(parameter)
        self._open_last()
        # Where the batch adapts, the step may be called off for lack of memory: on a CPU until the
        # last bucket is full, and on a GPU until its end.
        if not (self._context.planner.adapts or self._may_carry or step.has_told):
            self._context.begin_exchange()
        self._reductions.is_filling = not self._left
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._reductions.pass_ends)
        return True

    @property
    def _may_carry(self) -> bool:
        """Return whether gradients carry the flags of the step.

        A script that reads its data itself may take a step on some ranks alone: flags that have a
        reduction of their own pass by the gradients then.
        """
        several = self._context.worker.averagers.several
        carried = self._reductions.carrier is not None and not several
        return carried and bool(self._context.step.passes)

    def _note_pass(self, parameter: torch.Tensor) -> None:
        """Note what a backward pass leaves, with several optimizers, whose steps average it.

        Raises:
            ScriptError: it adds to a gradient that is averaged already.
        """
        self._left.added(parameter)
        if self._reductions.looks and not self._passing:
            self._passing = True
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._pass_ends)
        if self._reductions.are_done and parameter in self._names:
            raise ScriptError(
                f"the gradient of {self._names[parameter]!r} was averaged by synchronize(), and "
                "another backward pass adds to it before its optimizer's step(), so the ranks "
                "would go apart. Take that step before the backward pass of another loss"
            )

    def _pass_ends(self) -> None:
        self._passing = False
        self._reductions.note_all()

    def _refuse_left(self, parameter: torch.Tensor | None) -> None:
        """Raise ScriptError if a parameter is given: its gradient is that of an earlier body."""
        if parameter is None:
            return
        accumulate = (
            "compute all gradients of a step in one loop body"
            if self._context.worker.averagers.several
            else "put every backward() of a step but the last into `with optimizer.no_sync():`"
        )
        raise ScriptError(
            f"the gradient of {self._names.get(parameter)!r} holds that of an earlier batch, after "
            "which optimizer.step() was not called. A worker that joins would not have it, and a "
            f"failure would lose it. To accumulate gradients, {accumulate}; if the batch was to be "
            "skipped, call optimizer.zero_grad() before the next backward()"
        )

    def _before_step(self, _: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._refuse_what_is_not_averaged(*args[1:], **options)
        self.synchronize()
        if name := self._trained.changed():
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
            raise ScriptError(_NO_CLOSURE)
        self._trained.refuse_new()

    def _after_step(self, *_: Any, gain: float | None = None) -> None:
        self.stepping = False
        self.steps += 1
        if self._watch is not None:
            self._watch.stop_watching()
            self._watch = None
        if self.steps == 1:
            self.forgotten = forgotten_schedulers(self._context.worker, self.held)
        self._forget_step()
        gain = self._rates.gain if gain is None else gain
        self._context.planner.advance(gain, self._context.step.examples)
        self._context.optimizer_stepped()


def averager_of(optimizer: torch.optim.Optimizer) -> GradientAverager | None:
    """Return the averager of an optimizer that was given to :func:`DistributedOptimizer`."""
    owner = getattr(getattr(optimizer, "synchronize", None), "__self__", None)
    return owner if isinstance(owner, GradientAverager) else None


def check_optimizer(call: str, optimizer: Any, model: Any, compression: Any) -> None:
    """Raise ScriptError if an optimizer cannot be wrapped; ``call``: by what, for messages."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ScriptError(
            f"{call}() wraps a torch.optim optimizer, not a {type(optimizer).__name__}"
        )
    if model is not None and not isinstance(model, torch.nn.Module):
        raise ScriptError(
            f"{call}(optimizer, model): model is the torch.nn.Module whose parameters "
            f"messages are to name, not a {type(model).__name__}"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ScriptError(_NO_CLOSURE)
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ScriptError(
            f"{call}() cannot wrap SparseAdam, which refuses dense gradients: sparse "
            "ones are made dense to be averaged. Use Adam, AdamW or SGD for the embeddings"
        )
    parameters = (each for group in optimizer.param_groups for each in group["params"])
    if any(map(torch.nn.parameter.is_lazy, parameters)):
        raise ScriptError(
            f"{call}() was given a parameter of a lazy module, which has no shape "
            "yet; call the model once before, with inputs like those of training"
        )
    if hasattr(optimizer, "synchronize"):
        raise ScriptError(
            f"{call}() was given an optimizer whose gradients are averaged already, "
            "by an earlier call or by horovod.torch; give it the one of torch.optim, once"
        )
    if not isinstance(compression, Compression):
        raise ScriptError(
            f"{call}(compression={compression!r}): use none, fp16 or bf16 of "
            "hvd.Compression of hvd_elastic.torch, such as hvd.Compression.bf16"
        )


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

"""Averages gradients over the ranks during the backward pass.

The user's optimizer object is not replaced: hooks on its parameters begin a reduction as soon as a
gradient is ready, a hook before ``step()`` waits for the reductions, and a hook after it counts the
step. So schedulers, clipping and ``isinstance`` checks work as before.
"""

from __future__ import annotations

import cmath
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from hvd_elastic.communicator.interface import Communicator
from hvd_elastic.errors import ScriptError
from hvd_elastic.model.lr_rules import Rule, rule_named
from hvd_elastic.torch.frozen import FrozenParameters
from hvd_elastic.torch.gradient_statistics import GradientStatistics
from hvd_elastic.torch.gradient_sum import GradientSum
from hvd_elastic.torch.rate_scaling import checked, rates_scaled
from hvd_elastic.torch.schedule import forgotten_schedulers
from hvd_elastic.training import context
from hvd_elastic.training.planning.adaptive import AdaptivePlanner
from hvd_elastic.training.rollback import StepVoidedError
from hvd_elastic.training.step import Stage

_SEEN_TOGETHER = 32
"""Number of GPU gradients that are sampled together before they are reduced: fewer kernels, but
the first of them is reduced later."""
_NO_CLOSURE = (
    "optimizer.step(closure): the gradients are averaged before a step is taken, so they have to "
    "be there; call backward() before step(). Optimizers that need a closure (LBFGS) cannot be used"
)
_CANARIES = 8  # parts of the model in each of which one gradient is checked for NaN and infinity
_CANARY_NUMBERS = 1 << 14  # larger gradients are not checked, so that the check takes no time


class GradientAverager:
    """Averages the gradients of one optimizer; see :func:`DistributedOptimizer`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: dict[int, str],
        rule: str | Rule | None = None,
    ) -> None:
        self._context = context.current()
        self._optimizer = optimizer
        if rule is None:
            adam = all("betas" in group for group in optimizer.param_groups)
            rule = "adam_sqrt" if adam else "adascale"
        try:
            self._rule = checked(rule_named(rule)) if callable(rule) else rule_named(rule)
        except ValueError as error:
            raise ScriptError(f"DistributedOptimizer(lr_rule=...): {error}") from None
        self._sum = GradientSum()
        self._statistics = GradientStatistics(optimizer)
        self._groups = len(optimizer.param_groups)
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        self._frozen = FrozenParameters(
            {
                parameter: f"gradient.{names.get(id(parameter), f'parameter.{number}')}"
                for number, parameter in enumerate(parameters)
            }
        )
        self._names = self._frozen.trained
        self._handles: dict[torch.Tensor, tuple[Any, torch.Tensor, int]] = {}
        self._unseen: dict[torch.Tensor, None] = {}
        self._averaged = False
        self._absorbed = -1
        self._adapts = False
        self._sampling = False
        self._gain = 1.0
        self._forget_scale: Callable[[], None] | None = None
        self._loss_scale: torch.Tensor | None = None
        self.forgotten: list[LRScheduler] = []
        """Schedulers of this optimizer that the State lacks; set on rank 0 in the first step."""
        self.stepping = False
        """Whether ``step()`` is running; a composed optimizer calls others in it."""
        self.steps = 0
        """Number of steps that have ended on this rank, taken or left out."""
        self._hooks: dict[torch.Tensor, Any] = {}
        self._add_hooks()
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        self._context.register_averager(self)

    @property
    def _communicator(self) -> Communicator:
        return self._context.worker.communicator

    def _refuse_left_out(self) -> None:
        self._context.step.refuse_left_out(self._context.worker)

    def learning_rate(self) -> float:
        """Return the learning rate of the first parameter group."""
        return float(self._optimizer.param_groups[0]["lr"])

    def owns(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether this averager averages the gradients of ``optimizer``."""
        return optimizer is self._optimizer

    def retire(self) -> None:
        """Remove the hooks, since another optimizer was given to :func:`DistributedOptimizer`."""
        for hook in self._hooks.values():
            hook.remove()

    def scaled_by(self, forget: Callable[[], None], loss_scale: torch.Tensor) -> None:
        """Note that a gradient scaler multiplies the loss, and so the gradients, of this pass.

        Args:
            forget: called when the step is called off.
            loss_scale: factor of the loss.
        """
        self._loss_scale, self._forget_scale = loss_scale, forget
        self._context.planner.expect_overflows()

    def skip(self) -> None:
        """Count a step that is not taken because the averaged gradients are not finite."""
        step = self._context.worker.progress.step
        self._statistics.forget_step(step)
        self._context.planner.skip(step)
        self._after_step(gain=0.0)

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
        planner.attach(self._statistics, self._rule)
        if self._adapts:
            return
        self._adapts = True
        canaries = _canaries(list(self._names))
        take_step = self._optimizer.step

        # Schedulers expect ``step`` to be a bound method, and set an attribute on its function.
        def step(_: torch.optim.Optimizer, *args: Any, **options: Any) -> Any:
            self._refuse_what_is_not_averaged(*args, **options)
            if self._context.step.accumulating:
                self.absorb()
                # Otherwise a scheduler stepped after this warns that no optimizer step was taken.
                self._optimizer._opt_called = True  # type: ignore[attr-defined]
                return None
            self._synchronize()
            if self._context.step.stage is Stage.VOIDED:
                self.reset()
                raise StepVoidedError
            adaptive = self._context.planner
            assert isinstance(adaptive, AdaptivePlanner)
            gradients = [p.grad for p in canaries if p.grad is not None]
            # Gradients on a GPU are not checked, since reading a number would wait for it.
            if gradients and not any(gradient.is_cuda for gradient in gradients):
                if not all(map(_is_finite, gradients)):
                    self.skip()
                    return None
                adaptive.skipped.note(finite=True)
            *groups, whole = adaptive.adjustments()
            self._gain = whole.gain
            with rates_scaled(self._optimizer, groups):
                return take_step(*args, **options)

        if hasattr(take_step, "_wrapped_by_lr_sched"):
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        self._optimizer.step = MethodType(step, self._optimizer)  # type: ignore[method-assign]

    def synchronize(self) -> None:
        """Wait until every gradient holds its average over the ranks.

        ``step()`` calls it too. Call it yourself before clipping or reading gradients.
        """
        if self._context.step.accumulating:
            self.absorb()
            return
        self._synchronize()

    def _synchronize(self) -> None:
        if self._averaged:
            self._context.exchange()
            return
        self._follow_freezing()
        if self._context.step.is_too_large:
            self._sampling = False
        self._end_last_pass()
        if self._communicator.size == 1:
            self._context.planner.work_ends()
            self._averaged = True
            self._context.exchange()
            return
        self._context.begin_exchange()
        for parameter in self._names:
            if parameter not in self._handles:
                if parameter.grad is None and not parameter.requires_grad:
                    self._say_frozen(parameter)
                    continue
                # Another rank may have used the parameter, so this one contributes zeros.
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                self._begin(parameter)
        self._context.planner.work_ends()
        self._refuse_changed()
        # The last one first: if another rank leaves the step out, only this reduction fails, and
        # the others would never end.
        for parameter in reversed(self._names):
            handle, reduced, _ = self._handles[parameter]
            try:
                self._communicator.wait(handle)
            except ScriptError as differing:
                self._refuse_left_out()
                raise ScriptError(
                    f"the ranks disagree about parameter {self._name_of(parameter)!r}: some have "
                    "frozen it (requires_grad=False) and others not, or their models differ. "
                    f"Freeze it on all ranks between the same two steps ({differing})"
                ) from None
            gradient = parameter.grad
            if gradient is not None and reduced is not gradient:
                gradient.copy_(reduced.reshape(gradient.shape))
        self._handles.clear()
        self._averaged = True
        self._context.exchange()
        self._end_statistics()

    def leave_out(self, *, over: bool) -> None:
        """Check that all ranks leave out the optimizer step for the batch in flight.

        This rank reduces a tensor under the name of a gradient, with a shape that no gradient has.
        If another rank reduces a real gradient under that name, in this step or the next, Horovod
        reports the different shapes to all ranks. Steps that are taken need nothing extra.

        Args:
            over: the loop body has ended, so no step will use gradients that were computed.

        Raises:
            ScriptError: only some ranks leave the step out; names them.
        """
        if over and self._context.planner.adapts:
            self.synchronize()  # another rank may call the step off
            return
        self._follow_freezing()
        if self._communicator.size == 1 or not self._names:
            return
        if self._averaged or self._handles or self._unseen:
            if not over:
                return
            self._synchronize()  # the other ranks take the step, or get here in the same way
            self._averaged = False
        parameter = next(reversed(self._names))
        number = torch.zeros((1,) * (parameter.dim() + 2), device=parameter.device)
        handle = self._communicator.reduce_async(number, self._names[parameter])
        try:
            self._communicator.wait(handle)
        except ScriptError:
            self._refuse_left_out()
            raise

    def absorb(self) -> None:
        """Add the gradients of a pass that is not the step's last to the sum."""
        step = self._context.step
        if self._absorbed == len(step.passes):
            return
        self._absorbed = len(step.passes)
        self._follow_freezing()
        self._begin_statistics()
        if self._sampling:
            self._see(self._names)
            self._statistics.end_pass(step.weight / self._communicator.size)
        self._sum.take(self._names, step.weight)

    def give_up(self) -> None:
        """Call the step off: complete the reductions that other ranks wait for, and drop it."""
        self._sum.clear()
        self._synchronize()
        self.reset()

    def _follow_freezing(self) -> None:
        """Begin to average gradients of parameters that the script has unfrozen."""
        if self._frozen.follow(self._context.worker):
            self._add_hooks()

    def _add_hooks(self) -> None:
        for parameter in self._names:
            if parameter not in self._hooks:
                hook = parameter.register_post_accumulate_grad_hook(self._ready)
                self._hooks[parameter] = hook

    def _begin_statistics(self) -> None:
        """Decide whether the step is sampled, before its first gradient is used."""
        step = self._context.step
        if self._handles or self._unseen or len(step.passes) != 1:
            return
        alone = self._communicator.size == 1 and not step.accumulating
        useful = not (alone or step.is_too_large)
        planner = self._context.planner
        self._sampling = useful and planner.sampled(self._context.worker.progress.step)
        if self._sampling:
            planner.sampling_cost.step_begins()

    def _end_last_pass(self) -> None:
        """Sample and reduce the gradients of the last pass that the hooks have left."""
        step = self._context.step
        if self._communicator.size > 1:
            self._begin_statistics()
            left = (
                parameter
                for parameter in self._names
                if parameter not in self._handles
                and (self._sum.holds(parameter) or parameter.grad is not None)
            )
            self._see_and_begin(left)
            if self._sampling:
                self._statistics.end_pass(step.weight / self._communicator.size)
            return
        if len(step.passes) == 1:
            self._sampling = False
        self._see_and_sum(self._names)
        if self._sampling:
            self._statistics.end_pass(step.weight)
            self._end_statistics()

    def _see(self, parameters: Iterable[torch.Tensor]) -> None:
        with self._context.planner.sampling_cost:
            self._statistics.see(parameters)

    def _see_and_sum(self, parameters: Iterable[torch.Tensor]) -> None:
        if self._sampling:
            self._see(parameters)
        self._sum.give(parameters, self._context.step.weight)

    def _see_and_begin(self, parameters: Iterable[torch.Tensor]) -> None:
        several = list(parameters)
        self._see_and_sum(several)
        for parameter in several:
            self._begin(parameter)
        self._unseen.clear()

    def _end_statistics(self) -> None:
        """Sample this rank's part of the averaged gradients, if the step is sampled."""
        if self._sampling:
            communicator, cost = self._communicator, self._context.planner.sampling_cost
            step, examples = self._context.worker.progress.step, self._context.step.examples
            with cost:
                part = self._statistics.part(self._names, communicator.rank, communicator.size)
                self._statistics.end_step(step, examples, part, self._loss_scale)
            cost.step_ends()
            self._sampling = False

    def reset(self) -> None:
        """Drop a step that failed half way, with its gradients."""
        self._handles.clear()
        self._unseen.clear()
        self._sum.clear()
        self.forget()
        self.stepping = self._sampling = False
        self._statistics.drop_step()
        if self._forget_scale is not None:
            self._forget_scale()
        self._optimizer.zero_grad(set_to_none=True)

    def forget(self) -> None:
        """Forget a step that ended without ``step()``, as a gradient scaler may skip it."""
        self._averaged = False
        self._absorbed = -1

    def _ready(self, parameter: torch.Tensor) -> None:
        if self._communicator.size == 1 or self._context.step.accumulating:
            return
        if parameter not in self._names:  # just unfrozen: synchronize() reduces it
            return
        if parameter in self._handles or parameter in self._unseen or self._averaged:
            raise ScriptError(
                f"the gradient of {self._name_of(parameter)!r} was computed twice before "
                "optimizer.step(): one backward pass per step is supported. Call step() after "
                "each backward(), or use a larger batch."
            )
        # Where the batch adapts, it is known only at the step's end whether it is called off.
        if not self._context.planner.adapts:
            self._context.begin_exchange()
        self._begin_statistics()
        if self._sampling and self._statistics.together(parameter):
            self._unseen[parameter] = None
            if len(self._unseen) == _SEEN_TOGETHER:
                self._see_and_begin(self._unseen)
            return
        self._see_and_sum([parameter])
        self._begin(parameter)

    def _begin(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            gradient = parameter.grad = gradient.to_dense()
        # Horovod's PyTorch binding has no bfloat16, and reduces contiguous memory only.
        reduced = gradient.float() if gradient.dtype == torch.bfloat16 else gradient.contiguous()
        handle = self._communicator.reduce_async(reduced, self._names[parameter])
        self._handles[parameter] = (handle, reduced, gradient._version)

    def _name_of(self, parameter: torch.Tensor) -> str:
        return self._names[parameter].removeprefix("gradient.")

    def _refuse_changed(self) -> None:
        """Raise ScriptError if the script has changed a gradient while it was being averaged.

        Gradients on a GPU are not checked: the reduction itself may raise their version counter.
        """
        for parameter, (_, _, version) in self._handles.items():
            gradient = parameter.grad
            if gradient is not None and not gradient.is_cuda and gradient._version != version:
                raise ScriptError(
                    f"the gradient of {self._name_of(parameter)!r} was changed while it was being "
                    "averaged over the ranks, so they would go apart; call "
                    "optimizer.synchronize() after backward() and before clipping, or changing "
                    "gradients in another way"
                )

    def _say_frozen(self, parameter: torch.Tensor) -> None:
        """Reduce a placeholder for a parameter that was frozen after the optimizer was wrapped.

        It has a shape that no gradient of the parameter has: if another rank has not frozen it,
        Horovod reports an error on all ranks, instead of having them wait for each other.
        """
        number = torch.zeros((1,) * (parameter.dim() + 1), device=parameter.device)
        handle = self._communicator.reduce_async(number, self._names[parameter])
        self._handles[parameter] = (handle, number, 0)

    def _before_step(self, _: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._refuse_what_is_not_averaged(*args[1:], **options)
        self.synchronize()
        self._context.checkpoints.settle()
        self.stepping = True

    def _refuse_what_is_not_averaged(self, closure: object = None, **_: Any) -> None:
        """Raise ScriptError if the step would use gradients that are not averaged."""
        if self._context.worker.averager is not self:
            raise ScriptError(
                "optimizer.step(): another optimizer was given to DistributedOptimizer(...) after "
                "this one, and a step of training is a step of one. Scripts with several "
                "optimizers (GANs, actor-critic) are not supported yet"
            )
        if closure is not None:
            raise ScriptError(_NO_CLOSURE)
        if len(self._optimizer.param_groups) > self._groups:
            raise ScriptError(
                "optimizer.add_param_group() after DistributedOptimizer(...): gradients of what "
                "was added are not averaged, and a worker that joins could not take over the "
                "optimizer's state. Give the optimizer all groups before that, and freeze those "
                "that are to be trained later (requires_grad=False)"
            )

    def _after_step(self, *_: Any, gain: float | None = None) -> None:
        self.stepping = False
        self.steps += 1
        if self.steps == 1:
            self.forgotten = forgotten_schedulers(self._context.worker, self._optimizer)
        self.forget()
        gain = self._gain if gain is None else gain
        self._context.planner.advance(gain, self._context.step.examples)
        self._context.step_done()


def _canaries(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return a few parameters whose gradients show at little cost whether a step's are finite.

    A NaN or infinite loss makes the gradients of all parameters that it depends on not finite, and
    a NaN that arises in the backward pass spreads to the gradients of earlier layers. So the
    smallest parameter in each part of the model is enough, and is left out if it is large.
    """
    length = -(-len(parameters) // _CANARIES)
    parts = (parameters[at : at + length] for at in range(0, len(parameters), length))
    smallest = [min(part, key=torch.Tensor.numel) for part in parts]
    most = max(_CANARY_NUMBERS, min(parameter.numel() for parameter in smallest))
    return [parameter for parameter in smallest if parameter.numel() <= most]


def _is_finite(gradient: torch.Tensor) -> bool:
    # A finite sum has finite terms only; an infinite one may also come from an overflow.
    if cmath.isfinite(gradient.sum().item()):
        return True
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return bool(torch.isfinite(values).all())


def DistributedOptimizer(  # noqa: N802  (the name every Horovod user knows)
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module | None = None,
    *,
    lr_rule: str | Rule | None = None,
) -> torch.optim.Optimizer:
    """Make ``optimizer.step()`` use the gradient of the global batch.

    Each rank's mean gradient is weighted by its share of the examples and averaged over all ranks,
    so a step is the same at any number of ranks and with unequal shares.

    Args:
        optimizer: any ``torch.optim`` optimizer whose ``step()`` needs no closure.
        model: module whose parameter names are used for reductions and messages; without it
            parameters are numbered.
        lr_rule: how the learning rate follows an adaptive batch: ``"adascale"``, ``"linear"``,
            ``"sqrt"``, ``"adam_sqrt"``, ``"none"``, or a function as in
            :mod:`hvd_elastic.model.lr_rules`. By default ``"adam_sqrt"`` for Adam and related
            optimizers, and ``"adascale"`` for all others.

    Returns:
        The same object, with a method ``synchronize()`` to call before clipping.

    Raises:
        ScriptError: the optimizer cannot be used, or ``lr_rule`` is none of these.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ScriptError(
            f"DistributedOptimizer() wraps a torch.optim optimizer, not a "
            f"{type(optimizer).__name__}"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ScriptError(_NO_CLOSURE)
    if hasattr(optimizer, "synchronize"):
        raise ScriptError(
            "DistributedOptimizer() was given an optimizer whose gradients are averaged already, "
            "by an earlier call or by horovod.torch; give it the one of torch.optim, once"
        )
    names = {} if model is None else {id(p): name for name, p in model.named_parameters()}
    averager = GradientAverager(optimizer, names, lr_rule)
    synchronize: Callable[[], None] = averager.synchronize
    optimizer.synchronize = synchronize  # type: ignore[attr-defined]
    return optimizer

"""Averaging gradients over the ranks while the backward pass is still going on.

The user's optimizer object stays the one it was: hooks on its parameters begin a reduction as soon
as a gradient is ready, a hook before ``step()`` waits for them, a hook after it notes that the step
was taken. Schedulers, clipping and ``isinstance`` checks see nothing new.
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
from hvd_elastic.torch.gradient_statistics import GradientStatistics
from hvd_elastic.torch.gradient_sum import GradientSum
from hvd_elastic.torch.rate_scaling import checked, rates_scaled
from hvd_elastic.torch.schedule import forgotten_schedulers
from hvd_elastic.training import context
from hvd_elastic.training.planning.adaptive import AdaptivePlanner
from hvd_elastic.training.rollback import StepVoidedError
from hvd_elastic.training.step import Stage

__all__ = ["DistributedOptimizer", "GradientAverager"]

_SEEN_TOGETHER = 32
"""Gradients on a GPU that wait for each other before they are reduced, in a sampled step."""
_NO_CLOSURE = (
    "optimizer.step(closure): the gradients are averaged before a step is taken, so they have to "
    "be there; call backward() before step(). Optimizers that need a closure (LBFGS) cannot be used"
)
_CANARIES = 8
_CANARY_NUMBERS = 1 << 14


class GradientAverager:
    """Reduces the gradients of one optimizer; see :func:`DistributedOptimizer`."""

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
        self._names: dict[torch.Tensor, str] = {}
        self._frozen: dict[torch.Tensor, str] = {}
        self._groups = len(optimizer.param_groups)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names.get(id(parameter), f"parameter.{len(self._names)}")
                if parameter.requires_grad:
                    self._names[parameter] = f"gradient.{name}"
                else:
                    self._frozen[parameter] = name
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
        """Schedulers of this optimizer that are not in the State; known to rank 0 after a step."""
        self.stepping = False
        """Whether the optimizer is in its step, in which others may be, as parts of it."""
        self.steps = 0
        """Steps that have ended here, taken or left out."""
        self._hooks = [p.register_post_accumulate_grad_hook(self._ready) for p in self._names]
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        self._context.register_averager(self)

    @property
    def _communicator(self) -> Communicator:
        return self._context.worker.communicator

    def _refuse_left_out(self) -> None:
        self._context.step.refuse_left_out(self._context.worker)

    def learning_rate(self) -> float:
        """Return that of the first parameter group."""
        return float(self._optimizer.param_groups[0]["lr"])

    def owns(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it is this optimizer whose gradients are averaged."""
        return optimizer is self._optimizer

    def retire(self) -> None:
        """Another optimizer was given to :func:`DistributedOptimizer`: this one takes no step."""
        for hook in self._hooks:
            hook.remove()

    def scaled_by(self, forget: Callable[[], None], loss_scale: torch.Tensor) -> None:
        """A gradient scaler multiplies the loss, and so the gradients, of the pass that begins.

        Args:
            forget: called when the step is called off.
            loss_scale: the factor.
        """
        self._loss_scale, self._forget_scale = loss_scale, forget
        self._context.planner.expect_overflows()

    def skip(self) -> None:
        """The script's scaler has found averaged gradients that are not finite: no step."""
        step = self._context.worker.progress.step
        self._statistics.forget_step(step)
        self._context.planner.skip(step)
        self._after_step(gain=0.0)

    def adapt(self) -> None:
        """Add up the passes of a step, sample their gradients, and scale the learning rate.

        Raises:
            ScriptError: no parameter of the optimizer has a gradient.
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

        # Schedulers expect a method of the optimizer, and to find their mark on it.
        def step(_: torch.optim.Optimizer, *args: Any, **options: Any) -> Any:
            self._refuse_what_is_not_averaged(*args, **options)
            if self._context.step.accumulating:
                self.absorb()
                # Or a scheduler that is stepped after this warns that it came too early.
                self._optimizer._opt_called = True  # type: ignore[attr-defined]
                return None
            self._synchronize()
            if self._context.step.stage is Stage.VOIDED:
                self.reset()
                raise StepVoidedError
            adaptive = self._context.planner
            assert isinstance(adaptive, AdaptivePlanner)
            gradients = [p.grad for p in canaries if p.grad is not None]
            # On another device, looking would wait for it.
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
        """Wait until every gradient holds the average; ``step()`` does it when nobody else has.

        Call it before clipping or reading gradients.
        """
        if self._context.step.accumulating:
            self.absorb()
            return
        self._synchronize()

    def _synchronize(self) -> None:
        if self._averaged:
            self._context.exchange()
            return
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
                # Another rank may have used it, so this one takes part with a zero.
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                self._begin(parameter)
        self._context.planner.work_ends()
        self._refuse_changed()
        # The last first: it tells whether another rank leaves the step out, and has no others then.
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
        """The script goes on without a step for the batch in flight: do all ranks?

        It is said in the place of a gradient, in a shape that none has. If another rank has a
        gradient there, of this step or of the next, Horovod tells all of them; steps that are
        taken cost nothing more.

        Args:
            over: the loop body has ended, so no step follows gradients that are there.

        Raises:
            ScriptError: not all ranks do; names those that do.
        """
        if over and self._context.planner.adapts:
            self.synchronize()  # somebody may want to call the step off
            return
        if self._communicator.size == 1 or not self._names:
            return
        if self._averaged or self._handles or self._unseen:
            if not over:
                return
            self._synchronize()  # the others take the step, or end their loop body as well
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
        """A pass is over and others follow in the step: add its gradients to the sum."""
        step = self._context.step
        if self._absorbed == len(step.passes):
            return
        self._absorbed = len(step.passes)
        self._begin_statistics()
        if self._sampling:
            self._see(self._names)
            self._statistics.end_pass(step.weight / self._communicator.size)
        self._sum.take(self._names, step.weight)

    def give_up(self) -> None:
        """Call the step off: finish with the others what they wait for, and forget it."""
        self._sum.clear()
        self._synchronize()
        self.reset()

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
        """All of the last pass's gradients are there, or never will be."""
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
        """The gradients are those of the step: sample this rank's part of them for all ranks."""
        if self._sampling:
            communicator, cost = self._communicator, self._context.planner.sampling_cost
            step, examples = self._context.worker.progress.step, self._context.step.examples
            with cost:
                part = self._statistics.part(self._names, communicator.rank, communicator.size)
                self._statistics.end_step(step, examples, part, self._loss_scale)
            cost.step_ends()
            self._sampling = False

    def reset(self) -> None:
        """Forget a step that failed half way, its gradients included."""
        self._handles.clear()
        self._unseen.clear()
        self._sum.clear()
        self.stepping = self._averaged = False
        self._absorbed = -1
        self._sampling = False
        self._statistics.drop_step()
        if self._forget_scale is not None:
            self._forget_scale()
        self._optimizer.zero_grad(set_to_none=True)

    def forget(self) -> None:
        """The script went on without ``step()`` (a gradient scaler skipped it, say)."""
        self._averaged = False
        self._absorbed = -1

    def _ready(self, parameter: torch.Tensor) -> None:
        if self._communicator.size == 1 or self._context.step.accumulating:
            return
        if parameter in self._handles or parameter in self._unseen or self._averaged:
            raise ScriptError(
                f"the gradient of {self._name_of(parameter)!r} was computed twice before "
                "optimizer.step(): one backward pass per step is supported. Call step() after "
                "each backward(), or use a larger batch."
            )
        if not self._context.planner.adapts:  # else what is told is known at the end of the step
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
        # Horovod's PyTorch binding knows no bfloat16, and reduces contiguous memory only.
        reduced = gradient.float() if gradient.dtype == torch.bfloat16 else gradient.contiguous()
        handle = self._communicator.reduce_async(reduced, self._names[parameter])
        self._handles[parameter] = (handle, reduced, gradient._version)

    def _name_of(self, parameter: torch.Tensor) -> str:
        return self._names[parameter].removeprefix("gradient.")

    def _refuse_changed(self) -> None:
        """The script has changed gradients that are on their way: each rank would have others.

        On a GPU, what reduces them may write to them in a way that looks the same.
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
        """It was frozen since: no rank has a gradient for it, and none gets one.

        What takes its place in the exchange has a shape that no gradient of it has: ranks that
        disagree are told by Horovod, all of them, instead of waiting for each other.
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
        """Gradients that come only in the step, and those of parameters that learn since later."""
        if self._context.worker.averager is not self:
            raise ScriptError(
                "optimizer.step(): another optimizer was given to DistributedOptimizer(...) after "
                "this one, and a step of training is a step of one. Scripts with several "
                "optimizers (GANs, actor-critic) are not supported yet"
            )
        if closure is not None:
            raise ScriptError(_NO_CLOSURE)
        late = [
            name
            for parameter, name in self._frozen.items()
            if parameter.requires_grad and parameter.grad is not None
        ]
        if late:
            raise ScriptError(
                f"parameter {late[0]} was frozen when DistributedOptimizer(...) was made, so its "
                "gradients are not averaged. Have it learn from the start, with a learning rate of "
                "0 until it shall"
            )
        if len(self._optimizer.param_groups) > self._groups:
            raise ScriptError(
                "optimizer.add_param_group() after DistributedOptimizer(...): gradients of what "
                "was added are not averaged. Give the optimizer all groups before that, with a "
                "learning rate of 0 until they shall learn"
            )

    def _after_step(self, *_: Any, gain: float | None = None) -> None:
        self.stepping = False
        self.steps += 1
        if self.steps == 1:
            self.forgotten = forgotten_schedulers(self._context.worker, self._optimizer)
        self._averaged = False
        self._absorbed = -1
        gain = self._gain if gain is None else gain
        self._context.planner.advance(gain, self._context.step.examples)
        self._context.step_done()


def _canaries(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Parameters whose gradients tell whether those of a step are finite, at little cost.

    NaN and infinity of a loss spread over all gradients but those of parameters that it does not
    use, and what becomes NaN in the backward pass spreads over those of earlier layers: so the
    smallest one in each part of the model, where it is small.
    """
    length = -(-len(parameters) // _CANARIES)
    parts = (parameters[at : at + length] for at in range(0, len(parameters), length))
    smallest = [min(part, key=torch.Tensor.numel) for part in parts]
    most = max(_CANARY_NUMBERS, min(parameter.numel() for parameter in smallest))
    return [parameter for parameter in smallest if parameter.numel() <= most]


def _is_finite(gradient: torch.Tensor) -> bool:
    # A sum that is finite is one of finite numbers; one that is not may have overflowed.
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

    Each rank's mean gradient is weighted by its share of the examples and averaged over all
    ranks, so a step is the same at any number of ranks and with unequal slices. Returns the same
    object, with a method ``synchronize()`` for clipping.

    Args:
        optimizer: any ``torch.optim`` optimizer whose ``step()`` needs no closure.
        model: gives the reductions the names of its parameters; without it they are numbered.
        lr_rule: what a batch that adapts does to the learning rate: ``"adascale"``, ``"linear"``,
            ``"sqrt"``, ``"adam_sqrt"``, ``"none"``, or a function as in
            :mod:`hvd_elastic.model.lr_rules`. By default ``"adam_sqrt"`` for Adam and its kin and
            ``"adascale"`` for all others.
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

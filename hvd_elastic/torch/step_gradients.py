"""The gradients of one optimizer in the step in flight, from the hook of each to their averages."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from hvd_elastic.communicator.interface import Communicator
from hvd_elastic.errors import ScriptError
from hvd_elastic.torch.adaptive_rates import StepSampling
from hvd_elastic.torch.compression import Compression
from hvd_elastic.torch.finite_check import GradientCheck, is_finite
from hvd_elastic.torch.gradient_buckets import Bucket
from hvd_elastic.torch.reductions import Reductions
from hvd_elastic.torch.trained_parameters import LeftGradients, TrainedParameters
from hvd_elastic.worker.context import Context
from hvd_elastic.worker.planning.skipped_steps import whose_words


class StepGradients:
    """Averages the gradients of an optimizer over the passes and ranks of a step.

    Hooks on its parameters count gradients and begin the reduction of a bucket of them when it is
    full; :meth:`average` begins those that are left, and waits for all.

    Args:
        optimizer: optimizer of the parameters.
        names: names of the parameters, by id.
        compression: how gradients are sent.

    Attributes:
        trained: parameters that are trained.
        sampling: statistics of the gradients, where the batch adapts.
        reductions: collectives of the step.
        are_known: whether a parameter had a gradient in any step.
    """

    def __init__(
        self,
        context: Context,
        optimizer: torch.optim.Optimizer,
        names: dict[int, str],
        compression: Compression,
    ) -> None:
        self._context = context
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        every = {p: names.get(id(p), f"parameter.{number}") for number, p in enumerate(parameters)}
        self.trained = TrainedParameters(optimizer, every)
        self.sampling = StepSampling(context, optimizer)
        self.reductions = Reductions(
            context.worker, self.names, self.sampling.statistics.group_of, compression
        )
        self._left = LeftGradients()
        self.are_known = False
        self._absorbed = -1
        self._computed: set[torch.Tensor] = set()
        """Parameters whose gradients the last pass of a single rank has computed."""
        self._passing = False
        """Whether the end of the present backward pass will be noted; with several optimizers."""
        self._check = GradientCheck(self.names)

    @property
    def names(self) -> dict[torch.Tensor, str]:
        """The trained parameters, with their names."""
        return self.trained.names

    @property
    def _communicator(self) -> Communicator:
        return self._context.worker.communicator

    @property
    def factor(self) -> float:
        """Factor on this rank's mean gradient in the sum over ranks and passes."""
        return self._context.step.weight / self._communicator.size

    # -- the life of a step ----------------------------------------------------------------

    def engage(self, number: int) -> None:
        """Average the gradients of the optimizer with this number from now on."""
        self.reductions.number(number)
        self.trained.unhook()
        self.hook()

    def forget_step(self) -> None:
        self._passing = False
        self.reductions.begin_step()
        self._computed.clear()
        self._absorbed = -1

    def drop_step(self) -> None:
        """Drop the step, which failed half way."""
        self.reductions.clear()
        self.forget_step()
        self.sampling.drop_step()

    def begin_body(self, steps: int) -> None:
        """Look at what the loop body that has ended left in the parameters, after ``steps``."""
        # Where the batch adapts, a step that is left out leaves averages.
        if self._left.begin_body(steps) and not self._context.planner.adapts:
            self._left.note_left(self.names)
        if self._context.worker.elastic and not steps & (steps - 1):
            self.trained.watch()

    def open(self) -> None:
        """Begin a step with the first of its gradients, unless it has begun."""
        if self.reductions.is_open:
            return
        self.follow()
        self.sampling.begin_step()
        self.reductions.open()

    def open_last(self) -> None:
        """Begin the last pass of a step with the first of its gradients."""
        self.open()
        if self._context.step.counts is not None:
            self.reductions.scale(self._context.step.counts.take_scale_of_earlier())

    def absorb(self) -> None:
        """Add up the gradients of a pass that is followed by others in the same step."""
        step = self._context.step
        if self._absorbed == len(step.passes):
            return
        self._absorbed = len(step.passes)
        self.open()
        self.sampling.see(self.names)
        self.sampling.end_pass(self.factor)
        self.add_gradients()

    def average(self, *, used: bool = True) -> None:
        """Wait for the averages; ``used``: the script has not dropped them meanwhile."""
        if self.reductions.are_done:
            self._context.exchange()
            return
        self.note_known()
        if self._communicator.size == 1:
            if used:
                self.reductions.refuse_changed()
            self._end_alone()
            self._context.planner.work_ends()
            self.reductions.are_done = True
            self._context.exchange()
            return
        self.open_last()
        if self._context.step.is_too_large:
            self.sampling.leave_out()
        if used:
            self.reductions.refuse_changed()
        for bucket in self.reductions.waiting:
            self._reduce_bucket(bucket)
        self.trained.drop_late()
        self.sampling.end_pass(self.factor)
        self._context.begin_exchange()
        self._context.planner.work_ends()
        if self._context.worker.averagers.several:
            # A rank that leaves the body out is found before gradients are awaited.
            self._context.exchange()
        try:
            told = self.reductions.wait(self.sampling.see_mean)
        except ScriptError:
            self._context.step.refuse_left_out(self._context.worker)
            self.reductions.refuse_differences()
            raise
        if told is not None:
            self._context.step.receive(told, shared=True)
        self.reductions.are_done = True
        self._context.exchange()
        self.sampling.end_step(self.names)

    def end_block(self) -> None:
        """Keep the gradients of the passes in a block of ``no_sync``."""
        self.open()
        self.add_gradients()
        if self._context.step.is_long and self._communicator.size > 1 and self.names:
            self._context.check_left_out(self.reductions.begin_left_out(unaveraged=True))

    def leave_out(self) -> None:
        """Tell the other ranks that this one takes no step; see :meth:`Averager.leave_out`."""
        if self._communicator.size == 1:
            return
        if self.reductions.are_done or self.reductions.are_begun:
            cleared = [parameter for parameter in self.names if parameter.grad is None]
            # The other ranks take the step, or get here in the same way.
            self.average(used=False)
            for parameter in cleared:
                parameter.grad = None
            self.reductions.are_done = False
        self._context.check_left_out(self.reductions.begin_left_out())

    def add_gradients(self) -> None:
        """Add the gradients of the pass that has ended to those of earlier ones."""
        for bucket in self.reductions.waiting:
            bucket.add_gradients(self.factor)

    def follow(self) -> None:
        """Follow what the script has done to its parameters since the last step."""
        if self.trained.follow():
            self.hook()
            self.sampling.statistics.forget_parts()
            self.reductions.divide_again()
            self._check = GradientCheck(self.names)

    def note_known(self) -> None:
        """Note whether a parameter has a gradient."""
        self.are_known = (
            self.are_known
            or self.reductions.are_begun
            or any(parameter.grad is not None for parameter in self.names)
        )

    def _reduce_bucket(self, bucket: Bucket, *, later: bool = False) -> None:
        """Sample, add and reduce the gradients of a bucket in the last pass."""
        self.sampling.move(bucket, self.factor, checks=self.reductions.checks)
        carries = bucket is self.reductions.carrier and self._may_carry
        flags = self._context.begin_exchange(carried=True) if carries else None
        self.reductions.reduce_bucket(bucket, flags, later=later)

    def _end_alone(self) -> None:
        """Sample the gradients of the last pass of a single rank, and add those of earlier ones."""
        step = self._context.step
        if len(step.passes) == 1:
            self.sampling.leave_out()
        self.sampling.see(self.names)
        if self.reductions.is_open or step.weight != 1:
            self.open_last()
            self.add_gradients()
            for bucket in self.reductions.waiting:
                bucket.give(absent=False)
            self.trained.drop_late()
            self.reductions.clear()
        else:
            self.follow()
        for parameter in self.names:
            gradient = parameter.grad
            if gradient is not None and gradient.layout is not torch.strided:
                parameter.grad = gradient.to_dense()  # as with more ranks
        self.sampling.end_pass(step.weight)
        self.sampling.end_step(self.names)

    # -- the hooks of the backward pass ----------------------------------------------------

    def hook(self) -> None:
        """Have each gradient counted that a backward pass computes."""
        several = self._context.worker.averagers.several
        self.trained.hook(self._note_pass if several else self._ready)

    def _ready(self, parameter: torch.Tensor) -> None:
        # Called for each gradient: what holds for all of a pass is looked at with the first one.
        if not (self.reductions.is_filling or self._is_to_be_averaged(parameter)):
            return
        bucket = self.reductions.arrived(parameter)
        if bucket is not None:
            self._reduce_bucket(bucket, later=self.reductions.looks)

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
                self.reductions.refuse_twice(parameter)
            if not self._computed and self.reductions.looks:
                engine: Any = torch.autograd.Variable._execution_engine
                engine.queue_callback(self.reductions.note_all)
            self._computed.add(parameter)
            return False
        if self.reductions.are_done:
            self.reductions.refuse_if_reduced(parameter)
        self.open_last()
        # Where the batch adapts, the step may be called off for lack of memory: on a CPU until the
        # last bucket is full, and on a GPU until its end.
        if not (self._context.planner.adapts or self._may_carry or step.has_told):
            self._context.begin_exchange()
        self.reductions.is_filling = not self._left
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(self.reductions.pass_ends)
        return True

    @property
    def _may_carry(self) -> bool:
        """Return whether gradients carry the flags of the step.

        A script that reads its data itself may take a step on some ranks alone: flags that have a
        reduction of their own pass by the gradients then.
        """
        several = self._context.worker.averagers.several
        carried = self.reductions.carrier is not None and not several
        return carried and bool(self._context.step.passes)

    def _pass_ends(self) -> None:
        self._passing = False
        self.reductions.note_all()

    # -- what may be wrong with them -------------------------------------------------------

    def check_not_begun(self, call: str) -> None:
        """Raise ScriptError if gradients of the pass are weighted; see :class:`Averager`."""
        if self.reductions.are_begun or self.reductions.are_done or self._computed:
            raise ScriptError(
                f"{call} after a backward pass of the batch, whose gradients are being averaged "
                "already: call it before backward()"
            )

    def are_finite(self) -> bool:
        """Return whether the averaged gradients of the step are finite, the same on all ranks."""
        if not self.reductions.checks:
            return True
        alone = self._communicator.size == 1
        finite = self._check.are_finite() if alone else self.reductions.are_finite
        unknown = alone and self._check.unknown
        if finite and not (unknown or self._context.worker.averagers.several):
            self._context.planner.skipped.note_step(finite=True)
        return finite

    def where_not_finite(self) -> str:
        """Return in words where gradients of this rank alone are not finite; empty: nowhere."""
        bad = set(self.reductions.bad_here)
        if self._communicator.size == 1:
            known = ((each, each.grad) for each in self.names if each.grad is not None)
            bad = {each for each, grad in known if not grad.is_cuda and not is_finite(grad)}
        names = [name for parameter, name in self.names.items() if parameter in bad]
        return whose_words(names[::-1], len(self.names))

    def _note_pass(self, parameter: torch.Tensor) -> None:
        """Note what a backward pass leaves, with several optimizers, whose steps average it.

        Raises:
            ScriptError: it adds to a gradient that is averaged already.
        """
        if self.reductions.looks and not self._passing:
            self._passing = True
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._pass_ends)
        self._left.added(parameter)
        if self.reductions.are_done and parameter in self.names:
            raise ScriptError(
                f"the gradient of {self.names[parameter]!r} was averaged by synchronize(), and "
                "another backward pass adds to it before its optimizer's step(), so the ranks "
                "would go apart. Take that step before the backward pass of another loss"
            )

    def refuse_left(self) -> None:
        """Raise ScriptError if a gradient that is to be averaged is that of an earlier body."""
        if not self.reductions.are_done and (parameter := self._left.held()) is not None:
            self._refuse_left(parameter)

    def _refuse_left(self, parameter: torch.Tensor) -> NoReturn:
        accumulate = (
            "compute all gradients of a step in one loop body"
            if self._context.worker.averagers.several
            else "put every backward() of a step but the last into `with optimizer.no_sync():`"
        )
        raise ScriptError(
            f"the gradient of {self.names.get(parameter)!r} holds the gradient of an earlier "
            "batch, after "
            "which optimizer.step() was not called. A worker that joins would not have it, and a "
            f"failure would lose it. To accumulate gradients, {accumulate}; if the batch was to be "
            "skipped, call optimizer.zero_grad() before the next backward()"
        )

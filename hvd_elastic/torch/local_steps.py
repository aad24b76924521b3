"""Steps that each rank takes alone, and rings that meet once a period: LocalSGD and DiLoCo.

A period is one step of training of several batches, as the batches in ``no_sync()`` are: progress
stays at its beginning until it ends, and a failure repeats it. At its end the ranks average by how
much each of them has moved the parameters, and an outer optimizer takes that for a gradient.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from hvd_elastic.errors import ScriptError
from hvd_elastic.torch.compression import Compression
from hvd_elastic.torch.copies import OptimizerCopy
from hvd_elastic.torch.optimizer import GradientAverager
from hvd_elastic.torch.step_gradients import StepGradients
from hvd_elastic.torch.wrapped_optimizer import leave_as_it_is, refuse_other_scaler, replace_step


class PeriodGradients(StepGradients):
    """What the ranks have learnt in a period, in place of gradients."""

    @property
    def factor(self) -> float:
        # Of the examples of the period, not of its last batch.
        passes = self._context.step.passes
        examples = sum(each.step_examples for each in passes)
        weighted = sum(each.step_examples * each.weight for each in passes)
        return weighted / examples / self._communicator.size

    def hook(self) -> None:
        """Leave the gradients of this rank alone."""

    def note_known(self) -> None:
        """Note nothing: what the outer optimizer is given is always there."""


class LocalAverager(GradientAverager):
    """Averages what the ranks have learnt in a period; see ``LocalOptimizer``.

    Args:
        inner: optimizer whose steps each rank takes alone.
        outer: optimizer of the same parameters, whose gradients the ranks average.
        names: names of the parameters, by id.
        every: number of batches in a period.
        compression: how the averaged differences are sent.
    """

    local = True
    call = "LocalOptimizer"
    gradients_type = PeriodGradients

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        outer: torch.optim.Optimizer,
        names: dict[int, str],
        every: int,
        compression: Compression,
    ) -> None:
        self._inner = inner
        self._every = every
        self._start = OptimizerCopy(inner)
        """The parameters, and the state of the inner optimizer, when the period began."""
        self._sizes = [len(group["params"]) for group in inner.param_groups]
        self._stepped = 0
        """Number of the batch of the period that the last inner step was for, from 1."""
        self._ends_whole = False
        """Whether the period ends with the loop over the loader."""
        super().__init__(outer, names, None, compression)
        take_step = inner.step

        def step(_: torch.optim.Optimizer, *args: Any, **options: Any) -> None:
            self._take_inner_step(take_step, *args, **options)

        replace_step(inner, step)

    @property
    def held(self) -> torch.optim.Optimizer:
        return self._inner

    def own_tensors(self) -> Iterator[torch.Tensor]:
        for values in self._inner.state.values():
            yield from filter(torch.is_tensor, values.values())

    # -- a period --------------------------------------------------------------------------

    def pass_begins(self) -> None:
        ctx, step = self._context, self._context.step
        count, unit = ctx.data.aim
        done, ends_epoch = len(step.passes), step.passes[-1].ends_epoch
        is_last = ends_epoch or (unit == "step" and ctx.worker.progress.step + done >= count)
        self._ends_whole = is_last
        step.is_period = True
        step.continues = done < self._every and not is_last
        if done > 1:
            ctx.metrics.body_ended(time.monotonic())
        else:
            self._stepped = 0
        if ends_epoch and done < self._every and not ctx.worker.progress.position:
            ctx.worker.warn_once(
                f"hvd.LocalOptimizer: an epoch has {done} batches, fewer than a period, and with "
                "hvd.epochs() a period ends with the epoch at the latest, so the ranks meet after "
                f"{done} batches. With hvd.steps(count, loader) periods continue across epochs",
                of="epochs shorter than a period",
            )

    def _take_inner_step(self, take_step: Any, *args: Any, **options: Any) -> None:
        ctx, step = self._context, self._context.step
        self._refuse_what_is_not_averaged(*args, **options)
        if not self.steps:
            refuse_other_scaler()
        if [len(group["params"]) for group in self._inner.param_groups] != self._sizes:
            raise ScriptError(
                "optimizer.add_param_group() after LocalOptimizer(...): what is learnt by "
                "parameters that were added is not averaged. Give the optimizer all of them before"
            )
        if not step.is_open:
            raise ScriptError(
                "optimizer.step() of hvd.LocalOptimizer for a batch that does not come from "
                "hvd.DataLoader, or whose period has ended by an earlier step(). Read the data "
                "with hvd.DataLoader under @hvd.run, and call step() once for each batch"
            )
        if self._stepped == len(step.passes):
            raise ScriptError(
                "optimizer.step() of hvd.LocalOptimizer is called a second time for a batch; a "
                "period counts batches, so call it once for each of them"
            )
        ctx.worker.refuse_aborted()  # else this rank would compute until the period ends
        self._stepped = len(step.passes)
        self._begin_period()
        known = self.gradients.are_known
        self.gradients.are_known = known or any(p.grad is not None for p in self.gradients.names)
        if step.passes[-1].padding:  # other ranks learn from these examples
            leave_as_it_is(self._inner)
        else:
            take_step()
        self._inner_step_taken()
        if not step.continues:
            self._end_period()

    def _inner_step_taken(self) -> None:
        """Do what follows an inner step."""

    def leave_out(self) -> None:
        self._begin_period()
        self._end_period()

    def _begin_period(self) -> None:
        """Keep what the period begins with, unless it has begun."""
        if self._start.is_taken:
            return
        self._context.checkpoints.settle()
        self._start.copy_once()

    def _end_period(self) -> None:
        """Average what the ranks have learnt, and take the outer step; all ranks call this."""
        every = self._every_parameter()
        with gradients_aside(every):
            for parameter in every:
                begun = self._start.of(parameter)
                if begun is None:
                    self._refuse_unfrozen(parameter)
                    continue
                with torch.no_grad():
                    parameter.grad = begun - parameter
                    parameter.copy_(begun)
            self._optimizer.step()
            self._start.drop()

    def _every_parameter(self) -> list[torch.Tensor]:
        return [each for group in self._inner.param_groups for each in group["params"]]

    def _refuse_unfrozen(self, parameter: torch.Tensor) -> None:
        if parameter.requires_grad:
            raise ScriptError(
                "a parameter was unfrozen (requires_grad=True) within a period of "
                "hvd.LocalOptimizer, so what it has learnt in it cannot be averaged. Do that "
                "between two epochs"
            )

    def skip(self) -> None:
        self._start.restore()  # some moments are not finite
        super().skip()

    def reset(self) -> None:
        super().reset()
        self._start.restore()
        self._stepped = 0

    def forget(self) -> None:
        self.gradients.forget_step()

    # -- what scripts call -----------------------------------------------------------------

    def keep_gradients(self) -> None:
        """Do nothing: the gradients are those of this rank, and complete."""

    def no_sync(self) -> NoReturn:
        raise ScriptError(
            "optimizer.no_sync() of hvd.LocalOptimizer: the ranks average nothing in a backward "
            "pass. Leave it out; for a batch that does not fit into memory, split it in the loop "
            "body and call optimizer.step() once, after the last backward()"
        )

    def scaled_by(self, *_: Any) -> NoReturn:
        raise ScriptError(
            "hvd.GradScaler with hvd.LocalOptimizer: each rank would need a scale of its own. "
            "Train in bfloat16, which needs none: torch.autocast(device_type, torch.bfloat16)"
        )

    def check_not_begun(self, call: str) -> NoReturn:
        raise ScriptError(
            f"{call} with hvd.LocalOptimizer: each rank takes its steps with the mean of its own "
            "loss, and what the ranks learn in a period is weighted by their examples. Leave it out"
        )

    def adapt(self) -> NoReturn:
        raise ScriptError(
            "hvd.LocalOptimizer with hvd.DataLoader(max_batch_size=...): noise scale and "
            "learning-rate rules are of gradients that are averaged in each step. Leave "
            "max_batch_size out (unequal_shares=True works)"
        )

    def engage(self, number: int) -> None:
        super().engage(number)
        if self._context.worker.averagers.several:
            raise ScriptError(
                "hvd.LocalOptimizer is the only optimizer of a training, and this script has "
                "several. Train all parameters with one, in parameter groups of their own, or use "
                "hvd.DistributedOptimizer for each"
            )


@contextmanager
def gradients_aside(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Have parameters without gradients, and the rank's own ones again if nothing fails."""
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    yield
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient

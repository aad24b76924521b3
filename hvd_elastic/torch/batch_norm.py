"""Batch normalisation with the statistics of the global batch.

Each rank sends the mean and variance of its share, and all combine them with weights by examples
(Chan, Golub and LeVeque, 1979). So layers compute at any number of ranks, and at unequal shares,
what one process computes for the whole batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import BatchNorm1d, BatchNorm2d, BatchNorm3d, _BatchNorm

from hvd_elastic.communicator.interface import Communicator
from hvd_elastic.errors import ScriptError
from hvd_elastic.worker import context
from hvd_elastic.worker.step import Step


def synchronize_batch_norm(model: torch.nn.Module) -> None:
    """Make the batch normalisation layers of ``model`` use the statistics of the global batch.

    The layers stay the same objects with the same parameters and buffers; only their class changes,
    to a subclass.

    Raises:
        ScriptError: a layer is of a class of its own, whose computation is unknown; names it.
    """
    for name, layer in model.named_modules():
        kind = type(layer)
        if kind in _SYNCHRONIZED:
            layer.__class__ = _SYNCHRONIZED[kind]
            layer._reduction = f"batch_norm.{name}"
        elif isinstance(layer, _BatchNorm) and not isinstance(layer, _Synchronized):
            raise ScriptError(
                f"DistributedOptimizer(sync_batch_norm=True): layer {name!r} is a {kind.__name__}, "
                "which cannot be synchronised; make it a BatchNorm1d, 2d or 3d of torch.nn, "
                "without convert_sync_batchnorm, and run a lazy one once before"
            )


class _Synchronized(_BatchNorm):
    """Mixin for a batch normalisation layer."""

    _reduction: str
    """Name of the layer's collectives."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  (torch's name)
        ctx = context.current()
        worker = ctx.worker
        if not (self.training and worker.in_train):
            return super().forward(input)
        if ctx.planner.adapts:
            raise ScriptError(
                "DistributedOptimizer(sync_batch_norm=True) with DataLoader(max_batch_size=...): "
                "the ranks may compute a step in different numbers of passes, so layers cannot "
                "wait for each other. Leave one of them out"
            )
        if worker.communicator.size == 1:
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        output, mean, variance = _NormalizeOverRanks.apply(  # type: ignore[no-untyped-call]
            input,
            self.weight,
            self.bias,
            self.eps,
            worker.communicator,
            self._reduction,
            ctx.step,
        )
        self._track(mean, variance)
        return output

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Update the running statistics as torch does."""
        if self.running_mean is None or self.running_var is None:
            return
        part = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if part is None:
                part = 1.0 / float(self.num_batches_tracked)
        if part is not None:
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), part)
            self.running_var.lerp_(variance.to(self.running_var.dtype), part)


class _NormalizeOverRanks(torch.autograd.Function):
    """Normalise by mean and variance over the examples of all ranks.

    A rank's gradients are later multiplied by a factor and summed over the ranks: its weight in the
    step, 0 for padding. What its inputs change in the loss of other ranks is scaled here so that
    this holds for all of it. The factor is known in the backward pass: it depends on the loss.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        communicator: Communicator,
        name: str,
        step: Step,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the outputs, and the mean and the unbiased variance over all ranks."""
        channels, shape = inputs.shape[1], _shape(inputs)
        x = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
        has_examples = not step.passes or step.passes[-1].weight != 0
        count = x.numel() // channels if has_examples else 0
        if count:
            variance, mean = torch.var_mean(x, _all_but_channels(x), correction=0)
            own = torch.cat([mean, variance, x.new_full((1,), count)])
        else:  # NaN in padding must not reach the other ranks
            own = x.new_zeros(2 * channels + 1)
        rows = communicator.gather(own[None], name)
        means, variances, counts = rows.split([channels, channels, 1], dim=1)
        total = counts.sum()
        mean = (counts * means).sum(0) / total
        variance = (counts * (variances + (means - mean).square())).sum(0) / total
        inverse = torch.rsqrt(variance + eps)
        normal = (x - mean.view(shape)) * inverse.view(shape)
        output = normal
        if weight is not None:
            output = output * weight.view(shape)
        if bias is not None:
            output = output + bias.view(shape)
        ctx.save_for_backward(inputs, weight, mean, inverse, total)
        ctx.how = (communicator, name, step)
        unbiased = variance * (total / (total - 1).clamp(min=1))
        ctx.mark_non_differentiable(mean, unbiased)
        return output.to(inputs.dtype), mean, unbiased

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        inputs, weight, mean, inverse, total = ctx.saved_tensors
        communicator, name, step = ctx.how
        shape, dims = _shape(inputs), _all_but_channels(inputs)
        dy = gradients[0].to(mean.dtype)
        normal = (inputs.to(mean.dtype) - mean.view(shape)) * inverse.view(shape)
        for_bias, for_weight = dy.sum(dims), (dy * normal).sum(dims)
        for_inputs = None
        if ctx.needs_input_grad[0]:
            step_weight = step.relative_weight
            own = torch.cat([for_bias, for_weight])
            own = own * step_weight if step_weight else torch.zeros_like(own)
            handle = communicator.reduce_async(own, f"{name}.backward")
            over_ranks = communicator.wait(handle)
            for_inputs = torch.zeros_like(inputs)
            if step_weight:
                parts = over_ranks * (communicator.size / step_weight / total)
                constant, slope = (part.view(shape) for part in parts.chunk(2))
                scale = inverse if weight is None else inverse * weight
                for_inputs = (scale.view(shape) * (dy - constant - normal * slope)).to(inputs.dtype)
        if weight is not None:
            for_weight, for_bias = for_weight.to(weight.dtype), for_bias.to(weight.dtype)
        needs = ctx.needs_input_grad
        return (
            for_inputs,
            for_weight if needs[1] else None,
            for_bias if needs[2] else None,
            *(None,) * 4,
        )


def _shape(inputs: torch.Tensor) -> tuple[int, ...]:
    """Return the shape in which a value of each channel is broadcast over ``inputs``."""
    return (1, -1, *(1,) * (inputs.dim() - 2))


def _all_but_channels(inputs: torch.Tensor) -> list[int]:
    return [dim for dim in range(inputs.dim()) if dim != 1]


class SyncBatchNorm1d(_Synchronized, BatchNorm1d):
    """A ``BatchNorm1d`` over the ranks."""


class SyncBatchNorm2d(_Synchronized, BatchNorm2d):
    """A ``BatchNorm2d`` over the ranks."""


class SyncBatchNorm3d(_Synchronized, BatchNorm3d):
    """A ``BatchNorm3d`` over the ranks."""


_SYNCHRONIZED: dict[type, type] = {
    BatchNorm1d: SyncBatchNorm1d,
    BatchNorm2d: SyncBatchNorm2d,
    BatchNorm3d: SyncBatchNorm3d,
}

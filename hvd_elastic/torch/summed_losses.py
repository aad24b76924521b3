"""Finds losses that are sums over the batch, whose gradients ranks add up instead of averaging.

Ranks average gradients, which is right for a loss that is a mean over the examples. The average of
sums depends on the number of ranks. What a loss is can be seen in its graph: from its end a few
operations lead to the reduction over the examples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from hvd_elastic.training.context import Context

_LINEAR = frozenset(
    f"{name}Backward0"
    for name in (
        *("Add", "Sub", "Neg", "Mul", "Div", "ToCopy", "Clone"),
        *("View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Alias"),
    )
)
"""Operations on a loss that keep what it is: terms are added, and multiplied by constants."""
_LARGEST = 64
"""Most operations that are looked at: about 1 us each."""
_MEAN, _SUM, _OTHER = "a mean", "a sum over the batch", "something else"
_MIXED = (
    "the loss adds {} and {}. Ranks average gradients, which is right for means over the examples; "
    "that of a sum depends on the number of ranks. Make all terms means over the batch, or all of "
    'them sums (reduction="sum")'
)
_NOT_WITH = (
    "the loss is a sum over the batch, and {}: its gradients are averaged over the ranks, so a "
    'step depends on their number. Make the loss a mean over the batch (reduction="mean")'
)


@contextlib.contextmanager
def summed_losses_are_added(ctx: Context) -> Iterator[None]:
    """Look at the losses of all backward passes in the block."""
    backward = torch.autograd.backward

    def look_first(tensors: Any, *args: Any, **options: Any) -> None:
        if isinstance(tensors, torch.Tensor) and ctx.step.passes:
            _note(ctx, tensors)
        backward(tensors, *args, **options)

    torch.autograd.backward = look_first
    try:
        yield
    finally:
        torch.autograd.backward = backward


def _note(ctx: Context, loss: torch.Tensor) -> None:
    """Have the step add the gradients of a loss up if it is a sum; warn where that is not right."""
    step, worker = ctx.step, ctx.worker
    ranks = worker.communicator.size
    kinds = kinds_of(loss, step.passes[-1].examples)
    step.ranks_added = None
    if _SUM not in kinds or ranks == 1:
        return
    others = sorted(kinds - {_SUM})
    if others:
        worker.warn_once_of(_MIXED.format(_SUM, " and ".join(others)))
    elif ctx.planner.adapts:
        worker.warn_once_of(_NOT_WITH.format("the batch size adapts"))
    elif worker.averagers.several:
        worker.warn_once_of(_NOT_WITH.format("there are several optimizers or steps"))
    else:
        step.ranks_added = ranks


def kinds_of(loss: torch.Tensor, examples: int) -> set[str]:
    """Return what the terms of a loss are; empty: it cannot be seen.

    Args:
        loss: the loss, before its backward pass.
        examples: number of examples of this rank that it is computed from.
    """
    if loss.dim() and loss.shape[0] == examples > 1:
        return {_SUM}  # backward(torch.ones_like(loss))
    found: set[str] = set()
    # A node, and whether what leads to it from the loss divides by the number of examples.
    open_nodes: list[tuple[Any, bool]] = [(loss.grad_fn, False)]
    for _ in range(_LARGEST):
        if not open_nodes:
            return found
        node, divided = open_nodes.pop()
        name = "" if node is None else node.name()
        reduction = getattr(node, "_saved_reduction", None)
        if name in _LINEAR:
            nodes = [each for each, _ in node.next_functions]
            factors = [each for each in nodes if each is not None]
            if name in ("MulBackward0", "DivBackward0"):
                if len(factors) > 1:  # a learned weight, or a ratio
                    return set()
                divided = divided or _divides(node, name, examples)
            open_nodes += [(each, divided) for each in factors]
        elif reduction == 2 or (name == "SumBackward0" and _is_over_batch(node, examples)):
            found.add(_MEAN if divided else _SUM)
        elif reduction == 1 or name == "MeanBackward0":
            found.add(_MEAN)
        else:
            found.add(_OTHER)
    return set()


def _divides(node: Any, name: str, examples: int) -> bool:
    """Return whether an operation divides by the number of examples of this rank."""
    constant = getattr(node, "_saved_other", None)
    if not torch.is_tensor(constant) or constant.numel() != 1 or constant.device.type != "cpu":
        return False  # reading it would wait for the device
    value = float(constant)
    return value == examples if name == "DivBackward0" else abs(value * examples - 1) < 1e-6


def _is_over_batch(node: Any, examples: int) -> bool:
    """Return whether a sum is over the examples: not over a few losses, or over a parameter."""
    sizes = node._saved_self_sym_sizes
    if not sizes or examples < 2 or sizes[0] % examples:
        return False
    for _ in range(3):  # a penalty on a parameter, such as parameter.square().sum()
        node = node.next_functions[0][0] if node.next_functions else None
        if node is None or node.name().endswith("AccumulateGrad"):
            return False
    return True

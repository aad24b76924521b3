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
_OF_PENALTIES = frozenset({"PowBackward0", "AbsBackward0", "ViewBackward0"})
_LARGEST = 64
"""Most operations that are looked at: about 1 us each."""
_PARTS = frozenset({"StackBackward0", "CatBackward0"})
"""Inputs of a sum over a few losses."""
_MEAN, _SUM, _OTHER = "a mean", "a sum over the batch", "something else"
_DIVIDED = "a sum over the batch that is divided"
_UNSEEN = "a sum over what may be the batch"
_VALID = "a mean over the targets that are not ignored"
_MIXED = (
    "the loss adds {} and {}. Ranks average gradients, which is right for means over the examples; "
    "that of a sum depends on the number of ranks. Make all terms means over the batch, or all of "
    'them sums (reduction="sum")'
)
_UNKNOWN = (
    "the loss has {}. Ranks average gradients: if that makes the loss a mean over the targets or "
    "tokens of this rank, call hvd.step_weight(their number) before backward(); else the step "
    "depends on the number of ranks, so make the loss a mean over the batch"
)
_NOT_WITH = (
    "the loss is a sum over the batch, and {}: its gradients are averaged over the ranks, so a "
    'step depends on their number. Make the loss a mean over the batch (reduction="mean")'
)


@contextlib.contextmanager
def summed_losses_are_added(ctx: Context) -> Iterator[None]:
    """Look at the losses of all backward passes in the block."""
    backward, told = torch.autograd.backward, set[str]()

    def look_first(tensors: Any, grad_tensors: Any = None, *args: Any, **options: Any) -> None:
        if isinstance(tensors, torch.Tensor) and ctx.step.passes and _trains(**options):
            problem = _note(ctx, tensors, is_vector=grad_tensors is not None)
            if problem and problem not in told:
                told.add(problem)
                ctx.worker.warn_once(problem)
        backward(tensors, grad_tensors, *args, **options)

    torch.autograd.backward = look_first
    try:
        yield
    finally:
        torch.autograd.backward = backward


def _trains(inputs: Any = None, **_: Any) -> bool:
    """Return whether a backward pass computes gradients of parameters, not of inputs alone."""
    chosen = (inputs,) if isinstance(inputs, torch.Tensor) else inputs or ()
    return not chosen or any(isinstance(each, torch.nn.Parameter) for each in chosen)


def _note(ctx: Context, loss: torch.Tensor, *, is_vector: bool) -> str:
    """Have the step add the gradients of a loss up if it is a sum; return why that is not right."""
    step, ranks = ctx.step, ctx.worker.communicator.size
    step.ranks_added = None
    if ranks == 1 or step.counts is not None:  # the script has said what it is a mean over
        return ""
    now = step.passes[-1]
    share = now.step_examples // ranks
    kinds = kinds_of(loss, now.examples, (share, share + 1), is_vector=is_vector)
    if unknown := sorted(kinds & {_DIVIDED, _UNSEEN, _VALID}):
        return _UNKNOWN.format(" and ".join(unknown))
    if _SUM not in kinds:
        return ""
    if others := sorted(kinds - {_SUM}):
        return _MIXED.format(_SUM, " and ".join(others))
    if ctx.planner.adapts:
        return _NOT_WITH.format("the batch size adapts")
    if ctx.worker.averagers.several:
        return _NOT_WITH.format("there are several optimizers or steps")
    step.ranks_added = ranks
    return ""


def kinds_of(
    loss: torch.Tensor, examples: int, shares: tuple[int, ...], *, is_vector: bool = False
) -> set[str]:
    """Return what the terms of a loss are, the same on all ranks; empty: it cannot be seen.

    Args:
        loss: the loss, before its backward pass.
        examples: number of examples of this rank that it is computed from.
        shares: numbers of examples that ranks may have in the step.
        is_vector: whether the pass is given gradients of the elements of the loss.
    """
    if is_vector and loss.dim():
        return {_SUM if loss.shape[0] == examples else _UNSEEN}
    found: set[str] = set()
    # A node, and what a sum there is, as what leads to it from the loss divides it.
    open_nodes: list[tuple[Any, str]] = [(loss.grad_fn, _SUM)]
    for _ in range(_LARGEST):
        if not open_nodes:
            return found
        node, as_sum = open_nodes.pop()
        name = "" if node is None else node.name()
        reduction = getattr(node, "_saved_reduction", None)
        if name in _LINEAR:
            nodes = [each for each, _ in node.next_functions]
            factors = [each for each in nodes if each is not None]
            if name in ("MulBackward0", "DivBackward0"):
                if len(factors) > 1:  # a learned weight, or a ratio
                    return set()
                as_sum = _divided(node, name, examples, shares, as_sum)
            open_nodes += [(each, as_sum) for each in factors]
        elif reduction == 2:
            found.add(as_sum)
        elif name == "SumBackward0":
            kind = _over(node, examples)
            found.add(as_sum if kind == _SUM else kind)
        elif reduction == 1 or name == "MeanBackward0":
            found.add(_VALID if _ignores_targets(node) else _MEAN)
        else:
            found.add(_OTHER)
    return set()


def _divided(node: Any, name: str, examples: int, shares: tuple[int, ...], as_sum: str) -> str:
    """Return what a sum is that an operation multiplies or divides.

    Divided by the number of the rank's examples it is a mean; by another number or tensor it may be
    a mean over tokens. A number of Python's that it is multiplied by is a constant, unless it may
    be one by that number of examples.
    """
    constant = getattr(node, "_saved_other", None)
    if not isinstance(constant, torch.Tensor) or constant.numel() != 1:
        return _DIVIDED
    if constant.device.type != "cpu":
        return _DIVIDED  # reading it would wait for the device
    value = float(constant)
    if name == "DivBackward0":
        return _MEAN if value == examples else _DIVIDED
    is_number = constant.dtype in (torch.float64, torch.int64)
    may_divide = any(abs(value * share - 1) < 1e-6 for share in shares if share > 1)
    return as_sum if (is_number and not may_divide) or value >= 1 else _DIVIDED


def _ignores_targets(node: Any) -> bool:
    """Return whether a mean leaves targets out (``ignore_index``); False on a GPU."""
    counted = getattr(node, "_saved_total_weight", None)
    if counted is None or counted.device.type != "cpu" or node._saved_weight is not None:
        return False  # reading it would wait for the device, and classes have other weights
    return int(counted) != node._saved_target.numel()


def _over(node: Any, examples: int) -> str:
    """Return what a sum of all elements is over."""
    (inner, _), *_ = node.next_functions
    name = "" if inner is None else inner.name()
    if name == "MeanBackward1":  # of each class, say
        if 0 in inner._saved_dim:
            return _MEAN
    elif name in _PARTS:
        return _OTHER
    if _is_of_parameters(inner):
        return _OTHER  # a penalty on them, such as parameter.square().sum()
    sizes = node._saved_self_sym_sizes
    return _SUM if sizes and sizes[0] == examples else _UNSEEN


def _is_of_parameters(node: Any) -> bool:
    """Return whether a penalty is one on parameters alone, of many of which the first are seen."""
    if node is None or node.name().endswith("AccumulateGrad"):
        return node is not None
    parts = node.next_functions[:8]
    return node.name() in _OF_PENALTIES | _PARTS and all(
        _is_of_parameters(each) for each, _ in parts
    )

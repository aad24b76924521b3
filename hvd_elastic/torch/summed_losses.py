"""Finds losses that are sums over the batch, whose gradients ranks add up instead of averaging.

Ranks average gradients, which is right for a loss that is a mean over the examples. The average of
sums depends on the number of ranks. What a loss is can be seen in its graph: from its end a few
operations lead to the reduction over the examples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from math import nan, prod
from operator import mul
from typing import Any, NamedTuple

import torch

from hvd_elastic.worker.context import Context


def _operations(*names: str) -> frozenset[str]:
    return frozenset(f"{name}Backward{form}" for name in names for form in (0, 1))


_LINEAR = _operations(
    *("Add", "Sub", "Neg", "Mul", "Div", "ToCopy", "Clone"),
    *("View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Alias"),
)
"""Operations on a loss that keep what it is: terms are added, and multiplied by constants."""
_TRANSPOSES = _operations("T", "Transpose", "Permute")
_MASKS = _operations("Index", "MaskedSelect")
_FACTORS = _operations("Mul", "Div")
_DIVISIONS = _operations("Div")
_LISTS = _operations("Stack", "Cat")
_PARTS_OF_A_NUMBER = _LINEAR | _LISTS | _operations("Select", "Unbind")
"""Operations between the elements of a list of losses and what has computed each of them."""
_SUMS_OVER_ROWS = frozenset({"SumBackward1", "MeanBackward1"})
_LINEAR_IN_ELEMENTS = (
    _LINEAR
    | _TRANSPOSES
    | _MASKS
    | _SUMS_OVER_ROWS
    | _operations("Where", "MaskedFill", "Diagonal", "Slice", "AsStrided", "Cat", "Stack")
)
_ELEMENTWISE = (
    _LINEAR_IN_ELEMENTS
    | {"torch::autograd::CopySlices"}
    | _operations(
        *("Pow", "Abs", "Exp", "Log", "Log1P", "Sqrt", "Relu", "Sigmoid", "Tanh", "LogSigmoid"),
        *("Softplus", "Clamp", "ClampMin", "ClampMax", "Maximum", "Minimum", "LogSoftmax"),
    )
)
"""Operations whose results are of the batch if what they are computed from is."""
_PRODUCTS = {"MmBackward0": 0, "AddmmBackward0": 1, "BmmBackward0": 0, "LinearBackward0": 0}
"""Products of matrices, with the place of the factor whose rows are those of the result."""
_LARGEST = 64
"""Most operations that are looked at: about 1 us each."""
_LISTED_LOSSES = 8
"""Number of losses that are looked at in a list of them, which are computed alike."""
_TOLERANCE = 1e-3
"""Difference from 1 of what counts as a sum of weights that were divided by their sum."""
_MEAN, _SUM, _OTHER = "a mean", "a sum over the batch", "something else"
_DIVIDED = "a sum over the batch that is divided"
_VALID = "a mean over the targets that are not ignored"
_LISTED = "a sum of as many losses as this rank has examples"
_MIXED = (
    "the loss adds {} and {}. Ranks average gradients, which is right for means over the examples; "
    "that of a sum depends on the number of ranks. Make all terms means over the batch, or all of "
    'them sums (reduction="sum")'
)
_UNKNOWN = (
    "the loss has {}. Ranks average gradients: if that makes the loss a mean over the targets or "
    "tokens of this rank, call hvd.step_weight(their number) before backward(); else the step "
    "depends on the number of ranks, so make the loss a mean over the batch. A divisor that "
    "hvd.allreduce() has averaged over the ranks is right as it is"
)
_NOT_WITH = (
    "the loss is a sum over the batch, and {}: its gradients are averaged over the ranks, so a "
    'step depends on their number. Make the loss a mean over the batch (reduction="mean")'
)


@contextlib.contextmanager
def summed_losses_are_added(ctx: Context) -> Iterator[None]:
    """Look at the losses of all backward passes in the block."""
    backward, losses, seen = torch.autograd.backward, count(1), Seen()

    def look_first(tensors: Any, grad_tensors: Any = None, *args: Any, **options: Any) -> None:
        if isinstance(tensors, torch.Tensor) and ctx.step.passes and _trains(**options):
            rarely = next(losses).bit_count() == 1
            step, ranks = ctx.step.passes[-1], ctx.worker.communicator.size
            examples = Counts(
                step.examples, step.step_examples, step.step_examples // ranks, rarely, seen
            )
            problem = _note_loss(ctx, tensors, examples, is_vector=grad_tensors is not None)
            if problem:
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


def _note_loss(ctx: Context, loss: torch.Tensor, of: Counts, *, is_vector: bool) -> str:
    """Have the step add the gradients of a loss up if it is a sum; return why that is not right."""
    step, ranks = ctx.step, ctx.worker.communicator.size
    step.ranks_added = None
    if ranks == 1 or step.counts is not None:  # the script has said what it is a mean over
        return ""
    kinds = kinds_of(loss, of, is_vector=is_vector)
    unknown = sorted(kinds & {_DIVIDED, _VALID, _LISTED})
    if unknown and not ctx.worker.averagers.local:
        return _UNKNOWN.format(" and ".join(unknown))
    if _SUM not in kinds:
        return ""
    if ctx.worker.averagers.local:
        return _NOT_WITH.format("hvd.LocalOptimizer averages what the ranks have learnt")
    if others := sorted(kinds - {_SUM}):
        return _MIXED.format(_SUM, " and ".join(others))
    if ctx.planner.adapts:
        return _NOT_WITH.format("the batch size adapts")
    if ctx.worker.averagers.several:
        return _NOT_WITH.format("there are several optimizers or steps")
    step.ranks_added = ranks
    return ""


def kinds_of(loss: torch.Tensor, of: Counts, *, is_vector: bool = False) -> set[str]:
    """Return what the terms of a loss are, the same on all ranks; empty: it cannot be seen.

    Args:
        loss: the loss, before its backward pass.
        of: numbers of examples that it is computed from.
        is_vector: whether the pass is given gradients of the elements of the loss.
    """
    if is_vector and loss.dim() and (loss.numel() > 1 or _reduced(loss.grad_fn) is None):
        elements = _Elements(loss.grad_fn, of)
        return elements.kinds or {_SUM if elements.are_of_batch else _OTHER}
    found: set[str] = set()
    # A node, and what a loss is divided by on the way to it.
    open_nodes: list[tuple[Any, list[float]]] = [(loss.grad_fn, [])]
    for _ in range(_LARGEST):
        if not open_nodes:
            return found
        node, divisors = open_nodes.pop()
        name = "" if node is None else node.name()
        if name in _LINEAR:
            factors = [each for each, _ in node.next_functions if each is not None]
            if name in _FACTORS:
                if len(factors) > 1:  # a learned weight, or a ratio
                    return set()
                divisors = divisors + of.divisors(_constant(node), name)
            open_nodes += [(each, divisors) for each in factors]
        else:
            found |= _kinds_of_reduction(node, divisors, of)
    return set()


def _kinds_of_reduction(node: Any, divisors: list[float], of: Counts) -> set[str]:
    """Return what the end of a term is: the operation that reduces many numbers to one.

    It is of several kinds if it reduces a list of losses.
    """
    is_sum = _reduced(node)
    if is_sum is None:
        return {_OTHER}
    has_targets = hasattr(node, "_saved_reduction")
    inner = node.next_functions[0][0]
    elements = _Elements(inner, of, by_default=has_targets, are_summed=is_sum)
    if elements.kinds and not (_LISTED in elements.kinds and divisors + elements.divisors):
        return elements.kinds
    if not elements.are_of_batch:
        return {_OTHER if is_sum else _MEAN}
    if elements.is_sum is not None:
        is_sum = elements.is_sum
    if not is_sum:
        is_part = elements.are_masked or _ignores_targets(node, of.may_wait)
        return {_VALID if is_part else _MEAN}
    divisors = divisors + elements.divisors
    if not divisors:
        return {of.kind_of_weighted(elements.weights)}
    sizes = node._saved_self.shape if has_targets else node._saved_self_sym_sizes
    return {_MEAN if of.is_mean(divisors, sizes) else _DIVIDED}


def _reduced(node: Any) -> bool | None:
    """Return whether an operation is a sum to one number, or a mean (False); None: neither."""
    reduction = getattr(node, "_saved_reduction", 0)
    if reduction:
        return bool(reduction == 2)
    name = "" if node is None else node.name()
    if name in ("SumBackward0", "MeanBackward0") or (
        name in ("SumBackward1", "MeanBackward1") and _rows(node) is None
    ):
        return name.startswith("Sum")
    return None


@dataclass
class Seen:
    """What earlier losses have shown where numbers on a GPU are read rarely.

    Attributes:
        weighted: what a sum with weights was, when it was seen last; None: it was not.
    """

    weighted: str | None = None


class Weights(NamedTuple):
    """Constant weights of the elements of a sum.

    Attributes:
        values: the weights; what is divided by if ``divide``.
        shape: shape of what they weight.
    """

    values: torch.Tensor
    divide: bool
    shape: Sequence[int]

    @property
    def are_of_elements(self) -> bool:
        """Return whether each element has its own."""
        return tuple(self.values.shape) == tuple(self.shape)

    @property
    def may_be_shares(self) -> bool:
        """Return whether they may add up to 1 over the batch: each row has its own."""
        values = self.values
        has_rows = values.dim() == len(self.shape) and values.shape[0] == self.shape[0]
        are_numbers = values.is_floating_point() and values.numel() > 0
        return are_numbers and has_rows and (self.are_of_elements or not self.divide)

    def total(self) -> tuple[float, float]:
        """Return the sum and the largest of the weights; on a GPU this waits for it."""
        values = self.values.detach().float()
        values = values.reciprocal() if self.divide else values
        total, largest = torch.stack([values.sum(), values.max()]).tolist()
        return total, largest


class Counts(NamedTuple):
    """Numbers of examples that tell what a loss is divided by.

    Attributes:
        examples: those of this rank's pass.
        step_examples: those of the step over all ranks.
        share: the least that a rank has of them.
        may_wait: whether a number on a GPU may be read, for which the GPU's work has to end.
        seen: what earlier losses have shown.
    """

    examples: int
    step_examples: int
    share: int
    may_wait: bool = False
    seen: Seen | None = None

    def divisors(self, factor: Any, name: str) -> list[float]:
        """Return what an operation divides by, if it may be a number of examples, tokens or boxes.

        A number of Python's that is multiplied by is a constant, unless one by it is the number of
        examples of a rank.
        """
        is_tensor = isinstance(factor, torch.Tensor)
        if factor is None or (is_tensor and (factor.numel() != 1 or factor.device.type != "cpu")):
            return [nan]  # reading it would wait for the device
        value = float(factor)
        if name.startswith("Div"):
            return [value]
        is_number = not is_tensor or factor.dtype in (torch.float64, torch.int64)
        shares = (self.share, self.share + 1)
        may_divide = any(abs(value * share - 1) < 1e-6 for share in shares if share > 1)
        return [] if (is_number and not may_divide) or value >= 1 else [nan]

    def kind_of_weighted(self, weights: Sequence[Weights]) -> str:
        """Return what a sum over the batch is whose elements have weights.

        It is a mean if they add up to 1 on the rank, as weights that were divided by their sum.
        """
        weights = [each for each in weights if each.may_be_shares]
        if not weights:
            return _SUM
        seen = self.seen or Seen()
        waits = any(each.values.device.type != "cpu" for each in weights)
        if waits and not self.may_wait and seen.weighted:
            return seen.weighted
        kind = _SUM
        for each in weights:
            total, largest = each.total()
            if not abs(total - 1) <= max(_TOLERANCE, torch.finfo(each.values.dtype).eps):
                continue  # also NaN
            if self.examples == 1:  # a mask adds up to 1 too
                return seen.weighted or _DIVIDED
            if not each.are_of_elements:  # such as one by the lengths of sequences
                return _DIVIDED
            if largest < 1 - _TOLERANCE:  # else it may be a mask that has chosen one
                kind = _MEAN
            elif seen.weighted:
                return seen.weighted
        seen.weighted = kind
        return kind

    def is_mean(self, divisors: list[float], sizes: Sequence[int]) -> bool:
        """Return whether a sum over elements of such sizes is divided by their number.

        Another multiple of this rank's number of examples is as good, unless it may be one of all
        examples of the step.
        """
        counts = {float(size) for size in accumulate(sizes, mul)}
        own = max(self.examples, 1)  # 0 where an example is read again, which counts nothing
        return any(
            each in counts or each == own or (each % own == 0 and each % self.step_examples != 0)
            for each in divisors
        )


class _Elements:
    """The numbers over which a loss is a sum or a mean.

    Args:
        node: the operation that has computed them.
        of: numbers of examples.
        by_default: whether they are of the batch where that cannot be seen.
        are_summed: whether what they were divided by matters: a number that the graph has saved may
            be computed again to be read, where a part of the model is checkpointed.

    Attributes:
        are_of_batch: whether they are the examples', not those of parameters or of a correlation.
        are_masked: whether a mask has chosen some.
        divisors: what they were divided by; see :meth:`Counts.divisors`.
        weights: constants that they were multiplied by.
        kinds: what they are if they are losses of their own, in a list; empty: they are not, or
            as the other attributes say.
        is_sum: whether they are sums over the batch already, or means (False); None: neither.
    """

    def __init__(
        self, node: Any, of: Counts, *, by_default: bool = False, are_summed: bool = True
    ) -> None:
        self._are_summed = are_summed
        self.are_of_batch = self.are_masked = False
        self.divisors: list[float] = []
        self.weights: list[Weights] = []
        self.kinds: set[str] = set()
        self.is_sum: bool | None = None
        had_rows = by_default
        # An operation, the shape of what is computed from it, and whether that is linear in it.
        open_nodes: list[tuple[Any, Sequence[int], bool]] = [(node, (), True)]
        for _ in range(_LARGEST // 2):
            if not open_nodes or self.are_of_batch:
                return
            node, shape, is_linear = open_nodes.pop()
            if node is None:
                continue
            name = node.name()
            if name in _LISTS and (losses := _losses_in(node, of)):
                self._look_at_list(losses, len(node.next_functions), of)
            elif name.endswith("AccumulateGrad"):
                self.are_of_batch |= _is_spread(node.variable, shape, of.examples)
            elif name not in _ELEMENTWISE and getattr(node, "_saved_reduction", 1) != 0:
                self.are_of_batch |= _is_of_batch(node, name, of.examples, had_rows)
            elif self._pass(node, name, of, is_linear=is_linear):
                shape = _shape(node)
                had_rows = had_rows or shape[:1] == (of.examples,)
                is_linear = is_linear and name in _LINEAR_IN_ELEMENTS
                open_nodes += [(each, shape, is_linear) for each, _ in node.next_functions]
        self.are_of_batch = True

    def _pass(self, node: Any, name: str, of: Counts, *, is_linear: bool) -> bool:
        """Note what an operation does to the elements; return whether it leads to the batch."""
        if name in _MASKS:
            self.are_masked |= name == "MaskedSelectBackward0" or _is_mask(node._saved_indices[0])
        elif name in _SUMS_OVER_ROWS:
            if _is_over_rows(node) and node._saved_self_sym_sizes[0] == of.examples:
                if not is_linear or _rows(node) == of.examples:
                    return False  # a statistic of the batch, or its rows may be time steps
                self.is_sum = name == "SumBackward1"
                self.weights.clear()  # which were not those of the rows
        elif self._are_summed and is_linear and name in _FACTORS:
            factor = _constant(node)
            if factor is not None and not getattr(factor, "shape", ()):
                self.divisors += of.divisors(factor, name)
            elif factor is not None:
                self.weights.append(Weights(factor, name in _DIVISIONS, _shape(node)))
        return True

    def _look_at_list(
        self, losses: Sequence[tuple[Any, list[float]]], number: int, of: Counts
    ) -> None:
        """Note what a list of losses is: parts of the objective, or one loss for each example.

        Args:
            losses: the operations that have computed some of them, and what they were divided by.
            number: number of all of them.
            of: numbers of examples.
        """
        kinds = {kind for each in losses for kind in _kinds_of_reduction(*each, of)}
        rows = {_rows_reduced(node) for node, _ in losses}
        may_be_examples = number == of.examples and any(
            _Elements(node.next_functions[0][0], of, by_default=True, are_summed=False).are_of_batch
            for node, _ in losses
        )
        if may_be_examples and rows == {1} and of.share > 1:
            self.are_of_batch = True
            self.divisors += losses[0][1]
        elif kinds == {_SUM}:
            self.are_of_batch = True
            if self._are_summed or not may_be_examples:
                self.is_sum = True
        elif may_be_examples and (rows != {of.examples} or of.examples == 1):
            self.are_of_batch = True
            self.divisors += losses[0][1]
            self.kinds = {_LISTED} if self._are_summed else set()
        elif kinds - {_MEAN, _OTHER}:
            self.kinds = kinds


def _is_mask(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype == torch.bool


def _constant(node: Any) -> Any:
    """Return what an operation multiplies or divides by, if that is constant; None: it is not."""
    functions = node.next_functions
    is_first = len(functions) > 1 and functions[0][0] is None
    if is_first and node.name() in _DIVISIONS:
        return None
    return getattr(node, "_saved_self" if is_first else "_saved_other", None)


def _losses_in(node: Any, of: Counts) -> list[tuple[Any, list[float]]]:
    """Return the operations that have computed the first losses in a list of them.

    Returns:
        The operations, and what they were divided by; empty: it is a list of something else.
    """
    elements = [each for each, _ in node.next_functions if each is not None]
    if any(prod(_shape(each)) != 1 for each in elements):
        return []
    found: list[tuple[Any, list[float]]] = []
    open_nodes: list[tuple[Any, list[float]]] = [(each, []) for each in elements[:_LISTED_LOSSES]]
    for _ in range(_LARGEST):
        if not open_nodes:
            break
        each, divisors = open_nodes.pop()
        name = each.name()
        if name in _PARTS_OF_A_NUMBER:
            factors = [inner for inner, _ in each.next_functions if inner is not None]
            if name in _FACTORS and len(factors) == 1:
                divisors = divisors + of.divisors(_constant(each), name)
            open_nodes += [(inner, divisors) for inner in factors]
        elif name not in _ELEMENTWISE and not name.endswith("AccumulateGrad") and not _shape(each):
            found.append((each, divisors))
    return found


def _rows_reduced(node: Any) -> int | None:
    """Return the number of rows of what an operation has reduced; None: it has none."""
    inner = next((each for each, _ in node.next_functions if each is not None), None)
    return None if inner is None else _rows(inner)


def _shape(node: Any) -> tuple[int, ...]:
    """Return the shape of what an operation has computed."""
    return tuple(node._input_metadata[0].shape)


def _is_over_rows(node: Any) -> bool:
    """Return whether an operation, such as a standard deviation, is over the first axis."""
    axes = getattr(node, "_saved_dim", None)
    if not isinstance(axes, tuple):
        return False
    inner = node.next_functions[0][0]
    rank = len(_shape(inner)) if inner is not None else 0
    return any(axis in (0, 2**64 - rank) for axis in axes)  # a negative axis is kept unsigned


def _rows(node: Any) -> int | None:
    shape = _shape(node)
    return shape[0] if shape else None


def _is_spread(leaf: torch.Tensor, shape: Sequence[int], examples: int) -> bool:
    """Return whether a leaf is of the batch, or its use has a row for each example, and it none."""
    has_rows = leaf.shape[:1] == (examples,)
    if has_rows and not isinstance(leaf, torch.nn.Parameter):
        return True
    return shape[:1] == (examples,) and not (has_rows and leaf.dim() == len(shape))


def _is_of_batch(node: Any, name: str, examples: int, had_rows: bool) -> bool:
    """Return whether an operation that is not elementwise has computed something of the batch.

    A product of a parameter, or of what is transposed, has other rows: the correlation of features
    over the batch, or a penalty on weights.
    """
    place = _PRODUCTS.get(name)
    if place is None:
        return not _is_over_rows(node) and (had_rows or _rows(node) == examples)
    for _ in range(8):
        node = node.next_functions[place][0]
        name = "" if node is None else node.name()
        if name.endswith("AccumulateGrad"):
            return not isinstance(node.variable, torch.nn.Parameter)
        if name in _TRANSPOSES:
            return False
        if name not in _ELEMENTWISE:
            return True
        place = 0
    return True


def _ignores_targets(node: Any, may_wait: bool) -> bool:
    """Return whether a mean leaves targets out (``ignore_index``); False if that is not read."""
    counted = getattr(node, "_saved_total_weight", None)
    if counted is None or node._saved_weight is not None:  # classes have other weights
        return False
    if counted.device.type != "cpu" and not may_wait:
        return False
    return int(counted) != node._saved_target.numel()

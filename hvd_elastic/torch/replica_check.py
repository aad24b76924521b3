"""Compares the parameters of the ranks now and then: after every step they must be alike.

A check looks at some numbers of some tensors, others each time, and takes one small reduction. The
values are compared, not their bits: processors of different kinds round differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from hvd_elastic.errors import ScriptError

if TYPE_CHECKING:
    from hvd_elastic.torch.context import Context

__all__ = ["check_replicas"]

_PERIOD_STEPS = 1024
"""A check takes 1 to 2 ms, so less than 0.1 % of the time where a step takes 2 ms or more."""
_TENSORS, _NUMBERS = 16, 4096
"""Tensors in one check, and numbers of each."""
_LEAST_TOLERANCE = 1e-10
"""Squared; below it, float64 sums of squares are inexact themselves."""
_NAMES_SHOWN = 3


def check_replicas(context: Context) -> None:
    """Compare parameters with the other ranks, if that is due; all ranks call it in each step.

    Due are the steps 1, 2, 4, ... and every 1024th. Ranks differ where the norm of the difference,
    relative to that of the parameter, is above the square root of the type's machine epsilon: 3e-4
    in float32. It is estimated from sums with random signs, which differ by about that norm (Alon,
    Matias and Szegedy, STOC 1996, section 2.2).

    Raises:
        ScriptError: parameters differ; names the first of them, and the ranks.
    """
    step = context.progress.step
    number = _number_of_check(step)
    state = context.state
    if number is None or context.engine.size == 1 or state is None:
        return
    parameters = _parameters(state.named_modules())
    if not parameters:
        return
    first = number * _TENSORS
    chosen = [
        parameters[(first + index) % len(parameters)]
        for index in range(min(_TENSORS, len(parameters)))
    ]
    sums = _sums([_some(tensor, number) for _, tensor in chosen])
    told = torch.cat([sums, sums[:, :1].square()], dim=1)
    told = context.engine.wait(context.engine.reduce_async(told, "hvd_elastic.replicas"))
    signed, squares, signed_squares = told.unbind(dim=1)
    differ = signed_squares - signed.square() > _tolerances(chosen) * squares
    if differ.any():
        _tell_difference(context, parameters)


def _number_of_check(step: int) -> int | None:
    """Return which check is due after so many steps; None for none."""
    if step >= _PERIOD_STEPS:
        return None if step % _PERIOD_STEPS else step // _PERIOD_STEPS + 9
    return step.bit_length() - 1 if step and not step & (step - 1) else None


def _tell_difference(context: Context, parameters: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Compare all parameters as a whole, and raise with those that differ."""
    own = torch.stack([_sums_of_all(tensor) for _, tensor in parameters])
    rows = context.engine.gather(own.unsqueeze(0), "hvd_elastic.replicas_whole")
    apart = (rows[:, :, 0] - rows[:1, :, 0]).square() > _tolerances(parameters) * rows[:1, :, 1]
    names = [
        name for (name, _), differs in zip(parameters, apart.any(dim=0), strict=True) if differs
    ]
    ranks = [f"rank {rank}" for rank, differs in enumerate(apart.any(dim=1).tolist()) if differs]
    if not names:  # less than the tolerance, as a whole
        return
    shown = ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
    raise ScriptError(
        f"after step {context.progress.step} the ranks hold different parameters: "
        f"{', '.join(ranks)} {'differs' if len(ranks) == 1 else 'differ'} from rank 0 in {shown} "
        f"({len(names)} of {len(parameters)} parameters in the State). Parameters have to change "
        "alike on all ranks: in the step of the optimizer given to hvd.DistributedOptimizer, or by "
        "code that does the same on each of them. Look for another optimizer, for a scheduler "
        "that is not in the State, and for a condition, a random number or a learning rate that "
        "differs between ranks"
    )


def _parameters(modules: dict[str, torch.nn.Module]) -> list[tuple[str, torch.Tensor]]:
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for module_name, module in modules.items():
        for name, parameter in module.named_parameters():
            if parameter.is_floating_point() and parameter.numel() and not parameter.is_sparse:
                found.setdefault(id(parameter), (f"{module_name}.{name}", parameter.detach()))
    return list(found.values())


def _some(tensor: torch.Tensor, number: int) -> torch.Tensor:
    flat = tensor.reshape(-1)
    start = number * _NUMBERS % flat.numel()
    return flat[start : start + _NUMBERS]


def _sums(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return, for each piece of at most _NUMBERS, the sum with random signs, and that of squares.

    Shape (pieces, 2), float64, on the CPU.
    """
    rows = torch.zeros(len(pieces), _NUMBERS, dtype=torch.float64, device=pieces[0].device)
    for row, piece in zip(rows, pieces, strict=True):
        row[: len(piece)].copy_(piece)
    return torch.stack([rows @ _signs(rows.device), rows.square().sum(dim=1)], dim=1).cpu()


def _sums_of_all(tensor: torch.Tensor) -> torch.Tensor:
    pieces = tensor.reshape(-1).split(_NUMBERS)
    parts = (pieces[at : at + _TENSORS] for at in range(0, len(pieces), _TENSORS))
    return torch.stack([_sums(part).sum(dim=0) for part in parts]).sum(dim=0)


@lru_cache(maxsize=16)
def _signs(device: torch.device) -> torch.Tensor:
    bits = np.random.PCG64(0).random_raw(_NUMBERS) & np.uint64(1)  # the same in any NumPy
    return torch.from_numpy(bits.astype(np.float64) * 2 - 1).to(device)


def _tolerances(parameters: Sequence[tuple[str, torch.Tensor]]) -> torch.Tensor:
    squared = [max(torch.finfo(tensor.dtype).eps, _LEAST_TOLERANCE) for _, tensor in parameters]
    return torch.tensor(squared, dtype=torch.float64)

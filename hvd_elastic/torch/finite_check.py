"""Finds out whether the averaged gradients of a step are finite, at little cost."""

from __future__ import annotations

import cmath
from collections.abc import Iterable

import torch

from hvd_elastic.training.planning.canaries import canaries


def checked_parameters(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the few parameters whose gradients tell whether those of all are finite."""
    every = list(parameters)
    return [every[index] for index in canaries([each.numel() for each in every])]


def are_finite(parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether gradients of parameters are finite.

    Those on a GPU count as finite, since reading a number would wait for it.
    """
    gradients = [p.grad for p in parameters if p.grad is not None and not p.grad.is_cuda]
    return all(map(is_finite, gradients))


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all numbers of a tensor are finite; on a GPU this waits for it."""
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    if values.dtype in (torch.float32, torch.float64) and values.is_contiguous():
        flat = values.view(-1)
        total = torch.dot(flat, flat)  # half the time of a sum
    else:
        total = values.sum()
    # A finite sum has finite terms only; an infinite one may also come from an overflow.
    return cmath.isfinite(total.item()) or bool(torch.isfinite(values).all())

"""Sums over the parameters of a model, used to compare ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from hvd_elastic.worker.checks.replica_check import parameters_of_check
from hvd_elastic.worker.frontend import TrainedSums

_PIECES = 16
"""Number of pieces of a tensor summed at once: bounds memory."""


def trained_sums(
    modules: Mapping[str, torch.nn.Module],
    signs: np.ndarray,
    number: int | None,
    shared: Mapping[torch.Tensor, torch.Tensor] | None = None,
) -> TrainedSums:
    """See :meth:`~hvd_elastic.worker.frontend.State.trained_sums`.

    Args:
        shared: what is compared in place of parameters that differ from rank to rank.
    """
    parameters = _parameters(modules, shared or {})
    chosen = parameters_of_check(parameters, number)
    if number is None:
        sums = np.array([_sums_of_all(each, signs) for _, each in chosen]).reshape(-1, 2)
    else:
        sums = _sums([_some(each, number, len(signs)) for _, each in chosen], signs)
    epsilons = np.array([torch.finfo(each.dtype).eps for _, each in chosen])
    return TrainedSums([name for name, _ in chosen], sums, epsilons, len(parameters))


def _parameters(
    modules: Mapping[str, torch.nn.Module], shared: Mapping[torch.Tensor, torch.Tensor]
) -> list[tuple[str, torch.Tensor]]:
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for module_name, module in modules.items():
        for name, parameter in module.named_parameters():
            if parameter.is_floating_point() and parameter.numel() and not parameter.is_sparse:
                # Frozen ones may differ, such as running averages of Keras, but count as a number,
                # so that a collective has the same shape on a rank that has unfrozen one.
                same = shared.get(parameter, parameter)
                values = same.detach() if parameter.requires_grad else parameter.new_zeros(1)
                found.setdefault(id(parameter), (f"{module_name}.{name}", values))
    return list(found.values())


def _some(tensor: torch.Tensor, number: int, length: int) -> torch.Tensor:
    flat = tensor.reshape(-1)
    start = number * length % flat.numel()
    return flat[start : start + length]


def _sums(pieces: Sequence[torch.Tensor], signs: np.ndarray) -> np.ndarray:
    """Return the sum with random signs and the sum of squares of each piece, on the CPU."""
    if not pieces:
        return np.zeros((0, 2))
    device = pieces[0].device
    rows = torch.zeros(len(pieces), len(signs), dtype=torch.float64, device=device)
    for row, piece in zip(rows, pieces, strict=True):
        row[: len(piece)].copy_(piece)
    signed = rows @ torch.from_numpy(signs).to(device)
    return torch.stack([signed, rows.square().sum(dim=1)], dim=1).cpu().numpy()


def _sums_of_all(tensor: torch.Tensor, signs: np.ndarray) -> np.ndarray:
    pieces = tensor.reshape(-1).split(len(signs))
    parts = (pieces[at : at + _PIECES] for at in range(0, len(pieces), _PIECES))
    return np.sum([_sums(part, signs).sum(axis=0) for part in parts], axis=0)

"""Collects squared norms of gradients during a step, to estimate the gradient noise scale.

The numbers stay on the device until all are read at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from hvd_elastic.worker.planning.samples import MOMENT_STEPS, Samples

_CHUNK_ELEMENTS = 4 << 20
"""Numbers of gradients handled at a time on a GPU: for Adam they are divided in a copy, whose
memory this bounds."""
_IN_CACHE = 1 << 16
"""The same on a CPU, where the copy fits into the cache of a core."""


class GradientStatistics(Samples):
    """Collects the squared norms of one optimizer's gradients.

    For Adam and related optimizers, gradients are first divided by the square root of the second
    moment, as the optimizer does (Pollux, OSDI 2021, section 3.1). The moments of the step before
    are used, which are the same for all passes and ranks.

    Args:
        optimizer: optimizer whose parameter groups are sampled; frozen parameters have no
            gradients and do not count.

    Attributes:
        group_of: number of the parameter group of each parameter.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(len(optimizer.param_groups), _read)
        self._optimizer = optimizer
        self.group_of = {
            parameter: number
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        self._preconditioned = all("betas" in group for group in optimizer.param_groups)
        self._passes: list[list[torch.Tensor]] = []
        self._ready = not self._preconditioned
        self._mean: list[list[torch.Tensor]] = []
        self._part_of = (0, 0)
        self._part: list[torch.Tensor] = []

    @property
    def ready(self) -> bool:
        if not self._ready:
            states = [self._optimizer.state.get(p, {}) for p in self.group_of]
            moments = [state for state in states if "exp_avg_sq" in state]
            # Others with betas, such as Adamax and Lion, have no second moment to divide by.
            self._ready = any(state["step"] >= MOMENT_STEPS for state in moments) or (
                not moments and any(states)
            )
        return self._ready

    def takes(self, gradient: torch.Tensor) -> bool:
        """Return whether gradients of this kind can be sampled together in flat memory."""
        on_cpu = gradient.device.type == "cpu"
        return on_cpu and not self._preconditioned and gradient.dtype in _EXACT

    def together(self, parameter: torch.Tensor) -> bool:
        """Return whether a gradient should be sampled with others, in one GPU kernel for many."""
        return parameter.is_cuda

    def part(self, parameters: Iterable[torch.Tensor], rank: int, ranks: int) -> list[torch.Tensor]:
        """Return the parameters whose averaged gradients ``rank`` samples for all ranks."""
        if self._part_of != (rank, ranks):
            self._part_of, self._part = (rank, ranks), parts_by_size(parameters, ranks)[rank]
        return self._part

    def forget_parts(self) -> None:
        """Divide other parameters among the ranks from now on."""
        self._part_of = (0, 0)

    def see(self, parameters: Iterable[torch.Tensor]) -> None:
        """Sample gradients of this pass, before they are weighted or averaged."""
        self._append_norms(parameters, self._pass())

    def see_flat(self, group: int, flat: torch.Tensor, factor: float) -> None:
        """Sample gradients of this pass in flat memory; ``factor``: that was applied to them."""
        self._pass()[group].append(_flat_squared_norm(flat).div_(factor * factor))

    def see_mean(self, group: int, flat: torch.Tensor, rank: int, ranks: int) -> None:
        """Sample the part of ``rank`` of averaged gradients in flat memory."""
        if not self._mean:
            self._mean = [[] for _ in range(self.groups)]
        part = flat[rank * len(flat) // ranks : (rank + 1) * len(flat) // ranks]
        self._mean[group].append(_flat_squared_norm(part))

    def _pass(self) -> list[list[torch.Tensor]]:
        """Return the squared norms in the pass so far, by group."""
        if not self._passes:
            self._passes = [[] for _ in range(self.groups)]
        return self._passes

    def end_pass(self, share: float) -> None:
        """End a pass; ``share``: its fraction of the step's examples, 0 for padding."""
        if share > 0:
            self.add_pass(share, self._sums(self._pass()))
        self._passes = []

    def end_step(
        self,
        step: int,
        examples: int,
        parameters: Iterable[torch.Tensor],
        loss_scale: torch.Tensor | None = None,
    ) -> None:
        """Sample the averaged gradients of a step, and store its sample.

        Args:
            step: number of optimizer steps taken before it.
            examples: examples of the step over all ranks together.
            parameters: parameters of this rank's part, see :func:`parts_by_size`; of a step of
                which :meth:`see_mean` has sampled flat memory, only those elsewhere count.
            loss_scale: factor of all gradients of the step; None: 1.
        """
        found = self._mean or [[] for _ in range(self.groups)]
        if self._mean:
            parameters = [p for p in parameters if p.grad is not None and not self.takes(p.grad)]
        self._append_norms(parameters, found)
        total = self._sums(found)
        factor = None
        if loss_scale is not None:
            factor = loss_scale.double().reciprocal().square().to(total.device)
        self.add_step(step, examples, total, factor)
        self.drop_step()

    def drop_step(self) -> None:
        self._passes, self._mean = [], []
        super().drop_step()

    def _append_norms(
        self, parameters: Iterable[torch.Tensor], norms: Sequence[list[torch.Tensor]]
    ) -> None:
        """Append the squared norms of the gradients to the lists of their groups."""
        together: list[list[torch.Tensor]] = [[] for _ in range(self.groups)]
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            group = self.group_of[parameter]
            if self.together(parameter) and not gradient.is_sparse:
                together[group].append(parameter)
            else:
                norms[group].append(self._squared_norm(parameter, gradient))
        for group, several in enumerate(together):
            for some in _chunks(several):
                norms[group].append(self._sum_of_squares(group, some))

    def _sum_of_squares(self, group: int, parameters: list[torch.Tensor]) -> torch.Tensor:
        """Return the sum of :meth:`_squared_norm` over parameters, with few GPU kernels."""
        gradients = [p.grad.detach() for p in parameters if p.grad is not None]
        if self._preconditioned:
            divisors = self._divisors(group, parameters)
            if divisors is None:
                return torch.stack(
                    [self._squared_norm(p, g) for p, g in zip(parameters, gradients, strict=True)]
                ).sum()
            gradients = list(torch._foreach_div(gradients, divisors))
        elif any(gradient.dtype.itemsize < 4 for gradient in gradients):
            gradients = [gradient.float() for gradient in gradients]
        return torch.stack(torch._foreach_norm(gradients)).double().square().sum()

    def _divisors(self, group: int, parameters: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """Return what :meth:`_divided` divides by for each; None: to be computed one by one."""
        states: list[dict[str, Any]] = [self._optimizer.state.get(p, {}) for p in parameters]
        if not all("exp_avg_sq" in state for state in states):
            return None
        if any(isinstance(s["step"], torch.Tensor) and s["step"].is_cuda for s in states):
            return None  # reading them would wait for the device
        settings = self._optimizer.param_groups[group]
        corrections = [1 - settings["betas"][1] ** float(state["step"]) for state in states]
        divisors = torch._foreach_sqrt([state["exp_avg_sq"] for state in states])
        torch._foreach_div_(divisors, [correction**0.5 for correction in corrections])
        torch._foreach_add_(divisors, settings["eps"])
        return list(divisors)

    def _sums(self, norms: list[list[torch.Tensor]]) -> torch.Tensor:
        own = next(iter(self.group_of))  # a part may have no gradient
        device = next((each.device for group in norms for each in group), own.device)
        zero = torch.zeros((), dtype=torch.float64, device=device)
        return torch.stack([torch.stack(group).sum() if group else zero for group in norms])

    def _squared_norm(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.detach()
        if gradient.is_sparse:
            if self._preconditioned:
                gradient = gradient.to_dense()
            else:
                gradient = gradient.coalesce().values()
        if self._preconditioned:
            divided = self._divided(parameter, gradient)
            if divided is not None:
                return torch.stack([_squared_norm(piece) for piece in divided]).sum()
        return _squared_norm(gradient)

    def _divided(
        self, parameter: torch.Tensor, gradient: torch.Tensor
    ) -> Iterator[torch.Tensor] | None:
        """Return a gradient as Adam divides it, on a CPU in pieces; None: it does not yet."""
        state: dict[str, Any] = self._optimizer.state.get(parameter, {})
        if "exp_avg_sq" not in state:
            return None
        moment = state["exp_avg_sq"]
        group = self._optimizer.param_groups[self.group_of[parameter]]
        step, gradients, moments = state["step"], (gradient,), (moment,)
        if not moment.is_cuda and _is_flat(moment) and _is_flat(gradient):
            step = float(step)
            gradients, moments = (each.view(-1).split(_IN_CACHE) for each in (gradient, moment))
        correction = 1 - group["betas"][1] ** step
        return (
            piece / (square / correction).sqrt_().add_(group["eps"])
            for piece, square in zip(gradients, moments, strict=True)
        )


_EXACT = (torch.float32, torch.float64)
"""Types in which squares are added up as they are."""


def _is_flat(gradient: torch.Tensor) -> bool:
    return gradient.is_contiguous() and gradient.dtype in _EXACT


def _squared_norm(gradient: torch.Tensor) -> torch.Tensor:
    if _is_flat(gradient):
        return _flat_squared_norm(gradient.view(-1))
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return torch.linalg.vector_norm(gradient, dtype=wide).double().square()


def _flat_squared_norm(flat: torch.Tensor) -> torch.Tensor:
    return torch.dot(flat, flat).double()


def _read(norms: list[torch.Tensor]) -> np.ndarray:
    found: np.ndarray = torch.stack(norms).cpu().numpy()
    return found


def parts_by_size(parameters: Iterable[torch.Tensor], ranks: int) -> list[list[torch.Tensor]]:
    """Divide parameters into one part for each rank, with about equal numbers of elements.

    The mean gradient is the same on all ranks, so each rank samples one part of it; the squared
    norm of the whole is the sum over the parts.
    """
    parts: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    elements = [0] * ranks
    for parameter in sorted(parameters, key=torch.Tensor.numel, reverse=True):
        fewest = elements.index(min(elements))
        parts[fewest].append(parameter)
        elements[fewest] += parameter.numel()
    return parts


def _chunks(parameters: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield consecutive parameters of one type in chunks of limited size."""
    chunk: list[torch.Tensor] = []
    elements = 0
    for parameter in parameters:
        full = elements + parameter.numel() > _CHUNK_ELEMENTS
        if chunk and (full or parameter.dtype != chunk[0].dtype):
            yield chunk
            chunk, elements = [], 0
        chunk.append(parameter)
        elements += parameter.numel()
    if chunk:
        yield chunk

"""The reductions of one optimizer's gradients in a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hvd_elastic.communicator.interface import gradient_prefix
from hvd_elastic.errors import ScriptError
from hvd_elastic.training.worker import Worker


class Reductions:
    """Reductions that have begun and were not awaited yet, by parameter.

    Args:
        worker: this process, whose communicator changes with the generation.
        names: names of the parameters.
    """

    def __init__(self, worker: Worker, names: Mapping[torch.Tensor, str]) -> None:
        self._worker = worker
        self._names = names
        self._prefix = gradient_prefix(0)
        self._begun: dict[torch.Tensor, tuple[Any, torch.Tensor, int]] = {}

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return parameter in self._begun

    def __len__(self) -> int:
        return len(self._begun)

    def number(self, number: int) -> None:
        """Set the optimizer's number among those that train, from 0."""
        self._prefix = gradient_prefix(number)

    def begin(self, parameter: torch.Tensor) -> None:
        """Begin to average a parameter's gradient."""
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            gradient = parameter.grad = gradient.to_dense()
        # Horovod's PyTorch binding has no bfloat16, and reduces contiguous memory only.
        reduced = gradient.float() if gradient.dtype == torch.bfloat16 else gradient.contiguous()
        self._begun[parameter] = (self._reduce(parameter, reduced), reduced, gradient._version)

    def begin_frozen(self, parameter: torch.Tensor) -> None:
        """Reduce a placeholder for a parameter that was frozen after the optimizer was wrapped.

        It has a shape that no gradient of the parameter has: if another rank has not frozen it,
        Horovod reports an error on all ranks, instead of having them wait for each other.
        """
        number = torch.zeros((1,) * (parameter.dim() + 1), device=parameter.device)
        self._begun[parameter] = (self._reduce(parameter, number), number, 0)

    def reduce_left_out(self, parameter: torch.Tensor, *, unaveraged: bool = False) -> None:
        """Reduce a number of another shape than a gradient or a placeholder, and wait for it.

        Args:
            parameter: parameter under whose name it is reduced.
            unaveraged: the step is not left out, but goes on in ``no_sync()``: one more shape.

        Raises:
            ScriptError: another rank has reduced something else under the name.
        """
        dimensions = parameter.dim() + 2 + unaveraged
        number = torch.zeros((1,) * dimensions, device=parameter.device)
        self._worker.communicator.wait(self._reduce(parameter, number))

    def refuse_changed(self) -> None:
        """Raise ScriptError if the script has changed a gradient while it was being averaged.

        Gradients on a GPU are not checked: the reduction itself may raise their version counter.
        """
        for parameter, (_, _, version) in self._begun.items():
            gradient = parameter.grad
            if gradient is not None and not gradient.is_cuda and gradient._version != version:
                raise ScriptError(
                    f"the gradient of {self._names[parameter]!r} was changed while it was being "
                    "averaged over the ranks, so they would go apart; call "
                    "optimizer.synchronize() after backward() and before clipping, or changing "
                    "gradients in another way"
                )

    def wait(self, parameter: torch.Tensor) -> None:
        """Wait until a parameter's gradient holds the average.

        Raises:
            ScriptError: the ranks have reduced tensors of different shapes.
        """
        handle, reduced, _ = self._begun[parameter]
        self._worker.communicator.wait(handle)
        gradient = parameter.grad
        if gradient is not None and reduced is not gradient:
            gradient.copy_(reduced.reshape(gradient.shape))

    def clear(self) -> None:
        """Forget all: they have ended, or the ring is broken."""
        self._begun.clear()

    def _reduce(self, parameter: torch.Tensor, reduced: torch.Tensor) -> Any:
        name = self._prefix + self._names[parameter]
        return self._worker.communicator.reduce_async(reduced, name)

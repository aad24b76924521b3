"""Mixed precision: a gradient scaler that knows of averages over ranks and of passes of a step."""

from __future__ import annotations

from typing import Any

import torch

from hvd_elastic.torch.optimizer import GradientAverager
from hvd_elastic.training import context
from hvd_elastic.training.rollback import StepVoidedError
from hvd_elastic.training.step import Stage

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """:class:`torch.amp.GradScaler` for an optimizer of :func:`DistributedOptimizer`.

    Used like PyTorch's::

        scaler = hvd.GradScaler()
        ...
        with torch.autocast(hvd.device().type, torch.float16):
            loss = loss_function(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # before clipping; may be left out
        scaler.step(optimizer)
        scaler.update()

    PyTorch's own looks at the gradients of one rank, in place, while they are being averaged. This
    one waits for the average, so all ranks find the same, take or leave out the same steps and have
    the same scale; and while a step is made in several passes it leaves the scale alone. A step
    that is left out counts as one of ``skipped_steps``. It is part of the run's state by itself:
    newcomers and checkpoints have its scale.

    Args:
        device: type of the device, ``"cuda"`` or ``"cpu"``; that of this process by default.
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in PyTorch.
    """

    def __init__(
        self,
        device: str | None = None,
        *,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        self._context = context.current()
        self._type = device or ("cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(
            self._type, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self._looked = False
        self._context.keep("_grad_scaler", self)

    def scale(self, outputs: Any) -> Any:
        """See PyTorch's; called once for each pass."""
        averager: Any = self._context.worker.averager
        if self.is_enabled() and averager is not None:
            one = torch.ones((), device=self._type)
            # On the device: reading the number would wait for it.
            averager.scaled_by(self.forget, super().scale(one))
        return super().scale(outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Wait for the average and divide it; between the passes of a step do neither."""
        averager = self._averager_of(optimizer)
        if averager is not None:
            more = self._context.step.accumulating
            averager.synchronize()
            if more or self._context.step.stage is Stage.VOIDED:
                return
        self._looked = True
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **options: Any) -> Any:
        """Take the optimizer's step where the averaged gradients are finite."""
        averager = self._averager_of(optimizer)
        if averager is None or not self.is_enabled():  # the optimizer's own step waits
            self._looked = True
            return super().step(optimizer, *args, **options)
        if self._context.step.accumulating:
            averager.absorb()
            return None
        averager.synchronize()
        if self._context.step.stage is Stage.VOIDED:
            averager.reset()
            raise StepVoidedError
        if not self._looked:
            self.unscale_(optimizer)
        ended = averager.steps
        result = super().step(optimizer, *args, **options)
        if averager.steps == ended:
            averager.skip()
        return result

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adjust the scale after a step, and not after a pass of one."""
        if self.is_enabled() and not self._looked:
            return
        self._looked = False
        super().update(new_scale)

    def forget(self) -> None:
        """The step was called off; it is done again."""
        self._looked = False
        # Or the next unscale_() is refused as the second one of a step.
        self._per_optimizer_states.clear()

    def _averager_of(self, optimizer: torch.optim.Optimizer) -> GradientAverager | None:
        averager: Any = self._context.worker.averager
        return averager if averager is not None and averager.owns(optimizer) else None

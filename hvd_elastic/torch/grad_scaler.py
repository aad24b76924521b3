"""Gradient scaler for mixed precision with gradients averaged over ranks and several passes."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from hvd_elastic.errors import ScriptError
from hvd_elastic.script.state import SCALER
from hvd_elastic.torch.optimizer import averager_of
from hvd_elastic.worker import context
from hvd_elastic.worker.rollback import StepVoidedError
from hvd_elastic.worker.step import Stage


class GradScaler(torch.amp.GradScaler):
    """A :class:`torch.amp.GradScaler` for an optimizer of :func:`DistributedOptimizer`.

    It is used like PyTorch's::

        scaler = hvd.GradScaler()
        ...
        with torch.autocast(hvd.device().type, torch.float16):
            loss = loss_function(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # before clipping; may be left out
        scaler.step(optimizer)
        scaler.update()

    PyTorch's own scaler checks and changes the gradients of one rank while they are being averaged.
    This one waits for the average, so all ranks take or skip the same steps and have the same
    scale; between the passes of a step it does not change the scale. A skipped step counts in
    ``skipped_steps``. The scaler becomes part of the run's state without further code, so newcomers
    and checkpoints get its scale. Make it before the training function; a script may have several.

    Args:
        device: type of the device, ``"cuda"`` or ``"cpu"``; by default that of this process.
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in PyTorch.

    Raises:
        ScriptError: the training function runs.
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
        if self._context.worker.in_train:
            raise ScriptError(
                "hvd.GradScaler() is called in the training function, which is called again after "
                "a failure, and a worker that joins would not have its scale; make it before"
            )
        self._type = device or ("cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(
            self._type, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self._looked = False
        names = (f"{SCALER}{number or ''}" for number in itertools.count())
        self._context.keep(next(n for n in names if n not in self._context.state_parts), self)

    @classmethod
    def like(cls, scaler: torch.amp.GradScaler) -> GradScaler:
        """Return one with the options of PyTorch's, in place of which it is used."""
        return cls(
            init_scale=scaler._init_scale,
            growth_factor=scaler.get_growth_factor(),
            backoff_factor=scaler.get_backoff_factor(),
            growth_interval=scaler.get_growth_interval(),
            enabled=scaler.is_enabled(),
        )

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss by the scale, as PyTorch's does; called once for each pass."""
        averagers: Any = self._context.worker.averagers
        if self.is_enabled() and averagers:
            one = torch.ones((), dtype=torch.float32, device=self._type)
            # A tensor on the device, since reading the number would wait for the device.
            scale = super().scale(one)
            for averager in averagers:
                averager.scaled_by(self.forget, scale)
        return super().scale(outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Wait for the averaged gradients and unscale them; between passes do nothing."""
        averager = averager_of(optimizer)
        if averager is not None:
            more = self._context.step.accumulating
            averager.synchronize()
            if more or self._context.step.stage is Stage.VOIDED:
                return
        self._looked = True
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **options: Any) -> Any:
        """Take the optimizer's step if the averaged gradients are finite."""
        averager = averager_of(optimizer)
        if averager is None or not self.is_enabled():  # the optimizer's own step waits
            self._looked = True
            return super().step(optimizer, *args, **options)
        more = self._context.step.accumulating
        averager.synchronize()
        if more:
            return None
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
        """Adjust the scale after a step; do nothing after any other pass."""
        if self.is_enabled() and not self._looked:
            return
        self._looked = False
        super().update(new_scale)

    def forget(self) -> None:
        """Forget the step in flight, which was called off and is repeated."""
        self._looked = False
        # Otherwise PyTorch would refuse the next unscale_() as the second of one step.
        self._per_optimizer_states.clear()

    def snapshot(self) -> list[torch.Tensor | None] | None:
        """Return a copy of scale and growth count, if a body of several steps may be undone."""
        if not self._context.rollback.keeps_aside:
            return None
        return [_clone(self._scale), _clone(self._growth_tracker)]

    def roll_back(self, values: list[torch.Tensor | None] | None) -> None:
        """Restore an earlier :meth:`snapshot`."""
        if values is not None:
            self._scale, self._growth_tracker = map(_clone, values)


def _clone(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.clone()

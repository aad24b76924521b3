"""Steps of an optimizer with an adaptive batch: gradients are sampled, learning rates scaled."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from hvd_elastic.communicator.interface import Communicator
from hvd_elastic.model.lr_rules import Rule, chosen_rule, scaled_betas, scaled_epsilon
from hvd_elastic.torch.gradient_buckets import Bucket
from hvd_elastic.torch.gradient_statistics import GradientStatistics
from hvd_elastic.worker.context import Context
from hvd_elastic.worker.planning.adaptive import AdaptivePlanner


class StepSampling:
    """Decides whether a step is sampled, and measures what that costs.

    On a CPU gradients are sampled in the flat memory of their buckets: on the way there, and again
    as soon as a bucket holds the average, while others are still awaited. What cannot be sampled in
    this way is sampled gradient by gradient.

    Args:
        context: training context of this process.
        optimizer: optimizer whose gradients are sampled.

    Attributes:
        loss_scale: factor of the loss and so of all gradients of the step; None: 1.
    """

    def __init__(self, context: Context, optimizer: torch.optim.Optimizer) -> None:
        self._context = context
        self.statistics = GradientStatistics(optimizer)
        self.loss_scale: torch.Tensor | None = None
        self._is_on = False

    def begin_step(self) -> None:
        """Decide whether the step is sampled, before its first gradient is used."""
        if len(self._context.step.passes) != 1:
            return
        self._is_on = self._context.is_sampled()
        if self._is_on:
            self._context.planner.sampling_cost.step_begins()

    def leave_out(self) -> None:
        self._is_on = False

    def see(self, parameters: Iterable[torch.Tensor]) -> None:
        """Sample gradients of this pass, before they are weighted or averaged."""
        if self._is_on:
            with self._context.planner.sampling_cost:
                self.statistics.see(parameters)

    def move(self, bucket: Bucket, factor: float, *, checks: bool) -> None:
        """Sample the gradients of this pass, and add them to their bucket, times a factor.

        Args:
            checks: see :meth:`Bucket.add_gradients`.
        """
        if bucket.holds or not factor or not self._takes(bucket):
            self.see(bucket.parameters)
            bucket.add_gradients(factor, checks=checks)
            return
        group = self.statistics.group_of[bucket.parameters[0]]
        cost = self._context.planner.sampling_cost

        def sample_flat(flat: torch.Tensor) -> None:
            with cost:
                self.statistics.see_flat(group, flat, factor)

        bucket.add_gradients(factor, sample_flat, checks=checks)

    def see_mean(self, bucket: Bucket) -> None:
        """Sample this rank's part of a bucket that holds averages."""
        if self._takes(bucket):
            group, ring = self.statistics.group_of[bucket.parameters[0]], self._communicator
            with self._context.planner.sampling_cost:
                self.statistics.see_mean(group, bucket.flat, ring.rank, ring.size)

    def _takes(self, bucket: Bucket) -> bool:
        return self._is_on and bool(bucket.parameters) and self.statistics.takes(bucket.flat)

    @property
    def _communicator(self) -> Communicator:
        return self._context.worker.communicator

    def end_pass(self, share: float) -> None:
        """End a pass; ``share``: its fraction of the step's examples, 0 for padding."""
        if self._is_on:
            self.statistics.end_pass(share)

    def end_step(self, parameters: Iterable[torch.Tensor]) -> None:
        """Sample this rank's part of the averages that are left, and store the step's sample."""
        if not self._is_on:
            return
        ring, cost = self._communicator, self._context.planner.sampling_cost
        step, examples = self._context.worker.progress.step, self._context.step.examples
        with cost:
            part = self.statistics.part(parameters, ring.rank, ring.size)
            self.statistics.end_step(step, examples, part, self.loss_scale)
        cost.step_ends()
        self._is_on = False

    def drop_step(self) -> None:
        """Drop what was sampled of the step in flight."""
        self._is_on = False
        self.statistics.drop_step()


class AdaptiveRates:
    """The learning rate of an optimizer whose batch may adapt.

    Args:
        rule: learning-rate rule; None: that which suits the optimizer.

    Attributes:
        rule: learning-rate rule.
        adapts: whether the batch adapts.
        gain: progress of the latest step with a whole batch, in steps at the initial batch size.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, rule: str | Rule | None) -> None:
        self._optimizer = optimizer
        has_betas = all("betas" in group for group in optimizer.param_groups)
        self.rule = chosen_rule(rule, has_betas=has_betas)
        self.adapts = False
        self.gain = 1.0

    @contextlib.contextmanager
    def scaled(self, planner: AdaptivePlanner) -> Iterator[None]:
        """Change learning rate, betas and epsilon of each parameter group while a step is taken.

        Outside of a step the groups have the user's values, so schedulers work as if the batch had
        its initial size.
        """
        *adjustments, whole = planner.adjustments()
        self.gain = whole.gain
        before: list[dict[str, Any]] = []
        for group, adjustment in zip(self._optimizer.param_groups, adjustments, strict=True):
            changed: dict[str, Any] = {"lr": group["lr"] * adjustment.factor}
            if adjustment.rate != 1.0 and "betas" in group:
                changed["betas"] = scaled_betas(group["betas"], adjustment.rate)
                if "eps" in group:
                    changed["eps"] = scaled_epsilon(group["eps"], adjustment.rate)
            before.append({name: group[name] for name in changed})
            group.update(changed)
        try:
            yield
        finally:
            for group, own in zip(self._optimizer.param_groups, before, strict=True):
                group.update(own)

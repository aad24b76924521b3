"""Which parameters of an optimizer are trained, as the script freezes and unfreezes them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hvd_elastic.errors import ScriptError


class TrainedParameters:
    """Keeps the parameters of an optimizer that are frozen out of the reductions.

    Until they are unfrozen they cost nothing.

    Args:
        optimizer: the optimizer when it is wrapped.
        names: all its parameters in its order, with their names.

    Attributes:
        names: the trained ones: those that require a gradient, or have one. They are the same on
            all ranks, newcomers too, since these receive what is frozen with the state, and no rank
            has gradients when a generation begins.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> None:
        self._optimizer = optimizer
        self._sizes = self._group_sizes()
        self._every = dict(names)
        self._trained: list[bool] = []
        self.names: dict[torch.Tensor, str] = {}
        self.follow()

    def follow(self) -> bool:
        """Follow what the script has frozen and unfrozen; return whether ``names`` has changed."""
        trained = self._trained_now()
        if trained == self._trained:
            return False
        self._trained = trained
        every = zip(self._every.items(), trained, strict=True)
        self.names.clear()
        self.names.update(named for named, is_trained in every if is_trained)
        return True

    def drop_late(self) -> None:
        """Drop gradients of parameters that were unfrozen since :meth:`follow`, in a step.

        The ranks do not average them in this step, in which these parameters stay as they are.
        """
        if self._trained_now() != self._trained:
            for parameter in self._every:
                if parameter not in self.names:
                    parameter.grad = None

    def shared_with(self, other: TrainedParameters) -> str:
        """Return the name of a parameter that another optimizer has too, or ""."""
        return next((name for each, name in self._every.items() if each in other._every), "")

    def refuse_new(self) -> None:
        """Raise ScriptError if the optimizer got parameters after it was wrapped."""
        if self._group_sizes() != self._sizes:
            raise ScriptError(
                "optimizer.add_param_group() after DistributedOptimizer(...), or a parameter that "
                "was put into a group: gradients of what was added are not averaged, and a worker "
                "that joins could not take over the optimizer's state. Give the optimizer all "
                "parameters before that, and freeze those that are to be trained later "
                "(requires_grad=False)"
            )

    def _group_sizes(self) -> list[int]:
        return [len(group["params"]) for group in self._optimizer.param_groups]

    def _trained_now(self) -> list[bool]:
        return [each.requires_grad or each.grad is not None for each in self._every]

"""Which parameters of an optimizer are trained, and whether the script changes them itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

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
        self._versions: dict[torch.Tensor, int] = {}
        self._hooks: dict[torch.Tensor, Any] = {}
        self._is_told = False
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

    def hook(self, on_ready: Callable[[torch.Tensor], None]) -> None:
        """Have a backward pass call a function with each of these whose gradient it has added."""
        for parameter in self.names:
            if parameter not in self._hooks and parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(on_ready)
                self._hooks[parameter] = hook

    def unhook(self) -> None:
        """Undo :meth:`hook`."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def drop_late(self) -> None:
        """Drop gradients of parameters that were unfrozen since :meth:`follow`, in a step.

        The ranks do not average them in this step, in which these parameters stay as they are.
        """
        if self._trained_now() != self._trained:
            for parameter in self._every:
                if parameter not in self.names:
                    parameter.grad = None

    def watch(self) -> None:
        """Note what the parameters are when a loop body begins, for :meth:`changed`."""
        self._versions = {parameter: parameter._version for parameter in self.names}

    def changed(self) -> str:
        """Return once the name of a parameter that was changed in place since :meth:`watch`.

        An empty text: there is none, or one was told before.
        """
        versions, self._versions = self._versions, {}
        found = (p for p, version in versions.items() if p._version != version)
        name = "" if self._is_told else next((self._every[each] for each in found), "")
        self._is_told |= bool(name)
        return name

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

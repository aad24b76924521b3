"""Finds parameters that an optimizer got, or that began to learn, after it was wrapped."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hvd_elastic.errors import ScriptError


class LateParameters:
    """Parameters whose gradients are not averaged.

    Args:
        optimizer: the optimizer when it is wrapped.
        frozen: its parameters that need no gradient then, with their names.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, frozen: Mapping[torch.Tensor, str]
    ) -> None:
        self._optimizer = optimizer
        self._frozen = frozen
        self._groups = len(optimizer.param_groups)

    def refuse(self) -> None:
        """Raise ScriptError if the next step would change such a parameter."""
        late = [
            name
            for parameter, name in self._frozen.items()
            if parameter.requires_grad and parameter.grad is not None
        ]
        if late:
            raise ScriptError(
                f"parameter {late[0]} was frozen when DistributedOptimizer(...) was made, so its "
                "gradients are not averaged. Have it learn from the start, with a learning rate of "
                "0 until it shall"
            )
        if len(self._optimizer.param_groups) > self._groups:
            raise ScriptError(
                "optimizer.add_param_group() after DistributedOptimizer(...): gradients of what "
                "was added are not averaged. Give the optimizer all groups before that, with a "
                "learning rate of 0 until they shall learn"
            )

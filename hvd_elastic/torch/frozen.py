"""Parameters that are frozen at first and may be trained later."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hvd_elastic.errors import ScriptError
from hvd_elastic.training.worker import Worker


class FrozenParameters:
    """Keeps the parameters of an optimizer that require no gradient out of the reductions.

    The script may unfreeze them later. Until then a frozen model costs nothing.

    Args:
        optimizer: the optimizer when it is wrapped.
        names: all its parameters in its order, with their names.

    Attributes:
        trained: the other parameters, in an order that ranks which join later have in common.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> None:
        self._optimizer = optimizer
        self._groups = len(optimizer.param_groups)
        self._names = dict(names)
        self._frozen = self._frozen_now()
        self._generation = 0
        self.trained = {p: name for p, name in names.items() if p.requires_grad}

    def follow(self, worker: Worker) -> bool:
        """Follow what the script has frozen and unfrozen; return whether ``trained`` changes.

        All ranks call this in each step. In the first one of a generation they begin anew, since
        newcomers know only what the received state has frozen. After that a parameter that is
        frozen stays among the trained ones, and one that is unfrozen becomes one of them. A rank
        that is alone in it waits for the others in a collective of its own, from which the leader
        sees what differs.
        """
        is_first, self._generation = worker.generation != self._generation, worker.generation
        if is_first:
            now = self._frozen_now()
        else:
            now = {p: name for p, name in self._frozen.items() if not p.requires_grad}
        if now.keys() == self._frozen.keys():
            return False
        if worker.communicator.size > 1 and not is_first:
            first = next(name for p, name in self._frozen.items() if p.requires_grad)
            handle = worker.communicator.reduce_async(torch.zeros(1), f"unfrozen {first}")
            worker.communicator.wait(handle)
        self._frozen = now
        self.trained.clear()
        self.trained.update((p, name) for p, name in self._names.items() if p not in now)
        return True

    def shared_with(self, other: FrozenParameters) -> str:
        """Return the name of a parameter that another optimizer has too, or ""."""
        return next((name for each, name in self._names.items() if each in other._names), "")

    def refuse_new_groups(self) -> None:
        """Raise ScriptError if the optimizer got a parameter group after it was wrapped."""
        if len(self._optimizer.param_groups) > self._groups:
            raise ScriptError(
                "optimizer.add_param_group() after DistributedOptimizer(...): gradients of what "
                "was added are not averaged, and a worker that joins could not take over the "
                "optimizer's state. Give the optimizer all groups before that, and freeze those "
                "that are to be trained later (requires_grad=False)"
            )

    def _frozen_now(self) -> dict[torch.Tensor, str]:
        return {p: name for p, name in self._names.items() if not p.requires_grad}

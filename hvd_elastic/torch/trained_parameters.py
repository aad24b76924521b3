"""Trained parameters of an optimizer, and gradients that earlier batches have left in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import compress
from typing import Any

import torch

from hvd_elastic.errors import ScriptError
from hvd_elastic.torch.gradient_buckets import content_of, memory_of
from hvd_elastic.torch.tensor_forms import form_of, lay_out


class TrainedParameters:
    """Keeps the parameters of an optimizer that are frozen out of the reductions.

    Until they are unfrozen they cost nothing. The script may also convert parameters in training:
    ``model.double()``, ``model.to(memory_format=torch.channels_last)``.

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
        self._addresses: list[int | None] = []
        self._forms: list[tuple[Any, ...]] = []
        self._frozen: list[torch.Tensor] = []
        self._seen: dict[torch.Tensor, tuple[int, int, int]] = {}
        self._hooks: dict[torch.Tensor, Any] = {}
        self._is_told = False
        self.names: dict[torch.Tensor, str] = {}
        self.follow()

    def follow(self) -> bool:
        """Follow what the script has frozen, unfrozen and converted since the last call.

        The optimizer's state gets the strides of parameters that were converted, as fused
        optimizers need it.

        Returns:
            Whether other gradients are to be averaged, or gradients of other types, devices or
            strides.
        """
        addresses = [
            each.data_ptr() if each.requires_grad or each.grad is not None else None
            for each in self._every
        ]
        # Looking at the forms would take longer, and one that changes needs other memory.
        if addresses == self._addresses:
            return False
        self._addresses = addresses
        trained = [address is not None for address in addresses]
        names = dict(compress(self._every.items(), trained))
        forms = [form_of(parameter) for parameter in names]
        if names == self.names and forms == self._forms:
            return False
        self._frozen = [each for each in self._every if each not in names]
        self._forms = forms
        self.names.clear()
        self.names.update(names)
        for parameter in names:
            lay_out(self._optimizer.state.get(parameter, {}), parameter)
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
        for parameter in self._frozen:
            parameter.grad = None

    def watch(self) -> None:
        """Note what the parameters are when a loop body begins, for :meth:`changed`."""
        self._seen = self._look()

    def changed(self) -> str:
        """Return once the name of a parameter that was changed since :meth:`watch`.

        Also through ``p.data``. An empty text: there is none, or one was told before.
        """
        seen, self._seen = self._seen, {}
        if self._is_told or not seen:
            return ""
        now = self._look()
        found = (each for each, what in seen.items() if now.get(each, what) != what)
        name = next((self._every[each] for each in found), "")
        self._is_told = bool(name)
        return name

    def _look(self) -> dict[torch.Tensor, tuple[int, int, int]]:
        return {parameter: memory_of(parameter, content=True) for parameter in self.names}

    def weight_sums(self) -> list[tuple[str, int]]:
        """Return names, and a sum over a part of each, since all would take time."""
        return [
            (name, content_of(each[:1] if each.ndim else each)) for each, name in self.names.items()
        ]

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


class LeftGradients:
    """Gradients that a loop body has computed, and neither used in a step nor cleared.

    They are not part of the state: a worker that joins lacks them, and a failure drops them. So a
    later body may clear them, but not add to them or take a step with them.
    """

    def __init__(self) -> None:
        self._left: dict[torch.Tensor, tuple[torch.Tensor, int]] = {}
        self._steps = -1

    def __bool__(self) -> bool:
        """Return whether a body has left gradients that are neither used nor cleared yet."""
        return bool(self._left)

    def begin_body(self, steps: int) -> bool:
        """Begin a loop body; return whether the one before ended without a step.

        Args:
            steps: number of steps of the optimizer so far.
        """
        self._left.clear()
        before, self._steps = self._steps, steps
        return steps == before

    def note_left(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note the gradients of these parameters, which the earlier body has left."""
        self._left = {p: (p.grad, p.grad._version) for p in parameters if p.grad is not None}

    def added(self, parameter: torch.Tensor) -> bool:
        """Return whether a backward pass has just added to a gradient of an earlier body."""
        found = self._left.pop(parameter, None)
        if found is None:
            return False
        gradient, version = found
        # The pass has changed it once; clearing it in place was a change too.
        if parameter.grad is not gradient or gradient._version != version + 1:
            return False
        self._left[parameter] = gradient, version + 1
        return True

    def held(self) -> torch.Tensor | None:
        """Return a parameter whose gradient is, in part at least, that of an earlier body."""
        for parameter, (gradient, version) in self._left.items():
            if parameter.grad is gradient and gradient._version == version:
                return parameter
        return None

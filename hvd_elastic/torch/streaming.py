"""Streaming DiLoCo: the ranks meet for one fragment of the parameters after the other.

A period ends with the exchange of one fragment, which may begin some batches earlier, so at its end
nothing is on its way: there progress moves, hosts join, and a failure goes back to. In between the
ranks' parameters differ. What all of them share, the weights after the last outer step of each
fragment, is a part of the State.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hvd_elastic.errors import ScriptError
from hvd_elastic.torch.compression import Compression
from hvd_elastic.torch.local_steps import LocalAverager, PeriodGradients, gradients_aside
from hvd_elastic.torch.reductions import Reductions


class SharedWeights:
    """The weights that all ranks share, as a part of the State.

    Args:
        names: parameters that are trained, with their names.

    Attributes:
        fragment: number of the fragment that is exchanged next; -1: training has not begun.
        of: shared weights by parameter.
    """

    def __init__(self, names: Mapping[torch.Tensor, str]) -> None:
        self._names = dict(names)
        self.of = {parameter: parameter.detach().clone() for parameter in names}
        self.fragment = -1

    def begin(self) -> None:
        """Take over the parameters with which training begins, which all ranks have received."""
        if self.fragment < 0:
            self.fragment = 0
            for parameter, weight in self.of.items():
                weight.copy_(parameter.detach())

    def state_dict(self) -> dict[str, Any]:
        """Return the weights by name, and the number of the fragment."""
        return {
            "fragment": self.fragment,
            "weights": dict(zip(self._names.values(), self.of.values(), strict=True)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set them to what :meth:`state_dict` returned."""
        self.fragment = state["fragment"]
        for parameter, name in self._names.items():
            self.of[parameter].copy_(state["weights"][name])


class FragmentGradients(PeriodGradients):
    """What the ranks have learnt of a fragment, whose parameters stay the same."""

    def follow(self) -> None:
        if self.trained.follow():
            raise ScriptError(
                "parameters were frozen, unfrozen or converted in a training with "
                "hvd.LocalOptimizer(fragments=...), whose fragments stay as they are. Do it "
                "before, or leave fragments, delay and mix out"
            )


class StreamingAverager(LocalAverager):
    """Averages one fragment in a period; see ``LocalOptimizer``.

    Args:
        inner, outer, names, every, compression: as of :class:`LocalAverager`; ``every`` is the
            number of batches between two fragments.
        parts: number of fragments, of about the same size.
        delay: batches between the beginning of an exchange and the use of its result.
        mix: part of a rank's own parameters in what it continues with.
    """

    gradients_type = FragmentGradients

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        outer: torch.optim.Optimizer,
        names: dict[int, str],
        every: int,
        compression: Compression,
        *,
        parts: int,
        delay: int,
        mix: float,
    ) -> None:
        self._delay, self._mix = delay, mix
        self._sent: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        """Parameters whose exchange has begun, with what is averaged."""
        super().__init__(inner, outer, names, every, compression)
        self.shared = SharedWeights(self.gradients.names)
        self._whole, self._all = self.gradients.reductions, list(self.gradients.names)
        self._parts = _divide(self.gradients.names, parts)
        group_of = self.gradients.sampling.statistics.group_of
        self._fragments = [
            Reductions(self._context.worker, part, group_of, compression) for part in self._parts
        ]
        for number, each in enumerate(self._fragments, 1):
            each.number(number)

    def own_tensors(self) -> Iterator[torch.Tensor]:
        yield from super().own_tensors()
        yield from self.shared.of

    def shared_weights(self) -> dict[torch.Tensor, torch.Tensor]:
        return self.shared.of

    @property
    def flags_meet(self) -> str:
        return ""  # they have a reduction of their own

    def forget(self) -> None:
        super().forget()
        self.gradients.reductions = self._whole

    def reset(self) -> None:
        super().reset()
        self._sent = []

    def _begin_period(self) -> None:
        self.shared.begin()
        super()._begin_period()

    def _inner_step_taken(self) -> None:
        step = self._context.step
        if self._delay and step.continues and len(step.passes) == self._every - self._delay:
            self._send(whole=False)

    def _send(self, *, whole: bool) -> None:
        """Begin to average how far this rank is from the shared weights."""
        fragment = self.shared.fragment
        gradients = self.gradients
        gradients.reductions = self._whole if whole else self._fragments[fragment]
        parameters = self._all if whole else list(self._parts[fragment])
        with gradients_aside(parameters):
            with torch.no_grad():
                for parameter in parameters:
                    parameter.grad = self.shared.of[parameter] - parameter
            if self._context.worker.communicator.size > 1:
                gradients.open_last()
                for bucket in gradients.reductions.waiting:
                    checks = gradients.reductions.checks
                    gradients.sampling.move(bucket, gradients.factor, checks=checks)
                    gradients.reductions.reduce_bucket(bucket, later=False)
            self._sent = [(parameter, parameter.grad) for parameter in parameters]

    def _end_period(self) -> None:
        whole = self._ends_whole
        if whole and self._sent:  # the loop ends before its time: all of it is averaged again
            if self._context.worker.communicator.size > 1:
                self.gradients.reductions.wait()
            self._sent = []
        if not self._sent:
            self._send(whole=whole)
        sent, self._sent = self._sent, []
        own = {parameter: parameter.detach().clone() for parameter, _ in sent}
        with gradients_aside(self._every_parameter()):
            with torch.no_grad():
                for parameter, difference in sent:
                    parameter.grad = difference
                    parameter.copy_(self.shared.of[parameter])
            self._optimizer.step()
        if self._start.is_taken:  # else the average was not finite
            with torch.no_grad():
                for parameter, mine in own.items():
                    self.shared.of[parameter].copy_(parameter)
                    if self._mix and not whole:
                        parameter.lerp_(mine, self._mix)
            self.shared.fragment = 0 if whole else (self.shared.fragment + 1) % len(self._parts)
        self._start.drop()


def _divide(names: Mapping[torch.Tensor, str], parts: int) -> list[dict[torch.Tensor, str]]:
    """Divide parameters, in their order, into so many parts of about the same number of bytes."""
    total, before = sum(each.nbytes for each in names), 0
    found: list[dict[torch.Tensor, str]] = [{} for _ in range(parts)]
    for left, (parameter, name) in zip(range(len(names), 0, -1), names.items(), strict=True):
        middle = (before + parameter.nbytes / 2) / max(total, 1)
        empty = next((number for number, part in enumerate(found) if not part), parts)
        # Each part gets at least one.
        number = min(int(middle * parts), parts - 1, empty)
        if parts - empty >= left:
            number = empty
        found[number][parameter] = name
        before += parameter.nbytes
    return found

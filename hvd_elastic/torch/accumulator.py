"""Sums over all ranks that outlive a change of the world."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hvd_elastic.errors import ScriptError
from hvd_elastic.torch import context

__all__ = ["Accumulator"]


class Accumulator(Mapping[str, float]):
    """Adds up numbers by name: on each rank as they come, over the ranks when asked to.

    For losses and hits of an epoch::

        totals = hvd.Accumulator()
        ...
        totals.add(loss=loss.detach() * len(targets), examples=len(targets))   # every rank
        ...
        totals.synchronize()                                                   # every rank
        print(totals["loss"] / totals["examples"])
        totals.clear()

    What was added since the last :meth:`synchronize` on a rank that leaves or dies is lost, as are
    the examples' other traces there; what was synchronised lasts through rescales and checkpoints.
    Call :meth:`synchronize` every so many steps to lose little. Tensors stay on their device until
    then.

    Args:
        name: tells several of them apart; the same on all ranks.
    """

    def __init__(self, name: str = "accumulator") -> None:
        self._name = name
        self._own: dict[str, Any] = {}
        self._sums: dict[str, float] = {}
        context.current().keep(f"_accumulator.{name}", self)

    def add(self, **values: float | torch.Tensor) -> None:
        """Add numbers, or tensors of one element, on this rank."""
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                if value.numel() != 1:
                    raise ScriptError(
                        f"Accumulator.add({name}=...): a tensor of shape {tuple(value.shape)} is "
                        "no number; give its sum"
                    )
                value = value.detach().reshape(()).double()
            self._own[name] = self._own.get(name, 0.0) + value

    def synchronize(self) -> None:
        """Add what all ranks have added since the last call to the sums; all must call it.

        Raises:
            ScriptError: the ranks have added different names.
        """
        engine = context.current().engine
        names = sorted(self._own)
        values = [float(self._own[name]) for name in names]
        if engine.size > 1:
            length = len(names)
            gathered = engine.gather(
                torch.tensor([float(length), *values], dtype=torch.float64),
                f"hvd_elastic.{self._name}",
            )
            if len(gathered) != engine.size * (length + 1):
                raise ScriptError(
                    f"Accumulator {self._name!r}: this rank has added {names or 'nothing'}, others "
                    "have added more or fewer names; add the same ones on every rank"
                )
            values = gathered.reshape(engine.size, length + 1)[:, 1:].sum(0).tolist()
        for name, value in zip(names, values, strict=True):
            self._sums[name] = self._sums.get(name, 0.0) + value
        self._own.clear()

    def clear(self) -> None:
        """Begin anew at 0."""
        self._own.clear()
        self._sums.clear()

    def __getitem__(self, name: str) -> float:
        return self._sums[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sums)

    def __len__(self) -> int:
        return len(self._sums)

    def state_dict(self) -> dict[str, Any]:
        """The sums over all ranks."""
        return {"sums": dict(self._sums)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What :meth:`state_dict` gave."""
        self._sums = dict(state["sums"])

"""Sums of numbers over all ranks that are kept when the world changes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from hvd_elastic.errors import ScriptError
from hvd_elastic.training import context


class NoSumError(ScriptError, KeyError):
    """The requested sum does not exist: it was not added, or not synchronised."""

    __str__ = Exception.__str__  # a KeyError's puts quotes around the message


class Accumulator(Mapping[str, float]):
    """Sums numbers by name: on each rank with :meth:`add`, over all with :meth:`synchronize`.

    For the losses and hits of an epoch::

        totals = hvd.Accumulator()
        ...
        totals.add(loss=loss.detach() * len(targets), examples=len(targets))   # every rank
        ...
        totals.synchronize()                                                   # every rank
        print(totals["loss"] / totals["examples"])
        totals.clear()   # after the loop: code before the loop runs again after a failure

    If a rank dies, what it has added since the last :meth:`synchronize` is lost; what was
    synchronised is kept through failures and in checkpoints. Call :meth:`synchronize` more often to
    lose less; a rank that is asked to leave loses nothing. Tensors stay on their device until
    :meth:`synchronize`.

    Args:
        name: name of this accumulator, the same on all ranks; needed if there are several.

    Raises:
        ScriptError: the name is in use, or the accumulator is created in the training function.
    """

    def __init__(self, name: str = "accumulator") -> None:
        self._name = name
        self._own: dict[str, Any] = {}
        self._sums: dict[str, float] = {}
        self._times = 0
        """Number of synchronisations since the run began."""
        self._sent: dict[str, Any] = {}
        ctx, kept = context.current(), f"_accumulator.{name}"
        if ctx.worker.in_train:
            raise ScriptError(
                f"Accumulator {name!r} is made in the training function, which is called again "
                "after a failure, and a worker that joins would not have its sums; make it before"
            )
        if kept in ctx.state_parts:
            raise ScriptError(
                f"there is an Accumulator {name!r} already; make it once, outside of the training "
                'function, and give others names of their own: Accumulator("hits")'
            )
        ctx.keep(kept, self, before_change=self._add_up)

    def add(self, **values: float | torch.Tensor) -> None:
        """Add numbers, or tensors of one element, on this rank."""
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                if value.numel() != 1 or value.is_complex():
                    raise ScriptError(
                        f"Accumulator.add({name}=...): a tensor of shape {tuple(value.shape)} and "
                        f"type {value.dtype} is no number; give its sum"
                    )
                value = value.detach().reshape(()).double()
            else:
                try:
                    value = float(value)
                except (TypeError, ValueError):
                    raise ScriptError(
                        f"Accumulator.add({name}={value!r}): it must be a number, or a tensor of "
                        "one element"
                    ) from None
            self._own[name] = self._own.get(name, 0.0) + value

    def synchronize(self) -> None:
        """Add to the sums what all ranks have added since the last call; all ranks must call it.

        A rank that has added nothing, because it has just joined for example, counts as 0.
        """
        context.current().rollback.collective_begins(self._name, changes_state=True)
        self._add_up()

    def _add_up(self) -> None:
        communicator = context.current().worker.communicator
        added = [{name: float(value) for name, value in self._own.items()}]
        if communicator.size > 1:
            line = np.frombuffer(json.dumps(added[0]).encode() + b"\n", np.uint8).copy()
            lines = communicator.gather(line, f"hvd_elastic.{self._name}")
            added = [json.loads(line) for line in lines.tobytes().splitlines()]
        for values in added:
            for name, value in values.items():
                self._sums[name] = self._sums.get(name, 0.0) + value
        self._sent, self._own = self._own, {}
        self._times += 1

    def clear(self) -> None:
        """Remove all sums."""
        self._own.clear()
        self._sums.clear()

    def __getitem__(self, name: str) -> float:
        """Return the sum over all ranks.

        Raises:
            NoSumError: no rank had added it when :meth:`synchronize` was called; a KeyError.
        """
        try:
            return self._sums[name]
        except KeyError:
            there = ", ".join(self._sums) or "nothing"
            raise NoSumError(
                f"Accumulator {self._name!r} has no sum {name!r}, it has {there}: add it on some "
                "rank and call synchronize() on all before it is read. After a failure the loop of "
                "an epoch may have nothing left to read and to add"
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._sums)

    def __len__(self) -> int:
        return len(self._sums)

    def snapshot(self) -> tuple[dict[str, Any], dict[str, float], int]:
        """Return a copy for :meth:`roll_back`; shallow, since numbers never change in place."""
        return dict(self._own), dict(self._sums), self._times

    def roll_back(self, values: tuple[dict[str, Any], dict[str, float], int]) -> None:
        """Restore an earlier :meth:`snapshot`."""
        own, sums, self._times = values
        self._own, self._sums = dict(own), dict(sums)

    def state_dict(self) -> dict[str, Any]:
        """Return the sums over all ranks, and the number of synchronisations."""
        return {"sums": dict(self._sums), "times": self._times}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, possibly on another rank."""
        times = state.get("times", 0)
        if times > self._times:
            # The other rank completed a synchronisation that failed here, so its sums contain what
            # this rank had added.
            self._own.clear()
        elif times == self._times - 1:
            # This rank completed a synchronisation that the other did not, so those sums lack what
            # this rank sent in it.
            for name, value in self._sent.items():
                self._own[name] = self._own.get(name, 0.0) + value
        self._sums, self._times = dict(state["sums"]), times

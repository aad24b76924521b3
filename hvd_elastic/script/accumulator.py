"""Sums of numbers over all ranks that are kept when the world changes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from hvd_elastic.errors import ScriptError
from hvd_elastic.worker import context
from hvd_elastic.worker.progress import Phase
from hvd_elastic.worker.step import Pass


class NoSumError(ScriptError, KeyError):
    """The requested sum does not exist: it was not added, or not synchronised."""

    __str__ = Exception.__str__  # a KeyError's puts quotes around the message


class _Total(NamedTuple):
    """A sum, and the number of examples that it is over."""

    total: Any
    examples: float

    def plus(self, total: Any, examples: float) -> _Total:
        return _Total(self.total + total, self.examples + examples)


_NOTHING = _Total(0.0, 0.0)


class Accumulator(Mapping[str, float]):
    """Sums numbers by name: on each rank with :meth:`add`, over all with :meth:`synchronize`.

    For the losses and hits of an epoch::

        totals = hvd.Accumulator()
        ...
        totals.add(loss=loss * len(targets))            # every rank, for each batch
        ...
        totals.synchronize()                            # every rank
        print(totals.mean("loss"))
        totals.clear()   # after the loop: code before the loop runs again after a failure

    If a rank dies, what it has added since the last :meth:`synchronize` is lost; what was
    synchronised is kept through failures and in checkpoints. So divide by what was counted, as
    :meth:`mean` does, and not by the length of the dataset. Call :meth:`synchronize` more often to
    lose less; a rank that is asked to leave loses nothing. Tensors stay on their device until
    :meth:`synchronize`.

    Args:
        name: name of this accumulator, the same on all ranks; needed if there are several.

    Raises:
        ScriptError: the name is in use, or the accumulator is created in the training function.
    """

    def __init__(self, name: str = "accumulator") -> None:
        self._name = name
        self._own: dict[str, _Total] = {}
        self._sums: dict[str, _Total] = {}
        self._counted: dict[str, Pass] = {}
        """Pass in which each name was added last: it counts once."""
        self._times = 0
        """Number of synchronisations since the run began."""
        self._sent: dict[str, _Total] = {}
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

    def add(self, examples: float | None = None, /, **values: Any) -> None:
        """Add numbers, or tensors of one element, on this rank.

        Args:
            examples: number of examples that they are sums over, for :meth:`mean`; None: those of
                this rank's batch of ``hvd.DataLoader``, once for each name, or else 0. If the rank
                has none in the step and reads those of others again, nothing is added.
            values: the numbers by name.
        """
        for name, value in values.items():
            number = context.current().worker.frontend.element(name, value)
            if number is None:
                try:
                    number = float(value)
                except (TypeError, ValueError):
                    raise ScriptError(
                        f"Accumulator.add({name}={value!r}): it must be a number, or a tensor of "
                        "one element"
                    ) from None
            count = self._examples_of_pass(name) if examples is None else examples
            if count is None:
                continue
            self._own[name] = self._own.get(name, _NOTHING).plus(number, count)

    def _examples_of_pass(self, name: str) -> int | None:
        """Return the examples that a sum is over; None: other ranks add them."""
        ctx = context.current()
        passes = ctx.step.passes
        in_loop = ctx.worker.in_train and ctx.worker.progress.phase is Phase.LOOP
        if not (passes and in_loop):
            return 0
        if not passes[-1].weight:
            return None
        if self._counted.get(name) is passes[-1]:
            return 0
        self._counted[name] = passes[-1]
        return passes[-1].examples

    def synchronize(self) -> None:
        """Add to the sums what all ranks have added since the last call; all ranks must call it.

        A rank that has added nothing, because it has just joined for example, counts as 0.
        """
        context.current().rollback.collective_begins(self._name, changes_state=True)
        self._add_up()

    def _add_up(self) -> None:
        communicator = context.current().worker.communicator
        added = [{name: (float(value), count) for name, (value, count) in self._own.items()}]
        if communicator.size > 1:
            line = np.frombuffer(json.dumps(added[0]).encode() + b"\n", np.uint8).copy()
            lines = communicator.gather(line, f"hvd_elastic.{self._name}")
            added = [json.loads(line) for line in lines.tobytes().splitlines()]
        for values in added:
            for name, total in values.items():
                self._sums[name] = self._sums.get(name, _NOTHING).plus(*total)
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
        return float(self._total(name).total)

    def mean(self, name: str) -> float:
        """Return the sum over all ranks, divided by the number of examples that were added.

        A rank that died took its sum and its count with it, so the mean is over the others.

        Raises:
            NoSumError: there is no such sum.
            ScriptError: it is not known over how many examples.
        """
        total, examples = self._total(name)
        if not examples:
            raise ScriptError(
                f"Accumulator.mean({name!r}): it is not known over how many examples the sum is, "
                "since it was not added in a loop over hvd.DataLoader; give their number first: "
                f"add(len(targets), {name}=...)"
            )
        return float(total) / examples

    def _total(self, name: str) -> _Total:
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

    def snapshot(self) -> tuple[dict[str, _Total], dict[str, _Total], int]:
        """Return a copy for :meth:`roll_back`; shallow, since numbers never change in place."""
        return dict(self._own), dict(self._sums), self._times

    def roll_back(self, values: tuple[dict[str, _Total], dict[str, _Total], int]) -> None:
        """Restore an earlier :meth:`snapshot`."""
        self._counted.clear()
        own, sums, self._times = values
        self._own, self._sums = dict(own), dict(sums)

    def state_dict(self) -> dict[str, Any]:
        """Return the sums over all ranks, and the number of synchronisations."""
        return {
            "sums": {name: total for name, (total, _) in self._sums.items()},
            "examples": {name: count for name, (_, count) in self._sums.items()},
            "times": self._times,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, possibly on another rank."""
        times = state["times"]
        if times > self._times:
            # The other rank completed a synchronisation that failed here, so its sums contain what
            # this rank had added.
            self._own.clear()
        elif times == self._times - 1:
            # This rank completed a synchronisation that the other did not, so those sums lack what
            # this rank sent in it.
            for name, sent in self._sent.items():
                self._own[name] = self._own.get(name, _NOTHING).plus(*sent)
        counts = state["examples"]
        self._sums = {name: _Total(v, counts[name]) for name, v in state["sums"].items()}
        self._times = times

"""Unequal shares of a batch whose size stays: reviewed now and then, as all ranks know alike.

A batch that adapts has reviews anyway and decides about shares in those
(:mod:`hvd_elastic.torch.adaptation`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from hvd_elastic.errors import ScriptError
from hvd_elastic.model.shares import ShareBalance
from hvd_elastic.torch.own_times import OwnTimes
from hvd_elastic.wire import messages as msg

if TYPE_CHECKING:
    from hvd_elastic.torch.context import Context

__all__ = ["SETTLING_STEPS", "Rebalancing", "announce_shares", "steps_to_review"]

_REVIEW_S = 1.0
_REVIEW_STEPS = (10, 50)
SETTLING_STEPS = 2
"""After a change these are not timed: readers start, memory is allocated."""


class Rebalancing:
    """The shares of a run whose batch size stays, and what is known for choosing them.

    Args:
        batch_size: examples of a full step over all ranks.
        low: fewest examples of a rank.
    """

    def __init__(self, batch_size: int, low: int) -> None:
        self._batch_size = batch_size
        self._low = low
        self._balance = ShareBalance()
        self.own_times = OwnTimes()
        self._step_s: list[float] = []
        self._settling = SETTLING_STEPS
        self._generation = -1
        self._next_review = 0
        self._rank_s: list[float | None] = []
        self._ranks = 1

    @property
    def parts(self) -> tuple[int, ...]:
        """Examples of each rank in a full step; empty: equal shares."""
        return self._balance.parts

    def step_ends(self, examples: int, waited_s: float) -> None:
        """The script came back for the next batch; see :meth:`OwnTimes.step_ends`."""
        counts = self._settling <= 0 and examples == self._batch_size
        step_s = self.own_times.step_ends(waited_s, counts=counts)
        if counts:
            self._step_s.append(step_s)
        self._settling = max(0, self._settling - 1)

    def review_if_due(self, context: Context) -> None:
        """Between two steps; collective where it is due, which all ranks know alike."""
        moved = context.generation != self._generation
        step = context.progress.step
        if not moved and step < self._next_review:
            return
        if context.averager is None:
            raise ScriptError(
                "DataLoader(unequal_shares=True): gradients have to be averaged by examples, and "
                "no optimizer was given to hvd_elastic.torch.DistributedOptimizer; wrap yours in it"
            )
        engine = context.engine
        self._ranks = engine.size
        if moved:
            self._generation = context.generation
            self._begin_anew()
        own_s = torch.tensor([self.own_times.typical_s()], dtype=torch.float64)
        if engine.size > 1:
            own_s = engine.gather(own_s, "hvd_elastic.shares")
        before = self.parts
        reason = ""
        if engine.rank == 0:
            reason = self._decide(own_s.tolist(), engine.size, moved=moved)
            self._next_review = step + steps_to_review(self._step_s)
        if engine.size > 1:
            decided = engine.broadcast_bytes(json.dumps(self.state_dict()).encode(), 0)
            if engine.rank != 0:
                self.load_state_dict(json.loads(decided))
        self._step_s.clear()
        if self.parts != before:
            self._begin_anew()
            if engine.rank == 0:
                announce_shares(context, self._batch_size, self.parts, reason)

    def _begin_anew(self) -> None:
        self.own_times.forget()
        self._step_s.clear()
        self._settling = SETTLING_STEPS

    def _decide(self, own_s: Sequence[float], ranks: int, *, moved: bool) -> str:
        balance, batch_size = self._balance, self._batch_size
        self._rank_s = [own if math.isfinite(own) else None for own in own_s]
        if moved:
            balance.forget()
            return "the ranks have not been timed yet"
        step_s = median(self._step_s) if self._step_s else 0.0
        reason = balance.review(own_s, step_s, batch_size, self._low)
        if reason:
            self._rank_s = []  # they belong to the shares before
        balance.cut(batch_size, ranks, self._low)
        return reason

    def metrics(self) -> dict[str, Any]:
        """Fields of the run's metrics."""
        found: dict[str, Any] = {"global_batch_size": self._batch_size}
        if self._rank_s:
            found["rank_s"] = self._rank_s
        if self._ranks > 1:
            found["shares"] = list(self._balance.parts_of(self._batch_size, self._ranks))
        return found

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, for a broadcast."""
        return {
            "balance": self._balance.state_dict(),
            "rank_s": self._rank_s,
            "next_review": self._next_review,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What :meth:`state_dict` gave on rank 0."""
        self._balance.load_state_dict(state["balance"])
        self._rank_s = list(state["rank_s"])
        self._next_review = state["next_review"]


def steps_to_review(step_s: Sequence[float]) -> int:
    """Steps until the next review: about a second's, within bounds; few where none was timed."""
    few, many = _REVIEW_STEPS
    wished = _REVIEW_S / median(step_s) if step_s else few
    return int(min(max(wished, few), many))


def announce_shares(
    context: Context, global_batch_size: int, parts: Sequence[int], reason: str
) -> None:
    """Tell the run's records of new shares; empty parts: equal ones."""
    context.sink.send(
        msg.Shares(
            step=context.progress.step,
            global_batch_size=global_batch_size,
            shares=list(parts),
            reason=reason,
        )
    )

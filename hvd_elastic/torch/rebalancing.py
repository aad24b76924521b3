"""Unequal shares of a batch of fixed size, reviewed in steps that all ranks know beforehand.

An adaptive batch decides on shares in its own reviews (:mod:`hvd_elastic.torch.adaptation`).
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
from hvd_elastic.policy.batch import steps_to_review
from hvd_elastic.torch.device_times import cuda_event
from hvd_elastic.training.planning.compute_times import ComputeTimes
from hvd_elastic.wire import messages as msg

if TYPE_CHECKING:
    from hvd_elastic.torch.context import Context

__all__ = ["Rebalancing", "announce_shares"]


class Rebalancing:
    """The shares of a run whose batch size is fixed, and what was measured to choose them.

    Args:
        batch_size: examples of a full step over all ranks.
        low: fewest examples of a rank.
    """

    def __init__(self, batch_size: int, low: int) -> None:
        self._batch_size = batch_size
        self._low = low
        self._balance = ShareBalance()
        self.own_times = ComputeTimes(new_event=cuda_event)
        self._generation = -1
        self._next_review = 0
        self._rank_s: list[float | None] = []
        self._ranks = 1

    @property
    def parts(self) -> tuple[int, ...]:
        """Examples of each rank in a full step; empty: equal shares."""
        return self._balance.parts

    def step_ends(self, examples: int, waited_s: float) -> None:
        """End a step; see :meth:`ComputeTimes.step_ends`."""
        self.own_times.step_ends(waited_s, full=examples == self._batch_size)

    def review_if_due(self, context: Context) -> None:
        """Review between two steps; a collective, due in the same steps on all ranks."""
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
            self.own_times.forget()
        own_s = torch.tensor([self.own_times.typical_s()], dtype=torch.float64)
        if engine.size > 1:
            own_s = engine.gather(own_s, "hvd_elastic.shares")
        before = self.parts
        reason = ""
        if engine.rank == 0:
            reason = self._decide(own_s.tolist(), engine.size, moved=moved)
            self._next_review = step + steps_to_review(self.own_times.all_step_s())
        if engine.size > 1:
            decided = engine.broadcast_bytes(json.dumps(self.state_dict()).encode(), 0)
            if engine.rank != 0:
                self.load_state_dict(json.loads(decided))
        self.own_times.clear_steps()
        if self.parts != before:
            self.own_times.forget()
            if engine.rank == 0:
                announce_shares(context, self._batch_size, self.parts, reason)

    def _decide(self, own_s: Sequence[float], ranks: int, *, moved: bool) -> str:
        balance, batch_size = self._balance, self._batch_size
        self._rank_s = [own if math.isfinite(own) else None for own in own_s]
        if moved:
            balance.forget()
            return "the ranks have not been timed yet"
        timed = self.own_times.all_step_s()
        step_s = median(timed) if timed else 0.0
        reason = balance.review(own_s, step_s, batch_size, self._low)
        if reason:
            self._rank_s = []  # measured with the shares before
        balance.cut(batch_size, ranks, self._low)
        return reason

    def metrics(self) -> dict[str, Any]:
        """Return fields of the ``metrics`` event."""
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
        """Take what :meth:`state_dict` gave on rank 0."""
        self._balance.load_state_dict(state["balance"])
        self._rank_s = list(state["rank_s"])
        self._next_review = state["next_review"]


def announce_shares(
    context: Context, global_batch_size: int, parts: Sequence[int], reason: str
) -> None:
    """Send the ``shares`` event; empty parts: equal shares."""
    context.sink.send(
        msg.Shares(
            step=context.progress.step,
            global_batch_size=global_batch_size,
            shares=list(parts),
            reason=reason,
        )
    )

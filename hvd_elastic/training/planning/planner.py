"""Who computes how many examples of a step, in how many passes: a planner decides.

There are three kinds. :class:`Planner` itself leaves the batch as it is, in equal shares.
:class:`UnequalShares` follows the speed of the ranks. An adaptive one
(:mod:`hvd_elastic.training.planning.adaptive`) chooses the size of the batch too. The last two
*review* their plan every few steps, at a step boundary that all ranks know beforehand: each sends
rank 0 what it has measured, and rank 0 decides and broadcasts the plan with all that it rests on.
So ranks agree to the last bit, and whoever survives can go on.
"""

from __future__ import annotations

import json
import math
import os
import socket
import zlib
from collections.abc import Hashable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from hvd_elastic.errors import ScriptError
from hvd_elastic.model.shares import ShareBalance
from hvd_elastic.policy.batch import steps_to_review
from hvd_elastic.training.planning.compute_times import ComputeTimes, SamplingCost
from hvd_elastic.training.worker import Worker
from hvd_elastic.wire import messages as msg

__all__ = ["Planner", "Report", "ReviewedPlanner", "UnequalShares"]

_HEADER = 4


class Planner:
    """Plans steps of a fixed size, in equal shares of one pass each.

    Attributes:
        reviews: whether the ranks change the plan in training.
        adapts: whether the size of the batch is part of it.
        sampling_cost: times the sampling of gradients on this rank.
    """

    reviews = False
    adapts = False

    def __init__(self, batch_size: int = 0) -> None:
        self._batch_size = batch_size
        self.sampling_cost = SamplingCost()

    @property
    def batch_size(self) -> int:
        """Examples of a full step over all ranks."""
        return self._batch_size

    @property
    def parts(self) -> tuple[int, ...]:
        """Examples of each rank in a full step; empty: equal shares."""
        return ()

    @property
    def cut(self) -> Hashable:
        """What the cutting of steps into shares and passes depends on, besides step and ranks."""
        return self.batch_size, self.parts

    def passes(self, step: int, share: int, ranks: int) -> int:
        """Return in how many passes a rank makes its ``share`` of the step after ``step``."""
        return 1

    def sampled(self, step: int) -> bool:
        """Return whether the gradient statistics of the step after ``step`` are sampled."""
        return False

    def step_begins(self, passes: int, waited_s: float) -> None:
        """A step of so many passes begins; see :meth:`ComputeTimes.step_begins`."""

    def work_ends(self) -> None:
        """The last backward pass of the step was given to the device."""

    def step_ends(self, examples: int, passes: int, waited_s: float) -> None:
        """A step ends; see :meth:`ComputeTimes.step_ends`."""

    def advance(self, gain: float, step_examples: int) -> None:
        """Count a step that was taken; ``gain``: progress of a full one."""

    def skip(self, step: int) -> None:
        """Count a step that is not taken, since its gradients are not finite."""

    def expect_overflows(self) -> None:
        """A gradient scaler is in use: steps whose gradients overflow are part of its search."""

    def out_of_memory(self, pass_examples: int) -> bool:
        """Note that a pass did not fit; return whether a smaller one is allowed."""
        return False

    def want_review(self) -> None:
        """Review at the next step boundary; all ranks call this."""

    def review_if_due(self, worker: Worker) -> None:
        """Review between two steps; a collective, due in the same steps on all ranks."""

    def is_enough(self, epoch: int, count: int) -> bool:
        """Return whether ``epoch`` passes over the data make ``count`` epochs."""
        return epoch >= count

    def progress_in(self, unit: str) -> float | None:
        """Return how far a schedule by ``unit``, step or epoch, is; None: it counts its calls."""
        return None

    def metrics(self) -> dict[str, Any]:
        """Return fields of the ``metrics`` event."""
        return {}


class Report(NamedTuple):
    """What one rank tells rank 0 in a review.

    Attributes:
        memory_bound: most examples of a pass that fit into its memory; infinite: none has failed.
        compute_s: its typical compute time of a step [s]; NaN: not known.
        host: a number of its host's name.
        samples: of gradients, see :meth:`GradientNoise.add`.
    """

    memory_bound: float
    compute_s: float
    host: float
    samples: np.ndarray

    def pack(self) -> np.ndarray:
        """Return the report as one array, for :meth:`unpack`."""
        header = [*self[:3], len(self.samples)]
        return np.concatenate([np.array(header), self.samples.reshape(-1)])

    @classmethod
    def unpack(cls, gathered: np.ndarray, columns: int) -> list[Report]:
        """Return the reports of all ranks, which follow one another."""
        reports, at = [], 0
        while at < len(gathered):
            memory_bound, compute_s, host, rows = gathered[at : at + _HEADER].tolist()
            end = at + _HEADER + int(rows) * columns
            samples = gathered[at + _HEADER : end].reshape(int(rows), columns)
            reports.append(cls(memory_bound, compute_s, host, samples))
            at = end
        return reports


class ReviewedPlanner(Planner):
    """A plan that the ranks review in training.

    Args:
        batch_size: examples of a full step over all ranks.
        times: of this rank.

    Attributes:
        times: of this rank's steps.
    """

    reviews = True
    _option = ""
    """Of the loader, which asks for this kind."""

    def __init__(self, batch_size: int, times: ComputeTimes) -> None:
        super().__init__(batch_size)
        self.times = times
        self._ranks = 1
        self._rank_s: list[float | None] = []
        self._next_review = 0
        self._generation = -1
        """Of the last review; -1: there was none in this process."""

    def step_begins(self, passes: int, waited_s: float) -> None:
        """As of the base class."""
        self.times.step_begins(waited_s, passes)

    def work_ends(self) -> None:
        """As of the base class."""
        self.times.work_ends()

    def step_ends(self, examples: int, passes: int, waited_s: float) -> None:
        """As of the base class."""
        self.times.step_ends(waited_s, passes, full=examples == self.batch_size)

    def want_review(self) -> None:
        """As of the base class."""
        self._next_review = 0

    def review_if_due(self, worker: Worker) -> None:
        """As of the base class."""
        step, communicator = worker.progress.step, worker.communicator
        moved = worker.generation != self._generation
        if not moved and step < self._next_review:
            return
        if worker.averager is None:
            raise ScriptError(
                f"{self._option}, and no optimizer was given to "
                f"{worker.frontend.module}.DistributedOptimizer; wrap yours in it"
            )
        self._ranks = communicator.size
        if moved:
            self.times.forget()
        own = self._report(moved=moved)
        gathered = own.pack()
        if self._ranks > 1:
            gathered = communicator.gather(gathered, "hvd_elastic.review")
        before = self._planned
        why_plan = why_shares = ""
        if communicator.rank == 0:
            reports = Report.unpack(gathered, own.samples.shape[1])
            compute_s = [report.compute_s for report in reports]
            self._rank_s = [each if math.isfinite(each) else None for each in compute_s]
            why_shares, why_plan = self._decide(reports, moved=moved)
            if self._planned != before:
                self._rank_s = []  # measured with the plan and the shares before
            self._next_review = step + self._steps_to_review(step)
        if self._ranks > 1:
            decided = communicator.broadcast_bytes(json.dumps(self.state_dict()).encode(), 0)
            if communicator.rank != 0:
                self.load_state_dict(json.loads(decided))
        self.times.clear_steps()
        if self._planned != before:
            self.times.forget()
        first, self._generation = self._generation < 0, worker.generation
        if communicator.rank == 0:
            self._announce(worker, before[0], why_plan, first=first)
            if self.parts != before[1]:
                worker.sink.send(
                    msg.Shares(
                        step=step,
                        global_batch_size=self.batch_size,
                        shares=list(self.parts),
                        reason=why_shares or why_plan,
                    )
                )

    @property
    def _planned(self) -> tuple[Any, tuple[int, ...]]:
        """What times were measured with: they are forgotten when it changes."""
        return self.batch_size, self.parts

    def _report(self, *, moved: bool) -> Report:
        """Return what this rank tells rank 0; ``moved``: the ranks are others now."""
        name = os.environ.get("HVD_ELASTIC_HOST") or socket.gethostname()
        host = float(zlib.crc32(name.encode()))
        return Report(math.inf, self.times.typical_s(), host, np.zeros((0, 0)))

    def _decide(self, reports: Sequence[Report], *, moved: bool) -> tuple[str, str]:
        """Change the plan; return why the shares and why the rest changes, where they do."""
        raise NotImplementedError

    def _steps_to_review(self, step: int) -> int:
        """Return how many steps after ``step`` the next review is due."""
        return steps_to_review(self.times.all_step_s())

    def _announce(self, worker: Worker, before: Any, why: str, *, first: bool) -> None:
        """Tell of a plan that was another before."""

    def _typical_step_s(self) -> float:
        """Return the median time of whole steps [s]; 0: none was timed."""
        timed = self.times.all_step_s()
        return median(timed) if timed else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers, for a broadcast or a checkpoint."""
        return {"rank_s": self._rank_s, "next_review": self._next_review}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what :meth:`state_dict` gave, here or in the process that the run goes on from."""
        self._rank_s = list(state.get("rank_s", []))  # early checkpoints have none
        self._next_review = state["next_review"]

    def metrics(self) -> dict[str, Any]:
        """As of the base class; what is unknown is left out."""
        found: dict[str, Any] = {"global_batch_size": self.batch_size}
        if self._rank_s:
            found["rank_s"] = self._rank_s
        return found


class UnequalShares(ReviewedPlanner):
    """Plans steps of a fixed size, of which slow ranks get fewer examples.

    No part of the state: every world begins with a review, which tells all of it.

    Args:
        batch_size: examples of a full step over all ranks.
        low: fewest examples of a rank.
        times: of this rank.
    """

    _option = "DataLoader(unequal_shares=True): gradients have to be averaged by examples"

    def __init__(self, batch_size: int, low: int, times: ComputeTimes) -> None:
        super().__init__(batch_size, times)
        self._low = low
        self.balance = ShareBalance()

    @property
    def parts(self) -> tuple[int, ...]:
        """As of the base class."""
        return self.balance.parts

    def _decide(self, reports: Sequence[Report], *, moved: bool) -> tuple[str, str]:
        balance = self.balance
        if moved:
            balance.forget()
            return "the ranks have not been timed yet", ""
        compute_s = [report.compute_s for report in reports]
        reason = balance.review(compute_s, self._typical_step_s(), self.batch_size, self._low)
        balance.cut(self.batch_size, self._ranks, self._low)
        return reason, ""

    def state_dict(self) -> dict[str, Any]:
        """As of the base class."""
        return {**super().state_dict(), "balance": self.balance.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As of the base class."""
        super().load_state_dict(state)
        self.balance.load_state_dict(state["balance"])

    def metrics(self) -> dict[str, Any]:
        """As of the base class."""
        found = super().metrics()
        if self._ranks > 1:
            found["shares"] = list(self.balance.parts_of(self.batch_size, self._ranks))
        return found

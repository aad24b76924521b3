"""Planners, which decide how many examples of a step each rank computes, and in how many passes.

There are three kinds. :class:`Planner` itself keeps the batch size and gives equal shares.
:class:`UnequalShares` gives shares that follow the speed of the ranks. The adaptive planner
(:mod:`hvd_elastic.worker.planning.adaptive`) chooses the batch size too. The last two *review*
their plan every few steps, at a step boundary that all ranks know in advance: each rank sends rank
0 what it has measured; rank 0 decides, and broadcasts the plan with the data that it is based on.
So all ranks hold identical plans, and the survivors of a failure can continue.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
import zlib
from collections.abc import Hashable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from hvd_elastic.communicator.interface import FIRST
from hvd_elastic.errors import ScriptError
from hvd_elastic.model.shares import ShareBalance
from hvd_elastic.policy.batch import steps_to_review
from hvd_elastic.run_events import Shares
from hvd_elastic.worker.planning.compute_times import ComputeTimes, SamplingCost
from hvd_elastic.worker.planning.skipped_steps import SkippedSteps
from hvd_elastic.worker.worker import Worker

_HEADER = 4  # numbers before the samples in a packed Report


class Planner:
    """Plans steps of a fixed size, in equal shares of one pass each.

    Attributes:
        reviews: whether the ranks review the plan during training.
        adapts: whether a review may change the batch size.
        sampling_cost: measures the time that sampling gradients takes on this rank.
        skipped: counts steps that were not taken.
    """

    reviews = False
    adapts = False

    def __init__(self, batch_size: int = 0) -> None:
        self._batch_size = batch_size
        self.sampling_cost = SamplingCost()
        self.skipped = SkippedSteps()

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
        """All that determines shares and passes, besides the step and the ranks."""
        return self.batch_size, self.parts

    def passes(self, step: int, share: int, ranks: int) -> int:
        """Return the number of passes for a rank's ``share`` of the step after ``step``."""
        return 1

    def sampled(self, step: int) -> bool:
        """Return whether the gradient statistics of the step after ``step`` are sampled."""
        return False

    def step_begins(self, passes: int, waited_s: float) -> None:
        """Begin to time a step; see :meth:`ComputeTimes.step_begins`."""

    def work_ends(self) -> None:
        """Note that the last backward pass of the step is queued on the device."""

    def step_ends(self, examples: int, passes: int, waited_s: float) -> None:
        """Stop timing a step; see :meth:`ComputeTimes.step_ends`."""

    def advance(self, gain: float, step_examples: int) -> None:
        """Count a step that was taken; ``gain``: progress of a step with a whole batch."""

    def rate_advice(self) -> str:
        """Return advice for an error message if this class has raised the learning rate, or ""."""
        return ""

    def out_of_memory(self, pass_examples: int) -> bool:
        """Note that a pass did not fit into memory; return whether a smaller one is allowed."""
        return False

    def want_review(self) -> None:
        """Have the plan reviewed at the next step boundary; all ranks call this."""

    def review_if_due(self, worker: Worker) -> None:
        """Review the plan if due; a collective, in the same steps on all ranks."""

    def is_enough(self, done: int, count: int, unit: str = "epoch") -> bool:
        """Return whether ``done`` steps, or passes over the data, make ``count`` of ``unit``."""
        return done >= count

    def progress_in(self, unit: str) -> float | None:
        """Return the progress of a schedule in ``unit``, step or epoch; None: it counts calls."""
        return None

    def metrics(self) -> dict[str, Any]:
        """Return the planner's fields of the ``metrics`` event."""
        return {}


class Report(NamedTuple):
    """Measurements that one rank sends rank 0 in a review.

    Attributes:
        memory_bound: most examples of a pass that fit into its memory; infinite: none has failed.
        compute_s: its typical compute time of a step [s]; NaN: not known.
        host: hash of its host's name.
        samples: gradient samples, see :meth:`GradientNoise.add_samples`.
    """

    memory_bound: float
    compute_s: float
    host: float
    samples: np.ndarray

    def pack(self) -> np.ndarray:
        """Return the report as one flat array, for :meth:`unpack`."""
        header = [*self[:3], len(self.samples)]
        return np.concatenate([np.array(header), self.samples.reshape(-1)])

    @classmethod
    def unpack(cls, gathered: np.ndarray, columns: int) -> list[Report]:
        """Return the reports of all ranks from their concatenated arrays."""
        reports, at = [], 0
        while at < len(gathered):
            memory_bound, compute_s, host, rows = gathered[at : at + _HEADER].tolist()
            end = at + _HEADER + int(rows) * columns
            samples = gathered[at + _HEADER : end].reshape(int(rows), columns)
            reports.append(cls(memory_bound, compute_s, host, samples))
            at = end
        return reports


class ReviewedPlanner(Planner):
    """Base class of planners whose plan the ranks review during training.

    Args:
        batch_size: examples of a full step over all ranks.
        times: measures this rank's steps.

    Attributes:
        times: measures this rank's steps.
    """

    reviews = True
    _option = ""
    """The loader's option that asks for this planner, for messages."""

    def __init__(self, batch_size: int, times: ComputeTimes) -> None:
        super().__init__(batch_size)
        self.times = times
        self._ranks = 1
        self._rank_s: list[float | None] = []
        self._decision_s = 0.0
        """Time that the last decision of this rank took [s]; 0: it made none."""
        self._next_review = 0
        self._generation = -1
        """Generation of the last review; -1: this process has had none."""
        self._reports = False
        """Whether this process was rank 0, which reports the plan, at its last review."""

    def step_begins(self, passes: int, waited_s: float) -> None:
        self.times.step_begins(waited_s, passes)

    def work_ends(self) -> None:
        self.times.work_ends()

    def step_ends(self, examples: int, passes: int, waited_s: float) -> None:
        self.times.step_ends(waited_s, passes, full=examples == self.batch_size)

    def want_review(self) -> None:
        self._next_review = 0

    def review_if_due(self, worker: Worker) -> None:
        step, communicator = worker.progress.step, worker.communicator
        moved = worker.generation != self._generation
        if not moved and step < self._next_review:
            return
        if not worker.averagers:
            raise ScriptError(
                f"{self._option}, and no optimizer was given to "
                f"{worker.frontend.module}.DistributedOptimizer; wrap yours in it"
            )
        self._ranks = worker.size
        if moved:
            self.times.forget()
        own = self._report(moved=moved)
        gathered = own.pack()
        if self._ranks > 1:
            gathered = communicator.gather(gathered, "hvd_elastic.review")
        before = self._planned
        why_plan = why_shares = ""
        if worker.rank == 0:
            began = time.perf_counter()
            reports = Report.unpack(gathered, own.samples.shape[1])
            compute_s = [report.compute_s for report in reports]
            self._rank_s = [each if math.isfinite(each) else None for each in compute_s]
            why_shares, why_plan = self._decide(reports, moved=moved)
            if self._planned != before:
                self._rank_s = []  # these times belong to the previous plan
            self._decision_s = time.perf_counter() - began
            self._next_review = step + self._steps_to_review(step)
        if self._ranks > 1:
            decided = communicator.broadcast_bytes(json.dumps(self.state_dict()).encode(), FIRST)
            if worker.rank != 0:
                self.load_state_dict(json.loads(decided))
        self.times.clear_steps()
        if self._planned != before:
            self.times.forget()
        self._generation = worker.generation
        first, self._reports = not self._reports, worker.rank == 0
        if self._reports:
            self._announce(worker, before[0], why_plan, first=first)
            if self.parts != before[1]:
                worker.sink.send(
                    Shares(
                        step=step,
                        global_batch_size=self.batch_size,
                        shares=list(self.parts),
                        reason=why_shares or why_plan,
                    )
                )

    @property
    def _planned(self) -> tuple[Any, tuple[int, ...]]:
        """Plan and shares; measured times are dropped when they change."""
        return self.batch_size, self.parts

    def _report(self, *, moved: bool) -> Report:
        """Return this rank's report; ``moved``: it is the first review of a generation."""
        name = os.environ.get("HVD_ELASTIC_HOST") or socket.gethostname()
        host = float(zlib.crc32(name.encode()))
        return Report(math.inf, self.times.typical_s(), host, np.zeros((0, 0)))

    def _decide(self, reports: Sequence[Report], *, moved: bool) -> tuple[str, str]:
        """Update the plan on rank 0; return why the shares and why the rest change, or ""."""
        raise NotImplementedError

    def _steps_to_review(self, step: int) -> int:
        """Return how many steps after ``step`` the next review is due."""
        return steps_to_review(self.times.all_step_s(), self._decision_s)

    def _announce(self, worker: Worker, before: Any, why: str, *, first: bool) -> None:
        """Report the plan to the leader if it differs from ``before``.

        Args:
            first: whether this process has just become rank 0; it reports the plan in any case.
        """

    def _typical_step_s(self) -> float:
        """Return the median time of whole steps [s]; 0: none was timed."""
        timed = self.times.all_step_s()
        return median(timed) if timed else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return the plan and its data as plain numbers, for a broadcast or a checkpoint."""
        return {"rank_s": self._rank_s, "next_review": self._next_review}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, on rank 0 or before the run was resumed."""
        self._rank_s = list(state["rank_s"])
        self._next_review = state["next_review"]

    def metrics(self) -> dict[str, Any]:
        """See the base class; unknown values are left out."""
        found: dict[str, Any] = {"global_batch_size": self.batch_size}
        if self._rank_s:
            found["rank_s"] = self._rank_s
        return found


class UnequalShares(ReviewedPlanner):
    """Plans steps of a fixed size in which slow ranks get fewer examples.

    It is not part of checkpoints: every world begins with a review, which sets all of it.

    Args:
        batch_size: examples of a full step over all ranks.
        low: fewest examples of a rank.
        times: measures this rank's steps.
    """

    _option = "unequal_shares=True of the loader: gradients have to be averaged by examples"

    def __init__(self, batch_size: int, low: int, times: ComputeTimes) -> None:
        super().__init__(batch_size, times)
        self._low = low
        self.balance = ShareBalance()

    @property
    def parts(self) -> tuple[int, ...]:
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
        return {**super().state_dict(), "balance": self.balance.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.balance.load_state_dict(state["balance"])

    def metrics(self) -> dict[str, Any]:
        found = super().metrics()
        if self._ranks > 1:
            found["shares"] = list(self.balance.parts_of(self.batch_size, self._ranks))
        return found

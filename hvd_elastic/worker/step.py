"""The step in flight, and the exchange of flags between the ranks in each step."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np

from hvd_elastic.communicator.interface import FLAGS_NAME
from hvd_elastic.errors import ScriptError
from hvd_elastic.formatting import plural
from hvd_elastic.worker.checks.data_digest import ALIKE, difference
from hvd_elastic.worker.pass_counts import PassCounts
from hvd_elastic.worker.progress import Progress
from hvd_elastic.worker.worker import Worker

MOST_FLAGS = 16
"""Most numbers that a rank tells the others in a step."""
_PLACE_TOLERANCE = 1e-3
"""Largest variance of the ranks' place hashes that counts as the same place: above the rounding
error of float32 averages (4e-4), and below the variance that one differing rank of 1000 causes."""

_LEAVE_TOGETHER = (
    "Leave the loop over the loader on all ranks at the same step: by a condition that is the same "
    "on all of them, such as one on hvd.allreduce(loss, ...), or by hvd.stop(reason) without a "
    "break, which ends it on all of them"
)
_READ_ALIKE = (
    "Bring the same examples to all hosts (copyclust), and give the loader the same seed, shuffle "
    "and shuffle_window on all ranks; else some would be read twice, and others never"
)
_ACCUMULATE_TOGETHER = (
    "Enter optimizer.no_sync() on all ranks for the same batches: by a condition that is the same "
    "on all of them, such as one on the number of the batch, and not one on hvd.rank() or on what "
    "a rank computes from its own share"
)

_UNCHECKED_PASSES = 32
"""Number of passes in ``no_sync()`` after which ranks check that all add up, and again whenever
their number has doubled: shorter steps, which are usual, exchange nothing for it."""


@dataclass(frozen=True)
class Pass:
    """One rank's share of a step, or the part of it in one forward and backward pass.

    Attributes:
        step_examples: examples of the step over all ranks, by which progress advances.
        weight: factor on this rank's mean gradient before a plain average over ranks, so that
            the average is the mean over the global batch; 0.0 for padding. A skipped example has
            the gradient 0, so that what a step changes does not depend on the ranks.
        indices: dataset indices that were fetched for it, in order; None unless the run is audited.
        padding: whether this rank has no example of its own in the step and reads one again.
        examples: number of examples of this rank in the pass.
        skipped: dataset indices of those that were to be in it, and cannot be decoded.
        ends_epoch: whether the script's loop over the loader ends after it, with the epoch.
        accumulating: whether the planner lets further passes of the same batch follow.
        epoch: epoch of its examples.
        start: place of its first example in the order of the epoch; None: it is not known.
    """

    step_examples: int
    weight: float
    indices: list[int] | None = None
    padding: bool = False
    examples: int = 0
    accumulating: bool = False
    epoch: int = 0
    start: int | None = None
    skipped: Sequence[int] = ()
    ends_epoch: bool = False


class Stage(Enum):
    """Stage of a step."""

    NONE = "none"
    """No step is in flight."""
    BEGUN = "begun"
    """The loader has handed out at least one pass."""
    EXCHANGED = "exchanged"
    """The ranks have exchanged their flags. Has no passes if the script reads its data itself."""
    VOIDED = "voided"
    """Called off on all ranks, since a pass did not fit into memory; nothing of it counts."""
    DONE = "done"
    """Taken or left out on all ranks, and counted."""
    UNCOMMITTED = "uncommitted"
    """Taken for data that the script read itself, and not counted yet."""


class Step:
    """The step in flight on this rank.

    Attributes:
        passes: passes handed out so far on this rank.
        is_too_large: flag for the exchange: a pass did not fit into this rank's memory.
        is_left_out: flag for the exchange: this rank takes no optimizer step for it.
        is_committed: whether the script has called ``commit`` since its first pass.
        in_no_sync: whether the script is in a ``with optimizer.no_sync()`` block.
        continues: whether the script's last backward pass was in such a block, so that the next
            batch belongs to the step too.
        is_period: whether it is a period of steps that each rank takes alone; each counts.
        ahead: place in the data after the batches before the current one, in a step of several
            batches of the loader; None in a step of one.
        counts: what the script weights the passes by in place of examples; None: by examples.
        ranks_added: number of ranks if the loss of the current pass is a sum over its batch, so
            that gradients are to be added up over the ranks; None: they are averaged.
    """

    def __init__(self) -> None:
        self.stage = Stage.NONE
        self.passes: list[Pass] = []
        self.is_too_large = False
        self.is_left_out = False
        self.is_committed = False
        self.in_no_sync = False
        self.continues = self.is_period = False
        self.ahead: Progress | None = None
        self.counts: PassCounts | None = None
        self.ranks_added: int | None = None
        self._told: Any = None
        self._is_shared = self._is_received = False

    @property
    def is_open(self) -> bool:
        """Return whether the step was handed out and is neither done nor called off."""
        return bool(self.passes) and self.stage in (Stage.BEGUN, Stage.EXCHANGED)

    @property
    def examples_words(self) -> str:
        """Return the examples of the epoch's order that this rank has had; empty: not known."""
        starts = [each.start for each in self.passes if each.start is not None]
        if not starts:
            return ""
        last = self.passes[-1]
        return f", which had the examples {starts[0]} to {starts[-1] + last.examples - 1}"

    @property
    def is_exchanged(self) -> bool:
        """Return whether the ranks have exchanged their flags for this step."""
        return self.stage in (Stage.EXCHANGED, Stage.VOIDED, Stage.DONE)

    @property
    def has_told(self) -> bool:
        """Return whether this rank has begun to tell the others its flags."""
        return self._told is not None

    @property
    def accumulating(self) -> bool:
        """Return whether further passes of the step follow."""
        return self.is_open and (self.continues or self.passes[-1].accumulating)

    @property
    def steps(self) -> int:
        """Number of steps that it counts as."""
        return len(self.passes) if self.is_period else 1

    @property
    def _passes_unaveraged(self) -> int:
        """Number of passes so far if the last of them was in ``no_sync()``, else 0."""
        return len(self.passes) if self.continues else 0

    @property
    def is_long(self) -> bool:
        """Return whether to check that all ranks add up passes, as this one has for so long.

        A rank that does so alone exchanges nothing, while the others wait for its gradients.
        """
        passes = self._passes_unaveraged
        return passes >= _UNCHECKED_PASSES and passes.bit_count() == 1

    @property
    def examples(self) -> int:
        """Number of examples of the current batch over all ranks; 0 without our loader."""
        return self.passes[-1].step_examples if self.passes else 0

    @property
    def weight(self) -> float:
        """Factor on this rank's mean gradient in the current pass."""
        if self.counts is not None:
            self.counts.check(len(self.passes))
            return self.counts.weight(is_last=not (self.in_no_sync or self.continues))
        if self.ranks_added is not None and self.passes[-1].weight:
            return float(self.ranks_added)
        return self.passes[-1].weight if self.passes else 1.0

    @property
    def relative_weight(self) -> float:
        """Factor on this rank's mean gradient in the current pass, relative to the other ranks'.

        All ranks have it on one scale in each pass, also before the counts of all are known.
        """
        if self.counts is not None:
            self.counts.check(len(self.passes))
            return self.counts.latest
        return self.weight

    @property
    def is_empty(self) -> bool:
        """Return whether nothing counts on any rank, so that the step is left out."""
        return self.counts is not None and not self.counts.total()

    def begin_step(self, first: Pass) -> None:
        """Begin a new step with its first pass."""
        self.stage, self.passes, self.ahead = Stage.BEGUN, [first], None
        self.continues, self.counts, self.ranks_added = False, None, None
        self.is_period = self.is_committed = False

    def next_batch(self, progress: Progress) -> None:
        """Go on with the next batch of the loader; ``progress``: that of training."""
        self.ahead = replace(self.ahead or progress)
        self.ahead.read(self.examples)

    def count(self, progress: Progress) -> Progress:
        """End the step and return the progress after it; ``progress``: that before it."""
        ahead, self.stage, self.ahead = self.ahead, Stage.DONE, None
        if ahead is not None:
            progress = progress.moved_to(ahead)
        progress.advance(self.examples)
        progress.step += self.steps - 1
        return progress

    def forget(self) -> None:
        """Drop the step: it failed, or has been counted."""
        self.stage, self.passes, self._told = Stage.NONE, [], None
        self._is_received = self.is_committed = False
        self.ahead, self.continues, self.in_no_sync = None, False, False
        self.counts = self.ranks_added = None

    def begin_exchange(
        self,
        worker: Worker,
        wishes: Callable[[], Sequence[bool]],
        *,
        place: int,
        shared: bool,
        carried: bool = False,
        sent_as: str = "",
    ) -> np.ndarray | None:
        """Begin to exchange this rank's place and wishes with the others; once a step.

        The numbers are reduced together with the gradients, so all ranks learn of a wish in the
        same step and act on it at the same step boundary. The place in the training data is sent
        as a hash and its square, from whose averages every rank sees whether places differ.

        Args:
            wishes: returns this rank's wishes; one holds if any rank has it.
            place: hash of this rank's place in the training data.
            shared: whether the ranks exchange them, or each acts on its own.
            carried: whether the caller reduces them with its gradients, and then calls
                :meth:`receive`.
            sent_as: see :meth:`Communicator.reduce_async`.

        Returns:
            This rank's :meth:`flags`; None: the exchange has begun before.
        """
        if self.is_exchanged or self._told is not None:
            return None
        own = self.flags(wishes, place=place)
        self._told, self._is_shared = own, shared
        if shared and not carried:
            self._told = worker.communicator.reduce_async(own, FLAGS_NAME, sent_as=sent_as)
        return own

    def flags(self, wishes: Callable[[], Sequence[bool]], *, place: int) -> np.ndarray:
        """Return what this rank tells the others: at most ``MOST_FLAGS`` numbers."""
        own = [place, place * place, self.is_too_large, self.is_left_out, *wishes()]
        return np.array(own, np.float32)

    def receive(self, told: np.ndarray, *, shared: bool) -> None:
        """Take over the average of all ranks' :meth:`flags`, which came with the gradients."""
        self._told, self._is_shared, self._is_received = told, shared, True

    def finish_exchange(self, worker: Worker, adapts: bool, *, turn: bool = False) -> list[bool]:
        """Wait for the exchange that :meth:`begin_exchange` began; return the combined wishes.

        Args:
            adapts: whether the batch adapts: then all ranks exchange gradients even for a step
                that some leave out, which is found here.
            turn: whether this rank is at the end of an epoch, and not in a step.

        Raises:
            ScriptError: the ranks are in different places, or some of them leave the step out.
        """
        told, self._told = self._told, None
        received, self._is_received = self._is_received, False
        if self._is_shared and not received:
            try:
                told = worker.communicator.wait(told)
            except ScriptError as error:
                if turn:  # it met gradients
                    raise _left_alone(worker) from error
                raise
        place, square, too_large, left_out, *wishes = told.tolist()
        if square - place * place > _PLACE_TOLERANCE:
            if turn:
                raise _left_alone(worker)
            self._refuse_places(worker)
        size = worker.communicator.size
        if adapts and self._is_shared and 0 < round(left_out * size) < size and not too_large:
            self.refuse_left_out(worker)
        self.stage = Stage.VOIDED if too_large else Stage.EXCHANGED
        return [wish > 0 for wish in wishes]

    def _refuse_places(self, worker: Worker) -> None:
        """Gather where each rank reads and raise an error; all ranks call this.

        Raises:
            ScriptError: always; names each rank's place, and where it left an epoch early.
        """
        at, batches = self.ahead or worker.progress, len(self.passes)
        where = f"in epoch {at.epoch} at example {at.position}"
        if self.ahead is not None and not self.is_period:
            where += f", with {batches - 1} of {batches} backward passes in no_sync()"
        line = f"{at.order_hash}|{worker.data_sets.examples}|{where}|{worker.left_epoch}"
        places: dict[str, list[str]] = {}
        orders: dict[str, str] = {}
        for rank, told in enumerate(_gather_lines(worker, line, "places")):
            order, examples, place, left = told.split("|", 3)
            places.setdefault(place + (f" ({left})" if left else ""), []).append(str(rank))
            orders.setdefault(order, f"rank {rank} in one of {examples} examples")
        if len(orders) > 1:
            _refuse_data_sets(worker)
            raise ScriptError(
                f"the ranks read different datasets, or one in different orders: "
                f"{'; '.join(orders.values())}. {_READ_ALIKE}"
            )
        each = "; ".join(
            f"{plural('rank', len(ranks))} {', '.join(ranks)} {place}"
            for place, ranks in places.items()
        )
        remedy = _ACCUMULATE_TOGETHER if "no_sync()" in each else _LEAVE_TOGETHER
        raise ScriptError(
            f"the ranks are in different places of the training data in step "
            f"{worker.progress.step + 1}: {each}. A step would average gradients of different "
            f"epochs, and examples would be read twice or not at all. {remedy}"
        )

    def refuse_left_out(self, worker: Worker) -> None:
        """Gather which ranks do not take the step and raise an error; all ranks call this.

        Raises:
            ScriptError: only some ranks leave it out, or continue under ``no_sync()``; names them.
        """
        # Ranks that took the step may be one step further already.
        own = [worker.progress.step + 1 if self.is_left_out else 0, self._passes_unaveraged]
        rows = worker.communicator.gather(np.array([own]), "hvd_elastic.left_out")
        told, unaveraged = rows.T.tolist()
        ranks = [str(rank) for rank, passes in enumerate(unaveraged) if passes]
        if ranks:
            raise ScriptError(
                f"{max(unaveraged)} backward passes of step {worker.progress.step + 1} were added "
                f"up in `with optimizer.no_sync():` on {plural('rank', len(ranks))} "
                f"{', '.join(ranks)} alone, of {len(told)}, and the others wait for their "
                f"gradients. {_ACCUMULATE_TOGETHER}"
            )
        ranks = [str(rank) for rank, left_out in enumerate(told) if left_out]
        if ranks:
            raise ScriptError(
                f"step {max(told)} was left out on {plural('rank', len(ranks))} "
                f"{', '.join(ranks)} alone, of {len(told)}: the loop body continued with the next "
                f"batch without {worker.frontend.takes_step}, and from then on ranks would hold "
                "different weights. Take every step on all ranks; one with gradients that are not "
                "finite is left out on all of them by itself. Else have all decide alike, by "
                "hvd.allreduce"
            )


def _gather_lines(worker: Worker, line: str, name: str) -> list[str]:
    """Return the line of each rank; all ranks call this."""
    own = np.frombuffer(line.encode() + b"\n", np.uint8).copy()
    told: bytes = worker.communicator.gather(own, f"hvd_elastic.{name}").tobytes()
    return told.decode().splitlines()


def _refuse_data_sets(worker: Worker) -> None:
    """Raise ScriptError if datasets of the same length differ; names the rank and the field."""
    lines = _gather_lines(worker, worker.data_sets.described(), "data_sets")
    first, *others = map(json.loads, lines)
    for rank, theirs in enumerate(others, 1):
        for digest, one, other in zip(worker.data_sets.digests, first, theirs, strict=False):
            if field := difference(one, other):
                raise ScriptError(
                    f"the ranks read different datasets: those of ranks 0 and {rank} differ in "
                    f"{field!r} of {digest.words}. {ALIKE}"
                )


def _left_alone(worker: Worker) -> ScriptError:
    """Return the error of a rank that ends an epoch while others take another step of it.

    It asks no other rank, since they wait for its gradients.
    """
    progress = worker.progress
    left = f" ({worker.left_epoch})" if worker.left_epoch else ""
    return ScriptError(
        f"rank {worker.rank} of {worker.size} is at the end of epoch {progress.epoch}"
        f"{left}, and other ranks take step {progress.step + 1} of it. {_LEAVE_TOGETHER}"
    )

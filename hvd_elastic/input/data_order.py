"""Decides which examples this rank reads next, so that each one is read exactly once an epoch.

The order of an epoch is fixed by (seed, epoch), and every rank reads its share of the next
``batch_size`` positions in it. Progress within an epoch is one number. So after any change of rank,
world size or process, reading continues from that position: nothing has to be gathered, nothing is
skipped and nothing is read twice.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np

from hvd_elastic.errors import ScriptError
from hvd_elastic.input.rate import InputBench
from hvd_elastic.input.skipped import whole
from hvd_elastic.model.sharding import (
    Blocks,
    Order,
    Slice,
    attribute_of,
    block_order,
    blocks_from,
    epoch_order,
    step_slice,
    steps_left,
)
from hvd_elastic.worker.checks.data_digest import ALIKE, DataDigest, difference
from hvd_elastic.worker.context import Context
from hvd_elastic.worker.planning.planner import Planner
from hvd_elastic.worker.progress import Progress
from hvd_elastic.worker.step import Pass, Stage
from hvd_elastic.worker.worker import Worker

MIN_SHARE = 2
"""Fewest examples of a rank in a step, where the batch size allows it: batch normalisation cannot
train on a single example, which a short last step could leave to a rank."""

_INDICES_AT_ONCE = 4096
"""Number of indices computed in one call; a call itself costs as much as about 1000 indices."""


GivenOrder = Callable[[int], Sequence[int]]
"""Returns the indices that an epoch reads, in order."""


class Place(NamedTuple):
    """The beginning of a step, and all that determines the passes from there on.

    Attributes:
        start: position of the step in the epoch.
        world: epoch, rank and size.
        plan: the planner's ``cut``.
    """

    start: int
    world: tuple[int, int, int]
    plan: Hashable


class Read(Protocol):
    """Function that reads the next pass."""

    def __call__(
        self, step: Place, following: Place, *, is_first: bool
    ) -> tuple[Any, list[int] | None]:
        """Return a batch, and its indices where the run is audited (else None).

        The batch is a :class:`Shortened` if examples were skipped.

        Args:
            step: place of the step that the pass belongs to.
            following: place of the step after it.
            is_first: whether the pass is the first of its step.
        """


@dataclass
class _Given:
    """The script's own order, and the hash of the epoch (first) that was read last."""

    order: GivenOrder
    hash: tuple[int, int] = (-1, 0)


@dataclass
class _Prefetch:
    """Function of a dataset that is told which blocks will be read.

    Attributes:
        told: (epoch, first position, position after the last) for which it was called.
    """

    tell: Callable[[Sequence[int]], None] | None
    told: tuple[int, int, int] = (0, 0, 0)


class DataOrder:
    """Order in which a dataset is read, and this rank's share of each step.

    A dataset may have these attributes beside its examples, as those of :mod:`hvd_elastic.data`
    have:

    - ``blocks``: its blocks (files), by which it is shuffled.
    - ``prefetch_blocks``: function that is called in the process of the rank with the numbers of
      the blocks that will be read, in order, whenever the first ones are done with.
    - ``order_key``: what its examples depend on, beside their index (a number or text). It must
      stay the same within an epoch.
    - ``endless``: whether it has examples beyond its length: epoch e reads the indices
      ``e * len(dataset)`` to ``(e + 1) * len(dataset) - 1``.
    - ``ordered``: whether it can only be read in its own order.

    Args:
        dataset: what is read.
        examples: number of examples of an epoch.
        batch_size: examples of a step over all ranks together.
        shuffle: whether each epoch has a new random order drawn from ``seed``; False: 0, 1, 2, ...
        seed: >= 0, the same on all ranks.
        drop_last: leave out the last step of an epoch if it would be smaller than ``batch_size``.
        planner: divides the steps.
        given: returns the indices of an epoch, which has ``examples`` of them; None: each index
            once.

    Raises:
        ScriptError: the blocks do not have ``examples`` examples, or an ordered dataset is to be
            shuffled.
    """

    def __init__(
        self,
        dataset: Any,
        examples: int,
        batch_size: int,
        *,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        planner: Planner,
        given: GivenOrder | None = None,
    ) -> None:
        blocks: Blocks | None = None if given else attribute_of(dataset, "blocks")
        if blocks is not None and sum(blocks.sizes) != examples:
            raise ScriptError(
                f"the dataset has {examples} examples, and its blocks have {sum(blocks.sizes)} "
                "together; its attribute `blocks` must give the size of each, or be None"
            )
        if shuffle and attribute_of(dataset, "ordered"):
            raise ScriptError(
                f"a {type(dataset).__name__} can only be read in its own order; leave shuffle=True "
                "out, and mix its examples where they are made"
            )
        self.examples = examples
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.planner = planner
        self.blocks = blocks
        self._prefetch = _Prefetch(attribute_of(dataset, "prefetch_blocks"))
        self._endless = bool(attribute_of(dataset, "endless"))
        self._window: int | None = None
        sizes: tuple[int, ...] | None = None
        if blocks is not None and shuffle:
            self._window = blocks.window
            sizes = tuple(np.asarray(blocks.sizes, np.int64).tolist())
        determined_by = (
            (examples, shuffle, seed if shuffle else None, attribute_of(dataset, "order_key")),
            (self._window, sizes),
        )
        self._given = None if given is None else _Given(given)
        self._indices = examples if given is None else len(dataset)
        self.digest = DataDigest(dataset, self._indices)
        self._hash = zlib.crc32(repr((determined_by, self.digest.fields)).encode()) or 1
        self._data: str = ""
        """What this rank's dataset was compared with."""
        # An epoch, and its order.
        self._order: tuple[int, Order] | None = None
        # (epoch, generation) in which this loader was last read to its end.
        self._ended: tuple[int, int] | None = None
        self._largest: tuple[Any, int] = (None, 0)

    def register(self, context: Context) -> None:
        """Register the dataset and the planner with the context.

        Raises:
            ScriptError: the run is audited, and the script's own order has an example twice.
        """
        if self._given is not None and context.worker.audit:
            found = self._epoch_order(0)(np.arange(self.examples))
            if len(np.unique(found)) < self._indices or len(found) > self._indices:
                raise ScriptError(
                    "DataLoader(order=...) with --audit, which shows that each example of the data "
                    "set is used exactly once in an epoch: this order leaves some out, or has some "
                    "several times. Run it without --audit"
                )
        dropped = self.examples % self.batch_size if self.drop_last else 0
        context.register_data(self.examples, dropped, self.planner)
        context.worker.data_sets.digests.append(self.digest)

    def steps_from(self, position: int, ranks: int) -> int:
        """Return the number of steps from a position to the end of an epoch."""
        return steps_left(
            position, self._epoch_end(position), self.planner.batch_size, ranks, MIN_SHARE
        )

    def _epoch_end(self, position: int) -> int:
        """Return the position at which the epoch ends when steps continue from ``position``."""
        if not self.drop_last:
            return self.examples
        whole_steps = (self.examples - position) // self.batch_size
        return position + whole_steps * self.batch_size

    def loop(
        self, context: Context, read: Read, enough: Callable[[], bool] | None = None
    ) -> Iterator[Any]:
        """Yield the remaining batches of the current epoch, pass by pass.

        Args:
            context: training process.
            read: reads the next pass.
            enough: continue with further epochs until it returns true; None: end with this epoch.
        """
        worker, rollback, planner = context.worker, context.rollback, self.planner
        step, times = context.step, worker.input_times
        if not worker.has_ranks:
            raise ScriptError(
                "the loader is iterated outside of a training function, where this worker has no "
                "rank yet. Put the loop into a function under @hvd.run, `def train(state): ...`, "
                "and call it: train(hvd.State(model=model, optimizer=optimizer)). To read without "
                f"training, as update_bn or an evaluation does, use {worker.frontend.other_loader}"
            )
        bench = InputBench.of(os.environ, times)
        if bench is not None:
            self._read_only(context, read, bench)
        epoch = context.reading.epoch
        if enough is None and self._ended == (epoch, worker.generation) and self._at_end(context):
            raise ScriptError(
                f"all {self.examples} examples of epoch {epoch} were read already, and the loader "
                "is iterated again; iterate it once inside each turn of `for epoch in "
                "hvd.epochs(...)`, which moves on to the next epoch. To train for a number of "
                "steps instead, in as many passes over the data as that takes: `for batch in "
                "hvd.steps(20_000, loader)`; to read without training, as update_bn or an "
                f"evaluation does, use {worker.frontend.other_loader}"
            )
        context.refuse_open_period()
        context.count_committed()
        loop = rollback.loop_begins(in_step=step.ahead is not None)
        if not loop:
            return
        try:
            self._claim(context)
            while True:
                # The world does not change between the last step of an epoch and the script's code
                # after the loop, since a newcomer could not take part in the collectives there, and
                # not within a step of several batches.
                if not self._is_over(context, enough) and step.ahead is None:
                    context.step_boundary()
                    if enough is None and worker.progress.epoch != epoch:
                        # The state received or restored is in another epoch; hvd.epochs()
                        # continues there.
                        return
                    self._claim(context)
                if self._is_over(context, enough):
                    self._end_loop(context, whole=enough is None and self._at_end(context))
                    return
                if step.ahead is not None and step.ahead.position == 0:
                    step.ahead.order_hash = self._hash_of(step.ahead.epoch)
                self._warn_of_idle_ranks(worker)
                before = (worker.progress.epoch, worker.progress.position)
                position = context.reading.position
                share = self._slice(position, self._epoch_end(position), worker.rank, worker.size)
                spans = self._spans(share, worker.progress.step, worker.size)
                planner.step_begins(len(spans), worker.communicator.waited_s)
                place = self._place(context, position)
                following = place._replace(start=share.step_stop)
                for number, (start, stop) in enumerate(spans, 1):
                    times.read_begins()
                    made, indices = read(place, following, is_first=number == 1)
                    batch, skipped = whole(made)
                    times.read_ends(stop - start)
                    if skipped:
                        context.data.tell_skipped(worker, skipped)
                    left = stop - start - len(skipped)
                    more = number < len(spans)
                    context.hand_out(
                        Pass(
                            step_examples=share.step_examples,
                            weight=share.weight * left / (share.stop - share.start),
                            indices=self._within_epoch(indices),
                            padding=share.padding,
                            examples=max(left, 1),
                            accumulating=more,
                            epoch=context.reading.epoch,
                            start=start,
                            skipped=self._within_epoch([each.dataset_index for each in skipped])
                            or (),
                            ends_epoch=enough is None
                            and following.start >= self._epoch_end(following.start),
                        )
                    )
                    yield batch
                    if more:
                        context.pass_ends()
                    times.body_ends()
                waited_s = worker.communicator.waited_s
                planner.step_ends(share.step_examples, len(spans), waited_s)
                if step.accumulating:
                    step.next_batch(worker.progress)
                    self._warn_of_endless_step(context)
                    continue
                if (worker.progress.epoch, worker.progress.position) == before:
                    context.mark_consumed()
                rollback.body_ended(voided=step.stage is Stage.VOIDED)
        except GeneratorExit:
            if rollback.is_current(loop):
                context.body_left()
            rollback.loop_left(loop, within_epoch=enough is not None)
            raise

    def _read_only(self, context: Context, read: Read, bench: InputBench) -> NoReturn:
        """Read batches without training, and end the script."""
        worker = context.worker
        progress, times = worker.progress, worker.input_times
        while not bench.is_over():
            if self._at_end(context):
                progress.next_epoch()
            end = self._epoch_end(progress.position)
            share = self._slice(progress.position, end, worker.rank, worker.size)
            spans = self._spans(share, progress.step, worker.size)
            place = self._place(context, progress.position)
            following = place._replace(start=share.step_stop)
            for number, (start, stop) in enumerate(spans, 1):
                times.read_begins()
                read(place, following, is_first=number == 1)
                times.read_ends(stop - start)
                times.body_ends()
            progress.advance(share.step_examples)
        bench.write_result(self.batch_size)

    def _at_end(self, context: Context) -> bool:
        position = context.reading.position
        return position >= self._epoch_end(position)

    def _is_over(self, context: Context, enough: Callable[[], bool] | None) -> bool:
        """Return whether the loop ends; with ``enough``, begin the next epoch where one is over."""
        if enough is None:
            return self._at_end(context) or context.worker.progress.stopped
        if self._at_end(context):
            if context.step.ahead is None:
                context.rollback.next_pass()
            else:
                context.step.ahead.next_epoch()
        return context.worker.progress.stopped or enough()

    def _end_loop(self, context: Context, *, whole: bool) -> None:
        """End the loop; ``whole``: the epoch is over."""
        ahead = context.step.ahead
        if whole:
            self._ended = (context.reading.epoch, context.worker.generation)
        if ahead is None:
            context.rollback.loop_ended(within_epoch=not whole)
        else:  # the step continues in the next epoch, if there is one
            ahead.next_epoch()

    def indices(self, place: Place, progress: Progress) -> Iterator[list[int]]:
        """Yield the dataset indices of each pass from a place to the end of the epoch."""
        epoch, rank, size = place.world
        order = self._epoch_order(epoch)
        position, end, step = place.start, self._epoch_end(place.start), progress.step
        while position < end:
            spans: list[tuple[int, int]] = []
            ahead = 0
            while position < end and ahead < _INDICES_AT_ONCE:
                share = self._slice(position, end, rank, size)
                spans += self._spans(share, step, size)
                ahead += share.stop - share.start
                position, step = share.step_stop, step + 1
            positions = np.concatenate([np.arange(*span, dtype=np.int64) for span in spans])
            first = epoch * self.examples if self._endless else 0
            found = iter((order(positions) + first).tolist())
            for start, stop in spans:
                yield list(islice(found, stop - start))

    def _within_epoch(self, indices: list[int] | None) -> list[int] | None:
        if indices is None or not self._endless:
            return indices
        return [index % self.examples for index in indices]

    def prefetch(self, place: Place) -> None:
        """Tell the dataset which blocks will be read, if others than it was told last."""
        tell, (epoch, start, stop) = self._prefetch.tell, self._prefetch.told
        now = place.world[0]
        if tell is None or self.blocks is None:
            return
        if now == epoch and start <= place.start < stop:
            return
        following, _ = blocks_from(self.seed, now + 1, self.blocks, 0, shuffle=self.shuffle)
        coming, stop = blocks_from(self.seed, now, self.blocks, place.start, shuffle=self.shuffle)
        self._prefetch.told = (now, place.start, stop)
        tell([*coming, *following])

    def _slice(self, position: int, end: int, rank: int, size: int) -> Slice:
        """Return a rank's share of the step that begins at a position."""
        batch, parts = self.planner.batch_size, self.planner.parts
        return step_slice(position, end, batch, rank, size, MIN_SHARE, parts=parts)

    def largest_share(self, context: Context) -> int:
        """Return the most examples that a rank has in the step that is read."""
        position, size = context.reading.position, context.worker.communicator.size
        end = self._epoch_end(position)
        # The last step of an epoch may have fewer examples than the batch size, or a few more.
        examples = self._slice(position, end, 0, size).step_examples
        now = (examples, size, self.planner.batch_size, self.planner.parts)
        if self._largest[0] != now:
            shares = [self._slice(position, end, rank, size) for rank in range(size)]
            self._largest = now, max(each.stop - each.start for each in shares)
        return self._largest[1]

    def _spans(self, share: Slice, step: int, ranks: int) -> list[tuple[int, int]]:
        """Return (start, stop) of each pass over a share, in the step after ``step``."""
        examples = share.stop - share.start
        passes = 1 if share.padding else self.planner.passes(step, examples, ranks)
        cuts = [share.start + examples * number // passes for number in range(passes + 1)]
        return list(pairwise(cuts))

    def _place(self, context: Context, start: int) -> Place:
        worker, reading = context.worker, context.reading
        world = (reading.epoch, worker.rank, worker.size)
        return Place(start, world, self.planner.cut)

    def _epoch_order(self, epoch: int) -> Order:
        if self._order is None or self._order[0] != epoch:
            if self._given is not None:
                order = self._given_order(epoch, self._given.order)
            elif self.blocks is not None and self.shuffle:
                order = block_order(self.seed, epoch, *self.blocks)
            else:
                order = epoch_order(self.seed, epoch, self.examples, shuffle=self.shuffle)
            self._order = (epoch, order)
        return self._order[1]

    def _given_order(self, epoch: int, given: GivenOrder) -> Order:
        """Return the script's own order of an epoch.

        Raises:
            ScriptError: it has another length than the first, or what is no index of the dataset.
        """
        found = np.asarray(given(epoch))
        problem = ""
        if found.ndim != 1 or not np.issubdtype(found.dtype, np.integer):
            problem = f"returns a {found.dtype} array of the shape {found.shape}"
        elif len(found) != self.examples:
            problem = f"returns {len(found)} indices, and {self.examples} for epoch 0"
        elif found.min() < 0 or found.max() >= self._indices:
            wrong = found[(found < 0) | (found >= self._indices)][0]
            problem = f"returns the index {wrong}, and the data set has {self._indices} examples"
        if problem:
            raise ScriptError(
                f"DataLoader(order=...): order({epoch}) {problem}. Return the indices that the "
                "epoch reads, in order, the same number for each epoch and the same on all ranks"
            )
        return lambda positions: found[positions]

    def _hash_of(self, epoch: int) -> int:
        """Return a hash of all that determines the order of an epoch, not 0."""
        if self._given is None:
            return self._hash
        if self._given.hash[0] != epoch:
            indices = self._epoch_order(epoch)(np.arange(self.examples))
            found = zlib.crc32(indices.astype(np.int64).tobytes(), self._hash) or 1
            self._given.hash = (epoch, found)
        return self._given.hash[1]

    def _claim(self, context: Context) -> None:
        """Raise ScriptError if another loader has been reading the current epoch."""
        worker = context.worker
        progress, other = worker.progress, worker.frontend.other_loader
        if progress.position > self.examples:
            raise ScriptError(
                f"epoch {progress.epoch} stands at example {progress.position}, but the loader's "
                f"dataset has {self.examples}: either the dataset has shrunk since the checkpoint "
                "(give it all its examples, or start a new run), or this is a second loader in "
                f"the epoch; evaluate with {other}"
            )
        now = (progress.epoch, worker.generation)
        last = context.data.last_reader
        if last is not None and last[0] == now and last[1] is not self and progress.position > 0:
            raise ScriptError(
                f"two loaders are iterated in epoch {progress.epoch}, and progress counts one "
                "only; make the training loader once, and read other data (evaluation) with "
                f"{other}"
            )
        context.data.last_reader = (now, self)
        if progress.data != self._data:
            self._compare(worker)
        if progress.position == 0:
            progress.order_hash = self._hash_of(progress.epoch)
        elif progress.order_hash not in (0, self._hash_of(progress.epoch)):
            window = "" if self._window is None else f", shuffle_window={self._window}"
            raise ScriptError(
                f"epoch {progress.epoch} was begun in another order of the data, or with examples "
                f"that were decoded otherwise; {progress.position} of them were read. In this one "
                f"(a dataset of {self.examples} examples, seed={self.seed}, shuffle={self.shuffle}"
                f"{window}) some of them would come again, and others never, or with other values. "
                "Continue with the dataset, its `decode`, the release of hvd_elastic, seed, "
                "shuffle and shuffle_window with which the epoch was begun (and for a Mixture its "
                "datasets, weights and seed), or start a new run"
            )

    def _compare(self, worker: Worker) -> None:
        """Compare the dataset with that of the rank whose progress this one has received.

        Raises:
            ScriptError: they differ; names what differs.
        """
        self._data = worker.progress.data
        number, described = worker.data_sets.digests.index(self.digest), json.loads(self._data)
        if number >= len(described):
            return  # the other rank had not made this loader yet
        field = difference(self.digest.described(), described[number])
        if field:
            raise ScriptError(
                f"rank {worker.rank} reads another data set than the rank whose state "
                f"it has received, or than this run has read before: they differ in {field!r} of "
                f"{self.digest.words}. {ALIKE}"
            )

    def _warn_of_endless_step(self, context: Context) -> None:
        """Warn if a step of several batches continues after a whole pass over the data."""
        worker, ahead = context.worker, context.step.ahead
        if ahead is None or context.step.is_period:
            return
        read = ahead.examples - worker.progress.examples
        if read >= self._epoch_end(0):
            worker.warn_once(
                f"step {worker.progress.step + 1} continues after {len(context.step.passes)} "
                f"backward passes in `with optimizer.no_sync():`, which have read {read} examples, "
                f"and the data set has {self.examples}: it ends with the first optimizer.step() "
                "after a backward pass outside of that block, and until then nothing is learnt, "
                "and neither hvd.steps() nor a checkpoint continues. Leave no_sync() out around "
                "the last pass of each step",
                of="a step of more than a pass over the data",
            )

    def _warn_of_idle_ranks(self, worker: Worker) -> None:
        batch, size = self.planner.batch_size, worker.size
        if batch < size:
            worker.warn_once(
                f"the batch of {batch} is for all ranks together and there are {size}: "
                f"{size - batch} of them have no example in a step; use a "
                f"{'max_batch_size' if self.planner.adapts else 'batch_size'} of at least {size}"
            )

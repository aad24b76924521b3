"""A data loader that reads each example of an epoch exactly once while the world changes.

The order of an epoch is fixed by (seed, epoch), and every rank reads its share of the next
``batch_size`` positions of it. Where training stands is the context's progress, one number, so
after any change of rank, world size or process the loader goes on from there: nothing is gathered,
nothing is skipped and nothing is read twice.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast

import numpy as np
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, default_collate

from hvd_elastic.errors import ScriptError
from hvd_elastic.model.sharding import Order, Slice, epoch_order, step_slice, steps_left
from hvd_elastic.torch.adaptation import Adaptation
from hvd_elastic.torch.rebalancing import Rebalancing
from hvd_elastic.training.planning.batch_bounds import batch_limits, require_whole
from hvd_elastic.training.progress import InFlight, Progress

__all__ = ["DataLoader", "TrainingContext"]

_Batch = TypeVar("_Batch")

# Two, where the batch size allows it, so that a short last step does not leave a rank alone with
# one example, on which batch normalisation cannot train.
_MIN_SHARE = 2

# Indices that are computed at a time: a call costs as much as about a thousand of them.
_INDICES_AT_ONCE = 4096


class LoopWatch(Protocol):
    """Is told where the loop stands; :class:`hvd_elastic.torch.rollback.Rollback` is one."""

    def loop_begins(self) -> int:
        """The loader is iterated; return a number for this loop, 0 if nothing is left to read."""

    def body_ended(self) -> None:
        """The script came back for the next batch, and the step of the last one is made."""

    def loop_ended(self) -> None:
        """All batches of the epoch were handed out, and the script came back for more."""

    def loop_left(self, loop: int) -> None:
        """The script, or an exception in it, left this loop before its end."""


class TrainingContext(Protocol):
    """What the loader needs of the training context.

    Attributes:
        progress: where training stands, equal on all ranks between two steps.
        rank, size, generation: this process's place in the world as it is now.
        audit: whether the indices that were really read shall be reported.
        waited_s: for other ranks, since this process began [s].
        rollback: is told where the loop stands.
    """

    progress: Progress
    audit: bool

    @property
    def rollback(self) -> LoopWatch: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def waited_s(self) -> float: ...

    def step_boundary(self) -> None:
        """A batch is about to be handed out: the world may change here, and this may raise."""

    def hand_out(self, batch: InFlight) -> None:
        """The script gets this share next; the optimizer marks it consumed after its step."""

    def pass_ends(self) -> None:
        """The script came back for the next pass of the same step."""

    def mark_consumed(self) -> None:
        """The script came back for more and no optimizer of ours took a step: progress moves."""

    def register_loader(self, loader: DataLoader[Any]) -> None:
        """A loader was made."""

    def warn(self, message: str) -> None:
        """Something is wrong and training goes on; one rank tells it."""


class DataLoader(Generic[_Batch]):
    """Hands each rank its share of every global batch, exactly once an epoch at any world size.

    It takes the arguments of :class:`torch.utils.data.DataLoader` and reads through one, with the
    same worker processes. Two things differ: ``batch_size`` is that of all ranks together and
    stays as it is when the world grows or shrinks, and the epoch's order comes from ``seed``, not
    from a sampler. Iterate inside ``hvd.epochs()``, once an epoch, over one loader; an evaluation
    set goes through a plain PyTorch loader.

    Shares of one step differ by at most one example, unless they follow the ranks' speed. The last
    step of an epoch is the rest of it, or is lengthened by a rest too small to go round; gradients
    are averaged by examples, so every step's gradient is that of its global batch.

    ``len()`` is the number of steps of a whole epoch at the present world size;
    :meth:`steps_left` is what remains of the current one.

    With ``max_batch_size`` the batch adapts: the size of a step, and the number of passes in which
    a rank makes its share of it, are chosen for the most progress per second, between steps and
    alike on all ranks. The loader then gives one pass at a time; ``optimizer.step()`` of
    :func:`DistributedOptimizer` does nothing until the last of a step.

    Where the ranks are not equally fast, shares can follow their speed (``unequal_shares``): all
    are ready at the same time, and the gradient stays that of the global batch.

    Args:
        dataset: map-style: has ``__getitem__`` and ``__len__`` (``__getitems__`` is used if there).
            Every rank must see the same examples under the same indices.
        batch_size: examples in a step over all ranks together, >= 1.
        shuffle: read in an order drawn anew for each epoch from ``seed``; False: 0, 1, 2, ...
        seed: >= 0, the same on all ranks.
        drop_last: leave out the last step of an epoch if it would be smaller than ``batch_size``.
        max_batch_size: largest global batch to adapt to, >= batch_size; None keeps the batch.
        atomic_batch_size_bounds: fewest and most examples in one pass on one rank; the upper one
            may be None: as many as fit into memory.
        accumulation: whether a share may be made in several passes.
        unequal_shares: whether slow ranks get fewer examples of a step; None: where the batch
            adapts.
        num_workers, collate_fn, pin_memory, timeout, worker_init_fn, prefetch_factor,
        persistent_workers, multiprocessing_context: as in PyTorch.
        sampler, batch_sampler, generator: of PyTorch's loader; refused, since who reads what
            follows from ``seed`` alone.
        context: the training context; the process's own by default.

    Raises:
        ScriptError: a sampler is given; the dataset is iterable-style, empty, or otherwise cannot
            be read by index; batch_size or seed is out of range; the bounds of the batch exclude
            each other.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
        shuffle: bool = False,
        seed: int = 0,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        drop_last: bool = False,
        max_batch_size: int | None = None,
        atomic_batch_size_bounds: tuple[int, int | None] | None = None,
        accumulation: bool = True,
        unequal_shares: bool | None = None,
        multiprocessing_context: Any = None,
        sampler: object = None,
        batch_sampler: object = None,
        generator: object = None,
        context: TrainingContext | None = None,
    ) -> None:
        _refuse_samplers(sampler=sampler, batch_sampler=batch_sampler, generator=generator)
        self.examples = _examples(dataset)
        if batch_size is None:
            raise ScriptError(
                "DataLoader(dataset) needs a batch_size: the examples of all ranks together in one "
                "step, DataLoader(dataset, 64)"
            )
        require_whole("batch_size", batch_size, 1, "examples of all ranks together in one step")
        require_whole("seed", seed, 0, "the same on all ranks")
        if drop_last and self.examples < batch_size:
            raise ScriptError(
                f"drop_last=True leaves nothing to train on: the dataset has {self.examples} "
                f"examples and batch_size is {batch_size}; make batch_size at most "
                f"{self.examples}, or drop_last=False"
            )
        if unequal_shares not in (None, True, False):
            raise ScriptError(
                f"DataLoader(unequal_shares={unequal_shares!r}): it must be True, False, or None "
                "(only where the batch adapts)"
            )
        self.adaptation: Adaptation | None = None
        self.rebalancing: Rebalancing | None = None
        if max_batch_size is not None:
            limits = batch_limits(
                batch_size, max_batch_size, atomic_batch_size_bounds, accumulation, self.examples
            )
            if drop_last:
                raise ScriptError(
                    "DataLoader(drop_last=True, max_batch_size=...): which examples would be left "
                    "out depends on the batch; leave drop_last out: gradients are averaged by "
                    "examples, so a short last step is no worse"
                )
            self.adaptation = Adaptation(limits, self.examples, unequal_shares is not False)
        elif atomic_batch_size_bounds is not None:
            raise ScriptError(
                "DataLoader(atomic_batch_size_bounds=...) is for a batch that adapts; give "
                "max_batch_size too"
            )
        elif unequal_shares:
            self.rebalancing = Rebalancing(batch_size, _MIN_SHARE)
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.num_workers = num_workers
        self._persistent = persistent_workers
        self._collate = collate_fn if collate_fn is not None else default_collate
        self._options = {
            "num_workers": num_workers,
            "pin_memory": pin_memory,
            "timeout": timeout,
            "prefetch_factor": prefetch_factor,
            "persistent_workers": persistent_workers,
            "multiprocessing_context": multiprocessing_context,
            "generator": torch.Generator(),
        }
        self._worker_start = _WorkerStart(worker_init_fn)
        self._shares = _Shares(batch_size, self.adaptation, self.rebalancing)
        # Made at once, so that PyTorch refuses bad options here and not in the first epoch.
        self._inner = self._make_inner(audit=False)
        self._audited = False
        self._batches: Iterator[Any] | None = None
        # (epoch, rank, size, plan) and position of the share that the open iterator gives next.
        self._next_share: tuple[Any, ...] | None = None
        # Of which (epoch, version) it is the order.
        self._order: tuple[tuple[int, int], Order] | None = None
        # (epoch, generation) in which this loader was read to its end.
        self._ended: tuple[int, int] | None = None
        self._token = object()
        self._warned_world = 0

        self._given_context = context
        self._registered: TrainingContext | None = None
        from hvd_elastic.torch.context import is_initialized

        # Made before hvd.init(), it is registered when it is first used.
        if context is not None or is_initialized():
            self._context()

    def signature(self) -> dict[str, int | bool]:
        """What ranks, and a checkpoint and the run that resumes it, must agree on."""
        return {
            "examples": self.examples,
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "drop_last": self.drop_last,
        }

    def __len__(self) -> int:
        """Steps of a whole epoch at the present world size."""
        return self._steps_from(0)

    def steps_left(self) -> int:
        """Steps from here to the end of the current epoch at the present world size."""
        return self._steps_from(self._context().progress.position)

    def close(self) -> None:
        """End the worker processes; iterating starts new ones."""
        self._stop_reading(keep_processes=False)

    def __iter__(self) -> Iterator[_Batch]:
        context = self._context()
        epoch = context.progress.epoch
        position = context.progress.position
        if self._ended == (epoch, context.generation) and position >= self._end(position):
            raise ScriptError(
                f"all {self.examples} examples of epoch {epoch} were read already, and the loader "
                "is iterated again; iterate it once inside each turn of `for epoch in "
                "hvd.epochs(...)`, which moves on to the next epoch"
            )
        loop = context.rollback.loop_begins()
        if not loop:
            return
        try:
            self._claim(context)
            while True:
                # The world stays as it is between the last step of an epoch and what the script
                # does after the loop: a newcomer could not take part in that.
                if position >= self._end(position):
                    self._ended = (epoch, context.generation)
                    context.rollback.loop_ended()
                    return
                context.step_boundary()
                if context.progress.epoch != epoch:
                    # The state that was taken over or restored is in another epoch;
                    # hvd.epochs() goes on from there.
                    return
                self._claim(context)
                position = context.progress.position
                end = self._end(position)
                if position >= end:
                    self._ended = (epoch, context.generation)
                    context.rollback.loop_ended()
                    return
                self._warn_of_idle_ranks(context)
                wanted, rank, size = self._batch_now(), context.rank, context.size
                parts = self._shares.parts
                share = step_slice(position, end, wanted, rank, size, _MIN_SHARE, parts=parts)
                passes = self._shares.passes(share, context.progress.step, context.size)
                if self.adaptation is not None:
                    self.adaptation.step_begins(len(passes), context.waited_s)
                elif self.rebalancing is not None:
                    self.rebalancing.own_times.step_begins(context.waited_s)
                for number, (start, stop) in enumerate(passes, 1):
                    batch, indices = self._read(share, context, end, first=number == 1)
                    weight = share.weight * (stop - start) / (share.stop - share.start)
                    more = number < len(passes)
                    context.hand_out(
                        InFlight(
                            epoch=epoch,
                            position=position,
                            step_examples=share.step_examples,
                            weight=weight,
                            indices=indices,
                            padding=share.padding,
                            examples=stop - start,
                            accumulating=more,
                        )
                    )
                    yield batch
                    if more:
                        context.pass_ends()
                if self.adaptation is not None:
                    self.adaptation.step_ends(share.step_examples, len(passes), context.waited_s)
                elif self.rebalancing is not None:
                    self.rebalancing.step_ends(share.step_examples, context.waited_s)
                progress = context.progress
                if (progress.epoch, progress.position) == (epoch, position):
                    context.mark_consumed()
                context.rollback.body_ended()
                position = context.progress.position
        except GeneratorExit:
            context.rollback.loop_left(loop)
            raise
        finally:
            # Also if the loop is left early or by an error.
            self._stop_reading(keep_processes=self._persistent)

    # -- reading

    def _batch_now(self) -> int:
        return (
            self.batch_size if self.adaptation is None else self.adaptation.plan.global_batch_size
        )

    def _read(
        self, share: Slice, context: TrainingContext, end: int, *, first: bool
    ) -> tuple[_Batch, list[int] | None]:
        plan = None if self.adaptation is None else self.adaptation.cut
        progress = context.progress
        world = (progress.epoch, context.rank, context.size)
        place = (*world, plan, self._shares.parts, progress.data_order)
        if context.audit != self._audited:
            self.close()
            self._audited = context.audit
            self._inner = self._make_inner(self._audited)
        # A new generation in which this rank reads what it would have read keeps what it has.
        if first and (self._batches is None or self._next_share != (*place, share.step_start)):
            # What was read ahead is for another place in the world or the epoch. Its workers end
            # first: with the new ones they would need their memory twice.
            self._stop_reading(keep_processes=self._persistent)
            self._shares.rank, self._shares.size = context.rank, context.size
            self._shares.order = self._epoch_order(progress)
            self._shares.position, self._shares.end = share.step_start, end
            self._shares.step = progress.step
            # PyTorch would draw its workers' seeds from the script's generator, one for each
            # iterator, and so make the script's own randomness depend on rescales.
            seeds = np.random.SeedSequence((self.seed, *world, share.step_start))
            self._options["generator"].manual_seed(int(seeds.generate_state(1, np.uint64)[0]))
            self._worker_start.parent = (
                os.getpid() if threading.current_thread() is threading.main_thread() else None
            )
            self._batches = iter(self._inner)
        # Nothing is known of the iterator's place if this raises.
        self._next_share = None
        assert self._batches is not None
        read = next(self._batches)
        self._next_share = (*place, share.step_stop)
        if self._audited:
            indices, batch = read
            return batch, list(indices)
        return read, None

    def _stop_reading(self, *, keep_processes: bool) -> None:
        self._next_share = None
        batches, self._batches = self._batches, None
        if not keep_processes:
            # Left to the garbage collector (a traceback may hold the iterator in a cycle, and
            # its queues go first), the processes are not told, and PyTorch waits 5 s for each.
            reading = batches if batches is not None else self._inner._iterator
            shutdown = getattr(reading, "_shutdown_workers", None)
            if shutdown is not None:
                shutdown()
            self._inner._iterator = None

    def _make_inner(self, audit: bool) -> TorchDataLoader[Any]:
        options = dict(self._options)
        if self.num_workers > 0:
            options["worker_init_fn"] = self._worker_start
        dataset, collate = self.dataset, self._collate
        if audit:
            dataset, collate = _TellingDataset(dataset), _TellingCollate(collate)
        return TorchDataLoader(dataset, batch_sampler=self._shares, collate_fn=collate, **options)

    def _epoch_order(self, progress: Progress) -> Order:
        epoch, version = now = (progress.epoch, progress.data_order)
        if self._order is None or self._order[0] != now:
            self._order = None  # two whole orders of version 1 may be too much for the memory
            order = epoch_order(
                self.seed, epoch, self.examples, shuffle=self.shuffle, version=version
            )
            self._order = (now, order)
        return self._order[1]

    # -- place in the epoch

    def _end(self, position: int) -> int:
        """The position at which the epoch is over, seen from ``position``."""
        if not self.drop_last:
            return self.examples
        whole_steps = (self.examples - position) // self.batch_size
        return position + whole_steps * self.batch_size

    def _steps_from(self, position: int) -> int:
        size = self._context().size
        return steps_left(position, self._end(position), self._batch_now(), size, _MIN_SHARE)

    def _context(self) -> TrainingContext:
        context = self._given_context
        if context is None:
            from hvd_elastic.torch.context import current

            context = cast(TrainingContext, current())
        if self._registered is not context:
            self._registered = context
            context.register_loader(self)
        return context

    def _claim(self, context: TrainingContext) -> None:
        """Refuse the position of an epoch that another loader has been reading."""
        global _last_reader
        progress = context.progress
        if progress.position > self.examples:
            raise ScriptError(
                f"epoch {progress.epoch} stands at example {progress.position}, but the loader's "
                f"dataset has {self.examples}: either the dataset has shrunk since the checkpoint "
                "(give it all its examples, or start a new run), or this is a second loader in "
                "the epoch; evaluate with torch.utils.data.DataLoader"
            )
        now = (progress.epoch, context.generation)
        if (
            _last_reader is not None
            and _last_reader[0] is context
            and _last_reader[1] == now
            and _last_reader[2] is not self._token
            and progress.position > 0
        ):
            raise ScriptError(
                f"two loaders are iterated in epoch {progress.epoch}, and progress is that of one; "
                "make the training loader once, and read other data (evaluation) with "
                "torch.utils.data.DataLoader"
            )
        _last_reader = (context, now, self._token)

    def _warn_of_idle_ranks(self, context: TrainingContext) -> None:
        batch, size = self._batch_now(), context.size
        if batch < size != self._warned_world:
            self._warned_world = size
            if context.rank == 0:
                context.warn(
                    f"the batch of {batch} is for all ranks together and there are {size}: "
                    f"{size - batch} of them have no example in a step; use a "
                    f"{'batch_size' if self.adaptation is None else 'max_batch_size'} of at least "
                    f"{size}"
                )


# Which loader read last: (context, (epoch, generation), its token). Progress is one number for the
# process, so this is too.
_last_reader: tuple[TrainingContext, tuple[int, int], object] | None = None


class _Shares:
    """The batch sampler: this rank's passes, step after step, as lists of dataset indices."""

    def __init__(
        self, batch_size: int, adaptation: Adaptation | None, rebalancing: Rebalancing | None
    ) -> None:
        self._batch_size = batch_size
        self._adaptation = adaptation
        self._rebalancing = rebalancing
        self.step = 0
        self.rank = 0
        self.size = 1
        self.order: Order | None = None
        self.position = 0
        self.end = 0

    def __iter__(self) -> Iterator[list[int]]:
        position, step = self.position, self.step
        adaptation = self._adaptation
        batch = self._batch_size if adaptation is None else adaptation.plan.global_batch_size
        parts, rank, size, order = self.parts, self.rank, self.size, self.order
        assert order is not None
        while position < self.end:
            passes: list[tuple[int, int]] = []
            ahead = 0
            while position < self.end and ahead < _INDICES_AT_ONCE:
                share = step_slice(position, self.end, batch, rank, size, _MIN_SHARE, parts=parts)
                passes += self.passes(share, step, size)
                ahead += share.stop - share.start
                position, step = share.step_stop, step + 1
            positions = np.concatenate([np.arange(*span, dtype=np.int64) for span in passes])
            indices = iter(order(positions).tolist())
            for start, stop in passes:
                yield list(islice(indices, stop - start))

    @property
    def parts(self) -> tuple[int, ...]:
        """Examples of each rank in a full step; empty: equal shares."""
        planner = self._adaptation or self._rebalancing
        return () if planner is None else planner.parts

    def passes(self, share: Slice, step: int, ranks: int) -> list[tuple[int, int]]:
        """The positions of each pass over a share, in the step after ``step``."""
        examples = share.stop - share.start
        passes = 1
        if self._adaptation is not None and not share.padding:
            passes = self._adaptation.passes(step, examples, ranks)
        cuts = [share.start + examples * number // passes for number in range(passes + 1)]
        return list(pairwise(cuts))


class _TellingDataset:
    """A dataset that says which indices it was really asked for."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getattr__(self, name: str) -> Any:
        # A worker_init_fn looks at get_worker_info().dataset and expects its own. Copies made by
        # pickle ask for dunder names before _dataset exists.
        if name.startswith("__") or name == "_dataset":
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> tuple[list[int], list[Any]]:
        return [index], [self._dataset[index]]

    def __getitems__(self, indices: list[int]) -> tuple[list[int], Any]:
        at_once = getattr(self._dataset, "__getitems__", None)
        if at_once:
            return list(indices), at_once(indices)
        told: list[int] = []
        samples = []
        for index in indices:
            samples.append(self._dataset[index])
            told.append(index)
        return told, samples


class _TellingCollate:
    """Collates the samples as the script wants them, and passes the indices on beside them."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, told: Any) -> tuple[list[int], Any]:
        indices, samples = told
        return indices, self._collate(samples)


class _WorkerStart:
    """What a reading process does first: lets go of its rank's network, then the script's part.

    A reading process is forked from the rank and so holds its connections to the other ranks
    open. If the rank dies, they would learn of it only when the reading process ends too (PyTorch
    looks every 5 s), and if the rank closes its end, never.
    """

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then
        # The rank, if its main thread starts the process: the kernel tells of the end of the
        # *thread* that forked, and only the main one is known to live as long as its process.
        self.parent: int | None = None

    def __call__(self, worker_id: int) -> None:
        if self.parent is not None:
            _die_with(self.parent)
        _release_inherited_connections()
        if self._then is not None:
            self._then(worker_id)


_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def _die_with(parent: int) -> None:
    """Have the kernel end this process as soon as the rank has died."""
    if os.getppid() != parent:  # started by a fork server, whose death says nothing
        return
    try:
        prctl = ctypes.CDLL(None).prctl
    except (OSError, AttributeError):  # not Linux: PyTorch's own watch must do
        return
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died just before we asked
        os._exit(1)


def _release_inherited_connections() -> None:
    try:
        descriptors = [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]
    except OSError:  # not Linux
        return
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        if _is_tcp(descriptor):
            # The number stays taken: whoever still thinks of it as a connection reads its end
            # instead of somebody else's file.
            os.dup2(null, descriptor)
    os.close(null)


def _is_tcp(descriptor: int) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return False
        inherited = socket.socket(fileno=descriptor)
    except OSError:  # the descriptor that listed the folder
        return False
    found = inherited.family in (socket.AF_INET, socket.AF_INET6) and (
        inherited.type == socket.SOCK_STREAM
    )
    inherited.detach()
    return found


def _refuse_samplers(**given: object) -> None:
    for name, value in given.items():
        if value is not None:
            raise ScriptError(
                f"DataLoader({name}={type(value).__name__}): leave it out: batch_size is "
                "that of all ranks together, shuffle=True and seed=... draw the order of an epoch, "
                "and each rank is given its share of every batch, so no DistributedSampler and no "
                "set_epoch() is needed"
            )


def _examples(dataset: Any) -> int:
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise ScriptError(
            f"the dataset ({kind}) cannot be read by index, so its examples cannot be shared out "
            "exactly once; give hvd_elastic.torch.DataLoader a map-style dataset "
            "(__getitem__ and __len__)"
        )
    try:
        examples = len(dataset)
    except (TypeError, NotImplementedError) as missing:
        raise ScriptError(
            f"the dataset ({kind}) has no length; give it a __len__ that says how many examples "
            "it holds"
        ) from missing
    except (OverflowError, ValueError) as error:
        raise ScriptError(
            f"the dataset ({kind}) has a length that Python refuses ({error}); __len__ must return "
            f"a whole number from 1 to {sys.maxsize}"
        ) from error
    if examples == 0:
        raise ScriptError(
            f"the dataset ({kind}) is empty; check where it is read from on this host"
        )
    return examples

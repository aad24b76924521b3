"""A data loader that reads each example of an epoch exactly once while the world changes.

What it reads is decided by :mod:`hvd_elastic.training.data_order`.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, default_collate

from hvd_elastic.errors import ScriptError
from hvd_elastic.torch.device_times import cuda_event
from hvd_elastic.training import context as training
from hvd_elastic.training.context import Context
from hvd_elastic.training.data_order import MIN_SHARE, DataOrder, Place
from hvd_elastic.training.planning.adaptive import AdaptivePlanner
from hvd_elastic.training.planning.batch_bounds import batch_limits, require_whole
from hvd_elastic.training.planning.compute_times import ComputeTimes
from hvd_elastic.training.planning.planner import Planner, UnequalShares
from hvd_elastic.training.worker import Worker

__all__ = ["DataLoader"]

_Batch = TypeVar("_Batch")


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
        context: Context | None = None,
    ) -> None:
        _refuse_samplers(sampler=sampler, batch_sampler=batch_sampler, generator=generator)
        examples = _examples(dataset)
        if batch_size is None:
            raise ScriptError(
                "DataLoader(dataset) needs a batch_size: the examples of all ranks together in one "
                "step, DataLoader(dataset, 64)"
            )
        require_whole("batch_size", batch_size, 1, "examples of all ranks together in one step")
        require_whole("seed", seed, 0, "the same on all ranks")
        if drop_last and examples < batch_size:
            raise ScriptError(
                f"drop_last=True leaves nothing to train on: the dataset has {examples} "
                f"examples and batch_size is {batch_size}; make batch_size at most "
                f"{examples}, or drop_last=False"
            )
        if unequal_shares not in (None, True, False):
            raise ScriptError(
                f"DataLoader(unequal_shares={unequal_shares!r}): it must be True, False, or None "
                "(only where the batch adapts)"
            )
        self.planner = Planner(batch_size)
        if max_batch_size is not None:
            limits = batch_limits(
                batch_size, max_batch_size, atomic_batch_size_bounds, accumulation, examples
            )
            if drop_last:
                raise ScriptError(
                    "DataLoader(drop_last=True, max_batch_size=...): which examples would be left "
                    "out depends on the batch; leave drop_last out: gradients are averaged by "
                    "examples, so a short last step is no worse"
                )
            self.planner = AdaptivePlanner(
                limits, examples, unequal_shares is not False, cuda_event
            )
        elif atomic_batch_size_bounds is not None:
            raise ScriptError(
                "DataLoader(atomic_batch_size_bounds=...) is for a batch that adapts; give "
                "max_batch_size too"
            )
        elif unequal_shares:
            times = ComputeTimes(new_event=cuda_event)
            self.planner = UnequalShares(batch_size, MIN_SHARE, times)
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
        self._order = DataOrder(
            examples,
            batch_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            planner=self.planner,
        )
        self._worker_start = _WorkerStart(worker_init_fn)
        self._next_passes = _NextPasses()
        # Made at once, so that PyTorch refuses bad options here and not in the first epoch.
        self._inner = self._make_inner(audit=False)
        self._audited = False
        self._batches: Iterator[Any] | None = None
        self._next_place: Place | None = None
        """Of the step that the open iterator gives next."""
        self._given_context = context
        self._registered: Context | None = None
        # Made before hvd.init(), it is registered when it is first used.
        if context is not None or training.is_initialized():
            self._context()

    def __len__(self) -> int:
        """Steps of a whole epoch at the present world size."""
        return self._steps_from(0)

    def steps_left(self) -> int:
        """Steps from here to the end of the current epoch at the present world size."""
        return self._steps_from(self._context().worker.progress.position)

    def _steps_from(self, position: int) -> int:
        worker = self._context().worker
        worker.check_has_ranks("the number of steps")
        return self._order.steps_from(position, worker.communicator.size)

    def close(self) -> None:
        """End the worker processes; iterating starts new ones."""
        self._stop_reading(keep_processes=False)

    def __iter__(self) -> Iterator[_Batch]:
        context = self._context()
        try:
            yield from self._order.loop(context, functools.partial(self._read, context.worker))
        finally:
            # Also if the loop is left early or by an error.
            self._stop_reading(keep_processes=self._persistent)

    def _context(self) -> Context:
        context = self._given_context or training.current()
        if self._registered is not context:
            self._registered = context
            self._order.register(context)
        return context

    # -- reading

    def _read(
        self, worker: Worker, place: Place, following: Place, *, is_first: bool
    ) -> tuple[_Batch, list[int] | None]:
        if worker.audit != self._audited:
            self.close()
            self._audited = worker.audit
            self._inner = self._make_inner(self._audited)
        # A new generation in which this rank reads what it would have read keeps what it has.
        if is_first and (self._batches is None or self._next_place != place):
            # What was read ahead is for another place in the world or the epoch. Its workers end
            # first: with the new ones they would need their memory twice.
            self._stop_reading(keep_processes=self._persistent)
            self._next_passes.indices = self._order.indices(place, worker.progress)
            # PyTorch would draw its workers' seeds from the script's generator, one for each
            # iterator, and so make the script's own randomness depend on rescales.
            seeds = np.random.SeedSequence((self.seed, *place.world, place.start))
            self._options["generator"].manual_seed(int(seeds.generate_state(1, np.uint64)[0]))
            self._worker_start.parent = (
                os.getpid() if threading.current_thread() is threading.main_thread() else None
            )
            self._batches = iter(self._inner)
        # Nothing is known of the iterator's place if this raises.
        self._next_place = None
        assert self._batches is not None
        read = next(self._batches)
        self._next_place = following
        if self._audited:
            indices, batch = read
            return batch, list(indices)
        return read, None

    def _stop_reading(self, *, keep_processes: bool) -> None:
        self._next_place = None
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
        return TorchDataLoader(
            dataset, batch_sampler=self._next_passes, collate_fn=collate, **options
        )


class _NextPasses:
    """The batch sampler: indices of this rank's passes, from the last place on."""

    def __init__(self) -> None:
        self.indices: Iterator[list[int]] = iter(())

    def __iter__(self) -> Iterator[list[int]]:
        return self.indices


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

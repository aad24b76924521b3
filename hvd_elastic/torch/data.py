"""Data loader that reads each example of an epoch exactly once while the world changes.

:mod:`hvd_elastic.input.data_order` decides which examples a rank reads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import IterableDataset, default_collate

from hvd_elastic.errors import ScriptError
from hvd_elastic.input.data_order import Place
from hvd_elastic.input.forked import WorkerStart
from hvd_elastic.input.loader import OrderedLoader
from hvd_elastic.input.loader_arguments import examples_of, order_for
from hvd_elastic.input.shared import SharedReading
from hvd_elastic.script.horovod_names import explain_arguments
from hvd_elastic.torch.input_source import LoaderSource
from hvd_elastic.torch.plain_reading import PlainReading, cuda_event
from hvd_elastic.worker.context import Context
from hvd_elastic.worker.worker import Worker

_Batch = TypeVar("_Batch")


class DataLoader(OrderedLoader, Generic[_Batch]):
    """Gives each rank its share of every global batch; each example is read once an epoch.

    It takes the arguments of :class:`torch.utils.data.DataLoader` and reads through one, with the
    same worker processes. Two things differ: ``batch_size`` counts the examples of all ranks
    together and does not change with the world size, and the order of an epoch comes from ``seed``
    instead of a sampler. Iterate over one loader inside ``hvd.epochs()``, once an epoch; use a
    plain PyTorch loader for evaluation.

    Shares of one step differ by at most one example, unless they follow the ranks' speed. The last
    step of an epoch has the remaining examples, and includes a remainder that has too few for all
    ranks; gradients are weighted by examples, so the gradient of every step is that of its global
    batch.

    ``len()`` is the number of steps of a whole epoch at the present world size, before training
    that of one rank; :meth:`steps_left` is the number that remains of the current epoch.

    With ``max_batch_size`` the batch adapts: the global batch size, and the number of passes in
    which a rank computes its share, are chosen between steps for the most progress per second, the
    same on all ranks. The loader then gives one pass at a time, and ``optimizer.step()`` of
    :func:`DistributedOptimizer` does nothing until the last pass of a step.

    If the ranks are not equally fast, shares can follow their speed (``unequal_shares``), so that
    all finish a step at the same time; the gradient is still that of the global batch.

    Args:
        dataset: map-style dataset, with ``__getitem__`` and ``__len__`` (and ``__getitems__``,
            which is used if present). All ranks must see the same examples at the same indices.
            If it has ``blocks`` (:class:`hvd_elastic.model.sharding.Blocks`), as a
            :class:`hvd_elastic.data.ShardDataset` has, the order of an epoch is random within a
            few blocks at a time.
        batch_size: examples in a step over all ranks together, >= 1.
        shuffle: whether each epoch has a new random order drawn from ``seed``; False: 0, 1, 2, ...
        seed: seed of the order, >= 0, the same on all ranks.
        order: function that returns the indices that an epoch reads, in order, from the number of
            the epoch: ``order=lambda epoch: indices``, the same number for each epoch, and the same
            on all ranks. For examples of different weight, or grouped by length. None: each example
            once, as ``shuffle`` says.
        drop_last: leave out the last step of an epoch if it would be smaller than ``batch_size``.
        max_batch_size: largest global batch to adapt to, >= batch_size; None: the batch is fixed.
        atomic_batch_size_bounds: fewest and most examples in one pass on one rank; None as the
            upper bound means as many as fit into memory.
        accumulation: whether a share may be computed in several passes.
        unequal_shares: whether slow ranks get fewer examples of a step; None: if the batch adapts.
        seed_examples: seed the random numbers of Python, NumPy and PyTorch for each example, by
            ``seed``, the epoch and its index, so that an augmented example does not depend on the
            process that reads it. It is always so where input hosts read for the ranks.
        num_workers, collate_fn, pin_memory, timeout, worker_init_fn, prefetch_factor,
        persistent_workers, multiprocessing_context: as in PyTorch.
        sampler, batch_sampler, generator: arguments of PyTorch's loader that are refused, since
            ``seed`` alone determines which rank reads which example.
        context: training context; by default that of this process.

    Raises:
        ScriptError: a sampler is given; the dataset is iterable-style, empty, or otherwise cannot
            be read by index; batch_size or seed is out of range; the bounds of the batch contradict
            each other.
    """

    @explain_arguments
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
        order: Callable[[int], Sequence[int]] | None = None,
        max_batch_size: int | None = None,
        atomic_batch_size_bounds: tuple[int, int | None] | None = None,
        accumulation: bool = True,
        unequal_shares: bool | None = None,
        seed_examples: bool = False,
        multiprocessing_context: Any = None,
        sampler: object = None,
        batch_sampler: object = None,
        generator: object = None,
        context: Context | None = None,
    ) -> None:
        _refuse_samplers(sampler=sampler, batch_sampler=batch_sampler, generator=generator)
        if isinstance(dataset, tuple) and all(isinstance(each, torch.Tensor) for each in dataset):
            raise ScriptError(
                f"DataLoader(dataset): a tuple of {len(dataset)} tensors would be read as so many "
                "examples; make a data set of their rows: TensorDataset(*tensors)"
            )
        examples = examples_of(
            dataset,
            isinstance(dataset, IterableDataset),
            "hvd_elastic.torch.DataLoader a map-style dataset (__getitem__ and __len__)",
        )
        data_order = order_for(
            "DataLoader",
            dataset,
            batch_size,
            examples,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            max_batch_size=max_batch_size,
            atomic_batch_size_bounds=atomic_batch_size_bounds,
            accumulation=accumulation,
            unequal_shares=unequal_shares,
            order=order,
            new_event=cuda_event,
        )
        self.planner = data_order.planner
        self.dataset = dataset
        self.batch_size = data_order.batch_size
        self.shuffle = shuffle
        self.seed = data_order.seed
        self.drop_last = drop_last
        self.num_workers = num_workers
        collate_fn = collate_fn if collate_fn is not None else default_collate
        options = {
            "num_workers": num_workers,
            "pin_memory": pin_memory,
            "timeout": timeout,
            "prefetch_factor": prefetch_factor,
            "persistent_workers": persistent_workers,
            "multiprocessing_context": multiprocessing_context,
            "generator": torch.Generator(),
        }
        self._worker_start = WorkerStart(worker_init_fn)
        source = LoaderSource(
            dataset, examples, collate_fn, self.seed, self._worker_start, pins=pin_memory
        )
        shared = SharedReading(source, num_workers, always=seed_examples, new_event=cuda_event)
        self._is_shared = False
        self._plain = PlainReading(dataset, collate_fn, self.seed, options, self._worker_start)
        super().__init__(data_order, shared, context)

    def close(self) -> None:
        """End the loader's worker processes; iterating starts new ones."""
        self._plain.close()
        self._shared.close()

    def __iter__(self) -> Iterator[_Batch]:
        return self.batches()

    def batches(self, enough: Callable[[], bool] | None = None) -> Iterator[_Batch]:
        """Yield the remaining batches of the current epoch; see :meth:`Loader.batches`."""
        context = self._context()
        read = functools.partial(self._read, context.worker)
        try:
            yield from self._order.loop(context, read, enough)
        finally:
            # Runs too if the loop is left early or by an exception.
            self._plain.stop()

    def _read(
        self, worker: Worker, place: Place, following: Place, *, is_first: bool
    ) -> tuple[_Batch, list[int] | None]:
        if is_first:  # the passes of a step come from one reader
            self._is_shared = self._shared.is_used(worker)
        self._worker_start.set_parent()
        order = functools.partial(self._order.indices, place, worker.progress)
        # Prefetching may start threads, so it begins after the loader processes have been forked.
        if self._is_shared:
            if self._plain.has_processes:
                self._plain.close()
            batch, told = self._shared.read(worker, place, following, order, is_first=is_first)
            self._order.prefetch(place)
            return batch, told
        if is_first:
            self._plain.go_to(worker, place, order)
        self._order.prefetch(place)
        return self._plain.read(following)


def _refuse_samplers(**given: object) -> None:
    for name, value in given.items():
        if value is not None:
            raise ScriptError(
                f"DataLoader({name}={type(value).__name__}): leave it out: batch_size is "
                "that of all ranks together, shuffle=True and seed=... draw the order of an epoch, "
                "and each rank is given its share of every batch, so no DistributedSampler and no "
                "set_epoch() is needed. For another order, by weight (WeightedRandomSampler) or "
                "grouped by length, give a function of the epoch: order=lambda epoch: indices"
            )

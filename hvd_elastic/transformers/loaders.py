"""The data of a Trainer: each example of an epoch once, whatever happens to the ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from itertools import chain, count, islice, pairwise
from typing import Any

import torch
from accelerate.state import GradientState
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

import hvd_elastic.torch as hvd
from hvd_elastic.data import Stream
from hvd_elastic.errors import ScriptError
from hvd_elastic.model.sharding import attribute_of
from hvd_elastic.transformers.accelerator import ElasticAccelerator, gather_objects, together
from hvd_elastic.worker import context

_KEPT = ("collate_fn", "num_workers", "pin_memory")
"""Arguments of a loader that one of an evaluation keeps."""
Passes = list[tuple[int, Any]]
"""The passes in which a rank computes its share of a step: number of examples, and inputs."""


class _Split:
    """Collates a rank's share of a step, in passes of as many examples as a device takes."""

    def __init__(self, collate: Callable[[list[Any]], Any], most: int | None) -> None:
        self._collate = collate
        self._most = most

    def __call__(self, examples: list[Any]) -> Passes:
        passes = 1 if self._most is None else -(-len(examples) // self._most)
        cuts = [len(examples) * number // passes for number in range(passes + 1)]
        parts = [examples[start:stop] for start, stop in pairwise(cuts)]
        return [(len(part), self._collate(part)) for part in parts]


def training_loader(
    dataset: Any,
    collate: Callable[[list[Any]], Any],
    args: Any,
    sampler: Callable[[], Any],
    as_on: int,
    options: dict[str, Any],
) -> Any:
    """Return our loader, whose batches are update steps: a list of :data:`Passes`.

    Args:
        dataset: the training data.
        collate: makes the inputs of a pass.
        args: TrainingArguments.
        sampler: returns the sampler of an epoch.
        as_on: factor of the batch size.
        options: further arguments of :class:`hvd_elastic.torch.DataLoader`.

    Raises:
        ScriptError: the sampler gives no indices, or the batch of a stream is to adapt.
    """
    adapts = options.get("max_batch_size") is not None
    batch_size = args.train_batch_size * args.gradient_accumulation_steps * as_on
    seed = args.seed if args.data_seed is None else args.data_seed
    kind: type | None = None
    order = None
    if isinstance(dataset, IterableDataset):
        if adapts:
            raise ScriptError(
                f"train_dataset is a {type(dataset).__name__}, a stream, and max_batch_size is "
                "given: how many examples it has must be known. Leave max_batch_size out, or use "
                "a map-style data set (of the datasets library: streaming=False)"
            )
        repeated = functools.partial(_repeated, dataset)
        dataset = Stream(
            lambda _, __, start: islice(repeated(), start, None), length=args.max_steps * batch_size
        )
    else:
        first = sampler()
        kind = type(first)
        if kind not in (RandomSampler, SequentialSampler) or getattr(first, "replacement", False):
            order = _order_of(sampler, seed)
            if not hasattr(first, "__len__") or isinstance(next(iter(first), 0), (list, tuple)):
                raise ScriptError(
                    f"the sampler of the training data is a {kind.__name__}, and which rank reads "
                    "which example is decided by the library. Use train_sampling_strategy "
                    "random, sequential or group_by_length, or have _get_train_sampler() return a "
                    "sampler of indices"
                )
    workers = args.dataloader_num_workers
    return hvd.DataLoader(
        dataset,
        batch_size,
        shuffle=order is None and kind is RandomSampler and not attribute_of(dataset, "ordered"),
        seed=seed,
        order=order,
        drop_last=args.dataloader_drop_last,
        collate_fn=_Split(collate, None if adapts else args.train_batch_size),
        num_workers=workers,
        pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(),
        prefetch_factor=args.dataloader_prefetch_factor,
        persistent_workers=args.dataloader_persistent_workers and workers > 0,
        **options,
    )


def _repeated(stream: Any) -> Iterator[Any]:
    """Yield the examples of a stream, which begins again where it ends, as for Trainer."""
    for epoch in count():
        if hasattr(stream, "set_epoch"):
            stream.set_epoch(epoch)
        is_empty = True
        for example in stream:
            is_empty = False
            yield example
        if is_empty:
            return


def _order_of(sampler: Callable[[], Any], seed: int) -> Callable[[int], list[int]]:
    """Return the order of an epoch that a sampler of theirs draws, the same on all ranks."""

    def order(epoch: int) -> list[int]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + epoch)
            made = sampler()
            if hasattr(made, "set_epoch"):
                made.set_epoch(epoch)
            return [int(each) for each in made]

    return order


class EvaluationLoader:
    """Gives each rank the batches of an evaluation in turn; all ranks have the same number.

    Batch by batch the ranks' examples in rank order are those of the dataset in its order. A rank
    that has none left in the last round computes a batch again, whose outputs count nowhere.

    Args:
        loader: loader of all of the data.
        accelerator: is told how many examples of the present batch are this rank's.
    """

    def __init__(self, loader: Any, accelerator: ElasticAccelerator) -> None:
        self._loader = loader
        self._accelerator = accelerator
        self.dataset = loader.dataset
        self.batch_size = getattr(loader, "batch_size", None)
        self.remainder = -1
        self.end_of_dataloader = False

    @property
    def _place(self) -> tuple[int, int]:
        worker = context.current().worker
        return (worker.rank, worker.size) if together() else (0, 1)

    def __len__(self) -> int:
        return (len(self._loader) - 1) // self._place[1] + 1

    def __iter__(self) -> Iterator[Any]:
        rank, size = self._place
        state, accelerator = GradientState(), self._accelerator
        state._add_dataloader(self)
        self.end_of_dataloader = False
        try:
            rounds = self._of_stream(rank, size) if self._is_stream else self._by_index(rank, size)
            before = next(rounds, None)
            while before is not None:
                following = next(rounds, None)
                self.end_of_dataloader = following is None
                rows, batch = before
                accelerator.rows = None if rows == self.batch_size else rows
                yield batch
                before = following
        finally:
            accelerator.rows = None
            state._remove_dataloader(self)

    @property
    def _is_stream(self) -> bool:
        return isinstance(self.dataset, IterableDataset)

    def _by_index(self, rank: int, size: int) -> Iterator[tuple[int, Any]]:
        """Yield number of examples of this rank, and batch."""
        loader = self._loader
        batches = [list(each) for each in loader.batch_sampler]
        if not _is_in_order(loader):  # a random sampler gives each rank others
            batches = gather_objects(batches if rank == 0 else None)[0]
        rounds = -(-len(batches) // size)
        own = batches[rank::size]
        lacks = [batches[0][:1]] if len(own) < rounds else []
        given = {name: getattr(loader, name) for name in _KEPT}
        reader = DataLoader(loader.dataset, batch_sampler=own + lacks, **given)
        yield from zip([*map(len, own), *([0] * len(lacks))], reader, strict=True)

    def _of_stream(self, rank: int, size: int) -> Iterator[tuple[int, Any]]:
        # Not accelerate's, which reads in the process with rank 0 alone.
        given = {name: getattr(self._loader, name) for name in _KEPT}
        batches = iter(DataLoader(self.dataset, self.batch_size, **given))
        for first in batches:
            group = [first, *islice(batches, size - 1)]
            has = rank < len(group)
            batch = group[rank] if has else first
            yield (_examples_in(batch) if has else 0), batch


def _is_in_order(loader: Any) -> bool:
    """Return whether the batches are those of the dataset in its order."""
    batches = loader.batch_sampler
    return type(batches) is BatchSampler and type(batches.sampler) is SequentialSampler


def _examples_in(batch: Any) -> int:
    values = batch.values() if hasattr(batch, "values") else batch
    return next((len(each) for each in chain(values) if torch.is_tensor(each)), 1)

"""The loaders of a Trainer: each example of an epoch once, whatever happens to the ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

import hvd_elastic.torch as hvd
from hvd_elastic.errors import ScriptError
from hvd_elastic.worker import context

_KEPT = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor"),
    *("persistent_workers", "multiprocessing_context"),
)
"""Arguments of PyTorch's loader that ours takes as well."""


def training_loader(loader: Any, as_on: int, options: Mapping[str, Any]) -> Any:
    """Return our loader of the data of the script's.

    Args:
        loader: loader that the script has made.
        as_on: factor of its batch size.
        options: further arguments of :class:`hvd_elastic.torch.DataLoader`.

    Raises:
        ScriptError: it cannot be read by index, or has a sampler of its own.
    """
    if isinstance(loader, hvd.DataLoader):
        if as_on > 1 or options:
            raise ScriptError(
                "ElasticStrategy(as_on=..., max_batch_size=...): the train_dataloader is an "
                "hvd.DataLoader already, whose batch_size counts the examples of all ranks "
                "together. Give "
                "these arguments to one of them"
            )
        return loader
    if not isinstance(loader, DataLoader):
        raise ScriptError(
            f"the train_dataloader is a {type(loader).__name__}, which says nothing of which rank "
            "reads which example. Give the Trainer a torch.utils.data.DataLoader or an "
            "hvd_elastic.torch.DataLoader of a map-style data set"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise ScriptError(
            f"the train_dataloader reads a {type(loader.dataset).__name__}, an IterableDataset: "
            "its examples have no index, so none could be read exactly once. Use a map-style data "
            "set, or one of hvd_elastic.data (docs/data.md), which also streams"
        )
    sampler = loader.sampler
    plain = type(sampler) in (RandomSampler, SequentialSampler)
    if (
        not plain
        or loader.batch_size is None
        or getattr(sampler, "replacement", False)
        or getattr(sampler, "_num_samples", 0)
    ):
        kind = type(sampler if loader.batch_size is not None else loader.batch_sampler).__name__
        raise ScriptError(
            f"the train_dataloader has a {kind}: which rank reads which example is decided by the "
            "library. Give it an hvd_elastic.torch.DataLoader(dataset, batch_size, order=...), "
            "whose order is a function that returns the indices of an epoch"
        )
    given = {name: getattr(loader, name) for name in _KEPT}
    return hvd.DataLoader(
        loader.dataset,
        loader.batch_size * as_on,
        shuffle=isinstance(sampler, RandomSampler),
        seed=int(os.environ.get("PL_GLOBAL_SEED", "0")),  # that of seed_everything()
        drop_last=loader.drop_last,
        **given,
        **options,
    )


class EvaluationLoader:
    """Gives each rank a part of the examples, again in each iteration, since ranks may change.

    All ranks have the same number of batches where each has an example for each; else a rank has
    one batch less. Outside of training each process reads everything.

    Args:
        loader: loader that the script has made.
        limit: ``limit_val_batches`` of the Trainer: batches of all ranks, or a part of them.

    Raises:
        ScriptError: its sampler gives indices that cannot be sorted.
    """

    def __init__(self, loader: DataLoader[Any], limit: float) -> None:
        self._loader = loader
        self.dataset = loader.dataset
        whole = len(loader)
        batches = min(limit, whole) if isinstance(limit, int) else int(whole * limit)
        sampler: Any = loader.sampler
        if isinstance(sampler, (SequentialSampler, RandomSampler)):
            every = list(range(len(loader.dataset)))  # type: ignore[arg-type]
        else:
            every = _agreed(sampler)
        self._indices = every[: batches * (loader.batch_size or 1)]
        self._readers: tuple[Any, DataLoader[Any]] | None = None

    @property
    def _own(self) -> list[list[int]]:
        """The batches of this rank, as indices."""
        worker, every = context.current().worker, self._indices
        size = worker.size if worker.in_train and worker.has_ranks else 1
        rank = worker.rank if size > 1 else 0
        if len(every) < size:
            rank, size = 0, 1
        own = every[len(every) * rank // size : len(every) * (rank + 1) // size]
        most = -(-len(every) // size)
        count = min(-(-most // (self._loader.batch_size or 1)), len(own))
        cuts = [len(own) * number // max(count, 1) for number in range(count + 1)]
        return [own[start:stop] for start, stop in pairwise(cuts)]

    def __len__(self) -> int:
        return len(self._own)

    def __iter__(self) -> Iterator[Any]:
        own = self._own
        if self._readers is None or self._readers[0] != own:
            given = {name: getattr(self._loader, name) for name in _KEPT}
            self._readers = own, DataLoader(self.dataset, batch_sampler=own, **given)
        return iter(self._readers[1])


def _agreed(sampler: Any) -> list[Any]:
    """Return the indices of a sampler in an order that all ranks have, also if it is random."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # a sampler may draw which indices it gives
        drawn = list(sampler)
    try:
        return sorted(drawn)
    except TypeError as error:
        raise ScriptError(
            f"the sampler of a val_dataloader is a {type(sampler).__name__} whose indices cannot "
            f"be sorted ({error}), and each rank takes a part of them in an order that all know. "
            "Give it a sampler of whole numbers, or a torch.utils.data.Subset and no sampler"
        ) from error

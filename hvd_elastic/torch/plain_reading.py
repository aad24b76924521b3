"""Reads the batches of a loader through one of PyTorch, with its processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from torch.utils.data import DataLoader as TorchDataLoader

from hvd_elastic.torch.device_times import cuda_event
from hvd_elastic.training.data_order import Place
from hvd_elastic.training.worker import Worker


class PlainReading:
    """The loader of PyTorch that a loader reads through, and its processes.

    Args:
        dataset: the script's data set.
        collate: the script's collate function.
        seed: seed of the data order.
        options: further arguments of PyTorch's loader, with its ``generator``.
        worker_start: called in each of its processes.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any],
        seed: int,
        options: Mapping[str, Any],
        worker_start: Callable[[int], None],
    ) -> None:
        self._dataset, self._collate, self._seed = dataset, collate, seed
        self._options = dict(options)
        if options["num_workers"] > 0:
            self._options["worker_init_fn"] = worker_start
        self._next_passes = _NextPasses()
        # Created now, so that PyTorch raises on bad options here and not in the first epoch.
        self._inner = self._make_inner(audit=False)
        self._audited = False
        self._batches: Iterator[Any] | None = None
        self._next_place: Place | None = None
        """Place of the step that the open iterator returns next."""

    @property
    def has_processes(self) -> bool:
        """Whether it reads, or keeps processes for the next epoch."""
        return self._batches is not None or self._inner._iterator is not None

    def go_to(self, worker: Worker, place: Place, order: Callable[[], Iterator[list[int]]]) -> None:
        """Have the step at ``place`` read next.

        Args:
            worker: this process.
            place: of the step.
            order: returns the dataset indices of each pass from ``place`` on.
        """
        if worker.audit != self._audited:
            self.close()
            self._audited = worker.audit
            self._inner = self._make_inner(self._audited)
        # Batches read ahead stay valid in a new generation if this rank's place is the same.
        if self._batches is not None and self._next_place == place:
            return
        # They are for another place in the world or the epoch. The old worker processes end
        # before new ones start, which avoids holding their memory twice.
        self.stop()
        self._next_passes.indices = order()
        # By default each new iterator draws a seed from the script's generator, which would
        # make the script's own random numbers depend on rescales.
        seeds = np.random.SeedSequence((self._seed, *place.world, place.start))
        self._options["generator"].manual_seed(int(seeds.generate_state(1, np.uint64)[0]))
        self._batches = iter(self._inner)
        times = worker.input_times
        times.processes, times.pids = self._options["num_workers"], self._pids
        times.new_event = cuda_event

    def read(self, following: Place) -> tuple[Any, list[int] | None]:
        """Return the next batch; see :class:`hvd_elastic.training.data_order.Read`."""
        # The iterator's place is unknown if next() raises.
        self._next_place = None
        assert self._batches is not None
        read = next(self._batches)
        self._next_place = following
        if self._audited:
            indices, batch = read
            return batch, list(indices)
        return read, None

    def stop(self) -> None:
        """Stop reading; processes end unless ``persistent_workers`` keeps them."""
        if self._options["persistent_workers"]:
            self._next_place = self._batches = None
        else:
            self.close()

    def close(self) -> None:
        """Stop reading, and end the processes."""
        # The garbage collector may destroy the iterator's queues first (a traceback can hold it
        # in a cycle): then the processes get no signal to end, and PyTorch waits 5 s for each.
        reading = self._batches if self._batches is not None else self._inner._iterator
        self._next_place = self._batches = None
        shutdown = getattr(reading, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()
        self._inner._iterator = None

    def _pids(self) -> list[int]:
        """Return the process ids of the loader's live worker processes."""
        workers = getattr(self._batches, "_workers", ())
        return [process.pid for process in workers if process.pid is not None]

    def _make_inner(self, audit: bool) -> TorchDataLoader[Any]:
        dataset, collate = self._dataset, self._collate
        if audit:
            dataset, collate = _TellingDataset(dataset), _TellingCollate(collate)
        return TorchDataLoader(
            dataset, batch_sampler=self._next_passes, collate_fn=collate, **self._options
        )


class _NextPasses:
    """Batch sampler that yields the indices of this rank's passes from a given place."""

    def __init__(self) -> None:
        self.indices: Iterator[list[int]] = iter(())

    def __iter__(self) -> Iterator[list[int]]:
        return self.indices


class _TellingDataset:
    """Wraps a dataset to return with each sample the index that was really read."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getattr__(self, name: str) -> Any:
        # A worker_init_fn may use get_worker_info().dataset and expects the script's own. Pickle
        # asks for dunder names before _dataset exists.
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
    """Collates samples with the script's function, and returns the indices with them."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, told: Any) -> tuple[list[int], Any]:
        indices, samples = told
        return indices, self._collate(samples)

"""Reads the batches of a loader through one of PyTorch, with its processes."""

from __future__ import annotations

import ctypes
import functools
import random
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.sharedctypes import RawValue
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker as torch_worker

from hvd_elastic.input.data_order import Place
from hvd_elastic.input.skipped import read_examples, shortened
from hvd_elastic.model.sharding import attribute_of
from hvd_elastic.worker.input_source import Skipped
from hvd_elastic.worker.planning.compute_times import DeviceEvent
from hvd_elastic.worker.worker import Worker


class PlainReading:
    """The loader of PyTorch that a loader reads through, and its processes.

    Within a loop over the loader its processes are kept, whatever the world does: PyTorch's
    persistent workers are given other passes.

    Args:
        dataset: the script's dataset.
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
        self._kept_after_loop = options["persistent_workers"]
        if options["num_workers"] > 0:
            self._options["worker_init_fn"] = functools.partial(_start_process, worker_start)
            self._options["persistent_workers"] = True
        self._passes = _Passes()
        self._wanted = RawValue(ctypes.c_longlong, 0)
        """Number of the reading whose passes are wanted, for all processes."""
        # Created now, so that PyTorch raises on bad options here and not in the first epoch.
        self._inner = self._make_inner(audit=False)
        self._audited = False
        self._batches: Iterator[Any] | None = None
        self._next_place: Place | None = None
        """Place of the step that the open iterator returns next."""

    @property
    def has_processes(self) -> bool:
        """Return whether it reads, or keeps processes for the next epoch."""
        return self._batches is not None or self._inner._iterator is not None

    def go_to(self, worker: Worker, place: Place, order: Callable[[], Iterator[list[int]]]) -> None:
        """Have the step at ``place`` read next.

        Args:
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
        # They are for another place in the world or the epoch.
        self._next_place = None
        seed = self._seed_of_processes(place)
        self._wanted.value = reading = self._wanted.value + 1
        self._passes.asked = (_Pass(reading, seed, indices) for indices in order())
        try:
            self._batches = iter(self._inner)
        except BaseException:
            self.close()  # which answers are still to come from the processes is unknown
            raise
        times = worker.input_times
        times.processes, times.pids = self._options["num_workers"], self._pids
        times.new_event = cuda_event

    def _seed_of_processes(self, place: Place) -> int:
        """Return what PyTorch draws as the seed of processes that it starts at a place.

        By default each new iterator draws from the script's generator, which would make the
        script's own random numbers depend on rescales.
        """
        drawn = np.random.SeedSequence((self._seed, *place.world, place.start))
        seed = int(drawn.generate_state(1, np.uint64)[0])
        generator: torch.Generator = self._options["generator"]
        generator.manual_seed(seed)
        found = int(torch.empty((), dtype=torch.int64).random_(generator=generator))
        generator.manual_seed(seed)
        return found

    def read(self, following: Place) -> tuple[Any, list[int] | None]:
        """Return the next batch; see :class:`hvd_elastic.input.data_order.Read`."""
        # The iterator's place is unknown if next() raises.
        self._next_place = None
        assert self._batches is not None
        indices, batch = next(self._batches)
        self._next_place = following
        return batch, indices

    def stop(self) -> None:
        """Stop reading; processes end unless ``persistent_workers`` keeps them."""
        if self._kept_after_loop:
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
        dataset: Any = _WantedPasses(self._dataset, self._wanted, tells=audit)
        passes: Any = self._passes  # PyTorch hands each on to the dataset as it is
        collate: Any = _Collate(self._collate)
        return TorchDataLoader(dataset, batch_sampler=passes, collate_fn=collate, **self._options)


class _Pass(NamedTuple):
    """A pass that a process is asked to read.

    Attributes:
        reading: number of the reading that it is of: of passes from one place on.
        seed: of the processes that read it; each adds its number.
        indices: of the examples.
    """

    reading: int
    seed: int
    indices: list[int]


class _Passes:
    """Batch sampler that yields the passes of this rank from a given place."""

    def __init__(self) -> None:
        self.asked: Iterator[_Pass] = iter(())

    def __iter__(self) -> Iterator[_Pass]:
        return self.asked


class _WantedPasses:
    """Data set for PyTorch that reads the passes of the script's, if they are still wanted.

    Args:
        dataset: the script's dataset.
        wanted: number of the reading whose passes are wanted.
        tells: whether to return the indices that were really read.
    """

    def __init__(self, dataset: Any, wanted: Any, *, tells: bool) -> None:
        self.dataset = dataset
        self._wanted = wanted
        self._tells = tells
        self._reading = 0

    def __getitems__(self, asked: _Pass) -> tuple[list[int] | None, Any, list[Skipped]] | None:
        """Return the indices of a pass, if they are told, its examples, and those skipped.

        None: it is not wanted.
        """
        if asked.reading != self._wanted.value:
            return None
        info = get_worker_info()
        if info is not None and asked.reading != self._reading:
            # The numbers of a process that was started for this reading come from PyTorch, and from
            # a worker_init_fn. Others may have been started for one that they read nothing of.
            is_of_start = not self._reading and info.seed == asked.seed + info.id
            if not is_of_start:
                _seed(asked.seed, info.id)
        self._reading = asked.reading
        at_once = attribute_of(self.dataset, "__getitems__")
        samples, skipped = read_examples(self.dataset, at_once, asked.indices)
        return asked.indices if self._tells else None, samples, skipped


class _Collate:
    """Collates the examples of a pass with the script's function."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, read: tuple[list[int] | None, Any, list[Skipped]] | None) -> Any:
        if read is None:
            return None
        indices, samples, skipped = read
        return indices, shortened(self._collate(samples), skipped)


def _start_process(then: Callable[[int], None], number: int) -> None:
    """Let a process begin: its ``worker_init_fn`` sees the script's dataset."""
    info: Any = get_worker_info()
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=number, num_workers=info.num_workers, seed=info.seed, dataset=info.dataset.dataset
    )
    then(number)


def _seed(seed: int, number: int) -> None:
    """Seed the random numbers as PyTorch does in a process that it starts."""
    random.seed(seed + number)
    torch.manual_seed(seed + number)
    np.random.seed(torch_worker._generate_state(seed, number))


def cuda_event() -> DeviceEvent | None:
    """Return a new CUDA event with timing; None if PyTorch has not used a GPU."""
    if not torch.cuda.is_initialized():
        return None
    event: DeviceEvent = torch.cuda.Event(enable_timing=True)
    return event

"""What a loader reads is the same in every process, and survives the way to a rank."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, default_collate, get_worker_info

import hvd_elastic.torch as hvd
from hvd_elastic.input.link import Batch, Failed, Want
from hvd_elastic.input.server import LocalReader
from hvd_elastic.torch.input_source import LoaderSource
from hvd_elastic.worker.context import Context


class Augmented(Dataset[Any]):
    """Random numbers of each kind beside the index."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(3), float(np.random.rand()), random.random()


class AtOnce(Augmented):
    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [self[index] for index in indices]


def source(dataset: Any = None, seed: int = 0) -> LoaderSource:
    return LoaderSource(
        dataset or Augmented(), 40, default_collate, seed, lambda _: None, pins=False
    )


def rows(batch: Any) -> list[tuple[Any, ...]]:
    return [tuple(np.asarray(each[n]).tolist() for each in batch) for n in range(len(batch[0]))]


def as_lists(batch: Any) -> list[Any]:
    return [[index, *map(str, rest)] for index, *rest in rows(batch)]


def test_an_example_does_not_depend_on_its_batch() -> None:
    together = as_lists(source().make(1, [4, 5, 6]))
    alone = [as_lists(source().make(1, [index]))[0] for index in (4, 5, 6)]
    assert together == alone


def test_an_example_differs_by_epoch_and_seed() -> None:
    made = [source(seed=seed).make(epoch, [4]) for seed in (0, 1) for epoch in (0, 1)]
    for part in (1, 2, 3):
        assert len({str(batch[part]) for batch in made}) == 4


def test_reading_here_leaves_the_random_numbers_of_the_script_alone() -> None:
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(3)
    without = torch.rand(1).item(), np.random.rand(), random.random()
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(3)
    source().make_here(0, [1, 2])
    assert (torch.rand(1).item(), np.random.rand(), random.random()) == without


def test_a_data_set_that_reads_a_list_is_asked_for_one() -> None:
    batch = source(AtOnce()).make(0, [7, 8])
    assert batch[0].tolist() == [7, 8]
    again = source(AtOnce()).make(0, [7, 8])
    assert as_lists(batch) == as_lists(again)


@pytest.mark.parametrize(
    "batch",
    [
        torch.arange(12, dtype=torch.uint8).reshape(3, 4),
        {"x": [torch.rand(2, 3), torch.tensor(5)], "names": ["a", "b"], "n": 3},
        (torch.rand(4, dtype=torch.float64).to(torch.bfloat16), np.arange(6).reshape(2, 3)),
        torch.empty(0, 7),
        torch.rand(4, 4).t(),
        torch.tensor([1 + 2j]),
        [torch.tensor([True, False]), None],
    ],
)
def test_a_batch_arrives_as_it_was(batch: Any) -> None:
    made = source()
    sent = [bytearray(each) for each in made.pack(batch)]
    found = made.unpack(sent)

    def same(a: Any, b: Any) -> bool:
        assert type(a) is type(b)
        if isinstance(a, torch.Tensor):
            return a.dtype == b.dtype and torch.equal(a, b)
        if isinstance(a, np.ndarray):
            return a.dtype == b.dtype and bool((a == b).all())
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
        if isinstance(a, (list, tuple)):
            return len(a) == len(b) and all(map(same, a, b))
        return bool(a == b)

    assert same(batch, found)


@pytest.mark.parametrize(
    "batch",
    [
        torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.rand(4, 6).t(),
        torch.rand(2, 3, 4, 5).permute(2, 0, 3, 1),
        torch.rand(7),
        torch.tensor(3.0),
    ],
)
def test_a_batch_arrives_with_its_strides(batch: torch.Tensor) -> None:
    made = source()
    found = made.unpack([bytearray(each) for each in made.pack(batch)])
    assert torch.equal(found, batch)
    assert found.stride() == batch.stride()


@pytest.mark.parametrize("batch", [torch.rand(6, 4)[:, ::2], torch.rand(1, 3).expand(5, 3)])
def test_a_part_of_a_tensor_arrives_without_the_rest(batch: torch.Tensor) -> None:
    made = source()
    sent = [bytearray(each) for each in made.pack(batch)]
    assert torch.equal(made.unpack(sent), batch)
    assert len(sent[1]) == 4 * batch.numel()


def test_bytes_of_pictures_stay_bytes_and_may_be_changed() -> None:
    made = source()
    pictures = torch.zeros(8, 3, 16, 16, dtype=torch.uint8)
    sent = [bytearray(each) for each in made.pack(pictures)]
    assert sum(map(len, sent)) < 8 * 3 * 16 * 16 + 1000
    found = made.unpack(sent)
    found += 1
    assert int(found.sum()) == 8 * 3 * 16 * 16


def read_in_a_process(made: LoaderSource, number: int = 0, count: int = 1) -> tuple[Any, Any]:
    reader = LocalReader(made, number, count)
    try:
        reader.link.receive()  # the offer
        reader.link.send(Want(0, 1, [3, 7]))
        answer, buffers = reader.link.receive()
        return answer, made.unpack([*buffers]) if buffers else None
    finally:
        reader.close()
        reader.link.close()


def test_functions_without_a_name_transform_and_collate_in_a_process() -> None:
    """Nothing of the script is pickled, but its batches."""
    scale = 3

    class Transformed(Augmented):
        transform = staticmethod(lambda index: scale * index)

        def __getitem__(self, index: int) -> Any:
            return self.transform(index)

    made = LoaderSource(
        Transformed(), 40, lambda items: [items, scale], 0, lambda _: None, pins=False
    )
    answer, batch = read_in_a_process(made)
    assert isinstance(answer, Batch)
    assert batch == [[9, 21], 3]


def test_a_batch_that_cannot_be_pickled_is_an_error() -> None:
    made = LoaderSource(Augmented(), 40, lambda _: threading.Lock(), 0, lambda _: None, pins=False)
    answer, _ = read_in_a_process(made)
    assert isinstance(answer, Failed)
    assert "cannot pickle '_thread.lock' object" in answer.error


def test_a_process_knows_its_number_as_under_a_loader_of_pytorch() -> None:
    class Told(Augmented):
        def __getitem__(self, index: int) -> Any:
            info = get_worker_info()
            return None if info is None else (info.id, info.num_workers)

    made = LoaderSource(Told(), 40, list, 0, lambda _: None, pins=False)
    _, batch = read_in_a_process(made, 1, 3)
    assert batch == [(1, 3)] * 2
    assert made.make_here(0, [1]) == [None]


def test_seeded_examples_do_not_depend_on_the_number_of_processes(alone: Context) -> None:
    def read(processes: int) -> list[Any]:
        loader: hvd.DataLoader[Any] = hvd.DataLoader(
            Augmented(), 8, shuffle=True, seed_examples=True, num_workers=processes
        )
        found: list[Any] = []
        try:
            alone.worker.in_train = True
            alone.rollback.function_entered()
            for _ in hvd.epochs(2):
                for batch in loader:
                    found += as_lists(batch)
        finally:
            loader.close()
            alone.worker.in_train = False
            alone.worker.progress = type(alone.worker.progress)()
            alone.data.last_reader = None
        return found

    own = read(0)
    assert len(own) == 80
    assert read(2) == own

"""What ``hvd.dataset`` reads is the same in every process, and survives the way to a rank."""

from __future__ import annotations

from tests.paths import skip_module_without_tensorflow

skip_module_without_tensorflow()

import random
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvd_elastic.tensorflow as hvd
from hvd_elastic.communicator.interface import RingRank
from hvd_elastic.input.link import Batch, Failed, Want
from hvd_elastic.input.server import LocalReader
from hvd_elastic.tensorflow.data import DatasetSource
from hvd_elastic.worker.context import Context


class Augmented:
    """Random numbers of each kind beside the index."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": index, "noise": np.random.rand(3).astype("float32") + random.random()}


class Computing(Augmented):
    """Computes with TensorFlow."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"sum": tf.add(index, 1)}


def own_random_numbers() -> Any:
    numbers: Any = np.random.get_state()
    return random.getstate(), numbers[1].tolist()


def same(a: Any, b: Any) -> bool:
    return bool(a.keys() == b.keys() and all((a[key] == b[key]).all() for key in a))


def read_in_a_process(source: DatasetSource, indices: list[int]) -> tuple[Any, Any]:
    reader = LocalReader(source, 0, 1)
    try:
        reader.link.receive()  # the offer
        reader.link.send(Want(0, 1, indices))
        answer, buffers = reader.link.receive()
        return answer, source.unpack(buffers) if buffers else None
    finally:
        reader.close()
        reader.link.close()


def test_an_example_does_not_depend_on_the_process_that_reads_it() -> None:
    source = DatasetSource(Augmented(), 5)
    np.random.seed(8)
    state = own_random_numbers()
    here: Any = source.make_here(1, [3, 7])
    assert own_random_numbers() == state
    answer, there = read_in_a_process(source, [3, 7])
    assert isinstance(answer, Batch)
    assert isinstance(answer, Batch)
    assert same(here, there)
    second = here["noise"][1:]
    assert (source.make_here(1, [7])["noise"] == second).all()
    assert (source.make_here(2, [7])["noise"] != second).all()


@pytest.mark.parametrize(
    "batch",
    [
        np.arange(6, dtype="uint8").reshape(2, 3),
        np.arange(12.0).reshape(3, 4).T,
        np.zeros((0, 5), "float32"),
        np.array([b"some", b"text"], object),
        (np.array([1, 2]), {"x": np.array([True, False])}),
    ],
)
def test_arrays_survive_the_way_to_a_rank(batch: Any) -> None:
    source = DatasetSource(np.arange(3), 0)
    buffers = [memoryview(bytearray(memoryview(b).cast("B"))) for b in source.pack(batch)]
    for sent, got in zip(
        tf.nest.flatten(batch), tf.nest.flatten(source.unpack(buffers)), strict=True
    ):
        assert sent.dtype == got.dtype
        assert sent.tolist() == got.tolist()


def test_a_source_that_computes_with_tensorflow_is_refused_in_a_process() -> None:
    source = DatasetSource(Computing(), 0)
    assert source.make_here(0, [2])["sum"].tolist() == [3]
    answer, _ = read_in_a_process(source, [2])
    assert isinstance(answer, Failed)
    assert "the source of hvd.dataset computes with TensorFlow" in answer.error
    assert source.make_here(0, [2])["sum"].tolist() == [3]


def test_a_dataset_gives_seeded_examples_through_a_change_of_the_world(alone: Context) -> None:
    source = DatasetSource(Augmented(), 0)
    dataset = hvd.dataset(Augmented(), 4, seed_examples=True).map(lambda x: x).prefetch(4)
    communicator = alone.worker.communicator
    batches: list[dict[str, Any]] = []
    for batch in dataset:
        batches.append({key: value.numpy() for key, value in batch.items()})
        communicator.size, communicator.rank = 2, RingRank(1)  # from now on the second of two
    assert [each["index"].tolist() for each in batches] == [[0, 1, 2, 3], [6, 7], [10, 11]]
    # Only now: the thread of the pipeline has used the random numbers of this process until here.
    assert all(same(each, source.make_here(0, each["index"].tolist())) for each in batches)

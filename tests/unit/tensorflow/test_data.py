"""The dataset gives each example once, whatever the script maps after it."""

from __future__ import annotations

from tests.paths import LIMIT_S, skip_module_without_tensorflow

skip_module_without_tensorflow()

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.data.ops.dataset_ops import UnaryUnchangedStructureDataset

import hvd_elastic.tensorflow as hvd
from hvd_elastic.communicator.interface import RingRank
from hvd_elastic.data import Mixture
from hvd_elastic.errors import ScriptError
from hvd_elastic.model.sharding import Blocks
from hvd_elastic.worker.context import Context

NUMBERS = np.arange(10)


def read(dataset: Any) -> list[list[int]]:
    return [batch.numpy().tolist() for batch in dataset]


def test_batches_are_those_of_the_order_behind_map_and_prefetch(alone: Context) -> None:
    dataset = hvd.dataset(NUMBERS, 4).map(lambda x: x * 10).prefetch(3)
    assert read(dataset) == [[0, 10, 20, 30], [40, 50, 60, 70], [80, 90]]
    assert isinstance(dataset, tf.data.Dataset)


@pytest.mark.parametrize("by", ["map", "options"])
def test_batches_come_in_order_where_the_script_allows_any(alone: Context, by: str) -> None:
    """They are counted as they come, so one that overtakes another would be taken for it."""

    def delay(batch: np.ndarray) -> np.ndarray:
        time.sleep(0.3 if batch[0] == 0 else 0.0)
        return batch

    def slow(batch: Any) -> Any:
        return tf.numpy_function(delay, [batch], tf.int64)

    dataset = hvd.dataset(NUMBERS, 4)
    if by == "map":
        dataset = dataset.map(slow, 3, False)
    else:
        options = tf.data.Options()
        options.deterministic = False
        dataset = dataset.map(slow, num_parallel_calls=3).with_options(options)
    assert read(dataset) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_a_shuffled_epoch_has_each_example_once(alone: Context) -> None:
    dataset = hvd.dataset((NUMBERS, NUMBERS * 2), 4, shuffle=True).prefetch(2)
    epochs = []
    for _ in hvd.epochs(2):
        seen: list[int] = []
        for first, second in dataset:
            assert (second.numpy() == 2 * first.numpy()).all()
            seen += first.numpy().tolist()
        epochs.append(seen)
    assert sorted(epochs[0]) == sorted(epochs[1]) == NUMBERS.tolist()
    assert epochs[0] != epochs[1]


def test_a_change_of_the_world_drops_what_was_read_ahead(alone: Context) -> None:
    dataset = hvd.dataset(np.arange(12), 4).prefetch(4)
    communicator = alone.worker.communicator
    seen = []
    for batch in dataset:
        seen.append(batch.numpy().tolist())
        communicator.size, communicator.rank = 2, RingRank(1)  # from now on the second of two
        alone.worker.progress.advance(4)
        if len(seen) == 2:
            break
    assert seen == [[0, 1, 2, 3], [6, 7]]


def reading(shares: Any) -> Iterator[Any]:
    """Read as a pipeline does."""
    turn = np.int64(0)
    with contextlib.suppress(StopIteration):
        while True:
            turn, batch = shares.next_batch(turn)
            yield batch


def test_training_does_not_wait_for_the_removal_of_a_pipeline(alone: Context) -> None:
    """Which may take as long as the pipeline has lived."""
    trains_on, removed = threading.Event(), threading.Event()

    class Pipeline(list[list[int]]):
        def __del__(self) -> None:
            if trains_on.wait(LIMIT_S):
                removed.set()

    shares = hvd.dataset(NUMBERS, 4)._shares
    batches = shares.loop(lambda: iter(Pipeline(reading(shares))), None)
    assert [batch.tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    trains_on.set()
    assert removed.wait(LIMIT_S)


def test_a_pipeline_that_is_over_reads_nothing_more(alone: Context) -> None:
    read_of: list[int] = []

    class Source:
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> np.ndarray:
            read_of.append(index)
            return np.asarray(index)

    dataset = hvd.dataset(Source(), 4)
    shares = dataset._shares
    begun: list[Any] = []

    def begin() -> Any:
        begun.append(reading(shares))
        return begun[-1]

    for _ in shares.loop(begin, None):
        break
    read_of.clear()
    assert list(begun[0]) == []
    assert read_of == []


def test_a_data_set_is_told_which_blocks_come_next(alone: Context) -> None:
    class Blocked(list[int]):
        blocks, told = Blocks((4, 4, 2), 1), list[list[int]]()

        def prefetch_blocks(self, blocks: list[int]) -> None:
            self.told.append(blocks)

    source = Blocked(range(10))
    assert read(hvd.dataset(source, 4)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert source.told == [[0, 1, 2, 0, 1, 2], [1, 2, 0, 1, 2], [2, 0, 1, 2]]


def test_a_mixture_goes_on_from_epoch_to_epoch(alone: Context) -> None:
    mixture = Mixture([(range(7), 2), (range(100, 103), 1)], length=6)
    dataset, seen = hvd.dataset(mixture, 4), list[int]()
    for _ in hvd.epochs(3):
        for batch in dataset:
            seen += batch.numpy().tolist()
    assert seen == mixture.__getitems__(range(18))


def test_a_source_of_examples_is_collated(alone: Context) -> None:
    source = [{"x": np.full(2, number), "y": number} for number in range(4)]
    (first, second) = hvd.dataset(source, 2)
    assert first["x"].numpy().tolist() == [[0, 0], [1, 1]]
    assert second["y"].numpy().tolist() == [2, 3]


def test_outside_of_training_it_gives_examples_only(alone: Context) -> None:
    alone.worker.in_train = False
    batches = iter(hvd.dataset(NUMBERS, 4))
    assert next(batches).shape == (4,)
    assert next(batches).shape == (2,)
    with pytest.raises(ScriptError, match="outside of training"):
        next(batches)


def test_examples_are_not_taken_by_a_pipeline_that_was_begun_before(
    alone: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread of TensorFlow reads ahead for each, also of a loop that was left by an error."""
    dataset = hvd.dataset(NUMBERS, 4)
    shares, begin = dataset._shares, UnaryUnchangedStructureDataset.__iter__
    training = iter(dataset)
    next(training)
    turns, ahead = [np.int64(shares._turn)], []

    def begin_late(pipeline: Any) -> Any:
        with contextlib.suppress(StopIteration):
            ahead.append(shares.next_batch(turns[-1]))
        turns.append(np.int64(shares._turn))
        return begin(pipeline)

    monkeypatch.setattr(UnaryUnchangedStructureDataset, "__iter__", begin_late)
    alone.worker.in_train = False
    examples = dataset.examples()
    assert [next(examples).shape for _ in range(2)] == [(4,), (2,)]
    assert ahead == []


@pytest.mark.parametrize(
    "name", ["batch", "shuffle", "repeat", "take", "filter", "shard", "cache", "enumerate"]
)
def test_what_would_change_the_batches_is_refused(alone: Context, name: str) -> None:
    dataset = hvd.dataset(NUMBERS, 4)
    with pytest.raises(ScriptError, match=rf"{name}\(\) after hvd.dataset"):
        getattr(dataset, name)(2)


def test_a_pipeline_around_it_reads_nothing(alone: Context) -> None:
    pipeline = tf.data.Dataset.zip((hvd.dataset(NUMBERS, 4), tf.data.Dataset.range(3)))
    with pytest.raises(tf.errors.OpError, match=r"after hvd\.dataset"):
        next(iter(pipeline))


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        (NUMBERS, {}, "needs a batch_size"),
        (NUMBERS, {"batch_size": 0}, "batch_size"),
        (NUMBERS, {"batch_size": 20, "drop_last": True}, "leaves nothing"),
        ((NUMBERS, NUMBERS[:3]), {"batch_size": 2}, "same first dimension"),
        (np.zeros((0, 2)), {"batch_size": 2}, "same first dimension"),
        ([], {"batch_size": 2}, "is empty"),
        (iter([1]), {"batch_size": 2}, "cannot be read by index"),
        (keras.utils.PyDataset(), {"batch_size": 2}, "gives batches"),
        (tf.data.Dataset.range(3), {"batch_size": 2}, r"Dataset\) cannot be read by index"),
    ],
)
def test_bad_sources_are_refused(
    alone: Context, source: Any, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ScriptError, match=said):
        hvd.dataset(source, **options)


class Sentences:
    """Examples of unequal length, each with a text and a number."""

    def __init__(self, *wrong: Any) -> None:
        self.wrong = dict(wrong)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        ids = np.arange(1, index + 2)
        return self.wrong.get(
            index, {"ids": ids, "text": "ab"[: index + 1], "y": np.float32(index)}
        )


def test_examples_of_unequal_length_are_padded_by_batch(alone: Context) -> None:
    data = hvd.dataset(Sentences(), 2, pad=0)
    assert data.element_spec["ids"].shape.as_list() == [None, None]
    found = [batch["ids"].numpy().tolist() for batch in data]
    assert found == [[[1, 0], [1, 2]], [[1, 2, 3, 0], [1, 2, 3, 4]]]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: hvd.dataset(Sentences(), 2),
            r"different shapes in field \['ids'\]: \(1,\), \(2,\)",
        ),
        (
            lambda: hvd.dataset((np.ones(2), [[1], [1, 2]]), 2),
            "a list of 2 examples that do not fit",
        ),
        (lambda: hvd.dataset(np.ones((4, 2)), 2, pad=0), "leave pad out"),
        (
            lambda: hvd.dataset({"when": np.array(["2020-01-01"], "M8[D]")}, 1),
            "field when is of type datetime64",
        ),
    ],
)
def test_messages_about_types_and_shapes_name_the_field(
    alone: Context, make: Callable[[], Any], said: str
) -> None:
    with pytest.raises((ScriptError, tf.errors.OpError), match=said):
        list(make())


def test_another_type_in_a_later_example_names_the_field(
    alone: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Any] = []
    monkeypatch.setattr("hvd_elastic.tensorflow.data.show_instead", shown.append)
    later = {"ids": np.ones(3), "text": "a", "y": np.float32(1)}
    data = hvd.dataset(Sentences(*((index, later) for index in (2, 3))), 2, pad=0)
    with pytest.raises(tf.errors.OpError):
        list(data)
    assert "field ids is float64 of shape (3,) in an example, and int64" in str(shown[0])

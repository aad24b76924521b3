"""Reads by index, in any process: examples are seeded and collated into batches."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from io import BytesIO
from typing import Any

import numpy as np

from hvd_elastic.errors import ScriptError
from hvd_elastic.input.server import seed_example, undisturbed
from hvd_elastic.input.skipped import read_examples, shortened
from hvd_elastic.model.sharding import attribute_of
from hvd_elastic.worker.input_source import Buffers, Source


class IndexedSource(Source):
    """Makes batches of a dataset: the part of a :class:`Source` that all frontends share.

    Args:
        dataset: dataset with ``__getitem__``. If it has ``__getitems__`` too, that one is called
            for a whole batch, which is then seeded once.
        collate: makes a batch of what the dataset returns.
        seed: seed of the data order, which the random numbers of each example are seeded by.

    Attributes:
        pickler: pickles batches; large buffers stay out of the stream.
    """

    pickler: type[pickle.Pickler] = pickle.Pickler

    def __init__(
        self, dataset: Any, examples: int, collate: Callable[[Any], Any], seed: int
    ) -> None:
        self.examples = examples
        self._dataset = dataset
        self._collate = collate
        self._seed = seed
        self._at_once = attribute_of(dataset, "__getitems__")

    def make(self, epoch: int, indices: Sequence[int]) -> Any:
        return self._made(indices, partial(self.seed_for, epoch))

    def make_here(self, epoch: int, indices: Sequence[int]) -> Any:
        with undisturbed():
            return self.make(epoch, indices)

    def pack(self, batch: Any) -> Buffers:
        buffers: list[pickle.PickleBuffer] = []
        described = BytesIO()
        self.pickler(described, protocol=5, buffer_callback=buffers.append).dump(batch)
        return [described.getbuffer(), *(buffer.raw() for buffer in buffers)]

    def unpack(self, buffers: Buffers) -> Any:
        # They come from a process of this rank, or from one that has shown the run's certificate.
        return pickle.loads(buffers[0], buffers=buffers[1:])  # noqa: S301

    def read(self, indices: Sequence[int]) -> Any:
        """Return the batch of the examples at some indices, as :meth:`make`, without seeding."""
        return self._made(indices, lambda _: None)

    def _made(self, indices: Sequence[int], begin: Callable[[int], object]) -> Any:
        examples, skipped = read_examples(self._dataset, self._at_once, indices, begin)
        return shortened(self._collate(examples), skipped)

    def seed_for(self, epoch: int, index: int) -> int:
        """Seed the random numbers for an example, and return a seed for further ones."""
        return seed_example(self._seed, epoch, index)


class Arrays:
    """Arrays with a common first dimension, as a dataset.

    Args:
        arrays: an array, or a tuple or dict of them.

    Raises:
        ScriptError: their first dimensions differ, or are 0.

    >>> pairs = Arrays((np.arange(3), np.arange(3) ** 2))
    >>> len(pairs), pairs[2]
    (3, (np.int64(2), np.int64(4)))
    """

    def __init__(self, arrays: Any) -> None:
        lengths: set[int] = set()

        def noted(values: Any) -> np.ndarray:
            try:
                array = np.asarray(values)
            except ValueError as error:
                raise ScriptError(
                    f"hvd.dataset(source): one of the arrays is a {type(values).__name__} of "
                    f"{len(values)} examples that do not fit into one array ({error}). Give an "
                    "object whose __getitem__ returns one example, and pad=0, which fills them up "
                    "to the largest of their batch"
                ) from None
            lengths.add(len(array) if array.ndim else 0)
            return array

        self._arrays = mapped(noted, arrays)
        if len(lengths) != 1 or lengths == {0}:
            raise ScriptError(
                f"hvd.dataset(source): the arrays have {sorted(lengths)} examples; all need the "
                "same first dimension, of at least 1"
            )
        self._length = lengths.pop()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        return mapped(lambda array: array[index], self._arrays)

    __getitems__ = __getitem__
    """Returns a whole batch, for a list of indices."""

    @staticmethod
    def is_source(source: Any) -> bool:
        """Return whether a source is arrays and not an object that returns examples."""
        return isinstance(source, (tuple, dict)) or hasattr(source, "shape")

    @staticmethod
    def collate(batch: Any) -> Any:
        """Return the batch itself: arrays need no collating."""
        return batch


def mapped(function: Callable[[Any], Any], structure: Any) -> Any:
    """Return a tuple or dict, which may be nested, with a function applied to each value.

    >>> mapped(abs, {"a": -1, "b": (2, -3)})
    {'a': 1, 'b': (2, 3)}
    """
    if isinstance(structure, Mapping):
        return {key: mapped(function, each) for key, each in structure.items()}
    if isinstance(structure, tuple):
        values = [mapped(function, each) for each in structure]
        return type(structure)(*values) if hasattr(structure, "_fields") else tuple(values)
    return function(structure)


def collated(examples: Sequence[Any], *, pad: float | None = None, field: str = "") -> Any:
    """Return examples as one batch: arrays, stacked, in the structure of an example.

    Args:
        examples: examples, of the same structure.
        pad: value that fills arrays up to the largest of the batch; None: all have one shape.
        field: name of the field of the whole batch that they are, for messages.

    Raises:
        ScriptError: arrays differ in their shapes; names the field.

    >>> collated([{"x": 1, "y": (2, 3)}, {"x": 4, "y": (5, 6)}])
    {'x': array([1, 4]), 'y': (array([2, 5]), array([3, 6]))}
    >>> collated([[np.array([1, 2])], [np.array([3])]], pad=0)
    (array([[1, 2],
           [3, 0]]),)
    """
    first = examples[0]
    if isinstance(first, Mapping):
        return {
            key: collated([each[key] for each in examples], pad=pad, field=f"{field}[{key!r}]")
            for key in first
        }
    if isinstance(first, (tuple, list)):
        fields = enumerate(zip(*examples, strict=True))
        return tuple(collated(each, pad=pad, field=f"{field}[{key}]") for key, each in fields)
    arrays = [np.asarray(each) for each in examples]
    shapes = {each.shape for each in arrays}
    if len(shapes) == 1:
        return np.stack(arrays)
    if pad is None or len({len(shape) for shape in shapes}) > 1:
        where, some = f" in field {field}" if field else "", ", ".join(map(str, sorted(shapes)[:3]))
        raise ScriptError(
            f"hvd.dataset(source): examples have different shapes{where}: {some}. "
            "hvd.dataset(..., pad=0) fills them up with zeros to the largest of their batch, if "
            "they have as many dimensions"
        )
    batch = np.full((len(arrays), *np.max([*shapes], 0)), pad, arrays[0].dtype)
    for row, array in zip(batch, arrays, strict=True):
        row[tuple(map(slice, array.shape))] = array
    return batch

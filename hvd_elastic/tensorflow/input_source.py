"""What ``hvd.dataset`` reads, in any process: arrays by index, and as buffers."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf
from tensorflow.python import pywrap_tfe

from hvd_elastic.errors import ScriptError
from hvd_elastic.training.input.forked import WorkerStart
from hvd_elastic.training.input.link import Buffers
from hvd_elastic.training.input.server import seed_example, undisturbed
from hvd_elastic.training.planning.choice import examples_of


class DatasetSource:
    """Implements :class:`hvd_elastic.training.input.server.Source` for a source of examples.

    Args:
        source: what the script has given to ``hvd.dataset``.
        seed: seed of the data order; it also seeds the random numbers of Python and NumPy for each
            example where batches are made by :meth:`make`.

    Attributes:
        examples: number of examples.
        read: returns a batch of the examples at some indices, without seeding.

    Raises:
        ScriptError: the source cannot be read by index.
    """

    def __init__(self, source: Any, seed: int) -> None:
        self.read, self.examples = reader_of(source)
        self._seed = seed
        self._started = WorkerStart(None)
        self._get = None if is_arrays(source) else source.__getitem__
        self._at_once = getattr(source, "__getitems__", None)

    def start(self, number: int) -> None:
        """See :class:`Source`."""
        self._started(number)
        # The threads of TensorFlow do not exist in a forked process: an operation would wait for
        # ever. These two are what all operations on tensors go through.
        pywrap_tfe.TFE_Py_FastPathExecute = _no_operations
        pywrap_tfe.TFE_Py_Execute = _no_operations

    def make(self, epoch: int, indices: Sequence[int]) -> Any:
        """See :class:`Source`; a source with ``__getitems__`` is seeded once for all of them."""
        if self._get is None or self._at_once is not None:
            seed_example(self._seed, epoch, indices[0])
            return self.read(list(indices))
        examples = []
        for index in indices:
            seed_example(self._seed, epoch, index)
            examples.append(self._get(index))
        return collated(examples)

    def make_here(self, epoch: int, indices: Sequence[int]) -> Any:
        """See :class:`Source`."""
        with undisturbed():
            return self.make(epoch, indices)

    def pack(self, batch: Any) -> Buffers:
        """See :class:`Source`."""
        buffers: list[pickle.PickleBuffer] = []
        described = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
        return [described, *(buffer.raw() for buffer in buffers)]

    def unpack(self, buffers: Buffers) -> Any:
        """See :class:`Source`."""
        # They come from a process that has shown the run's certificate.
        return pickle.loads(buffers[0], buffers=buffers[1:])  # noqa: S301


def _no_operations(*_: Any) -> NoReturn:
    raise ScriptError(
        "the source of hvd.dataset computes with TensorFlow, which processes of input hosts "
        "cannot; read and transform there with NumPy or Pillow, and compute with TensorFlow in "
        "hvd.dataset(...).map(...)"
    )


def is_arrays(source: Any) -> bool:
    """Return whether a source is arrays and not an object that returns examples."""
    return isinstance(source, (tuple, dict)) or hasattr(source, "shape")


def reader_of(source: Any) -> tuple[Callable[[list[int]], Any], int]:
    """Return a function that reads a batch by indices, and the number of examples."""
    if is_arrays(source):
        arrays = tf.nest.map_structure(np.asarray, source)
        lengths = {len(array) if array.ndim else 0 for array in tf.nest.flatten(arrays)}
        if len(lengths) != 1 or lengths == {0}:
            raise ScriptError(
                f"hvd.dataset(source): the arrays have {sorted(lengths)} examples; all need the "
                "same first dimension, of at least 1"
            )
        return lambda indices: tf.nest.map_structure(lambda a: a[indices], arrays), lengths.pop()
    instead = (
        "hvd.dataset arrays, or an object with __len__ and __getitem__; map and prefetch may "
        "follow: hvd.dataset((images, labels), 64).map(augment)"
    )
    examples = examples_of(source, isinstance(source, tf.data.Dataset), instead)
    at_once = getattr(source, "__getitems__", None)

    def read(indices: Sequence[int]) -> Any:
        return collated(at_once(indices) if at_once else [source[index] for index in indices])

    return read, examples


def collated(examples: Sequence[Any]) -> Any:
    """Return examples as one batch: arrays, stacked, in the structure of an example."""
    first = examples[0]
    if isinstance(first, Mapping):
        return {key: collated([each[key] for each in examples]) for key in first}
    if isinstance(first, (tuple, list)):
        return tuple(map(collated, zip(*examples, strict=True)))
    return np.stack([np.asarray(each) for each in examples])

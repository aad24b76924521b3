"""What ``hvd.dataset`` reads, in any process: arrays by index, and as buffers."""

from __future__ import annotations

from typing import Any, NoReturn

import tensorflow as tf
from tensorflow.python import pywrap_tfe

from hvd_elastic.errors import ScriptError
from hvd_elastic.training.input.forked import WorkerStart
from hvd_elastic.training.input.indexed import Arrays, IndexedSource, collated
from hvd_elastic.training.planning.choice import examples_of


class DatasetSource(IndexedSource):
    """Reads a source of examples, arrays or an object, for ``hvd.dataset``.

    Args:
        source: what the script has given to ``hvd.dataset``.
        seed: seed of the data order; it also seeds the random numbers of Python and NumPy for each
            example where batches are made by :meth:`make`.

    Raises:
        ScriptError: the source cannot be read by index.
    """

    def __init__(self, source: Any, seed: int = 0) -> None:
        if Arrays.is_source(source):
            arrays = Arrays(source)
            super().__init__(arrays, len(arrays), arrays.collate, seed)
        else:
            instead = (
                "hvd.dataset arrays, or an object with __len__ and __getitem__; map and prefetch "
                "may follow: hvd.dataset((images, labels), 64).map(augment)"
            )
            examples = examples_of(source, isinstance(source, tf.data.Dataset), instead)
            super().__init__(source, examples, collated, seed)
        self._started = WorkerStart(None)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]

    def start(self, number: int, count: int) -> None:
        self._started(number)
        # The threads of TensorFlow do not exist in a forked process: an operation would wait for
        # ever. These two are what all operations on tensors go through.
        pywrap_tfe.TFE_Py_FastPathExecute = _no_operations
        pywrap_tfe.TFE_Py_Execute = _no_operations


def _no_operations(*_: Any) -> NoReturn:
    raise ScriptError(
        "the source of hvd.dataset computes with TensorFlow, which processes of input hosts "
        "cannot; read and transform there with NumPy or Pillow, and compute with TensorFlow in "
        "hvd.dataset(...).map(...)"
    )

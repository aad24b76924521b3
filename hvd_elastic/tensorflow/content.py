"""Converts the state of a TensorFlow training to the content of checkpoints and back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_elastic.checkpoint.header import TensorInfo
from hvd_elastic.checkpoint.reader import open_checkpoint
from hvd_elastic.checkpoint.stream import Content
from hvd_elastic.tensorflow.variables import LiveVariable

_PIECE_BYTES = 16 << 20  # digests of a tensor's pieces are computed in several threads


class TensorFlowContent(Content):
    """Nested dicts, lists, variables, arrays and plain values; variables are shared by ``id()``."""

    frontend = "tensorflow"

    def _encode_leaf(self, value: Any, path: tuple[Any, ...]) -> Any:
        if not isinstance(value, (tf.Variable, np.ndarray)) or value.dtype == object:
            return NotImplemented
        key, live = id(value), LiveVariable(value) if isinstance(value, tf.Variable) else value
        shared, kind = key in self._shared, live.dtype.name
        return {"$tensor": self.name_tensor(key, path, live, kind, shared=shared)}

    def _copied(self, tensor: LiveVariable | np.ndarray) -> np.ndarray:
        return _bytes_of(tensor.copy() if isinstance(tensor, np.ndarray) else tensor.view())

    def begin_copy(
        self, begin: int, end: int, target: np.ndarray[Any, Any], lasting: set[int]
    ) -> Callable[[], str | None]:
        # Views of variables keep their values, so all is copied later.
        views = [
            _bytes_of(self.tensors[number].view())[first:last]
            for number, first, last in self.parts(begin, end)
        ]

        def copy_rest() -> None:
            if views:
                np.concatenate(views, out=target)
            views.clear()

        return copy_rest


def _bytes_of(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def pieces_of(tensor: LiveVariable | np.ndarray) -> list[Callable[[], np.ndarray]]:
    """Return functions that return the bytes of a tensor, piece by piece."""
    flat = _bytes_of(tensor.view())
    cuts = range(0, max(1, len(flat)), _PIECE_BYTES)
    return [partial(flat.__getitem__, slice(at, at + _PIECE_BYTES)) for at in cuts]


def load_checkpoint(path: Path | str, name: str | None = None) -> dict[str, Any]:
    """Return the content of a checkpoint, or of one object; see :meth:`CheckpointReader.load`."""
    with open_checkpoint(path) as reader:
        return reader.load("tensorflow", new_array, name=name)


def new_array(info: TensorInfo) -> tuple[np.ndarray, np.ndarray]:
    """Return an array for a tensor of a checkpoint, and its memory as bytes."""
    array = np.empty(info.shape, type_named(info.dtype))
    return array, _bytes_of(array)


def type_named(name: str) -> np.dtype[Any]:
    """Return the numpy type of a name such as ``bfloat16``."""
    return np.dtype(tf.as_dtype(name).as_numpy_dtype)

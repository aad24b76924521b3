"""The state of the callbacks of ``fit`` that follow a metric, which all ranks must share."""

from __future__ import annotations

import gc
from typing import Any

import keras
import numpy as np

from hvd_elastic.errors import ScriptError
from hvd_elastic.script.instances import holders_of

_MONITORS = (
    keras.callbacks.EarlyStopping,
    keras.callbacks.History,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ReduceLROnPlateau,
)
_PLAIN = (bool, int, float, np.generic, np.ndarray, type(None))
_SET_ONCE = ("min_delta", "monitor_op")
"""Keras sets the latter, and turns the sign of the former, when it learns whether the metric is to
fall, once in each process."""


class Monitors:
    """EarlyStopping, ModelCheckpoint, ReduceLROnPlateau and History, as one object of the State.

    Each rank decides for itself when to stop or to reduce the learning rate, by metrics that are
    the same on all. So a worker that joins, and a resumed run, need what the others remember.

    Args:
        first: the callback that has to come before them.

    Attributes:
        callbacks: all callbacks of ``fit``, in the order in which Keras calls them.

    Raises:
        ScriptError: one comes before it, or a callback restores training by itself.
    """

    def __init__(self, first: keras.callbacks.Callback) -> None:
        self._received: dict[str, dict[str, Any]] = {}
        self._monitors: dict[str, tuple[keras.callbacks.Callback, dict[str, Any]]] = {}
        self.callbacks = callbacks = next(
            (
                each.callbacks
                for found in gc.get_referrers(first)
                if isinstance(found, list)
                for each in holders_of(found, keras.callbacks.CallbackList)
            ),
            [first],
        )
        for place, callback in enumerate(callbacks, -callbacks.index(first)):
            kind = type(callback).__name__
            if isinstance(callback, keras.callbacks.BackupAndRestore):
                raise ScriptError(
                    "model.fit(callbacks=[BackupAndRestore]): training continues after failures by "
                    "itself, and after its end with hvd-elastic run --resume; leave it out"
                )
            if isinstance(callback, _MONITORS):
                if place < 0:
                    raise ScriptError(
                        f"model.fit(callbacks=[{kind}, ElasticCallback]): ElasticCallback averages "
                        "the metrics over the ranks, so it comes first in callbacks; else each "
                        "rank decides by its own share of the examples"
                    )
                self._monitors[f"{place}.{kind}"] = (callback, _remembered(callback))

    def state_dict(self) -> dict[str, Any]:
        """Return what training has changed in the callbacks, by callback and attribute."""
        return {
            name: {
                key: value
                for key, value in _remembered(callback).items()
                if key not in before or value is not before[key]
            }
            for name, (callback, before) in self._monitors.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the callbacks to what another rank had, or a checkpoint."""
        self._received = state
        for name, (callback, before) in self._monitors.items():
            vars(callback).update(_copied(before | state.get(name, {})))

    snapshot = state_dict
    roll_back = load_state_dict

    def restore_best_weights(self, model: Any) -> None:
        """Do what EarlyStopping does at the end of training, so that the last checkpoint has it."""
        for callback, _ in self._monitors.values():
            if isinstance(callback, keras.callbacks.EarlyStopping):
                if callback.restore_best_weights and callback.best_weights is not None:
                    model.set_weights(callback.best_weights)

    def set_again(self) -> None:
        """Set them again, since Keras has reset them in their on_train_begin."""
        self.load_state_dict(self._received)


def _remembered(callback: keras.callbacks.Callback) -> dict[str, Any]:
    plain = {k: v for k, v in vars(callback).items() if k not in _SET_ONCE and _is_plain(v)}
    found: dict[str, Any] = _copied(plain)
    return found


def _copied(value: Any) -> Any:
    """Return a value with lists and dicts of its own, which callbacks add to."""
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    return [*value] if isinstance(value, list) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value[:1]))  # of one kind, and a history is long
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return isinstance(value, _PLAIN)

"""Metrics of Keras over all ranks: their variables are added up, and not their results averaged."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvd_elastic.errors import ScriptError
from hvd_elastic.script.collectives import script_collective
from hvd_elastic.tensorflow.variables import keep_values, variable_of

_TOLD_ELEMENTS = 4096
"""Most numbers that a step tells the other ranks: 16 KiB, little beside the gradients."""


def metric_results(*metrics: keras.metrics.Metric) -> dict[str, Any]:
    """Return the results of metrics over the examples of all ranks; all ranks must call it.

    A metric that a script updates in its own loop has seen the examples of its rank alone. The
    metrics themselves stay as they are.

    Args:
        metrics: metrics of Keras whose variables are sums, as those of ``keras.metrics`` are.

    Returns:
        The result of each, by its name: a number, or an array.

    Raises:
        ScriptError: one is no metric, or its variables are not sums.

    >>> accuracy = keras.metrics.SparseCategoricalAccuracy()      # doctest: +SKIP
    >>> metric_results(accuracy)["sparse_categorical_accuracy"]      # doctest: +SKIP
    0.98
    """
    for metric in metrics:
        if not isinstance(metric, keras.metrics.Metric) or not _is_sum(metric):
            raise ScriptError(
                f"hvd.metric_results({getattr(metric, 'name', metric)}): a "
                f"{type(metric).__name__} is no metric of Keras whose variables are sums, which "
                "could be added up over the ranks. Add what it is made of to a keras.metrics.Sum "
                "or Mean, or use hvd.allreduce"
            )
    sums = MetricSums(metrics)
    with script_collective("metric_results", "metrics") as communicator:
        values = communicator.wait(communicator.sum_async(sums.own(), "user.metrics"))

    def results() -> dict[str, Any]:
        return {each.name: tf.convert_to_tensor(each.result()).numpy() for each in metrics}

    return sums.results(values, results)


class MetricSums:
    """The variables of metrics as one vector, and its sum over the ranks.

    In ``model.fit`` each step of training also tells the other ranks what they have grown by since
    the step before. So the sums lack nothing but a rank's last batch if it dies, and they are part
    of the state.

    Args:
        metrics: metrics; those whose variables are not sums are left out.

    Attributes:
        sums: sum over all ranks, those that are gone too, of what was told in this epoch.
        size: number of elements that a step tells.
    """

    def __init__(self, metrics: Iterable[Any]) -> None:
        flat = [
            each for metric in metrics for each in (getattr(metric, "metrics", None) or [metric])
        ]
        self.others = [metric for metric in flat if not _is_sum(metric)]
        found = {
            id(each): each
            for metric in flat
            if metric not in self.others
            for each in map(variable_of, metric.variables)
        }
        self._variables = sorted(found.values(), key=_elements)
        self._lengths = [*map(_elements, self._variables)]
        within = np.cumsum([0, *self._lengths]) <= _TOLD_ELEMENTS
        self._live = self._variables[: int(within.sum()) - 1]
        self.size = sum(map(_elements, self._live))
        self.sums = tf.Variable(tf.zeros(sum(self._lengths), tf.float64), trainable=False)
        self._told = tf.Variable(tf.zeros(self.size, tf.float64), trainable=False)

    def own(self) -> np.ndarray:
        """Return this rank's variables, shape (n,), float64."""
        pieces = [np.asarray(each.numpy(), np.float64).reshape(-1) for each in self._variables]
        return np.concatenate([np.zeros(0), *pieces])

    def untold(self, own: np.ndarray) -> np.ndarray:
        """Return what no step has told yet of what :meth:`own` has returned."""
        told: np.ndarray = self._told.numpy()
        return own - np.pad(told, (0, len(own) - len(told)))

    def results(self, values: np.ndarray, results: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return ``results()`` with the variables set to ``values``, as :meth:`own` has them."""
        restore = keep_values(self._variables)
        pieces = np.split(values, np.cumsum(self._lengths)[:-1])
        for variable, piece in zip(self._variables, pieces, strict=True):
            if variable.dtype.is_integer:
                piece = np.rint(piece)  # shares of a sum arrive as float32
            variable.assign(piece.reshape(variable.shape).astype(variable.dtype.as_numpy_dtype))
        try:
            return results()
        finally:
            restore()

    def begin_epoch(self, *, whole: bool) -> None:
        """Note that Keras has reset the metrics; ``whole``: no step of the epoch is taken yet."""
        self._told.assign(tf.zeros_like(self._told))
        if whole:
            self.sums.assign(tf.zeros_like(self.sums))

    def all_told(self) -> None:
        """Note that a step has told everything, though it failed on this rank."""
        self._told.assign(self.own()[: self.size])

    # -- as an object of the State ----------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the sums over all ranks."""
        return {"sums": self.sums.numpy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the sums, unless they are of other metrics, as a run may be resumed with."""
        if state["sums"].shape == tuple(self.sums.shape):
            self.sums.assign(state["sums"])

    def snapshot(self) -> tf.Tensor:
        """Return the sums; nothing is copied."""
        return self.sums.read_value()

    def roll_back(self, values: tf.Tensor) -> None:
        """Set the sums to an earlier :meth:`snapshot`."""
        self.sums.assign(values)

    # -- in the graph of a step ------------------------------------------------------------

    def tell(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the variables, and what they have grown by, as float32 to send."""
        pieces = [tf.reshape(tf.cast(each.read_value(), tf.float64), [-1]) for each in self._live]
        own = tf.concat(pieces, 0) if pieces else tf.zeros(0, tf.float64)
        return own, tf.cast(own - self._told.read_value(), tf.float32)

    def add_received(self, own: tf.Tensor, mean: tf.Tensor, ranks: tf.Tensor) -> None:
        """Add what all ranks have told; ``mean``: the average over so many ranks."""
        self._told.assign(own, read_value=False)
        more = tf.cast(mean, tf.float64) * ranks
        rest = tf.zeros(self.sums.shape[0] - self.size, tf.float64)
        self.sums.assign_add(tf.concat([more, rest], 0), read_value=False)


def _elements(variable: tf.Variable) -> int:
    return int(variable.shape.num_elements() or 0)


def _is_sum(metric: Any) -> bool:
    """Return whether a metric's variables only grow by what each batch adds.

    So it is with those of Keras, which adds them up over the replicas of its own distribution, and
    with others unless they set variables (``assign``), as for a maximum.
    """
    update = inspect.unwrap(type(metric).update_state)
    sets = not update.__module__.startswith("keras.") and "assign" in update.__code__.co_names
    kinds: Sequence[Any] = [getattr(each, "aggregation", "sum") for each in metric.variables]
    return not sets and all(kind == "sum" for kind in kinds)

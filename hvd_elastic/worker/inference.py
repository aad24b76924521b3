"""Interface of a framework for ``hvd.evaluate`` and ``hvd.predict``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np


class Inference(ABC):
    """A model that computes outputs and is not trained, and a dataset for it.

    Args of a frontend's class: model, dataset, ``called`` (the function of the script, for
    messages), ``num_workers`` and ``collate_fn``. It raises ScriptError for a dataset that cannot
    be read by index.

    Attributes:
        state, load_model: the frontend's.
        dataset: the dataset, read by index.
    """

    state: type[Any]
    load_model: Callable[..., Any]
    model: Any
    dataset: Any
    examples: int

    @abstractmethod
    def batches(self, indices: Sequence[range]) -> Iterable[Any]:
        """Return a batch for each range of indices."""

    @abstractmethod
    def shared(self, dataset: Any, batch_size: int) -> Iterable[Any]:
        """Return this rank's batches of a part of the dataset, of the frontend's loader."""

    def given(self, batch: Any) -> Any:
        """Return a batch as the model takes it."""
        return batch

    @abstractmethod
    def outputs(self, inputs: Any) -> Any:
        """Return what the model computes of the inputs of a batch."""

    @abstractmethod
    def values(self, metric: Callable[[Any, Any], Any], outputs: Any, targets: Any) -> Any:
        """Return the numbers of a metric for a batch, as what numpy makes an array of."""

    @abstractmethod
    def array(self, output: Any) -> np.ndarray:
        """Return an output as an array."""

    def evaluating(self) -> AbstractContextManager[object]:
        """Return a context in which the model is not in training mode."""
        return nullcontext()

    @abstractmethod
    def untrained(self) -> tuple[list[Any], Callable[[], None]]:
        """Return the live tensors that may differ between ranks, and what sets them back."""

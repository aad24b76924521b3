"""Examples that cannot be decoded, and are left out of their batches: ``on_error="skip"``.

A dataset raises :class:`SkippedExampleError` for such an example. It may be read in any process,
so what was skipped comes to the rank with its batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hvd_elastic.errors import DataError, SkippedExampleError
from hvd_elastic.worker.input_source import Skipped

_TRIES = 1000
"""Other examples that are tried where a batch has none left."""


class Shortened(NamedTuple):
    """A batch that lacks examples.

    Attributes:
        batch: the batch of the others. If there are none, it has one of another place, which does
            not count.
        skipped: those that it lacks.
    """

    batch: Any
    skipped: Sequence[Skipped]


def shortened(batch: Any, skipped: Sequence[Skipped]) -> Any:
    """Return a batch, as :class:`Shortened` if it lacks examples."""
    return Shortened(batch, skipped) if skipped else batch


def whole(batch: Any) -> Shortened:
    """Return what :func:`shortened` was given."""
    return batch if isinstance(batch, Shortened) else Shortened(batch, ())


def read_examples(
    dataset: Any,
    at_once: Callable[[list[int]], Any] | None,
    indices: Sequence[int],
    begin: Callable[[int], object] = lambda _: None,
) -> tuple[Any, list[Skipped]]:
    """Return the examples at some indices, without those that are skipped, and these.

    Args:
        at_once: its ``__getitems__``; None: it has none.
        begin: called with an index before its example is read, or once with the first one.

    Raises:
        DataError: all are skipped, and so are many others.
    """
    if at_once is not None:
        begin(indices[0])
        try:
            return at_once(list(indices)), []
        except SkippedExampleError:
            pass  # which ones: they are read one by one
    found: list[Any] = []
    skipped: list[Skipped] = []
    for index in indices:
        begin(index)
        try:
            found.append(dataset[index])
        except SkippedExampleError as error:
            skipped.append(Skipped(index, error.example, error.reason))
    if skipped and not found:
        found.append(_stand_in(dataset, skipped[0]))
    return found, skipped


def _stand_in(dataset: Any, skipped: Skipped) -> Any:
    """Return any example that can be decoded: a model cannot compute a batch of none."""
    places = random.Random(skipped.dataset_index)
    for _ in range(_TRIES):
        try:
            return dataset[places.randrange(len(dataset))]
        except SkippedExampleError:
            continue
    raise DataError(
        f"{skipped.example} cannot be decoded: {skipped.reason}. Nor can any other of its batch, "
        f'or of {_TRIES} more of the data set: on_error="skip" is for a few; prepare it again'
    )

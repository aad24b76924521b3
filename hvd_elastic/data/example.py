"""The place of an example in a shard, and the number that it is taken by."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple


def example_number(index: Any) -> int:
    """Return the index of an example as an int.

    Raises:
        TypeError: it is something else, such as a slice.
    """
    try:
        return operator.index(index)
    except TypeError:
        raise TypeError(
            f"an example is taken by its number, not by {index!r} ({type(index).__name__}); for a "
            "part of a dataset: torch.utils.data.Subset(dataset, range(10))"
        ) from None


class Example(NamedTuple):
    """The place of an example in a shard.

    Attributes:
        key: its name in the shard.
        start, length: its record in the shard [bytes].
        fields: names of its values, such as ``("jpg", "cls")``.
        offsets: where in the record each value begins [bytes].
        sizes: of each value [bytes].
        label: number of its class; -1: none.
        kinds: of its values, where some are no bytes: names of
            :data:`hvd_elastic.data.tfrecord.KINDS`; empty: all are bytes.
        checksum: that a TFRecord ends with; 0: none.
    """

    key: str
    start: int
    length: int
    fields: tuple[str, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    label: int = -1
    kinds: tuple[str, ...] = ()
    checksum: int = 0


def readable(name: str) -> str:
    r"""Return the name of a file as JSON can hold it.

    >>> import os
    >>> readable(os.fsdecode(b"caf\xe9")), readable("é")
    ('caf\\xe9', 'é')
    """
    return as_bytes(name).decode(errors="backslashreplace")


def as_bytes(name: str) -> bytes:
    """Return a name as it is stored; bytes of it that are no UTF-8 stay as they are."""
    return name.encode(errors="surrogateescape")

"""Where an example lies in a shard."""

from __future__ import annotations

from typing import NamedTuple


class Example(NamedTuple):
    """Where an example lies in a shard.

    Attributes:
        key: its name in the shard.
        start, length: its record in the shard [bytes].
        fields: names of its values, such as ``("jpg", "cls")``.
        offsets: where in the record each value begins [bytes].
        sizes: of each value [bytes].
        label: number of its class; -1: none.
    """

    key: str
    start: int
    length: int
    fields: tuple[str, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    label: int = -1

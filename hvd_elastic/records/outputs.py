"""The folder of a prediction's outputs: a file for each batch, and an index once it is complete."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

TOTAL_FILE = "prediction.json"
"""Name under which the script saves the number of examples."""
INDEX_FILE = "index.json"
"""Name of the index of a complete folder."""
_NAME = re.compile(r"outputs-(\d{12})-(\d{12})\.npz")


def output_name(begin: int, end: int) -> str:
    """Return the name of the file with the outputs of the examples [begin, end).

    >>> output_name(0, 256)
    'outputs-000000000000-000000000256.npz'
    """
    return f"outputs-{begin:012d}-{end:012d}.npz"


def output_ranges(names: Iterable[str]) -> list[tuple[int, int]]:
    """Return the ranges of the files of outputs among some names, in order.

    >>> output_ranges(["index.json", output_name(4, 6), output_name(0, 4)])
    [(0, 4), (4, 6)]
    """
    found = filter(None, map(_NAME.fullmatch, names))
    return sorted((int(match[1]), int(match[2])) for match in found)


def joined(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield ranges in order, those that touch or overlap as one.

    >>> list(joined([(0, 4), (4, 6), (8, 9)]))
    [(0, 6), (8, 9)]
    """
    begin, end = 0, 0
    for first, last in ranges:
        if first > end:
            if end > begin:
                yield begin, end
            begin, end = first, last
        end = max(end, last)
    if end > begin:
        yield begin, end

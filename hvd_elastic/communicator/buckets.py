"""Cut the bytes of many arrays into messages of a fixed size, and write messages back.

Arrays are flat and of type uint8: numpy arrays, or tensors with the same ``len``, slices and
assignment to slices.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

BUCKET_BYTES = 16 << 20
"""Large enough for the full bandwidth of a link, and small enough that copying one bucket overlaps
with sending the next."""
LAST_BYTES = 1 << 20
"""Most that the last bucket of gradients holds. A smaller one would take hardly less time, since
each sum over the ranks takes some whatever its size."""


def cut_into_buckets(arrays: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield slices of the arrays, in order, that together hold at most `BUCKET_BYTES`."""
    bucket: list[Any] = []
    room = BUCKET_BYTES
    for array in arrays:
        at = 0
        while at < len(array):
            bucket.append(array[at : at + room])
            at += len(bucket[-1])
            room -= len(bucket[-1])
            if not room:
                yield bucket
                bucket, room = [], BUCKET_BYTES
    if bucket:
        yield bucket


def share_of(bucket: Sequence[Any], index: int, shares: int) -> list[Any]:
    """Return the slices of share ``index`` when a bucket is divided into ``shares`` equal shares.

    >>> share_of([b"abc", b"defgh"], 1, 2)
    [b'efgh']
    """
    size = sum(map(len, bucket))
    first, last = size * index // shares, size * (index + 1) // shares
    found, offset = [], 0
    for array in bucket:
        part = array[max(0, first - offset) : max(0, last - offset)]
        if len(part):
            found.append(part)
        offset += len(array)
    return found


def scatter(message: Any, bucket: Sequence[Any]) -> None:
    """Overwrite the slices of a bucket with the bytes of a message."""
    offset = 0
    for array in bucket:
        array[:] = message[offset : offset + len(array)]
        offset += len(array)


def divide(kinds: Sequence[Hashable], sizes: Sequence[int], most: int) -> list[list[int]]:
    """Divide things into buckets of one kind each, in order; return the indices in each.

    The last bucket of a kind is complete when the backward pass ends, so nothing hides its
    reduction, and that of the one before has the time in which the last one fills. So buckets
    double in size from the last one on, and the first one of a kind holds what is left over.

    Args:
        kinds: kind of each thing.
        sizes: size of each thing [bytes].
        most: most that a bucket holds; a thing of at least this size has a bucket to itself.

    >>> divide("aabaa", [1, 2, 5, 9, 2], 4)
    [[0], [1, 4], [2], [3]]
    >>> divide("a" * 16, [1 << 19] * 16, 4 << 20)
    [[0, 1], [2, 3, 4, 5, 6, 7, 8, 9], [10, 11, 12, 13], [14, 15]]
    """
    found: list[list[int]] = []
    large: list[list[int]] = []
    filling: dict[Hashable, list[int]] = {}
    room: dict[Hashable, int] = {}
    limit: dict[Hashable, int] = {}
    for index in reversed(range(len(sizes))):
        kind, size = kinds[index], sizes[index]
        if size >= most:
            large.append([index])
            continue
        if kind not in filling or room[kind] < size:
            limit[kind] = min(most, 2 * limit[kind] if kind in limit else LAST_BYTES)
            room[kind] = max(size, limit[kind])
            filling[kind] = []
            found.append(filling[kind])
        filling[kind].append(index)
        room[kind] -= size
    return [bucket[::-1] for bucket in reversed(found)] + large[::-1]

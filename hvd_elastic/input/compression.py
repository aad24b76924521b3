"""Compression of batches, where the link from an input host to a rank is the limit."""

from __future__ import annotations

import zlib
from collections.abc import Generator, Sequence
from typing import Any

from hvd_elastic.input.link import LinkError
from hvd_elastic.worker.input_source import Buffers

_LEVEL = 1
"""Of zlib: the fastest. A link that is slower than this on one core is worth it."""
_NOTABLE = 0.2
"""Time to send, in that to make a batch, that is worth to be shortened."""
_PROBE_BYTES = 8 << 20
"""Size of the batches by which a way of sending is measured [bytes]: far more than the operating
system takes at once."""
_KEPT_BYTES = 512 << 20
"""Size of the batches that are then sent in the better way, before both are measured again."""


class LinkLimit:
    """Decides for one connection whether to compress its batches.

    The link is the limit where a process waits while it sends, and makes no batch meanwhile. Then
    both ways are measured, and that one is kept which takes less time for the same bytes,
    compression included.

    Attributes:
        compresses: whether to compress the next batch.
    """

    def __init__(self) -> None:
        self.compresses = False
        self._plan = self._decide()
        next(self._plan)

    def sent(self, size: int, made_s: float, sent_s: float) -> None:
        """Note a batch of this size [bytes], how long it took to make, and to compress and send."""
        self._plan.send((size, made_s, sent_s))

    def _decide(self) -> Generator[None, tuple[int, float, float], None]:
        while True:
            made_s, plain_s = yield from self._send(_PROBE_BYTES, compressed=False)
            is_better = False
            if plain_s > _NOTABLE * made_s:
                _, compressed_s = yield from self._send(_PROBE_BYTES, compressed=True)
                is_better = compressed_s < plain_s
            yield from self._send(_KEPT_BYTES, compressed=is_better)

    def _send(
        self, least: int, *, compressed: bool
    ) -> Generator[None, tuple[int, float, float], tuple[float, float]]:
        """Have at least so many bytes sent; return the times to make and to send a byte [s]."""
        self.compresses = compressed
        total, all_made_s, all_sent_s = 0, 0.0, 0.0
        while total < least:
            size, made_s, sent_s = yield
            total, all_made_s, all_sent_s = total + size, all_made_s + made_s, all_sent_s + sent_s
        return all_made_s / total, all_sent_s / total


def compress(buffers: Buffers) -> tuple[Buffers, list[int]]:
    """Return buffers compressed, and the size of each before."""
    return [zlib.compress(each, _LEVEL) for each in buffers], [size_of([each]) for each in buffers]


def expand(buffers: Sequence[Any], sizes: Sequence[int]) -> Buffers:
    """Return what :func:`compress` was given; it may be written to.

    Raises:
        LinkError: the buffers are not compressed, or have other sizes.
    """
    try:
        found = [
            memoryview(bytearray(zlib.decompressobj().decompress(buffer, size + 1)))
            for buffer, size in zip(buffers, sizes, strict=True)
        ]
    except (zlib.error, ValueError) as error:
        raise LinkError(f"a batch that cannot be expanded: {error}") from error
    if [each.nbytes for each in found] != [*sizes]:
        raise LinkError("a batch that does not have the size that was announced")
    return found


def size_of(buffers: Buffers) -> int:
    """Return the size of buffers [bytes]."""
    return sum(memoryview(each).nbytes for each in buffers)

"""A dataset over sources that can only be read one example after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from hvd_elastic.data.example import example_number
from hvd_elastic.errors import DataError

Make = Callable[[int, int, int], Iterator[Any]]
"""Called with epoch, share and start; gives the examples of the share in this epoch from the
example with number ``start`` on."""


class Stream:
    """A map-style dataset over streams: generators, ``IterableDataset`` s, files of lines.

    The stream is divided into shares, and an epoch takes equally many examples of each. Progress in
    it is one number, as for every dataset, from which follows which examples of which share come
    next. So no state of a generator is saved or handed on: a rank that takes over a share opens it
    at that example.

    If ``make`` gives the same examples each time it is called with the same numbers, each example
    is used exactly once, at any sequence of world sizes, through failures and restarts. If it does
    not (a queue, a generator with random numbers of its own), each *place* of the epoch is used
    exactly once; which examples they are is up to the source: what ranks had read ahead when the
    world changed, ``prefetch`` batches and the step in flight, is lost or comes again.

    A share is read in chunks: a chunk of each share in turn. With ``chunk = batch_size // shares``
    and a number of ranks that divides the shares, every rank reads its own shares alone. Otherwise
    some shares are read by several ranks, each of which drops what is not its own. Loader processes
    do the same among themselves, so give the loader ``num_workers=0`` or 1. ``shuffle`` must be
    False: mix in ``make``.

    Args:
        make: gives the examples of a share.
        length: examples of an epoch, a multiple of ``shares``.
        shares: number of shares, best a multiple of all numbers of ranks; 1: every rank reads all.
        chunk: consecutive examples of a share.

    Raises:
        DataError: a number is out of range; when it is read, a share ends early.

    >>> def count(epoch, share, start):
    ...     return iter(range(100 * share + start, 100 * share + 50))
    >>> list(Stream(count, length=8, shares=2, chunk=3))
    [0, 1, 2, 100, 101, 102, 3, 103]
    """

    endless = True
    """Indices beyond the length are those of later epochs; see :class:`DataOrder`."""
    ordered = True
    """It must not be shuffled."""

    def __init__(self, make: Make, *, length: int, shares: int = 1, chunk: int = 1) -> None:
        if min(length, shares, chunk) < 1 or length % shares:
            raise DataError(
                f"Stream(length={length}, shares={shares}, chunk={chunk}): each must be 1 or more, "
                "and length a multiple of shares, since an epoch takes as many examples of each"
            )
        self._make, self._length, self._shares, self._chunk = make, length, shares, chunk
        self._of_share = length // shares
        self.order_key = repr((length, shares, chunk))
        self._opened: dict[int, _OpenShare] = {}

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, range(self._length))

    def __getitem__(self, index: int) -> Any:
        epoch, share, number = self.place(index)
        opened = self._opened.pop(share, None)
        if opened is None or opened.epoch != epoch or opened.following > number:
            examples = iter(self._make(epoch, share, number))
            opened = _OpenShare(epoch, number, examples)
        found = None
        for following in range(opened.following, number + 1):
            try:
                found = next(opened.examples)
            except StopIteration:
                raise DataError(
                    f"share {share} of {self._shares} of the stream ended after {following} "
                    f"examples in epoch {epoch}, and an epoch takes {self._of_share} of each; "
                    f"give Stream a length of at most {following * self._shares}, or let the share "
                    "begin again"
                ) from None
        self._opened[share] = _OpenShare(epoch, number + 1, opened.examples)
        return found

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return several examples, in this order."""
        return [self[index] for index in indices]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": {}}

    def place(self, index: int) -> tuple[int, int, int]:
        """Return epoch, share and number in the share of an example.

        Args:
            index: of the stream, >= 0; from ``len()`` on those of later epochs.
        """
        index = example_number(index)
        if index < 0:
            raise IndexError(f"example {index} of a stream")
        epoch, index = divmod(index, self._length)
        turn, rest = divmod(index, self._chunk * self._shares)
        before = turn * self._chunk
        share, number = divmod(rest, min(self._chunk, self._of_share - before))
        return epoch, share, before + number


class _OpenShare(NamedTuple):
    """A share that is being read.

    Attributes:
        following: number of the example that comes next.
    """

    epoch: int
    following: int
    examples: Iterator[Any]

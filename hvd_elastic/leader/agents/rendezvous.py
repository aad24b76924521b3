"""Passes the entries of Gloo's rendezvous from the agent of one host to those of the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hvd_elastic.control.commands import Member
from hvd_elastic.wire import messages as msg
from hvd_elastic.wire.framing import compress, decompress

SMALL_WORLD = 16
"""Largest world whose entries are sent at once and whole, which is soonest."""
_ALL_RANKS = "global"
"""Scope in which Horovod's ranks all meet; others, such as of process sets, have fewer ranks."""

Put = msg.PutEntry | msg.PutAddresses


class EntryRelay:
    """Decides which entries of Gloo's rendezvous are sent to which hosts in one generation.

    A rank stores one value, its addresses for each other rank: all values together grow with the
    square of the world. So in a large world each host is sent the parts that its own ranks read,
    once all values are there, since no rank can continue before.
    """

    def __init__(self, generation: int, members: Sequence[Member]) -> None:
        self.generation = generation
        self._ranks: dict[str, list[int]] = {}
        for member in members:
            self._ranks.setdefault(member.host, []).append(member.rank)
        self._size = len(members)
        self._waiting: dict[str, tuple[msg.StoreEntry, str, bytes]] = {}

    def add_entry(self, entry: msg.StoreEntry, origin: str) -> Iterator[tuple[str, Put]]:
        """Yield the messages to send now, each with its host.

        Args:
            origin: host of that rank.

        Raises:
            ProtocolError: the value was not compressed as agents do.
        """
        if len(self._ranks) == 1:
            return  # the agent of the only host has all of them
        if entry.scope != _ALL_RANKS or self._size <= SMALL_WORLD:
            yield from self._whole(entry, origin)
            return
        self._waiting[entry.key] = (entry, origin, decompress(entry.value))
        if len(self._waiting) < self._size:
            return
        waiting, self._waiting = self._waiting, {}
        values = [waiting[key][2] for key in map(str, range(self._size)) if key in waiting]
        lengths = {len(value) for value in values}
        if len(values) == self._size and len(lengths) == 1 and not lengths.pop() % (self._size - 1):
            yield from self._addresses(values)
        else:  # not as Gloo writes them
            for one, host, _ in waiting.values():
                yield from self._whole(one, host)

    def _whole(self, entry: msg.StoreEntry, origin: str) -> Iterator[tuple[str, Put]]:
        message = msg.PutEntry(entry)
        return ((host, message) for host in self._ranks if host != origin)

    def _addresses(self, values: Sequence[bytes]) -> Iterator[tuple[str, Put]]:
        length = len(values[0]) // (self._size - 1)
        for host, ranks in self._ranks.items():
            first, count = ranks[0], len(ranks)  # the ranks of a host are consecutive
            # A rank has no address for itself, so those for later ranks come one place earlier.
            before = slice((first - 1) * length, (first - 1 + count) * length)
            after = slice(first * length, (first + count) * length)
            parts = [value[before] for value in values[:first]]
            parts += [value[after] for value in values[first + count :]]
            place = self.generation, _ALL_RANKS, self._size, first, count
            yield host, msg.PutAddresses(*place, compress(b"".join(parts)))

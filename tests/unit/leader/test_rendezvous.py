"""Who is sent what of Gloo's rendezvous."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest

from hvd_elastic.agent.rendezvous import GenerationStore
from hvd_elastic.control.ranks import Seat, assign_ranks
from hvd_elastic.leader.agents.rendezvous import SMALL_WORLD, EntryRelay
from hvd_elastic.run_events import HostSlots
from hvd_elastic.wire import messages as msg
from hvd_elastic.wire.framing import ProtocolError, compress, decompress, encode

GENERATION = 3
SLOTS = (1, 3, 2, *[1] * SMALL_WORLD)  # workers on each host of a large world
SIZE = sum(SLOTS)


def addresses(rank: int, size: int, length: int = 5) -> bytes:
    """As Gloo writes them: an address for each other rank, in their order."""
    others = (other for other in range(size) if other != rank)
    return b"".join(struct.pack("!HH", rank, other).ljust(length, b".") for other in others)


class World:
    """Hosts with the stores of their agents."""

    def __init__(self, slots: tuple[int, ...]) -> None:
        hosts = [HostSlots(f"h{number}", count) for number, count in enumerate(slots)]
        seats = [Seat(f"{h.name}.{slot}", h.name, slot) for h in hosts for slot in range(h.slots)]
        self.members = assign_ranks(seats, hosts)
        self.relay = EntryRelay(GENERATION, self.members)
        self.stores = {host.name: GenerationStore(lambda *_: None) for host in hosts}
        self.messages = 0
        self.bytes = 0

    def put(self, rank: int, value: bytes, scope: str = "global") -> None:
        host = self.members[rank].host
        self.stores[host].put(scope, str(rank), value)
        entry = msg.StoreEntry(GENERATION, scope, str(rank), compress(value))
        for to, message in self.relay.add_entry(entry, host):
            self.messages += 1
            self.bytes += len(encode(message))
            if isinstance(message, msg.PutAddresses):
                self.stores[to].put_addresses(message)
            else:
                value = decompress(message.entry.value)
                self.stores[to].put(message.entry.scope, message.entry.key, value)

    def value(self, reader: int, rank: int, scope: str = "global") -> bytes | None:
        """What a rank reads in the store of its host."""
        store = self.stores[self.members[reader].host]
        found = store._values.get((scope, str(rank)))
        return None if found is None else found.whole()


def every_pair(size: int) -> Iterator[tuple[int, int]]:
    return ((one, other) for one in range(size) for other in range(size) if one != other)


def test_in_a_small_world_each_entry_is_sent_at_once_and_whole() -> None:
    world = World((2, 1, 1))
    world.put(0, addresses(0, 4))
    assert [world.value(reader, 0) for reader in range(4)] == [addresses(0, 4)] * 4
    assert world.value(3, 1) is None


def test_in_a_large_world_each_rank_finds_its_address_in_every_value() -> None:
    world = World(SLOTS)
    for rank in reversed(range(SIZE)):
        assert not world.messages, "nobody can go on before all are there"
        world.put(rank, addresses(rank, SIZE))
    assert world.messages == len(SLOTS), "one to each host"
    for reader, rank in every_pair(SIZE):
        value = world.value(reader, rank)
        assert value is not None
        assert len(value) == len(addresses(rank, SIZE))
        at = 5 * (reader - (reader > rank))  # where Gloo looks
        assert value[at : at + 5] == struct.pack("!HH", rank, reader) + b"."


def test_a_large_world_on_one_host_is_sent_nothing() -> None:
    world = World((SIZE,))
    for rank in range(SIZE):
        world.put(rank, addresses(rank, SIZE))
    assert not world.messages
    assert world.value(0, SIZE - 1) == addresses(SIZE - 1, SIZE)


def test_what_a_large_world_is_sent_does_not_grow_with_its_square() -> None:
    sent = []
    for size in (64, 256):
        world = World((1,) * size)
        for rank in range(size):
            world.put(rank, addresses(rank, size, 136))
        sent.append(world.bytes / size)
    assert sent[1] < 4.5 * sent[0], "bytes for each host grow with the number of the others"


@pytest.mark.parametrize("odd", [b"", b"x", b"x" * 5 * SIZE])
def test_values_that_are_not_as_gloo_writes_them_are_sent_whole(odd: bytes) -> None:
    world = World(SLOTS)
    for rank in range(SIZE):
        world.put(rank, odd if rank == 7 else addresses(rank, SIZE))
    assert [world.value(reader, 7) for reader in range(SIZE)] == [odd] * SIZE
    assert world.value(0, 8) == addresses(8, SIZE)


def test_entries_of_other_scopes_are_never_held_back() -> None:
    world = World(SLOTS)
    world.put(2, b"what only some ranks store", scope="process_set_1")
    assert world.value(SIZE - 1, 2, "process_set_1") == b"what only some ranks store"


def test_damaged_bytes_are_refused() -> None:
    entry = msg.StoreEntry(GENERATION, "global", "0", b"\x80 no such thing")
    with pytest.raises(ProtocolError, match="compressed bytes that are damaged"):
        list(World(SLOTS).relay.add_entry(entry, "h0"))

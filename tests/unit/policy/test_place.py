"""Where slots are taken."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hvd_elastic.policy.scoring import placements, sizes_to_try
from hvd_elastic.policy.snapshot import Allocation, HostOffer


def place(hosts: list[HostOffer], size: int, current: Allocation | None = None) -> list[object]:
    return [dict(a.counts) for a in placements(tuple(hosts), (size,), current or Allocation())]


def test_fewest_hosts_first():
    hosts = [HostOffer("a", 2), HostOffer("b", 8), HostOffer("c", 4)]
    assert place(hosts, 9) == [{"a": 1, "b": 8}]
    assert place(hosts, 8) == [{"b": 8}]
    assert place(hosts, 3)[0] == {"c": 3}, "the smallest that is large enough"
    assert place([HostOffer("a", 4, 1.0), HostOffer("b", 3, 9.0)], 3) == [{"a": 3}], "but no dearer"


def test_hosts_in_use_stay_in_use():
    hosts = [HostOffer(name, 2) for name in "abcd"]
    assert place(hosts, 4, Allocation.of({"c": 2, "d": 2})) == [{"c": 2, "d": 2}]


def test_pinned_hosts_are_kept_as_a_whole():
    hosts = [HostOffer("a", 4), HostOffer("b", 2, pinned=True), HostOffer("c", 2, slowness=3.0)]
    assert place(hosts, 1) == []
    assert place(hosts, 2) == [{"b": 2}]
    assert place(hosts, 4)[0] == {"a": 2, "b": 2}
    slow = [HostOffer("a", 4), HostOffer("b", 2, slowness=3.0, pinned=True)]
    assert place(slow, 4) == [{"a": 2, "b": 2}], "however slow"


def test_cheap_hosts_and_fast_hosts_are_among_the_choices():
    hosts = [HostOffer("a", 4, 9.0), HostOffer("b", 2, 1.0), HostOffer("c", 2, 1.0, slowness=2.0)]
    found = place(hosts, 4)
    assert {"b": 2, "c": 2} in found
    assert {"a": 4} in found


@given(
    st.lists(st.tuples(st.integers(1, 9), st.floats(1, 4), st.floats(0, 9)), min_size=1),
    st.integers(1, 40),
)
def test_placements_hold_what_was_asked(rows, size):
    hosts = [HostOffer(f"h{i}", s, price, slow) for i, (s, slow, price) in enumerate(rows)]
    slots = {host.name: host.slots for host in hosts}
    found = placements(tuple(hosts), (size,), Allocation())
    assert bool(found) == (size <= sum(slots.values()))
    for allocation in found:
        assert allocation.slots == size
        assert all(0 < number <= slots[host] for host, number in allocation.counts)
    if found:
        fewest = min(a.hosts for a in found)
        largest_first = np.cumsum(sorted(slots.values(), reverse=True))
        assert fewest == int(np.searchsorted(largest_first, size)) + 1


@given(st.integers(1, 50), st.integers(0, 5000), st.integers(1, 5000))
def test_sizes_are_within_bounds_and_near_the_current(least, more, current):
    most = least + more
    found = sizes_to_try(least, most, current, [8] * 100)
    assert found[0] == least
    assert found[-1] == most
    assert found == sorted(set(found))
    if least <= current <= most:
        assert current in found

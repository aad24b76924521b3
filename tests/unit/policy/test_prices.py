from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_elastic.policy.objective import cheapest_hosts, hourly_price
from hvd_elastic.policy.snapshot import HostOffer


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), max_size=6),
    st.integers(0, 12),
)
def test_the_cheapest_hosts_are_found(rows: list[tuple[int, int]], slots: int) -> None:
    hosts = [HostOffer(f"n{i}", s, float(price)) for i, (s, price) in enumerate(rows)]
    tried = [
        sum(host.price or 0.0 for host in some)
        for number in range(len(hosts) + 1)
        for some in itertools.combinations(hosts, number)
        if sum(host.slots for host in some) >= slots
    ]
    found = cheapest_hosts(hosts, slots)
    if found is None:
        assert not tried
    else:
        assert sum(host.slots for host in found) >= slots
        assert hourly_price(found) == min(tried)


def test_many_hosts_are_added_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for each number of slots: the leader of a thousand hosts would stand still for it."""
    reads = []
    price = HostOffer.__getattribute__

    def counted(host: HostOffer, name: str) -> object:
        if name == "price":
            reads.append(host)
        return price(host, name)

    hosts = [HostOffer(f"n{i}", 8, 1 + i * 7 % 13) for i in range(40)]
    monkeypatch.setattr(HostOffer, "__getattribute__", counted)
    assert len(cheapest_hosts(hosts, 160) or ()) == 20
    assert len(reads) == len(hosts)

from __future__ import annotations

import ipaddress
import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_elastic.errors import UsageError
from hvd_elastic.virtual.plan import (
    MAX_HOSTS,
    Rate,
    Shape,
    check_name,
    free_subnets,
    hardware_address,
    host_address,
    interface_name,
    leader_address,
    loopback_subnets,
    parse_rate,
    parse_shape,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("3x2", Shape(3, 2)), ("1X8", Shape(1, 8)), (" 4 ", Shape(4, 1)), ("250x1", Shape(250, 1))],
)
def test_shapes(text: str, expected: Shape) -> None:
    assert parse_shape(text) == expected


@pytest.mark.parametrize("text", ["", "x", "3x", "0x2", "3x0", "251x1", "-1x2", "3x2x1", "2x9999"])
def test_what_is_no_shape_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(UsageError, match=r"hosts|slots") as raised:
        parse_shape(text)
    assert f"'{text}'" in str(raised.value)


@pytest.mark.parametrize(
    ("text", "bits"),
    [("1gbit", 10**9), ("200Mbit", 2 * 10**8), ("1.5 gbit", 15 * 10**8), ("64000bit", 64_000)],
)
def test_rates(text: str, bits: int) -> None:
    assert parse_rate(text).bits_per_s == bits


@pytest.mark.parametrize("text", ["", "fast", "1gbps", "1 GB/s", "0gbit", "-1mbit", "1bit", "1g"])
def test_what_is_no_rate_is_refused_with_the_valid_forms(text: str) -> None:
    with pytest.raises(UsageError, match="1gbit or 200mbit"):
        parse_rate(text)


@given(st.integers(10_000, 10**12))
def test_the_bucket_holds_full_packets_and_little_time(bits: int) -> None:
    burst = Rate(bits).burst_bytes
    assert 16_000 <= burst <= 4_000_000


@pytest.mark.parametrize("name", ["vc1", "a", "big-one"])
def test_names(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["", "1", "Vc", "a_b", "a-", "../x", "x" * 33, "a b", "a\n"])
def test_a_name_that_cannot_begin_host_names_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="cluster name"):
        check_name(name)


@given(
    st.lists(
        st.tuples(st.integers(0, 2**32 - 1), st.integers(8, 32)).map(
            lambda pair: str(ipaddress.IPv4Network(pair, strict=False))
        ),
        max_size=8,
    ),
    st.integers(0, 1000),
)
def test_a_chosen_network_overlaps_no_route(taken: list[str], seed: int) -> None:
    routes = [ipaddress.IPv4Network(text) for text in taken]
    for text in itertools.islice(free_subnets(taken, random.Random(seed)), 50):
        chosen = ipaddress.IPv4Network(text)
        assert chosen.is_private
        assert not any(chosen.overlaps(route) for route in routes)


def test_a_route_to_all_of_10_moves_the_choice_to_other_private_networks() -> None:
    chosen = next(free_subnets(["10.0.0.0/8"], random.Random(1)))
    assert chosen.startswith("172.")
    assert list(free_subnets(["0.0.0.0/0"], random.Random(1))) == []


def test_loopback_networks_are_in_127() -> None:
    for text in itertools.islice(loopback_subnets([], random.Random(2)), 20):
        assert ipaddress.IPv4Network(text).is_loopback


def test_addresses_and_names_of_one_network_are_distinct_and_short() -> None:
    subnet = "198.19.255.0/24"
    addresses = [host_address(subnet, index) for index in range(1, MAX_HOSTS + 1)]
    assert len({*addresses, leader_address(subnet)}) == MAX_HOSTS + 1
    assert len(interface_name(subnet)) <= 15
    assert interface_name(subnet) != interface_name("198.19.254.0/24")
    # locally administered, unicast
    assert int(hardware_address(subnet, 1).split(":")[0], 16) & 3 == 2


def test_every_free_network_is_offered_once() -> None:
    offered = list(free_subnets([], random.Random(3)))
    assert len(offered) == len(set(offered)) == 160 * 256 + 16 * 256 + 192 + 512

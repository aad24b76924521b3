"""Compute and check a virtual cluster's shape, rates, addresses and names.

Pure functions: no process is started and no file is read here.
"""

from __future__ import annotations

import ipaddress
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hvd_elastic.errors import UsageError

MAX_HOSTS = 250
"""Hosts have the addresses .1 to .250 of a /24 network."""

# Above all hosts, so that adding hosts never needs this address.
LEADER_INDEX = 254
MAX_SLOTS = 1024

_SHAPE = re.compile(r"(?P<hosts>[0-9]{1,6})(?:[xX](?P<slots>[0-9]{1,6}))?")
_RATE = re.compile(r"(?P<value>[0-9]{1,9}(?:\.[0-9]{1,6})?)\s*(?P<unit>[kmgt]?)bit", re.IGNORECASE)
_SCALE = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
# A host name such as "vc12-250" may have at most 63 characters.
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,30}[a-z0-9])?")


@dataclass(frozen=True)
class Shape:
    """Shape of a cluster: ``3x2`` is three hosts of two slots each."""

    hosts: int
    slots: int


@dataclass(frozen=True)
class Rate:
    """A link rate, with the parameters that ``tc tbf`` needs to reach it.

    Attributes:
        bits_per_s: rate in each direction of a host's link [bit/s].
    """

    bits_per_s: int

    @property
    def burst_bytes(self) -> int:
        """Bytes that may pass at once: 2 ms at the rate, but at least a few full-size packets."""
        return min(max(self.bits_per_s // 8 // 500, 16_000), 4_000_000)

    @property
    def arguments(self) -> str:
        """Arguments after ``tc qdisc add dev X root``."""
        return f"tbf rate {self.bits_per_s}bit burst {self.burst_bytes}b latency 50ms"


def parse_shape(text: str) -> Shape:
    """Parse ``HOSTSxSLOTS``; a number alone means hosts of one slot.

    >>> parse_shape("3x2")
    Shape(hosts=3, slots=2)
    """
    match = _SHAPE.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"'{text}' is no cluster shape; write HOSTSxSLOTS, such as 3x2 "
            "for three hosts of two slots each"
        )
    hosts, slots = int(match["hosts"]), int(match["slots"] or 1)
    if not 1 <= hosts <= MAX_HOSTS:
        raise UsageError(f"'{text}' asks for {hosts} hosts; a virtual cluster has 1 to {MAX_HOSTS}")
    if not 1 <= slots <= MAX_SLOTS:
        raise UsageError(f"'{text}' asks for {slots} slots a host; valid are 1 to {MAX_SLOTS}")
    return Shape(hosts, slots)


def parse_rate(text: str) -> Rate:
    """Parse a link rate such as ``1gbit``.

    >>> parse_rate("100mbit").bits_per_s
    100000000
    """
    match = _RATE.fullmatch(text.strip())
    # tc reads "gbps" as gigabytes per second. It is refused, since most people mean bits.
    bits = int(float(match["value"]) * _SCALE[match["unit"].lower()]) if match else 0
    if not 10_000 <= bits <= 10**12:
        raise UsageError(
            f"'{text}' is no link rate; write a number and kbit, mbit or gbit (bits a second), "
            "such as 1gbit or 200mbit, from 10kbit to 1000gbit"
        )
    return Rate(bits)


def check_name(name: str) -> str:
    """Return the name if it is valid in host names and as the name of a folder."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"'{name}' is no cluster name; valid are up to 32 lower-case letters, digits and '-', "
            "beginning with a letter, such as vc1"
        )
    return name


def host_address(subnet: str, index: int) -> str:
    """Return the address of host number ``index`` (from 1).

    >>> host_address("10.99.7.0/24", 2)
    '10.99.7.2'
    """
    return str(ipaddress.IPv4Network(subnet)[index])


def leader_address(subnet: str) -> str:
    """Return the address of the machine itself in the cluster's network."""
    return host_address(subnet, LEADER_INDEX)


def interface_name(subnet: str) -> str:
    """Return the name of the leader's interface.

    Each /24 has one name, so that the kernel refuses a second cluster with the same network.

    >>> interface_name("10.99.7.0/24")
    'hve0a6307'
    """
    return "hve" + ipaddress.IPv4Network(subnet).network_address.packed[:3].hex()


def hardware_address(subnet: str, index: int) -> str:
    """Return a host's MAC address, which stays the same when the host boots again."""
    packed = ipaddress.IPv4Network(subnet)[index].packed
    return "02:e1:" + ":".join(f"{byte:02x}" for byte in packed)


def free_subnets(taken: Iterable[str], rng: random.Random) -> Iterator[str]:
    """Yield private /24 networks that overlap none in ``taken``, in random order.

    The order is random so that callers who choose at the same moment rarely choose the same one.
    If a VPN uses all of 10/8, the other private ranges follow.
    """
    networks = [ipaddress.IPv4Network(text, strict=False) for text in taken]
    blocks = [
        ("10.64.0.0", 160 * 256),
        ("172.16.0.0", 16 * 256),
        ("192.168.64.0", 192),
        # Reserved for network benchmarks (RFC 2544), never used on the Internet.
        ("198.18.0.0", 512),
    ]
    for first, count in blocks:
        base, start = int(ipaddress.IPv4Address(first)), rng.randrange(count)
        # None of these primes divides a count, so each step length visits the whole block.
        step = rng.choice((7, 11, 13, 17, 19, 23))
        for number in range(count):
            chosen = ipaddress.IPv4Network((base + 256 * ((start + number * step) % count), 24))
            if not any(chosen.overlaps(network) for network in networks):
                yield str(chosen)


def loopback_subnets(taken: Iterable[str], rng: random.Random) -> Iterator[str]:
    """Yield /24 networks of 127/8 for hosts on the loopback interface, in random order."""
    used = set(taken)
    while True:
        text = f"127.{rng.randrange(64, 224)}.{rng.randrange(256)}.0/24"
        if text not in used:
            yield text

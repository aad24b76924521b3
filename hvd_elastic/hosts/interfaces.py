"""Network interfaces of this host, and the one by which other hosts of a run reach it."""

from __future__ import annotations

import os
import socket

import psutil

LEADER_ADDRESS = "HVD_ELASTIC_LEADER_ADDRESS"
"""Variable with the address of the leader, where there is no ssh connection from it."""


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that has ``address``; None if there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == address for entry in addresses):
            return name
    # All of 127.0.0.0/8 belongs to the loopback interface.
    return "lo" if address.startswith("127.") else None


def interfaces() -> dict[str, str]:
    """Return name and address of the network interfaces that the ring can use."""
    found: dict[str, str] = {}
    for name, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                found.setdefault(name, entry.address)
    return found


def own_address(default: str) -> str:
    """Return the address of this host for the other hosts; ``default`` if nothing tells it."""
    leader = os.environ.get(LEADER_ADDRESS)
    if leader:
        family = socket.AF_INET6 if ":" in leader else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((leader, 9))  # sends nothing, only looks up the route
            return str(probe.getsockname()[0])
    ssh = os.environ.get("SSH_CONNECTION", "").split(" ")
    return ssh[2] if len(ssh) == 4 else default

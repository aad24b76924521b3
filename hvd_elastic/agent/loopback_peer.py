"""Find the user at the other end of a connection over 127.0.0.1."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

Address = tuple[str, int]

# The kernel answers at once; this only prevents a hang.
_TIMEOUT_S = 1.0
# <linux/inet_diag.h>, <linux/sock_diag.h>, <linux/netlink.h>
_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_REQUEST = 1
_ANY_INTERFACE, _ANY_COOKIE = 0, 0xFFFFFFFF
_HEADER = struct.Struct("=IHHII")
_ESTABLISHED = 1  # the kernel reports a closed socket as root's, whoever owned it
_STATE_AT = 1
_UID_AT = 4 + 48 + 12


def loopback_peer_uid(peer: Address, own: Address) -> int | None:
    """Return the user id that owns the other end of a loopback TCP connection; None if closed.

    The kernel is asked for this one socket. If it does not answer, ``/proc/net/tcp`` is read, which
    has a line for every connection of the machine and takes milliseconds on a busy one.

    Args:
        peer: address of the other end, as returned by ``getpeername()``.
        own: address of this end.
    """
    try:
        return _ask_kernel(peer, own)
    except (OSError, struct.error):  # no such socket, or a kernel without inet_diag
        return _look_up(peer, own)


def _ask_kernel(peer: Address, own: Address) -> int | None:
    """Return the user id by a netlink query.

    Source: sock_diag(7).

    Raises:
        OSError: the socket does not exist, or the query is not possible.
    """
    wanted = struct.pack("!HH", peer[1], own[1])
    for address, _ in (peer, own):
        wanted += socket.inet_aton(address).ljust(16, b"\0")
    wanted += struct.pack("=III", _ANY_INTERFACE, _ANY_COOKIE, _ANY_COOKIE)
    states = 1 << _ESTABLISHED
    question = struct.pack("=BBBBI", socket.AF_INET, socket.IPPROTO_TCP, 0, 0, states) + wanted
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
        kernel.settimeout(_TIMEOUT_S)
        length = _HEADER.size + len(question)
        kernel.send(_HEADER.pack(length, _SOCK_DIAG_BY_FAMILY, _REQUEST, 1, 0) + question)
        answer = kernel.recv(1 << 12)
    if _HEADER.unpack_from(answer)[1] != _SOCK_DIAG_BY_FAMILY:
        raise OSError("the kernel does not show this socket")
    found = memoryview(answer)[_HEADER.size :]
    if found[_STATE_AT] != _ESTABLISHED:
        return None
    uid: int = struct.unpack_from("=I", found, _UID_AT)[0]
    return uid


def _look_up(peer: Address, own: Address) -> int | None:
    """Return the user id from ``/proc/net/tcp``.

    Source: proc(5), /proc/net/tcp: addresses are the hexadecimal words of the network-order
    address read in host order.
    """

    def word(address: Address) -> str:
        packed = int.from_bytes(socket.inet_aton(address[0]), "little")
        return f"{packed:08X}:{address[1]:04X}"

    wanted = [word(peer), word(own), f"{_ESTABLISHED:02X}"]
    with Path("/proc/net/tcp").open() as table:
        for line in table:
            fields = line.split()
            if len(fields) > 7 and fields[1:4] == wanted:
                return int(fields[7])
    return None

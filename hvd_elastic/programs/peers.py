"""Find the user at the other end of a connection within this machine.

Every user can bind a name in the abstract namespace of unix sockets, and can connect to one. So the
kernel is asked for the peer's user before anything is sent or read.
"""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path
from typing import Any

from hvd_elastic.errors import StrangerError
from hvd_elastic.own_files import user_words

Address = tuple[Any, ...]
"""Address of a TCP socket, as ``getpeername()`` returns it; the first two entries are used."""

_SO_PEERGROUPS = 59  # <asm-generic/socket.h>; not in the module socket
_MOST_GROUPS = 256  # getsockopt of Python returns 1024 bytes at most
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


def peer_uid(connection: socket.socket) -> int:
    """Return the user id of the peer of a unix socket, as reported by the kernel."""
    credentials = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
    )
    _pid, uid, _gid = struct.unpack("3i", credentials)
    return int(uid)


def peer_groups(connection: socket.socket) -> set[int]:
    """Return the ids of the groups of the peer of a unix socket, as reported by the kernel.

    They are those that it had when it connected.
    """
    credentials = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
    )
    _pid, _uid, gid = struct.unpack("3i", credentials)
    try:
        found = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MOST_GROUPS * 4)
    except OSError:  # it has more of them
        return {gid}
    return {gid, *struct.unpack(f"{len(found) // 4}I", found)}


def connect_own(
    address: str, timeout_s: float | None = None, owner: int | None = None
) -> socket.socket:
    """Return a connection to a unix socket of this user, or of another one who is named.

    Args:
        address: path of the socket, or a zero byte and its name in the abstract namespace.
        timeout_s: time limit for connecting, and for whatever follows [s]; None: no limit.
        owner: id of the user whose socket it is to be; None: this user.

    Raises:
        StrangerError: a process of another user listens there. Nothing was sent to it.
        OSError: nobody listens there.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(address)
        found = peer_uid(connection)
        if found != (os.getuid() if owner is None else owner):
            name = address.lstrip("\0")
            raise StrangerError(
                f"{user_words(found)} holds the local socket {name}, which is not theirs. Nothing "
                "was sent to it. End their process, or ask an administrator to do so"
            )
    except BaseException:
        connection.close()
        raise
    return connection


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
    family = _family(peer)
    wanted = struct.pack("!HH", peer[1], own[1])
    for address in (peer[0], own[0]):
        wanted += socket.inet_pton(family, address).ljust(16, b"\0")
    wanted += struct.pack("=III", _ANY_INTERFACE, _ANY_COOKIE, _ANY_COOKIE)
    states = 1 << _ESTABLISHED
    question = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 0, 0, states) + wanted
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
    """Return the user id from ``/proc/net/tcp`` or ``tcp6``.

    Source: proc(5), /proc/net/tcp: addresses are the hexadecimal words of the network-order
    address read in host order.
    """
    family = _family(peer)

    def words(address: Address) -> str:
        packed = struct.iter_unpack("=I", socket.inet_pton(family, address[0]))
        return f"{''.join(f'{word:08X}' for (word,) in packed)}:{address[1]:04X}"

    wanted = [words(peer), words(own), f"{_ESTABLISHED:02X}"]
    with Path("/proc/net/tcp6" if family == socket.AF_INET6 else "/proc/net/tcp").open() as table:
        for line in table:
            fields = line.split()
            if len(fields) > 7 and fields[1:4] == wanted:
                return int(fields[7])
    return None


def _family(address: Address) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address[0] else socket.AF_INET

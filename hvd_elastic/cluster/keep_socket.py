"""Where a user's keepers are found: unix sockets in a folder that is the user's alone.

Imports next to nothing (``socket`` and ``signal`` load ``enum``, which takes as long as everything
else): a call through a keeper takes little longer than what is loaded for it.
"""

from __future__ import annotations

import _socket
import binascii
import os
import struct
import sys

from hvd_elastic import __version__

TYPE_CHECKING = False  # typing is slow to load
if TYPE_CHECKING:
    from socket import socket
    from typing import TypeVar

    Socket = TypeVar("Socket", bound=_socket.socket)

__all__ = ["ATTACH", "RUN", "STOP", "call_keeper", "identity", "open_folder", "peer_is_own"]
__all__ += ["read_request", "send_request", "socket_name", "socket_names", "socket_path"]

# What a keeper is asked for: a whole call, a call's connection to the hosts, its end.
RUN, ATTACH, STOP = b"run", b"attach", b"stop"
SUFFIX = ".keeper"
HEAD_BYTES = 4
MOST_DESCRIPTORS = 4
# Connections depend on them as on the ssh configuration: a call with others has another keeper.
_VARIABLES = ("HOME", "USER", "LOGNAME", "SSH_AUTH_SOCK")


def open_folder(make: bool = False) -> int | None:
    """A descriptor of the folder; None where there is none, or it is not the user's alone."""
    base = os.environ.get("HVD_ELASTIC_HOME") or os.path.expanduser("~/.hvd_elastic")
    path = os.path.join(base, "keepers")
    try:
        if make:
            os.makedirs(base, exist_ok=True)
            if not os.path.isdir(path):
                os.mkdir(path, 0o700)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    found = os.fstat(descriptor)
    if found.st_uid == os.geteuid() and not found.st_mode & 0o077:
        return descriptor
    os.close(descriptor)
    return None


def identity() -> bytes:
    """What a call and its keeper have in common: the code, and where and as whom it runs."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    folders = [os.path.join(package, *parts) for parts in ((), ("cli",), ("cluster",))]
    parts = [
        __version__,
        sys.executable,
        *(f"{folder} {os.stat(folder).st_mtime_ns}" for folder in folders),
        *(os.environ.get(name, "") for name in _VARIABLES),
        os.uname().nodename,
        str(os.geteuid()),
        *(_namespace(name) for name in ("mnt", "net", "pid")),
    ]
    return "\n".join(parts).encode("utf-8", "surrogateescape")


def socket_name(of: bytes) -> str:
    """The file of the keeper with that identity, which it compares in whole."""
    return f"{binascii.crc32(of):08x}{SUFFIX}"


def socket_path(folder: int, name: str) -> str:
    """Through the folder's descriptor: a path may be longer than a socket's can be."""
    return f"/proc/self/fd/{folder}/{name}"


def call_keeper(folder: int, name: str, kind: type[Socket]) -> Socket | None:
    """A connection to a keeper, as a socket of that kind; None where none answers."""
    sock = kind(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        sock.connect(socket_path(folder, name))
        if peer_is_own(sock):
            return sock
    except OSError:
        pass
    sock.close()
    return None


def peer_is_own(sock: _socket.socket) -> bool:
    """Whether the process at the other end belongs to the same user, as the kernel has it."""
    found = sock.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", found)[1] == os.geteuid()


def _namespace(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{name}")
    except OSError:
        return ""


def socket_names(folder: int) -> list[str]:
    """All that there are, of keepers that live or not."""
    return [name for name in os.listdir(folder) if name.endswith(SUFFIX)]


def send_request(
    sock: _socket.socket, parts: list[bytes], descriptors: list[int] | None = None
) -> None:
    """Asks a keeper for something.

    Args:
        sock: to the keeper.
        parts: what for; no part has a zero byte.
        descriptors: that it gets.

    Raises:
        OSError: the keeper is gone.
    """
    body = b"\0".join(parts)
    data = len(body).to_bytes(HEAD_BYTES, "big") + body
    rights = struct.pack(f"{len(descriptors)}i", *descriptors) if descriptors else b""
    with_it = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)] if rights else []
    sock.sendall(data[sock.sendmsg([data], with_it) :])


def read_request(sock: socket) -> tuple[list[bytes], list[int]]:
    """The parts and descriptors of a request, and no byte more.

    Raises:
        OSError: it does not come.
    """
    from socket import recv_fds

    head, descriptors, _, _ = recv_fds(sock, HEAD_BYTES, MOST_DESCRIPTORS)
    size = int.from_bytes(head, "big") if len(head) == HEAD_BYTES else 0
    body = bytearray()
    while len(body) < size:
        data = sock.recv(size - len(body))
        if not data:
            raise ConnectionResetError("the call went away")
        body += data
    return bytes(body).split(b"\0"), descriptors

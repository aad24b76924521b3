"""Mutually authenticated TLS between processes that were all given the same certificate."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import tempfile
from collections.abc import Iterator

_TCP_OPTIONS = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3))
"""An idle connection that was cut is noticed after about 10 s, if the leader is not faster."""


def keep_alive(plain: socket.socket) -> None:
    """Have the kernel look whether the peer is still there, and send small messages at once."""
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _TCP_OPTIONS:
        if hasattr(socket, name):
            plain.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def tls_context(certificate: str, *, client: bool) -> ssl.SSLContext:
    """Return a TLS context that shows this certificate and accepts no other.

    Args:
        certificate: private key and self-signed certificate, as PEM text.
        client: whether this side begins the handshake.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if client else ssl.PROTOCOL_TLS_SERVER)
    context.check_hostname = False
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    begin = certificate.index("-----BEGIN CERTIFICATE-----")
    context.load_verify_locations(cadata=certificate[begin:])
    with _as_file(certificate) as path:
        context.load_cert_chain(path)
    return context


@contextlib.contextmanager
def _as_file(text: str) -> Iterator[str]:
    """Yield a path where OpenSSL can read the text; it is only in memory where possible."""
    data = text.encode("ascii")
    if hasattr(os, "memfd_create"):
        number = os.memfd_create("certificate")
        try:
            os.write(number, data)
            yield f"/proc/self/fd/{number}"
        finally:
            os.close(number)
        return
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        yield file.name

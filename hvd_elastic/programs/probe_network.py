"""Measure the network to other hosts: reachability, latency and throughput.

The leader writes JSON lines {"do": …} to stdin, and each gets one answer on stdout. The program
listens on one address, serves only peers that send the leader's token, and ends with its stdin.
"""

from __future__ import annotations

import hmac
import json
import os
import select
import socket
import struct
import sys
import threading
import time

from hvd_elastic.programs.accept_peers import accept_peers

# A firewall that drops packets gives no answer, so do not wait longer than this.
CONNECT_S = 2.0
# A peer that neither sends nor receives for this time has failed.
SILENCE_S = 3.0
PIECE_BYTES = 1 << 18
# Number of round trips, of which the fastest counts: others also show how busy the hosts are.
PINGS = 15
# Share of the time that is not counted: TCP starts slowly, and rate limits allow a first burst.
WARM_UP = 0.25
TOKEN_BYTES = 32
PING, SEND, RECEIVE = b"p", b"s", b"r"
RATE = struct.Struct("!d")


def read_exactly(sock: socket.socket, size: int) -> bytes:
    """Read exactly ``size`` bytes, or raise OSError."""
    data = b""
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            raise OSError(0, "the connection was closed")
        data += piece
    return data


def send_until_told(sock: socket.socket) -> float:
    """Send as fast as possible until the other side reports the rate; return it [bytes/s]."""
    piece = bytes(PIECE_BYTES)
    sock.setblocking(False)
    while True:
        told, ready, _ = select.select([sock], [sock], [], SILENCE_S)
        if told:
            sock.settimeout(SILENCE_S)
            rate: float = RATE.unpack(read_exactly(sock, RATE.size))[0]
            return rate
        if not ready:
            raise OSError(0, "nothing goes through")
        sock.send(piece)


def receive_for(sock: socket.socket, seconds: float) -> float:
    """Receive for this time [s]; report the rate to the sender and return it [bytes/s]."""
    sock.settimeout(SILENCE_S)
    buffer = bytearray(PIECE_BYTES)
    begun = counted_from = time.monotonic()
    counted = 0
    while True:
        size = sock.recv_into(buffer)
        now = time.monotonic()
        if not size:
            raise OSError(0, "the connection was closed")
        if now - begun < seconds * WARM_UP:
            counted_from = now
        else:
            counted += size
        if now - begun >= seconds:
            break
    rate = counted / max(now - counted_from, 1e-6)
    sock.sendall(RATE.pack(rate))
    return rate


def connect(peer: list[object], token: bytes, what: bytes) -> socket.socket:
    """Return a connection to another host's probe."""
    sock = socket.create_connection((str(peer[0]), int(str(peer[1]))), CONNECT_S)
    try:
        sock.settimeout(SILENCE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Drop unsent data when closing, or a slow link would stay busy with it.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.sendall(token + what)
        read_exactly(sock, 1)
    except BaseException:
        sock.close()
        raise
    return sock


def admit(sock: socket.socket, token: bytes) -> socket.socket:
    """Return the connection once it has shown the token."""
    sock.settimeout(SILENCE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if not hmac.compare_digest(read_exactly(sock, TOKEN_BYTES), token):
        raise OSError(0, "it does not have the token")
    return sock


def serve(sock: socket.socket, seconds: float) -> None:
    """Serve one connection made with :func:`connect`."""
    with sock:
        try:
            what = read_exactly(sock, 1)
            sock.sendall(b"+")
            if what == PING:
                while True:
                    sock.sendall(read_exactly(sock, 1))
            elif what == SEND:
                receive_for(sock, seconds)
                # Wait until the sender has read the rate and closes.
                while sock.recv(PIECE_BYTES):
                    pass
            elif what == RECEIVE:
                send_until_told(sock)
        except OSError:
            return


class Probe:
    """Requests of the leader, each a method of that name."""

    def __init__(self) -> None:
        self._token = b""
        self._seconds = 0.0

    def clock(self, request: dict[str, object]) -> dict[str, object]:
        """Return the time of this host's clock [unix seconds]."""
        del request
        return {"clock": time.time()}

    def listen(self, request: dict[str, object]) -> dict[str, object]:
        """Listen on the given address, or on the one that ssh connected to."""
        self._token = bytes.fromhex(str(request["token"]))
        self._seconds = float(str(request["seconds"]))
        words = os.environ.get("SSH_CONNECTION", "").split()
        address = str(request["address"] or (words[2] if len(words) == 4 else "127.0.0.1"))
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.bind((address, 0))
        listener.listen(512)

        arguments = (
            listener,
            lambda sock: admit(sock, self._token),
            lambda sock: serve(sock, self._seconds),
        )
        threading.Thread(target=accept_peers, args=arguments, daemon=True).start()
        return {"address": address, "port": listener.getsockname()[1]}

    def reach(self, request: dict[str, object]) -> dict[str, object]:
        """Try to connect to every peer; return the reason for each that failed."""
        failed: dict[str, str] = {}

        def attempt(name: str, peer: list[object]) -> None:
            try:
                connect(peer, self._token, PING).close()
            except OSError as error:
                failed[name] = error.strerror or str(error)

        peers = request["peers"]
        assert isinstance(peers, dict)
        threads = [threading.Thread(target=attempt, args=item) for item in peers.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {"failed": failed}

    def measure(self, request: dict[str, object]) -> dict[str, object]:
        """Return latency [s] and throughput to and from a peer [bytes/s]."""
        peer = request["peer"]
        assert isinstance(peer, list)
        times = []
        with connect(peer, self._token, PING) as sock:
            for _ in range(PINGS):
                begun = time.monotonic()
                sock.sendall(b"x")
                read_exactly(sock, 1)
                times.append(time.monotonic() - begun)
        with connect(peer, self._token, SEND) as sock:
            there = send_until_told(sock)
        with connect(peer, self._token, RECEIVE) as sock:
            back = receive_for(sock, self._seconds)
        return {"latency": min(times), "there": there, "back": back}


def main() -> None:
    """Answer requests, one per line."""
    probe = Probe()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        try:
            answer = getattr(probe, request["do"])(request)
        except OSError as error:
            answer = {"error": error.strerror or str(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()

"""Measures plain TCP transfers between virtual hosts, as a lower bound for other transfers."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise

from hvd_elastic.errors import RunError
from hvd_elastic.virtual import VirtualCluster

_RECEIVE = """
import socket, sys
with socket.create_server((sys.argv[1], 29999)) as server:
    print("listening", flush=True)
    connection, _ = server.accept()
    with connection:
        while connection.recv(1 << 20):
            pass
"""
_SEND = """
import socket, sys, time
data = memoryview(bytes(1 << 20))
left = int(sys.argv[2])
begin = time.monotonic()
with socket.create_connection((sys.argv[1], 29999)) as connection:
    while left:
        part = data[:min(left, len(data))]
        connection.sendall(part)
        left -= len(part)
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
print(time.monotonic() - begin)
"""


def time_raw_tcp(cluster: VirtualCluster, places: Sequence[str | None], size: int) -> float:
    """Send data from each place to the next by TCP, over one connection each, all at once.

    Args:
        cluster: virtual hosts.
        places: names of hosts, each at most once, but the first can be the last too, which closes
            a ring; None is this machine, and can only be the first.
        size: amount that each place sends [bytes].

    Returns:
        Duration of the slowest transfer [s].

    Raises:
        RunError: a connection failed.
    """
    with contextlib.ExitStack() as processes:

        def start(place: str | None, program: str, *arguments: str) -> subprocess.Popen[str]:
            if place is None:
                command = [sys.executable, "-c", program, *arguments]
                process = subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                )
            else:
                command = ["python3", "-c", program, *arguments]
                process = cluster.popen_on(
                    place, command, stdout=subprocess.PIPE, stderr=subprocess.PIPE
                )
            processes.enter_context(process)
            processes.callback(process.kill)  # if one end fails, the other one would never end
            return process

        for place in places[1:]:
            assert place is not None, "this machine only sends"
            receiver = start(place, _RECEIVE, cluster.address(place))
            assert receiver.stdout is not None
            receiver.stdout.readline()
        senders = [
            (place, start(place, _SEND, cluster.address(to), str(size)))
            for place, to in pairwise(places)
            if to is not None
        ]
        seconds = []
        for place, sender in senders:
            shown, error = sender.communicate()
            if sender.returncode != 0:
                raise RunError(f"raw TCP from {place or 'this machine'} failed: {error}")
            seconds.append(float(shown))
    return max(seconds)

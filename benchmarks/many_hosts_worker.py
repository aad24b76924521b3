"""A worker without torch: meets the others through its agent as Gloo does, and trains nothing.

It stores a value of the size and form that Gloo stores (one socket address for each other rank),
and reads those of its neighbours in the ring. It appends a line to a file when it has them.
"""

from __future__ import annotations

import os
import random
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hvd_elastic.control.progress import Activity
from hvd_elastic.run_events import Metrics
from hvd_elastic.wire import messages as msg
from hvd_elastic.worker.agent_link import AgentLink

ADDRESS_BYTES = 136
"""Size of an address in Gloo: a ``sockaddr_storage``, most of it unset, and a number."""
METRICS_EVERY_S = 1.0
START = time.monotonic()


def addresses(rank: int, size: int) -> bytes:
    """Return a value as Gloo stores it: they differ in the port, two bytes of each."""
    dice = random.Random(rank)
    rest = dice.randbytes(4) + bytes(8)  # IP address and padding
    rest += dice.randbytes(40) + bytes(72) + b"\xff" * 8  # what Gloo leaves unset, and its number
    return b"".join(b"\2\0" + dice.randbytes(2) + rest for _ in range(size - 1))


def mine(value: bytes, rank: int, my_rank: int) -> bytes:
    """Return the address and port in the value of ``rank`` that ``my_rank`` connects to."""
    at = my_rank - (my_rank > rank)
    return value[at * ADDRESS_BYTES :][:16]


def ask(port: int, method: str, key: int, body: bytes = b"") -> bytes:
    """Send a request to the store of the generation; return the answer's body, b"" if aborted."""
    with socket.create_connection(("127.0.0.1", port)) as store:
        head = f"{method} /global/{key} HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n"
        store.sendall(head.encode() + body)
        answer = b"".join(iter(lambda: store.recv(1 << 16), b""))
    status, _, rest = answer.partition(b"\r\n\r\n")
    return rest if b" 200 " in status else b""


def meet(env: Mapping[str, str]) -> bool:
    """Meet the other ranks of a generation; return False if it was aborted."""
    rank, size = int(env["HOROVOD_RANK"]), int(env["HOROVOD_SIZE"])
    port = int(env["HOROVOD_GLOO_RENDEZVOUS_PORT"])
    ask(port, "PUT", rank, addresses(rank, size))
    for other in {(rank + 1) % size, (rank - 1) % size} - {rank}:
        value = ask(port, "GET", other)
        if not value:
            return False
        assert mine(value, other, rank) == mine(addresses(other, size), other, rank)
    return True


def main() -> None:
    """Serve as a worker until told to leave; the argument is the file for the lines."""
    told = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    joined = generation = steps = 0
    link = AgentLink.from_environment(lambda _: broken(), lambda: Activity(0.0, joined, steps))
    sending = threading.Lock()

    def broken() -> None:
        """Report, as a member whose ring has failed, and only once."""
        nonlocal joined
        with sending:
            if joined:
                link.send(msg.Broken(generation=joined, step=steps, error="the ring broke"))
                joined = 0

    def report() -> None:
        while True:
            time.sleep(METRICS_EVERY_S)
            with sending:
                if joined and rank == 0:
                    link.send(Metrics(steps, 0, steps, steps, size, 1.0, values={"loss": 1.0}))

    rank = size = 0
    threading.Thread(target=report, daemon=True).start()
    link.send(msg.Ready(time.monotonic() - START))
    while True:
        instruction = link.wait(generation)
        match instruction:
            case msg.Join(announcement=announcement, env=env):
                generation = announcement.generation
                rank, size = int(env["HOROVOD_RANK"]), int(env["HOROVOD_SIZE"])
                if meet(env):
                    line = f"{generation} {rank} {os.getpid()} {time.monotonic()}\n"
                    os.write(told, line.encode())
                    with sending:
                        joined, steps = generation, steps + 1
                        link.send(msg.Joined(generation=generation, step=steps))
                    if link.aborted(generation):
                        broken()
                else:  # a newcomer has no state
                    step = steps or -1
                    link.send(msg.Broken(generation=generation, step=step, error="called off"))
            case msg.Leave():
                return
            case None:
                link.take_checkpoint_request()


if __name__ == "__main__":
    main()

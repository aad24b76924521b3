"""Measure the network between pairs of hosts, and find links that are slow or unusable."""

from __future__ import annotations

import contextlib
import json
import secrets
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from hvd_elastic.errors import SshError
from hvd_elastic.hosts.connection import Connection, SshOptions
from hvd_elastic.hosts.fanout import fan_out
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.hosts.local import LocalConnection
from hvd_elastic.hosts.process import RemoteProcess
from hvd_elastic.hosts.remote_python import PROGRAMS, start_program
from hvd_elastic.hosts.ssh import connect, own_address_towards
from hvd_elastic.json_text import parse_json

# Duration of one throughput measurement in each direction.
MEASURE_S = 0.2
# Maximum wait for an answer of a host.
ANSWER_S = 15.0
# Number of times that each clock is read; the fastest answer counts.
CLOCK_ASKS = 3
# A link is slow below this share of the median rate, or if its latency exceeds the median by this
# factor and by at least this time.
SLOW_SHARE = 0.5
# Hosts of one machine, such as virtual ones, have no cable between them: they answer within this
# time there and back, and above this rate theirs depends on what the processors do meanwhile.
LOCAL_S = 5e-5
LOCAL_BYTES_PER_S = 1.25e8
FAR_TIMES = 5.0
FAR_S = 1e-3
# Links that look slow are measured again, one pair at a time, the slowest first.
SECOND_LOOKS = 2
MOST_SECOND_LOOKS = 12
# Maximum number of rounds; in larger clusters each host is measured with this number of others.
MOST_ROUNDS = 15


@dataclass(frozen=True)
class NetLink:
    """One direction of the network between two hosts.

    Attributes:
        source, target: names of the hosts.
        bytes_per_s: throughput [bytes/s].
        latency_s: round-trip time [s].
        refused: why no connection can be made; the numbers are 0 then.
    """

    source: str
    target: str
    bytes_per_s: float = 0.0
    latency_s: float = 0.0
    refused: str = ""


@dataclass
class _Node:
    host: Host
    connection: Connection
    process: RemoteProcess
    address: str = ""
    port: int = 0


class NetworkProbe(AbstractContextManager["NetworkProbe"]):
    """Programs on the hosts that measure the network among them; used in a ``with`` statement.

    Args:
        hosts: hosts to measure.
        addresses: addresses to listen on, by host; others listen on the one ssh connects to.
        python: Python interpreter on the hosts.
        fanout: maximum number of connections that are opened at the same time.

    Attributes:
        failures: reasons why hosts could not be measured, by host.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        options: SshOptions,
        addresses: Mapping[str, str],
        python: str,
        fanout: int,
    ) -> None:
        self._options = options
        self._nodes: dict[str, _Node] = {}
        self._lock = threading.Lock()
        self.failures: dict[str, str] = {}

        def begin(host: Host, _: object) -> None:
            connection = connect(host, options)
            try:
                process = start_program(connection, f"{PROGRAMS}.probe_network", python)
            except BaseException:
                connection.close()
                raise
            with self._lock:
                self._nodes[host.name] = _Node(host, connection, process)

        for result in fan_out(hosts, begin, fanout, options.connect_timeout_s + ANSWER_S):
            if not result.ok:
                self.failures[result.host.name] = result.error
        self._token = secrets.token_hex(32)
        self._listen(addresses)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the hosts whose program answers."""
        return tuple(self._nodes)

    def clocks(self) -> dict[str, tuple[float, float]]:
        """Return how far each host's clock is ahead of ours, and the uncertainty of that [s]."""
        found: dict[str, tuple[float, float]] = {}
        for name in self.names:
            for _ in range(CLOCK_ASKS):
                if name not in self._nodes:  # it has not answered
                    break
                before = time.time()
                answer = self._ask({name: {"do": "clock"}}).get(name, {})
                after = time.time()
                if "clock" in answer:
                    one = (answer["clock"] - (before + after) / 2, (after - before) / 2)
                    found[name] = min(found.get(name, one), one, key=lambda pair: pair[1])
        return found

    def unreachable(self) -> list[NetLink]:
        """Return the directions in which no connection can be made."""
        peers = {name: [node.address, node.port] for name, node in self._nodes.items()}
        answers = self._ask(
            {
                name: {"do": "reach", "peers": {n: peer for n, peer in peers.items() if n != name}}
                for name in peers
            }
        )
        return [
            NetLink(source, target, refused=f"{peers[target][0]}: {why}")
            for source, answer in answers.items()
            for target, why in answer.get("failed", {}).items()
        ]

    def measure(
        self, broken: Iterable[NetLink], on_round: Callable[[int, int], None] | None = None
    ) -> list[NetLink]:
        """Measure latency and throughput of pairs, in rounds with each host in one pair at most.

        Args:
            broken: directions in which no connection can be made.
            on_round: called with the number of rounds done and in total.
        """
        without = {(link.source, link.target) for link in broken}
        without |= {(target, source) for source, target in without}
        links: list[NetLink] = []
        rounds = all_pairs_in_rounds(self.names)[:MOST_ROUNDS]
        for number, pairs in enumerate(rounds, start=1):
            links += self._measure_at_once([pair for pair in pairs if pair not in without])
            if on_round is not None:
                on_round(number, len(rounds))
        for _ in range(SECOND_LOOKS):
            suspects = list(dict.fromkeys(_pair(link) for link in slow_links(links)))
            for pair in suspects[:MOST_SECOND_LOOKS]:
                # The first measurement may have been slowed down by other pairs or a busy machine.
                again = {(link.source, link.target): link for link in self._measure_at_once([pair])}
                links = [_better(link, again.get((link.source, link.target))) for link in links]
        return links

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        nodes, self._nodes = self._nodes, {}
        for node in nodes.values():
            node.process.stdin.close()
        for node in nodes.values():
            node.process.close()
            node.connection.close()

    def _listen(self, addresses: Mapping[str, str]) -> None:
        elsewhere = [
            node.host
            for node in self._nodes.values()
            if not isinstance(node.connection, LocalConnection)
        ]
        wanted = {}
        for name, node in self._nodes.items():
            address = addresses.get(name)
            if address is None and isinstance(node.connection, LocalConnection) and elsewhere:
                address = own_address_towards(elsewhere[0], self._options)
            wanted[name] = {
                "do": "listen",
                "address": address,
                "token": self._token,
                "seconds": MEASURE_S,
            }
        for name, answer in self._ask(wanted).items():
            if "port" in answer:
                self._nodes[name].address = answer["address"]
                self._nodes[name].port = answer["port"]
            else:
                self._drop(name, answer.get("error", "no answer"))

    def _measure_at_once(self, pairs: Sequence[tuple[str, str]]) -> list[NetLink]:
        asked = {}
        for source, target in pairs:
            node = self._nodes.get(target)
            if node is not None and source in self._nodes:
                asked[source] = {"do": "measure", "peer": [node.address, node.port]}
        answers = self._ask(asked)
        links = []
        for source, target in pairs:
            answer = answers.get(source, {})
            if "latency" in answer:
                links.append(NetLink(source, target, answer["there"], answer["latency"]))
                links.append(NetLink(target, source, answer["back"], answer["latency"]))
            elif source in asked:
                links.append(NetLink(source, target, refused=answer.get("error", "no answer")))
        return links

    def _ask(self, requests: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Send requests to several hosts and return the answers; drop hosts that do not answer."""
        asked = []
        for name, request in requests.items():
            try:
                self._nodes[name].process.stdin.write(json.dumps(request).encode() + b"\n")
                asked.append(name)
            except (OSError, EOFError) as error:
                self._drop(name, str(error))
        deadline = time.monotonic() + ANSWER_S
        answers = {}
        for name in asked:
            process = self._nodes[name].process
            try:
                answers[name] = _read_answer(process, deadline)
            except TimeoutError:
                self._drop(name, process.last_line or "no answer")
        return answers

    def _drop(self, name: str, why: str) -> None:
        node = self._nodes.pop(name)
        self.failures[name] = str(SshError(f"host {name}: its network cannot be measured: {why}"))
        node.process.close()
        node.connection.close()


def _read_answer(process: RemoteProcess, deadline: float) -> dict[str, Any]:
    """Return the next JSON object that a program prints.

    Raises:
        TimeoutError: there was none in time, or the program has ended.
    """
    while True:
        line = process.stdout.readline(max(0.0, deadline - time.monotonic()))
        if not line:
            raise TimeoutError
        # Output of login scripts is not JSON and is skipped.
        with contextlib.suppress(ValueError):
            answer = parse_json(line)
            if isinstance(answer, dict):
                return answer


def all_pairs_in_rounds(names: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Return every pair once, in rounds with each host in one pair at most (circle method).

    >>> all_pairs_in_rounds(["a", "b", "c"])
    [[('a', 'b')], [('c', 'a')], [('b', 'c')]]
    """
    ring: list[str | None] = [*names]
    if len(ring) % 2:
        ring.insert(0, None)
    rounds = []
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        rounds.append([(a, b) for a, b in pairs if a is not None and b is not None])
        ring.insert(1, ring.pop())
    return rounds


def slow_links(links: Sequence[NetLink]) -> list[NetLink]:
    """Return links whose rate is far below the median, or latency far above; slowest first."""
    good = [link for link in links if not link.refused]
    if not good:
        return []
    rate = statistics.median_high([link.bytes_per_s for link in good])
    latency = statistics.median([link.latency_s for link in good])
    return sorted(
        (
            link
            for link in good
            if (link.bytes_per_s < SLOW_SHARE * rate and not _is_local(link))
            or link.latency_s > max(FAR_TIMES * latency, latency + FAR_S)
        ),
        key=lambda link: link.bytes_per_s,
    )


def _is_local(link: NetLink) -> bool:
    return link.latency_s < LOCAL_S and link.bytes_per_s > LOCAL_BYTES_PER_S


def _pair(link: NetLink) -> tuple[str, str]:
    return min(link.source, link.target), max(link.source, link.target)


def _better(link: NetLink, again: NetLink | None) -> NetLink:
    if again is None or again.refused:
        return link
    return NetLink(
        link.source,
        link.target,
        max(link.bytes_per_s, again.bytes_per_s),
        min(link.latency_s, again.latency_s),
    )

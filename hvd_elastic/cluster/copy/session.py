"""One copy to many hosts as the leader leads it: nodes are started over ssh, then fed in a chain.

The leader itself carries no data: the source is a process too, here or on another host.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from hvd_elastic.cluster.copy.chain import Chain, Verdict, Why
from hvd_elastic.cluster.copy.keys import make_certificate
from hvd_elastic.cluster.copy.node.frames import pack, unpack
from hvd_elastic.errors import HostUnreachableError, HvdElasticError, SshError, UsageError
from hvd_elastic.hosts.connection import Connection, SshOptions
from hvd_elastic.hosts.fanout import HostResult, Outcome
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.hosts.local import LocalConnection
from hvd_elastic.hosts.process import RemoteProcess
from hvd_elastic.hosts.remote_python import COMMAND_NOT_FOUND, no_python, start_program
from hvd_elastic.hosts.ssh import connect, is_local, own_address_towards

NODE = "hvd_elastic.cluster.copy.node"
SOURCE = "the source"
TICK_S = 0.1
PING_S = 5.0
LOOK_S = 0.25
# A host that takes longer to be reached than this after the first joins when it is there.
LATE_S = 3.0
# What a silent host gets to be heard again before it is given up; less when it is the last.
SILENCE_S = 15.0
LAST_SILENCE_S = 4.0
RELINK_S = 0.3
MOST_BROKEN = 5
# A connection that was never made counts for more than one that broke.
UNMADE = 3
END_S = 5.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CopySettings:
    """How a copy is made.

    Attributes:
        delete: remove at the destination what the source has not.
        exclude: patterns of what is neither sent nor removed (see ``node.tree.is_excluded``).
        checksum: compare contents even where size and time agree.
        plain: no encryption; nodes still prove to one another that they belong to this copy.
        compress: compress where it pays.
        bytes_per_s: most that each node sends [bytes/s]; 0 for no limit.
        shard: each host gets only its part: every n-th file.
        dry_run: only find out what would be sent.
        fanout: connections that are made at a time.
        python: the interpreter on the hosts.
    """

    delete: bool = False
    exclude: tuple[str, ...] = ()
    checksum: bool = False
    plain: bool = False
    compress: bool = True
    bytes_per_s: float = 0.0
    shard: bool = False
    dry_run: bool = False
    fanout: int = 64
    python: str = "python3"


@dataclass(frozen=True)
class Copied:
    """What was done on a host, or would be in a dry run.

    Attributes:
        files, size_bytes: sent to it (in a dry run: to be sent).
        skipped: files that it had.
        touched: files of which only time or mode was set.
        removed: entries that the source has not.
        resumed_bytes: of ``size_bytes``, what an interrupted copy had left there.
        problems: what could not be done.
        fetched, fetched_bytes: fetched by it from a shared store (in a dry run: to be fetched, as
            far as sizes are known).
        failure: why a command that fetches failed there, where others did its work.
        unreached: who should have fed it and could not connect to it.
    """

    files: int
    size_bytes: int
    skipped: int
    touched: int
    removed: tuple[str, ...]
    resumed_bytes: int = 0
    problems: tuple[str, ...] = ()
    fetched: int = 0
    fetched_bytes: int = 0
    failure: str = ""
    unreached: tuple[str, ...] = ()


@dataclass(frozen=True)
class CopyProgress:
    """How far a copy is.

    Attributes:
        done_bytes, total_bytes: of all hosts together.
        states: of each host: ``connecting``, ``comparing``, ``fetching``, a share such as ``42%``,
            ``done``, ``shared`` (another host fills the same place), ``silent``, ``failed``.
    """

    done_bytes: int
    total_bytes: int
    states: dict[str, str]


@dataclass
class Node:
    """A host, or the source, as the leader sees it."""

    host: Host
    name: str
    started: float
    heard: float = 0.0
    connection: Connection | None = None
    process: RemoteProcess | None = None
    addresses: list[tuple[str, int]] = field(default_factory=list)
    secret: str = field(default_factory=lambda: secrets.token_hex(32))
    state: str = "connecting"
    ready: dict[str, Any] = field(default_factory=dict)
    received: int = 0
    left: int = 0
    silent_since: float = 0.0
    broken: int = 0
    relink_at: float = 0.0
    link_number: int = 0
    result: Copied | None = None
    mute: bool = False
    asked: bool = False
    """Whether the source was asked for the digests of what came from other hosts' copies."""

    def tell(self, do: str, **fields: Any) -> None:
        """One line to the node; that it is gone shows elsewhere."""
        if self.process is not None:
            try:
                self.process.stdin.write(json.dumps({"do": do, **fields}).encode() + b"\n")
            except (OSError, EOFError) as error:
                log.debug("%s: %s", self.name, error)


_Event = tuple[Node, "dict[str, Any] | Exception | None"]


class CopySession(AbstractContextManager["CopySession"]):
    """A copy from its first connection to its last; use it in a ``with`` statement.

    Args:
        hosts: where to.
        source_host: where from; None is this machine.
        source: the folder or file there.
        destination: the place on every host.
        options: how to connect.
        settings: how it is made.
        on_progress: told how far it is, a few times a second.
        newcomers: asked a few times a second for further hosts.

    Attributes:
        skipped: of the source, what is neither file nor folder nor link.
    """

    program = f"{NODE}.node"

    def __init__(
        self,
        hosts: Sequence[Host],
        source_host: Host | None,
        source: str,
        destination: str,
        options: SshOptions,
        settings: CopySettings,
        on_progress: Callable[[CopyProgress], None] | None = None,
        newcomers: Callable[[], Sequence[Host]] | None = None,
    ) -> None:
        now = time.monotonic()
        self._options = options
        self._settings = settings
        self._destination = destination
        self._source_path = source
        self._on_progress = on_progress
        # Which file is whose is settled with the number of hosts.
        joins = newcomers is not None and not (settings.shard or settings.dry_run)
        self._newcomers = newcomers if joins else None
        self._events: queue.Queue[_Event] = queue.Queue()
        self._gate = threading.Semaphore(settings.fanout)
        self._closed = False
        self._lock = threading.Lock()
        # Hosts without ssh first: what feeds them is this machine.
        ordered = sorted(hosts, key=lambda host: not is_local(host, options))
        self._nodes = {host.name: Node(host, host.name, now) for host in ordered}
        self._source: Node | None = Node(source_host or Host("localhost"), SOURCE, now)
        self._source_is_here = source_host is None
        self._name = secrets.token_hex(8)
        self._certificate = None if settings.plain else make_certificate()
        self._listen_here = next(
            (own_address_towards(host, options) for host in ordered if not is_local(host, options)),
            "127.0.0.1",
        )
        self._chain = Chain(SOURCE, spread=settings.shard)
        self._links: dict[str, str] = {}
        self._tree: str | None = None
        self._files = 0
        self._first_ready = 0.0
        self._begun = False
        self.skipped: list[str] = []

    # ---- from outside

    def run(self) -> Iterator[HostResult[Copied]]:
        """One result a host, as it ends.

        Raises:
            UsageError: the source is not there or cannot be read.
            SshError: the host of the source cannot be used.
        """
        for node in self._everybody():
            self._begin(node)
        open_nodes = set(self._nodes)
        last_tick = pinged = looked = time.monotonic()
        while open_nodes:
            results: list[HostResult[Copied]] = []
            said: _Event | None = None
            with contextlib.suppress(queue.Empty):
                said = self._events.get(timeout=TICK_S)
            now = time.monotonic()
            if now - last_tick > 1.0:
                self._excuse(now - last_tick)
            if said is not None:
                results = self._take(*said, now)
            may_begin = said is not None and not self._begun and self._may_begin(now)
            if may_begin or now - last_tick >= TICK_S:
                last_tick = now
                results += self._tick(now)
                self._tell_progress()
                if now - pinged >= PING_S:
                    pinged = now
                    for each in self._everybody():
                        each.tell("ping")
            if self._newcomers is not None and now - looked >= LOOK_S:
                looked = now
                open_nodes.update(self._admit(self._newcomers(), now))
            for result in results:
                if result.host.name in open_nodes:
                    open_nodes.remove(result.host.name)
                    yield result
        self._tell_progress()

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all nodes; waits for them no longer than a few seconds."""
        with self._lock:
            self._closed = True
        threads = [
            threading.Thread(target=_end, args=(node,), daemon=True) for node in self._everybody()
        ]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + END_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _begin(self, node: Node) -> None:
        threading.Thread(
            target=self._open, args=(node,), name=f"copy to {node.name}", daemon=True
        ).start()

    def _admit(self, hosts: Sequence[Host], now: float) -> list[str]:
        """Takes hosts into the copy that nobody has spoken of before; returns their names."""
        new = [host for host in hosts if host.name not in self._nodes]
        for host in new:
            node = Node(host, host.name, now)
            # Threads of other nodes may be going through them.
            self._nodes = {**self._nodes, host.name: node}
            self._begin(node)
        return [host.name for host in new]

    def _everybody(self) -> list[Node]:
        return [*([self._source] if self._source else []), *self._nodes.values()]

    def _excuse(self, seconds: float) -> None:
        """The leader itself was asleep for so long: nobody's silence is meant by that."""
        self._chain.excuse(seconds)

    # ---- one node

    def _open(self, node: Node) -> None:
        """Connects, starts the program, and passes on what it says: the body of a thread."""
        try:
            with self._gate:
                is_source = node is self._source
                if is_source and self._source_is_here:
                    connection: Connection = LocalConnection(node.host)
                else:
                    connection = connect(node.host, self._options)
                with self._lock:
                    node.connection = connection
                    closed = self._closed
                if closed:
                    connection.close()
                    return
                process = start_program(connection, self.program, self._settings.python)
                node.process = process
                process.stdin.write(json.dumps(self._config(node)).encode() + b"\n")
        except (HvdElasticError, OSError) as error:
            self._events.put((node, error))
            return
        for line in process.stdout:
            try:
                message = json.loads(line)
            except ValueError:
                # A login script that talks is not the program's voice.
                continue
            if isinstance(message, dict):
                self._events.put((node, message))
        self._events.put((node, self._why_ended(node, process)))

    def _config(self, node: Node) -> dict[str, Any]:
        settings = self._settings
        numbers = {name: number for number, name in enumerate(self._nodes)}
        shard = (
            [numbers[node.name], len(numbers)] if settings.shard and node.name in numbers else None
        )
        is_source = node is self._source
        return {
            "role": "source" if is_source else "destination",
            "place": self._source_path if is_source else self._destination,
            "listen": self._listen_here if isinstance(node.connection, LocalConnection) else None,
            "secret": node.secret,
            "copy": self._name,
            "name": node.name,
            "certificate": self._certificate,
            "patterns": list(settings.exclude),
            "deletes": settings.delete,
            "checksum": settings.checksum,
            "dry_run": settings.dry_run,
            "bytes_per_s": settings.bytes_per_s,
            "packs": settings.compress,
            "shard": shard,
        }

    def _why_ended(self, node: Node, process: RemoteProcess) -> SshError:
        try:
            status = process.wait(2.0)
        except TimeoutError:
            status = -1
        if status == COMMAND_NOT_FOUND:
            return no_python(node.host.name, self._settings.python)
        tail = process.stderr_tail.decode("utf-8", errors="replace").strip().splitlines()
        if status > 0 and tail:
            return SshError(f"host {node.host.name}: the copy failed there: {tail[-1]}")
        return SshError(
            f"host {node.host.name}: the connection was lost during the copy. Is the host still "
            "up? Call again to repair it"
        )

    # ---- events

    def _take(
        self, node: Node, event: dict[str, Any] | Exception | None, now: float
    ) -> list[HostResult[Copied]]:
        if isinstance(event, Exception):
            return self._lost(node, event, now)
        assert event is not None, "a node's thread ends with a reason"
        say = event["say"]
        if say == "failed":
            name = node.host.name
            if node is self._source and self._source_is_here:
                return self._lost(node, UsageError(f"source {event['why']}"), now)
            if node is self._source:
                return self._lost(node, SshError(f"host {name}: source {event['why']}"), now)
            return self._lost(node, SshError(f"host {name}: {event['why']}"), now)
        if node is self._source:
            return self._take_from_source(event, now)
        if node.state in ("done", "failed") and say not in ("at", "unlinked", "complete"):
            return []
        if say == "hello":
            own = (event["address"], event["port"])
            seen = node.connection.peer_address if node.connection else None
            node.addresses = [own] if seen in (None, own[0]) else [(seen, own[1]), own]
            node.state = "comparing"
            self._send_tree(node)
        elif say == "shared":
            # Another host fills the same place: looked at again when that one is through.
            node.state = "shared"
        elif say == "doubts":
            self._ask_source(node, event["files"])
        elif say == "ready":
            return self._take_ready(node, event, now)
        elif say == "at":
            self._take_progress(node, event, now)
        elif say == "unlinked":
            self._take_broken(event, now)
        elif say == "complete":
            return self._take_complete(node, event, now)
        return []

    def _take_from_source(self, event: dict[str, Any], now: float) -> list[HostResult[Copied]]:
        say = event["say"]
        if say == "tree":
            self._tree = event["tree"]
            self._files = event["files"]
            self.skipped = event["skipped"]
            for node in self._nodes.values():
                self._send_tree(node)
        elif say == "at":
            self._hear_feeds(event, now)
        elif say == "unlinked":
            self._take_broken(event, now)
        elif say == "digests":
            node = self._nodes[event["name"]]
            if node.asked:
                return self._prove(node, dict(unpack(event["digests"])), now)
            node.tell("digests", digests=event["digests"])
        return []

    def _ask_source(self, node: Node, files: str) -> None:
        assert self._source is not None, "only a copy that has a source is in doubt"
        self._source.tell("digest", name=node.name, files=files)

    def _send_tree(self, node: Node) -> None:
        if self._tree is not None and node.state == "comparing":
            node.tell("tree", tree=self._tree)

    def _take_ready(
        self, node: Node, event: dict[str, Any], now: float
    ) -> list[HostResult[Copied]]:
        node.ready = event
        node.left = event["left"]
        node.state = "ready"
        if self._settings.dry_run:
            node.state = "done"
            return [self._result(node, self._copied(node), now)]
        self._first_ready = self._first_ready or now
        if self._begun:
            self._join(node, now)
        return []

    def _take_progress(self, node: Node, event: dict[str, Any], now: float) -> None:
        node.mute = False
        if node.state == "silent":
            # It was not dead after all.
            log.debug("%s is heard again", node.name)
            self._join(node, now)
        if node.name in self._chain:
            self._chain.hear(node.name, now, event.get("received"), event.get("left"))
            if event.get("received", 0) > node.received:
                node.broken = 0
            node.received = event.get("received", node.received)
            node.left = event.get("left", node.left)
        self._hear_feeds(event, now)

    def _hear_feeds(self, event: dict[str, Any], now: float) -> None:
        for name, (sent, sending) in event["feeds"].items():
            self._chain.hear_feeding(name, now, sent, sending)

    def _take_broken(self, event: dict[str, Any], now: float) -> None:
        """A node lost its link: the same again, unless more is known by then."""
        node = self._nodes[event["name"]]
        log.debug("the link to %s broke: %s", node.name, event["why"])
        # Both of its ends tell, and so do those of a link that was given up for another.
        if event["number"] == node.link_number and not node.relink_at:
            node.broken += 1 if event["made"] else UNMADE
            node.relink_at = now + RELINK_S * node.broken
            node.ready["why"] = event["why"]

    def _take_complete(
        self, node: Node, event: dict[str, Any], now: float
    ) -> list[HostResult[Copied]]:
        node.received, node.left = event["received"], 0
        if node.name not in self._chain and node.state != "ready":
            self._chain.add(node.name, now)
        if node.name in self._chain:
            self._chain.hear(node.name, now, event["received"], 0)
        problems = [f"{path}: {why}" for path, why in event["gone"]] + event["problems"]
        node.result = self._copied(node, problems)
        unproved = unpack(event["unproved"])
        if unproved:
            node.asked = True
            node.ready["unproved"] = unproved
            self._ask_source(node, pack([i for i, _ in unproved]))
            return []
        return self._completed(node, now)

    def _prove(self, node: Node, digests: dict[int, str], now: float) -> list[HostResult[Copied]]:
        """Holds what came from another host's own copy against the source."""
        wrong = sum(digests.get(index) != digest for index, digest in node.ready["unproved"])
        if wrong and node.result is not None:
            problem = (
                f"{wrong} files came from another host's copy that differs from the source; call "
                "again with --checksum"
            )
            node.result = self._copied(node, [*node.result.problems, problem])
        return self._completed(node, now)

    def _completed(self, node: Node, now: float) -> list[HostResult[Copied]]:
        assert node.result is not None, "said to be complete"
        if node.state == "done":
            return []
        node.state = "done"
        return [self._result(node, node.result, now)]

    def _copied(self, node: Node, problems: Sequence[str] = ()) -> Copied:
        ready = node.ready
        return Copied(
            files=ready["files"],
            size_bytes=ready["bytes"],
            skipped=self._files - ready["files"] - ready["touched"],
            touched=ready["touched"],
            removed=tuple(ready["extra"]),
            resumed_bytes=ready["bytes"] - ready["left"],
            problems=tuple(problems),
            unreached=tuple(self._chain.blocked(node.name)),
        )

    def _result(self, node: Node, value: Copied, now: float) -> HostResult[Copied]:
        seconds = now - node.started
        if not value.problems:
            return HostResult(node.host, Outcome.OK, seconds, value)
        more = f" (and {len(value.problems) - 1} more)" if len(value.problems) > 1 else ""
        error = f"host {node.host.name}: {value.problems[0]}{more}"
        return HostResult(node.host, Outcome.FAILED, seconds, value, error)

    def _lost(self, node: Node, error: Exception, now: float) -> list[HostResult[Copied]]:
        if node is self._source:
            if isinstance(error, HvdElasticError):
                raise error
            raise SshError(f"the source: {error}") from error
        self._chain.remove(node.name)
        if node.state in ("done", "failed"):
            return []
        node.state = "failed"
        lost = isinstance(error, HostUnreachableError)
        outcome = Outcome.UNREACHABLE if lost else Outcome.FAILED
        return [HostResult(node.host, outcome, now - node.started, error=str(error))]

    # ---- the chain

    def _tick(self, now: float) -> list[HostResult[Copied]]:
        results = []
        if not self._begun and self._may_begin(now):
            self._begun = True
            for node in self._nodes.values():
                if node.state == "ready":
                    self._join(node, now)
        for verdict in self._chain.judge(now):
            results += self._obey(verdict, now)
        results += self._give_up_silent(now)
        self._look_again(now)
        return results + self._relink(now)

    def _may_begin(self, now: float) -> bool:
        """Once every host has said that the copy fits, but for those that are not reached yet."""
        states = {node.state for node in self._nodes.values()}
        if "comparing" in states or not self._first_ready:
            return False
        return "connecting" not in states or now - self._first_ready > LATE_S

    def _join(self, node: Node, now: float) -> None:
        node.state = "copying"
        self._chain.add(node.name, now)

    def _obey(self, verdict: Verdict, now: float) -> list[HostResult[Copied]]:
        node = self._nodes[verdict.name]
        log.debug("%s %s", node.name, verdict.why.value)
        if verdict.why is Why.SILENT:
            self._chain.remove(node.name)
            node.mute = True
            if node.state == "copying":
                node.state, node.silent_since = "silent", now
            return []
        if verdict.why is Why.HOPELESS:
            reason = node.ready.get("why", "nothing arrives")
            why = (
                f"none of three hosts could send to it ({reason}). Hosts must reach one another at "
                "the addresses by which ssh reaches them"
            )
            return self._drop(node, why, now)
        self._chain.move(node.name, verdict.why)
        node.relink_at = now  # even if the same node feeds it again
        return []

    def _look_again(self, now: float) -> None:
        """Hosts whose place another one fills are asked again, one by one, as the others end."""
        states = [node.state for node in self._nodes.values()]
        if "shared" in states and not set(states) & {"connecting", "comparing", "ready", "copying"}:
            node = next(node for node in self._nodes.values() if node.state == "shared")
            node.state = "comparing"
            self._send_tree(node)

    def _give_up_silent(self, now: float) -> list[HostResult[Copied]]:
        results = []
        others = {n.state for n in self._nodes.values()} - {"silent", "done", "failed"}
        for node in self._nodes.values():
            limit_s = SILENCE_S if others else LAST_SILENCE_S
            if node.state == "silent" and now - node.silent_since > limit_s:
                results += self._drop(node, "it fell silent during the copy", now)
        return results

    def _drop(self, node: Node, why: str, now: float) -> list[HostResult[Copied]]:
        message = f"host {node.host.name}: {why}. When it is well, call again to repair it"
        threading.Thread(target=_end, args=(node,), daemon=True).start()
        return self._lost(node, HostUnreachableError(message), now)

    def _relink(self, now: float) -> list[HostResult[Copied]]:
        """Makes the feeders feed as the chain says."""
        wanted = self._chain.links()
        nodes = {node.name: node for node in self._everybody()}
        for name, feeder in list(self._links.items()):
            if wanted.get(name) != feeder:
                nodes[feeder].tell("rest", names=[name])
                del self._links[name]
        for name, feeder in wanted.items():
            node = self._nodes[name]
            again = 0 < node.relink_at <= now
            if self._links.get(name) == feeder and not again:
                continue
            node.relink_at = 0.0
            if again and node.broken >= MOST_BROKEN:
                node.broken = 0
                return self._obey(self._chain.blame(name), now)
            self._links[name] = feeder
            self._chain.linked(name, now)
            node.link_number += 1
            nodes[feeder].tell(
                "feed",
                name=name,
                number=node.link_number,
                addresses=node.addresses,
                secret=node.secret,
            )
        return []

    def _tell_progress(self) -> None:
        if self._on_progress is None:
            return
        states = {}
        done = total = 0
        for node in self._nodes.values():
            states[node.name] = node.state
            if node.ready and node.state != "failed":
                total += node.ready["left"]
                done += node.ready["left"] - node.left
            if node.state in ("copying", "ready") and node.ready:
                share = 1 - node.left / node.ready["left"] if node.ready["left"] else 1.0
                states[node.name] = f"{share:.0%}"
        self._on_progress(CopyProgress(done, total, states))


def _end(node: Node) -> None:
    """Lets a node end by itself, then makes it."""
    try:
        # One that does not answer is not asked: its own watch ends it.
        if node.process is not None and not node.mute:
            node.process.stdin.close()
            try:
                node.process.wait(2.0)
                node.process.close()
            except TimeoutError:
                node.process.stop(1.0)
    finally:
        if node.connection is not None:
            node.connection.close()

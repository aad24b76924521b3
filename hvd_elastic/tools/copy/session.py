"""Run one copy to many hosts: start a node on each over ssh and direct which node feeds which.

The leader itself handles no file data: the source is a separate process, here or on another host.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from hvd_elastic.errors import HostUnreachableError, HvdElasticError, SshError, UsageError
from hvd_elastic.hosts.certificate import make_certificate
from hvd_elastic.hosts.connection import Connection
from hvd_elastic.hosts.fanout import HostResult, Outcome
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.hosts.local import LocalConnection
from hvd_elastic.hosts.process import RemoteProcess
from hvd_elastic.hosts.remote_python import COMMAND_NOT_FOUND, no_python, start_program
from hvd_elastic.hosts.ssh import connect, is_local, own_address_towards
from hvd_elastic.json_text import parse_json
from hvd_elastic.programs.copy.frames import pack, unpack
from hvd_elastic.tools.copy.chain import Chain, Verdict, Why
from hvd_elastic.tools.copy.job import Copied, CopyJob, CopyProgress

SOURCE = "the source"
# Interval of the checks, pings to the nodes, and requests for newcomers.
TICK_S = 0.1
PING_S = 5.0
LOOK_S = 0.25
# A host that takes longer than this after the first ready host joins the running copy later.
LATE_S = 3.0
# Time in which a silent host may report again before it is given up.
SILENCE_S = 15.0
# Wait before a broken link is made again, times the number of failures so far.
RELINK_S = 0.3
# Number of failures of its links after which a node gets another feeder.
MOST_BROKEN = 5
# A connection that could not be made counts as this number of broken ones.
UNMADE = 3
# Maximum wait for the nodes to end.
END_S = 5.0

log = logging.getLogger(__name__)


@dataclass
class Node:
    """A host, or the source, as the leader knows it."""

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
    """Whether the source was asked for the digests of files that came from other hosts' copies."""

    @property
    def is_done(self) -> bool:
        """Return whether the host's result is known."""
        return self.state in ("done", "failed")

    def tell(self, do: str, **fields: Any) -> None:
        """Send one message to the node; errors are ignored, since its output ends as well then."""
        if self.process is not None:
            try:
                self.process.stdin.write(json.dumps({"do": do, **fields}).encode() + b"\n")
            except (OSError, EOFError) as error:
                log.debug("%s: %s", self.name, error)

    def end_node(self) -> None:
        """Close the node's input so that it ends, or else stop it; close the connection."""
        try:
            # Do not wait for a node that does not answer: it ends by itself without a leader.
            if self.process is not None and not self.mute:
                self.process.stdin.close()
                try:
                    self.process.wait(2.0)
                    self.process.close()
                except TimeoutError:
                    self.process.stop(1.0)
        finally:
            if self.connection is not None:
                self.connection.close()


class CopySession(AbstractContextManager["CopySession"]):
    """One copy, from the first connection to the last; used in a ``with`` statement.

    Attributes:
        skipped: paths in the source that are neither file, folder nor link.
    """

    program = "hvd_elastic.programs.copy.node"

    def __init__(self, job: CopyJob) -> None:
        options, settings = job.options, job.settings
        self._now = time.monotonic()
        self._job = job
        # With shares, the number of hosts fixes which files each gets, so none can be added.
        self._newcomers = None if settings.shard or settings.dry_run else job.newcomers
        self._events: queue.Queue[tuple[Node, dict[str, Any] | Exception]] = queue.Queue()
        self._results: list[HostResult[Copied]] = []
        self._gate = threading.Semaphore(settings.fanout)
        self._closed = threading.Event()
        # Local hosts first, so that the source on this machine feeds them and not a remote host.
        ordered = sorted(job.hosts, key=lambda host: not is_local(host, options))
        self._nodes = {host.name: Node(host, host.name, self._now) for host in ordered}
        self._source: Node | None = Node(job.source_host or Host("localhost"), SOURCE, self._now)
        if job.source_host is None:
            self._source.connection = LocalConnection(self._source.host)
        listen_here = next(
            (own_address_towards(host, options) for host in ordered if not is_local(host, options)),
            "127.0.0.1",
        )
        self._common: dict[str, Any] = {
            "role": "destination",
            "place": job.destination,
            "listen": listen_here,
            "copy": secrets.token_hex(8),
            "certificate": None if settings.plain else make_certificate(),
            "patterns": list(settings.exclude),
            "passing": list(settings.passing),
            "deletes": settings.delete,
            "keeps": list(settings.keeps),
            "checksum": settings.checksum,
            "dry_run": settings.dry_run,
            "bytes_per_s": settings.bytes_per_s,
            "packs": settings.compress,
            "shard": None,
        }
        self._chain = Chain(SOURCE, spread=settings.shard)
        self._links: dict[str, str] = {}
        self._tree: str | None = None
        self._first_ready = 0.0
        self._begun = False
        self.skipped: list[str] = []

    # ---- public methods

    def run(self) -> Iterator[HostResult[Copied]]:
        """Yield one result for each host, as soon as it is known.

        Raises:
            UsageError: the source does not exist or cannot be read.
            SshError: the host of the source cannot be used.
        """
        for node in self._everybody():
            self._start_node(node)
        threading.Thread(target=self._ping, name="pings", daemon=True).start()
        open_nodes = set(self._nodes)
        last_tick = looked = time.monotonic()
        while open_nodes:
            said = None
            with contextlib.suppress(queue.Empty):
                said = self._events.get(timeout=TICK_S)
            now = self._now = time.monotonic()
            if now - last_tick > 1.0:
                self._excuse(now - last_tick)
            if said is not None:
                self._handle_event(*said)
            may_begin = said is not None and not self._begun and self._may_begin()
            if may_begin or now - last_tick >= TICK_S:
                last_tick = now
                self._tick()
                self._tell_progress()
            if self._newcomers is not None and now - looked >= LOOK_S:
                looked = now
                open_nodes.update(self._admit(self._newcomers()))
            results, self._results = self._results, []
            for result in results:
                if result.host.name in open_nodes:
                    open_nodes.remove(result.host.name)
                    yield result
        self._tell_progress()

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End all nodes; returns after a few seconds at most."""
        self._closed.set()
        threads = [
            threading.Thread(target=node.end_node, daemon=True) for node in self._everybody()
        ]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + END_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _ping(self) -> None:
        """Ping the nodes, also while a long message is sent to one of them."""
        while not self._closed.wait(PING_S):
            for node in self._everybody():
                # One that is being sent a message hears the leader by that.
                if node.process is not None and not node.process.stdin.is_in_use:
                    node.tell("ping")

    def _start_node(self, node: Node) -> None:
        threading.Thread(
            target=self._open, args=(node,), name=f"copy to {node.name}", daemon=True
        ).start()

    def _admit(self, hosts: Sequence[Host]) -> list[str]:
        """Add the hosts that are new to this copy; return their names."""
        new = [host for host in hosts if host.name not in self._nodes]
        for host in new:
            node = Node(host, host.name, self._now)
            # Other threads may be iterating over the old dictionary, so it is not changed.
            self._nodes = {**self._nodes, host.name: node}
            self._start_node(node)
        return [host.name for host in new]

    def _everybody(self) -> list[Node]:
        return [*([self._source] if self._source else []), *self._nodes.values()]

    def _excuse(self, seconds: float) -> None:
        """Extend the deadlines by the time [s] for which the leader itself was suspended."""
        self._chain.discount(seconds)
        for node in self._nodes.values():
            node.silent_since += seconds

    # ---- one node

    def _open(self, node: Node) -> None:
        """Connect, start the program and queue its messages; runs in a thread of its own."""
        try:
            with self._gate:
                connection = node.connection or connect(node.host, self._job.options)
                node.connection = connection
                if self._closed.is_set():
                    connection.close()
                    return
                process = start_program(connection, self.program, self._job.settings.python)
                node.process = process
                process.stdin.write(json.dumps(self._config(node)).encode() + b"\n")
        except (HvdElasticError, OSError) as error:
            self._events.put((node, error))
            return
        pieces = []
        for piece in process.stdout:
            pieces.append(piece)
            if not piece.endswith(b"\n"):  # a line longer than the buffer comes in pieces
                continue
            line = b"".join(pieces)
            pieces.clear()
            # Output of login scripts is not JSON and is skipped.
            with contextlib.suppress(ValueError):
                message = parse_json(line)
                if isinstance(message, dict):
                    self._events.put((node, message))
        self._events.put((node, self._why_ended(node, process)))

    def _config(self, node: Node) -> dict[str, Any]:
        config = {**self._common, "name": node.name, "secret": node.secret}
        if not isinstance(node.connection, LocalConnection):
            config["listen"] = None  # it listens on the address that ssh connected to
        if node is self._source:
            config.update(role="source", place=self._job.source)
        elif self._job.settings.shard:
            config["shard"] = [list(self._nodes).index(node.name), len(self._nodes)]
        return config

    def _why_ended(self, node: Node, process: RemoteProcess) -> SshError:
        try:
            status = process.wait(2.0)
        except TimeoutError:
            status = -1
        if status == COMMAND_NOT_FOUND:
            return no_python(node.host.name, self._job.settings.python)
        if status > 0 and process.last_line:
            return SshError(f"host {node.host.name}: the copy failed there: {process.last_line}")
        return SshError(
            f"host {node.host.name}: the connection was lost during the copy. Is the host still "
            "up? Call again to repair it"
        )

    # ---- events

    def _handle_event(self, node: Node, event: dict[str, Any] | Exception) -> None:
        if isinstance(event, Exception):
            self._lose(node, event)
        elif event["say"] == "failed":
            source = "source " if node is self._source else ""
            if source and self._job.source_host is None:
                raise UsageError(f"source {event['why']}")
            self._lose(node, SshError(f"host {node.host.name}: {source}{event['why']}"))
        elif node is self._source:
            self._take_from_source(event)
        elif not node.is_done or event["say"] in ("at", "unlinked", "complete"):
            self._take_from_host(node, event)

    def _take_from_host(self, node: Node, event: dict[str, Any]) -> None:
        match event["say"]:
            case "hello":
                own = (event["address"], event["port"])
                seen = node.connection.peer_address if node.connection else None
                node.addresses = [own] if seen in (None, own[0]) else [(seen, own[1]), own]
                node.state = "comparing"
                self._send_tree(node)
            case "shared":
                # Another host fills the same folder; this one is compared again when that is done.
                node.state = "shared"
            case "doubts":
                self._ask_source(node, event["files"])
            case "ready":
                node.ready, node.left, node.state = event, event["left"], "ready"
                if self._job.settings.dry_run:
                    self._end_well(node, self._copied(node))
                    return
                self._first_ready = self._first_ready or self._now
                if self._begun:
                    self._join(node)
            case "at":
                self._take_progress(node, event)
            case "unlinked":
                self._take_broken(event)
            case "complete":
                self._take_complete(node, event)

    def _take_from_source(self, event: dict[str, Any]) -> None:
        match event["say"]:
            case "tree":
                self._tree = event["tree"]
                self.skipped = event["skipped"]
                for node in self._nodes.values():
                    self._send_tree(node)
            case "at":
                self._hear_feeds(event)
            case "unlinked":
                self._take_broken(event)
            case "digests":
                node = self._nodes[event["name"]]
                if node.asked:
                    self._prove(node, dict(unpack(event["digests"])))
                else:
                    node.tell("digests", digests=event["digests"])

    def _ask_source(self, node: Node, files: str) -> None:
        assert self._source is not None, "only a copy that has a source is in doubt"
        self._source.tell("digest", name=node.name, files=files)

    def _send_tree(self, node: Node) -> None:
        if self._tree is not None and node.state == "comparing":
            node.tell("tree", tree=self._tree)

    def _take_progress(self, node: Node, event: dict[str, Any]) -> None:
        node.mute = False
        if node.state == "silent":
            # The node was only delayed, so it joins the chain again.
            log.debug("%s is heard again", node.name)
            self._join(node)
        if node.name in self._chain:
            self._chain.hear(node.name, self._now, event.get("received"), event.get("left"))
            if event.get("received", 0) > node.received:
                node.broken = 0
            node.received = event.get("received", node.received)
            node.left = event.get("left", node.left)
        self._hear_feeds(event)

    def _hear_feeds(self, event: dict[str, Any]) -> None:
        for name, (sent, sending) in event["feeds"].items():
            self._chain.hear_feeding(name, self._now, sent, sending)

    def _take_broken(self, event: dict[str, Any]) -> None:
        """Handle a broken link: schedule the same link again after a delay."""
        node = self._nodes[event["name"]]
        log.debug("the link to %s broke: %s", node.name, event["why"])
        # Both ends report a broken link; reports on a link that was replaced are ignored.
        if event["number"] == node.link_number and not node.relink_at:
            node.broken += 1 if event["made"] else UNMADE
            node.relink_at = self._now + RELINK_S * node.broken
            node.ready["why"] = event["why"]

    def _take_complete(self, node: Node, event: dict[str, Any]) -> None:
        node.received, node.left = event["received"], 0
        if node.name not in self._chain and node.state != "ready":
            self._chain.add_node(node.name, self._now)
        if node.name in self._chain:
            self._chain.hear(node.name, self._now, event["received"], 0)
        problems = [f"{path}: {why}" for path, why in event["gone"]] + event["problems"]
        node.result = self._copied(node, problems)
        unproved = unpack(event["unproved"])
        if unproved:
            node.asked = True
            node.ready["unproved"] = unproved
            self._ask_source(node, pack([i for i, _ in unproved]))
        else:
            self._end_well(node, node.result)

    def _prove(self, node: Node, digests: dict[int, str]) -> None:
        """Compare the digests of files that came from another host's own copy with the source's."""
        assert node.result is not None, "said to be complete"
        wrong = sum(digests.get(index) != digest for index, digest in node.ready["unproved"])
        if wrong:
            problem = (
                f"{wrong} files came from another host's copy that differs from the source; call "
                "again with --checksum"
            )
            node.result = self._copied(node, [*node.result.problems, problem])
        self._end_well(node, node.result)

    def _copied(self, node: Node, problems: Sequence[str] = ()) -> Copied:
        ready = node.ready
        return Copied(
            files=ready["files"],
            size_bytes=ready["bytes"],
            skipped=ready["share"] - ready["files"] - ready["touched"],
            touched=ready["touched"],
            removed=tuple(ready["extra"]),
            resumed_bytes=ready["bytes"] - ready["left"],
            problems=tuple(problems),
            unreached=tuple(self._chain.blocked(node.name)),
        )

    # ---- results

    def _end_well(self, node: Node, value: Copied) -> None:
        """Record the result of a host that has finished; it failed if there are problems."""
        if node.state == "done":
            return
        node.state = "done"
        outcome, error = Outcome.OK, ""
        if value.problems:
            more = f" (and {len(value.problems) - 1} more)" if len(value.problems) > 1 else ""
            outcome = Outcome.FAILED
            error = f"host {node.host.name}: {value.problems[0]}{more}"
        seconds = self._now - node.started
        self._results.append(HostResult(node.host, outcome, seconds, value, error))

    def _lose(self, node: Node, error: Exception) -> None:
        """Record the failure of a host; a failure of the source ends the copy."""
        if node is self._source:
            if isinstance(error, HvdElasticError):
                raise error
            raise SshError(f"the source: {error}") from error
        self._chain.remove(node.name)
        if node.is_done:
            return
        node.state = "failed"
        lost = isinstance(error, HostUnreachableError)
        outcome = Outcome.UNREACHABLE if lost else Outcome.FAILED
        seconds = self._now - node.started
        self._results.append(HostResult(node.host, outcome, seconds, error=str(error)))

    def _drop(self, node: Node, why: str) -> None:
        message = f"host {node.host.name}: {why}. When it is well, call again to repair it"
        threading.Thread(target=node.end_node, daemon=True).start()
        self._lose(node, HostUnreachableError(message))

    # ---- the chain

    def _tick(self) -> None:
        if not self._begun and self._may_begin():
            self._begun = True
            for node in self._nodes.values():
                if node.state == "ready":
                    self._join(node)
        for verdict in self._chain.verdicts(self._now):
            self._obey(verdict)
        self._give_up_silent()
        self._look_again()
        self._relink()

    def _may_begin(self) -> bool:
        """Return whether all reached hosts are ready and the others need not be waited for."""
        states = {node.state for node in self._nodes.values()}
        if "comparing" in states or not self._first_ready:
            return False
        return "connecting" not in states or self._now - self._first_ready > LATE_S

    def _join(self, node: Node) -> None:
        node.state = "copying"
        self._chain.add_node(node.name, self._now)

    def _obey(self, verdict: Verdict) -> None:
        node = self._nodes[verdict.name]
        log.debug("%s %s", node.name, verdict.why.value)
        if verdict.why is Why.SILENT:
            self._chain.remove(node.name)
            node.mute = True
            if node.state == "copying":
                node.state, node.silent_since = "silent", self._now
        elif verdict.why is Why.HOPELESS:
            reason = node.ready.get("why", "nothing arrives")
            self._drop(
                node,
                f"none of three hosts could send to it ({reason}). Hosts must reach one another at "
                "the addresses by which ssh reaches them",
            )
        else:
            self._chain.move(node.name, verdict.why)
            node.relink_at = self._now  # link again even if the feeder stays the same

    def _look_again(self) -> None:
        """Compare one of the hosts that share a folder again, once no other host is copying."""
        states = [node.state for node in self._nodes.values()]
        if "shared" in states and not set(states) & {"connecting", "comparing", "ready", "copying"}:
            node = next(node for node in self._nodes.values() if node.state == "shared")
            node.state = "comparing"
            self._send_tree(node)

    def _give_up_silent(self) -> None:
        for node in self._nodes.values():
            if node.state == "silent" and self._now - node.silent_since > SILENCE_S:
                self._drop(node, "it fell silent during the copy")

    def _relink(self) -> None:
        """Send the feeders the changes that make their links match the chain."""
        wanted = self._chain.links()
        nodes = {node.name: node for node in self._everybody()}
        for name, feeder in list(self._links.items()):
            if wanted.get(name) != feeder:
                nodes[feeder].tell("rest", names=[name])
                del self._links[name]
        for name, feeder in wanted.items():
            node = self._nodes[name]
            again = 0 < node.relink_at <= self._now
            if self._links.get(name) == feeder and not again:
                continue
            node.relink_at = 0.0
            if again and node.broken >= MOST_BROKEN:
                node.broken = 0
                self._obey(self._chain.blame(name))
                return
            self._links[name] = feeder
            self._chain.linked(name, self._now)
            node.link_number += 1
            nodes[feeder].tell(
                "feed",
                name=name,
                number=node.link_number,
                addresses=node.addresses,
                secret=node.secret,
            )

    def _tell_progress(self) -> None:
        if self._job.on_progress is None:
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
        self._job.on_progress(CopyProgress(done, total, states))

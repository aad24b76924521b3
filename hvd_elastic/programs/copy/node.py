"""A node of a copy: the source, or a destination that is fed and feeds others.

It reads one JSON object per line from stdin, the configuration first and then commands, and writes
messages to stdout. It ends when stdin ends, or after half a minute without a command.

Commands: {"do": "tree" | "digests" | "digest" | "feed" | "rest" | "ping", …}.
Messages: {"say": "hello" | "tree" | "doubts" | "digests" | "shared" | "ready" | "at" | "complete" |
"unlinked" | "failed", …}.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import sys
import threading
import time
from typing import Any

from hvd_elastic.programs.accept_peers import accept_peers
from hvd_elastic.programs.copy.comparison import Comparison, StoreError
from hvd_elastic.programs.copy.feed import Feeder
from hvd_elastic.programs.copy.frames import (
    DATA,
    DIGEST_BYTES,
    END,
    GONE,
    LAST,
    PACKED,
    WHOLE,
    Link,
    LinkError,
    accept,
    make_frame,
    pack,
    read_frame,
    unpack,
    unpack_payload,
)
from hvd_elastic.programs.copy.store import Gone, SharedError, SourceStore, Store, Target
from hvd_elastic.programs.copy.tree import Keeps, Tree, encode, read_tree, shown, walk

# Interval of the progress reports.
BEAT_S = 0.25
# The leader pings every 5 s; without anything for this time it is taken for lost.
LEADER_SILENCE_S = 30.0
# A long message is read in pieces of this size; each shows that the leader lives.
PIECE_BYTES = 1 << 16
# Maximum wait at the end for the thread that receives.
ENDING_S = 3.0


class Node:
    """Base of source and destination: talks to the leader and feeds other nodes."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.store: Store | None = None
        self._feeders: dict[str, Feeder] = {}
        # Reentrant, since a signal handler may run in the thread that holds it.
        self._lock = threading.RLock()
        self._saying = threading.Lock()
        self._heard = time.monotonic()
        self._lines: queue.Queue[bytes] = queue.Queue()
        self._ending = False

    def say(self, what: str, **fields: Any) -> None:
        """Send one message to the leader; end the node if nobody reads it."""
        line = json.dumps({"say": what, **fields}).encode("ascii") + b"\n"
        try:
            with self._saying:
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()
        except (OSError, ValueError):
            self.end_process()

    def run(self) -> None:
        """Carry out commands until the input ends."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: self.end_process())
        threading.Thread(target=self._listen, daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()
        try:
            self.open_session()
            for line in iter(self._lines.get, b""):
                message = json.loads(line.decode("ascii"))
                self.obey(message["do"], message)
        except StoreError as error:
            self.fail(str(error))
        except OSError as error:
            name = error.filename
            where = shown(os.fsdecode(name)) + ": " if name is not None else ""
            self.fail(f"{where}{error.strerror or error}")
        except ValueError as error:
            self.fail(str(error))
        self.end_process()

    def open_session(self) -> None:
        """Prepare the node and send its first message."""
        raise NotImplementedError

    def obey(self, do: str, message: dict[str, Any]) -> None:
        """Carry out one command."""
        if do == "feed":
            self._feed(message)
        elif do == "rest":
            for name in message["names"]:
                self._drop(name)

    def fail(self, why: str) -> None:
        """Report why the node cannot continue, and end it."""
        self.say("failed", why=why)
        self.end_process()

    def end_process(self) -> None:
        """End the process; only partial files that the next copy can resume stay."""
        with self._lock:
            if self._ending:
                return
            self._ending = True
        for feeder in list(self._feeders.values()):
            feeder.drop()
        self.leave()
        os._exit(0)

    def leave(self) -> None:
        """Clean up at the end; for subclasses."""

    def beat(self) -> dict[str, Any]:
        """Return the fields that a subclass adds to each progress report."""
        return {}

    def _listen(self) -> None:
        """Queue the lines of stdin, so that the leader is heard while a command is carried out."""
        pieces = []
        try:
            for piece in iter(lambda: sys.stdin.buffer.readline(PIECE_BYTES), b""):
                self._heard = time.monotonic()
                pieces.append(piece)
                if piece.endswith(b"\n"):
                    self._lines.put(b"".join(pieces))
                    pieces.clear()
        finally:
            self._lines.put(b"")

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_S)
            if time.monotonic() - self._heard > LEADER_SILENCE_S:
                self.end_process()
            with self._lock:
                feeds = {name: [f.sent, f.sending] for name, f in self._feeders.items()}
            self.say("at", feeds=feeds, **self.beat())

    def _feed(self, message: dict[str, Any]) -> None:
        assert self.store is not None, "told to feed before it has anything"
        name = message["name"]
        self._drop(name)
        feeder = Feeder(
            self.store,
            name,
            message["number"],
            [(address, port) for address, port in message["addresses"]],
            bytes.fromhex(message["secret"]),
            self.config["certificate"],
            self.config["bytes_per_s"],
            self.config["packs"],
            self._fed,
        )
        with self._lock:
            self._feeders[name] = feeder
        threading.Thread(target=feeder.run, daemon=True).start()

    def _drop(self, name: str) -> None:
        with self._lock:
            feeder = self._feeders.pop(name, None)
        if feeder is not None:
            feeder.drop()

    def _fed(self, feeder: Feeder, why: str) -> None:
        with self._lock:
            if self._feeders.get(feeder.peer) is not feeder:
                return
        if why:
            self.say(
                "unlinked", name=feeder.peer, number=feeder.number, why=why, made=feeder.sent >= 0
            )


class Source(Node):
    """The node that has the files."""

    def open_session(self) -> None:
        """Read the tree of files and send it."""
        root = os.path.expanduser(encode(self.config["place"]))
        tree, skipped = walk(root, self.config["patterns"], Keeps(*self.config["keeps"]))
        self._source = SourceStore(root, tree)
        self.store = self._source
        self._asked: queue.Queue[tuple[str, list[int]]] = queue.Queue()
        threading.Thread(target=self._answer, daemon=True).start()
        self.say(
            "tree",
            tree=pack(tree),
            skipped=[shown(path) for path in skipped],
        )

    def obey(self, do: str, message: dict[str, Any]) -> None:
        """Carry out one command; digests are computed in another thread while feeding continues."""
        if do == "digest":
            self._asked.put((message["name"], unpack(message["files"])))
        else:
            super().obey(do, message)

    def _answer(self) -> None:
        while True:
            name, files = self._asked.get()
            found: dict[int, str] = {}
            for index in files:
                # A changed file has no digest; it is reported as changed when it is sent.
                with contextlib.suppress(Gone):
                    found[index] = self._source.digest(index).hex()
            self.say("digests", name=name, digests=pack(list(found.items())))


class Destination(Node):
    """A node that receives files.

    Attributes:
        trusts: see :class:`Target`.
        fetched_here: identities of the files that this host has fetched from a store for this copy,
            by path; None for files that nobody else could have put there.
    """

    trusts = False

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.fetched_here: dict[str, tuple[int, int] | None] = {}
        self._plan: Comparison | None = None
        self._target: Target | None = None
        self._link: Link | None = None
        self._receiving: threading.Thread | None = None
        self._taking = threading.Lock()
        self._said_complete = False
        self._completing = threading.Lock()
        self._keeps = True

    def open_session(self) -> None:
        """Listen on the address that ssh connected to, and report address and port."""
        os.umask(0)
        address = self.config["listen"] or os.environ.get("SSH_CONNECTION", "").split(" ")[2]
        if address.startswith("::ffff:"):  # an IPv4 address that sshd reports as IPv6
            address = address[len("::ffff:") :]
        family, _, _, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.bind(where)
        self._listener.listen(128)
        arguments = (self._listener, self._admit, self._receive_from_feeder)
        threading.Thread(target=accept_peers, args=arguments, daemon=True).start()
        self.say("hello", address=address, port=self._listener.getsockname()[1])

    def obey(self, do: str, message: dict[str, Any]) -> None:
        """Carry out one command; "tree" and "digests" begin the copy."""
        if do == "tree":
            self._begin_copy(read_tree(unpack(message["tree"])))
        elif do == "digests":
            assert self._plan is not None, "digests come after the tree"
            digests = {index: bytes.fromhex(text) for index, text in unpack(message["digests"])}
            self._settle(self._plan, digests)
        else:
            super().obey(do, message)

    def beat(self) -> dict[str, Any]:
        """Return the bytes received and left."""
        target = self._target
        if target is None:
            return {}
        # 0 means that every file has its name, so it is at least 1 until then.
        left = 0 if target.complete else max(1, target.left)
        return {"received": target.received, "left": left}

    def leave(self) -> None:
        """Keep partial files that the next copy can resume."""
        if self._link is not None:
            self._link.drop()
        receiving = self._receiving
        if receiving is not None and receiving is not threading.current_thread():
            receiving.join(ENDING_S)
        if self._target is not None:
            with contextlib.suppress(OSError):
                self._target.abandon(self._keeps)

    def _begin_copy(self, tree: Tree) -> None:
        config = self.config
        if self._plan is not None:
            self._plan.folders.close()
        plan = self._plan = Comparison(
            os.path.expanduser(encode(config["place"])),
            tree,
            config["patterns"],
            config["deletes"],
            config["checksum"],
            config["passing"],
            self.fetched_here,
        )
        if config["shard"] is not None:
            plan.take_share(*config["shard"])
        if plan.doubtful and not self.trusts:
            self.say("doubts", files=pack(plan.doubtful))
        else:
            self._settle(plan, {})

    def _settle(self, plan: Comparison, digests: dict[int, bytes]) -> None:
        plan.settle_doubts(digests)
        plan.check_room()
        if not self.config["dry_run"]:
            try:
                keeps = Keeps(*self.config["keeps"])
                self.store = self._target = Target(plan, self.config["copy"], self.trusts, keeps)
            except SharedError:
                self.say("shared")
                return
        self.say(
            "ready",
            share=plan.share,
            files=len(plan.needed),
            bytes=plan.needed_bytes,
            left=plan.needed_bytes if self._target is None else self._target.left,
            touched=len(plan.touched),
            extra=[shown(path) for path in plan.extra],
        )
        if self._target is not None and self._target.arrived:
            self._complete(self._target)

    def _complete(self, target: Target) -> None:
        with self._completing:
            if self._said_complete:
                return
            self._said_complete = True
        try:
            problems = target.finish()
        except OSError as error:
            self._keeps = False
            threading.Thread(target=self.fail, args=(target.explain(error),), daemon=True).start()
            return
        self.say(
            "complete",
            received=target.received,
            problems=problems,
            gone=[[shown(target.tree.files[i].path), why] for i, why in target.gone.items()],
            unproved=pack([[index, target.digests[index].hex()] for index in target.unproved]),
        )

    def _admit(self, sock: socket.socket) -> Link:
        return accept(sock, bytes.fromhex(self.config["secret"]), self.config["certificate"])

    def _receive_from_feeder(self, link: Link) -> None:
        """Receive from a feeder that has connected, in place of the previous one."""
        with self._taking:
            if self._link is not None:
                self._link.dropped_for_another = True
                self._link.drop()
            if self._receiving is not None:
                self._receiving.join()
            target = self._target
            if target is None or self._said_complete or self._ending:
                link.close()
                return
            self._link = link
            self._receiving = threading.Thread(
                target=self._receive, args=(link, target), daemon=True
            )
            self._receiving.start()

    def _receive(self, link: Link, target: Target) -> None:
        why = "it ended before everything had come"
        number = -1
        try:
            number = link.read_list()
            link.send_list(target.wants())
            while self._take_frame(link, target):
                pass
        except (OSError, LinkError, ValueError) as error:
            why = str(error)
        except StoreError as error:
            threading.Thread(target=self.fail, args=(str(error),), daemon=True).start()
        finally:
            link.close()
        if self._ending or link.dropped_for_another:
            return
        if target.arrived:
            self._complete(target)
        else:
            self.say("unlinked", name=self.config["name"], number=number, why=why, made=True)

    def _take_frame(self, link: Link, target: Target) -> bool:
        kind, index, offset, payload = read_frame(link.file)
        if link.dropped:
            return False
        data = unpack_payload(payload) if kind & PACKED else payload
        plain = kind & ~PACKED
        if plain == LAST:
            return False
        if not 0 <= index < len(target.tree.files):
            raise LinkError("there is no such file")
        frame = make_frame(kind, index, offset, payload)
        try:
            if plain == DATA:
                target.write(index, offset, data, frame)
            elif plain == END:
                target.finish_file(index, data[:DIGEST_BYTES], data[DIGEST_BYTES])
            elif plain == WHOLE:
                digest, origin = data[:DIGEST_BYTES], data[DIGEST_BYTES]
                target.whole(index, digest, origin, data[DIGEST_BYTES + 1 :], frame)
            elif plain == GONE:
                target.give_up(index, data.decode("utf-8", "replace"))
        except OSError as error:
            self._keeps = False
            raise StoreError(target.explain(error)) from error
        return True


def main() -> None:
    """Read the configuration from stdin and run the node that it describes."""
    config = json.loads(sys.stdin.buffer.readline().decode("ascii"))
    (Source if config["role"] == "source" else Destination)(config).run()

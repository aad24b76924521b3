"""Brings files from the spools of hosts to the leader.

A worker leaves a file in the spool of its host: a shard of a checkpoint, or a file that the script
saves. The leader fetches the files in a thread, one *parcel* at a time: all shards of a checkpoint,
or one saved file. A parcel that could not be fetched or stored stays in the spools and is tried
again, after pauses that grow.
"""

from __future__ import annotations

import math
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Generic, Protocol, TypeVar

from hvd_elastic.checkpoint.shards import ShardInfo
from hvd_elastic.checkpoint.whole_files import HashingWriter
from hvd_elastic.control.backoff import Retry
from hvd_elastic.errors import HvdElasticError
from hvd_elastic.formatting import bytes_words, hosts_named
from hvd_elastic.run_events import Event, LogNote
from hvd_elastic.wire.messages import AgentHello, LeaderToAgent, SavedFile

_PAUSES_S = (2.0, 5.0, 15.0, 30.0, 60.0)
"""Pauses before a parcel is tried again after 1, 2, … failures in a row [s]. The first is short,
because a connection may be back soon; a disk stays full for longer, and each try costs traffic."""
_LAST_TRIES_S = 10.0
"""How long the end of a run keeps trying to fetch a parcel that fails [s]. Where the first
try took longer, as on a host whose connection is silent, there is a second one."""
_SILENCE_S = 90.0
"""How long the end of a run waits for a transfer without any data [s]; longer than the limit after
which a transfer fails by itself."""
_SILENT_S = 1.0
"""How long the end of a run waits for parcels before it says so [s]."""
_TOLD_EVERY_S = 5.0
"""Time between two notes on the parcels that the end of a run waits for [s]."""

Entry = TypeVar("Entry", ShardInfo, SavedFile)
Stored = TypeVar("Stored")


class HostFiles(Protocol):
    """The part of a connection to an agent that a collector uses."""

    @property
    def info(self) -> AgentHello | None:
        """Return the agent's hello, which describes its host; None before it arrived."""

    def send(self, message: LeaderToAgent) -> None:
        """Queue a message for the agent."""

    def receive(self, remote: str, write: Callable[[bytes | memoryview], object]) -> None:
        """Pass the content of a file of the host to ``write``; raises SshError on failure."""

    def put(self, local: Path, remote: str) -> None:
        """Copy a file to the host; raises SshError on failure."""

    def discard(self, remote: str) -> None:
        """Remove a folder of the host; raises SshError on failure."""


@dataclass(eq=False)
class Source(Generic[Entry]):
    """A file, and a host whose spool has it.

    Attributes:
        entry: description of the file.
        name: path of the file in the spool.
        seconds: how long the worker took to write it [s].
        blocked_s: how long training waited for that [s].
        heard: when it was reported [monotonic s].
        received: how much of it has arrived [bytes].
    """

    host: str
    agent: HostFiles
    entry: Entry
    name: str
    seconds: float = 0.0
    blocked_s: float = 0.0
    heard: float = field(default_factory=time.monotonic)
    received: int = 0


@dataclass(eq=False)
class Parcel(Generic[Entry]):
    """Files that are fetched together.

    Attributes:
        sources: the files; the same one may be on several hosts.
        subject: what complaints about it are about; each is told once until one succeeds.
        retry: when it is tried again.
        error: why it could not be fetched or stored; empty: it was not tried yet.
    """

    words: str
    sources: list[Source[Entry]]
    subject: str = ""
    retry: Retry = field(default_factory=lambda: Retry(_PAUSES_S))
    error: str = ""


@dataclass(frozen=True)
class Callbacks:
    """Functions that a collector calls.

    Attributes:
        post: schedules a call in the leader's loop.
        on_idle: called after each attempt, unless another one begins at once.
    """

    post: Callable[[Callable[[], None]], None]
    emit: Callable[[Event], None]
    warn: Callable[[str], None]
    on_idle: Callable[[], None]


class Collector(ABC, Generic[Entry, Stored]):
    """Fetches parcels of one kind; its methods are called from the leader's loop.

    Args:
        agents: returns the connections of the hosts that can be used now.
    """

    _not_here: ClassVar[str]
    """What users are told of a parcel that failed."""

    def __init__(self, agents: Callable[[], Collection[HostFiles]], call: Callbacks) -> None:
        self._agents = agents
        self._call = call
        self._complaints: set[tuple[str, str]] = set()
        """Subject and kind of the problems that users were told of."""
        self._fetching: Parcel[Entry] | None = None
        self._idle = threading.Event()
        """Set while nothing is being fetched, for other threads."""
        self._idle.set()
        self._received_at = self._told_at = 0.0

    @property
    def busy(self) -> bool:
        """Return whether a parcel is being fetched."""
        return self._fetching is not None

    def fetch_due(self) -> None:
        """Fetch the next parcel that may be tried now, if there is one; called often."""
        if self._fetching is not None:
            return
        now = time.monotonic()
        for parcel in self._parcels():
            if not parcel.error or (now >= parcel.retry.at and self._is_there(parcel)):
                self._fetching, self._received_at = parcel, now
                self._idle.clear()
                threading.Thread(
                    target=self._work, args=(parcel,), name="collector", daemon=True
                ).start()
                return

    def _work(self, parcel: Parcel[Entry]) -> None:
        """Fetch a parcel; runs in a thread."""
        stored, error = None, "it could not be fetched"
        try:
            stored, error = self._fetch(parcel), ""
        except (HvdElasticError, OSError) as failure:
            error = str(failure)
        finally:
            self._call.post(lambda: self._ended(parcel, stored, error))

    def _note_progress(self) -> None:
        self._received_at = time.monotonic()

    def _receive(self, source: Source[Entry], writer: HashingWriter) -> None:
        def write(data: bytes | memoryview) -> None:
            self._note_progress()
            source.received += writer.write(data)

        source.received = 0
        assert source.agent.info is not None
        source.agent.receive(f"{source.agent.info.spool}/{source.name}", write)

    def _ended(self, parcel: Parcel[Entry], stored: Stored | None, error: str) -> None:
        self._fetching, parcel.error = None, error
        problems: Sequence[str] = ()
        if stored is None:
            parcel.retry.failed(time.monotonic())
            if self._note_failed(parcel):
                again = "; trying again" if self._is_there(parcel) else ""
                problems = [f"{self._why(parcel)}{again}"]
        else:
            problems = self._note_stored(parcel, stored)
            if not problems:
                self._complaints = {each for each in self._complaints if each[0] != parcel.subject}
        for problem in problems:
            self._complain(parcel.subject, problem)
        self.fetch_due()
        if not self.busy:
            self._idle.set()
            self._call.on_idle()

    def _complain(self, subject: str, message: str) -> None:
        """Warn, but once for each kind of problem, as a full disk affects all that follow."""
        complaint = subject, re.sub(r"[0-9a-f]{12,}|\d+", "#", message)
        if complaint not in self._complaints:
            self._complaints.add(complaint)
            self._call.warn(message)

    def _is_there(self, parcel: Parcel[Entry]) -> bool:
        """Return whether all files of a parcel are on hosts that can be used."""
        agents = self._agents()
        there = {source.name for source in parcel.sources if source.agent in agents}
        return there.issuperset(source.name for source in parcel.sources)

    def _why(self, parcel: Parcel[Entry]) -> str:
        """Return that a parcel is not here, and why."""
        return f"{parcel.words} {self._not_here}: {parcel.error}"

    # -- the end ---------------------------------------------------------------------------

    def is_awaited(self, ended_at: float) -> bool:
        """Return whether the end of the run has to wait for a parcel; note it if it takes long.

        Args:
            ended_at: when training ended [monotonic s].
        """
        now = time.monotonic()
        awaited = [p for p in self._parcels() if p is self._fetching or self._is_there(p)]
        until = ended_at + _LAST_TRIES_S
        if self.busy:
            until = max(self._received_at, ended_at) + _SILENCE_S
        elif any(p.retry.failures == 1 for p in awaited):
            until = math.inf  # the second try is due soon
        if now >= until or not awaited:
            return False
        if now >= max(ended_at + _SILENT_S, self._told_at + _TOLD_EVERY_S):
            self._told_at = now
            message = f"training has ended; waiting for {', '.join(map(_progress, awaited))}"
            self._call.emit(LogNote(message))
        return True

    # -- of each kind ----------------------------------------------------------------------

    @abstractmethod
    def _parcels(self) -> Iterable[Parcel[Entry]]:
        """Return the parcels that are wanted, those that are to be fetched first in front."""

    @abstractmethod
    def _fetch(self, parcel: Parcel[Entry]) -> Stored:
        """Fetch and store a parcel, in a thread; raises HvdElasticError or OSError on failure."""

    @abstractmethod
    def _note_stored(self, parcel: Parcel[Entry], stored: Stored) -> Sequence[str]:
        """Note what was stored; return problems to complain about."""

    @abstractmethod
    def _note_failed(self, parcel: Parcel[Entry]) -> bool:
        """Note a failed attempt; return whether it is a problem."""


def _progress(parcel: Parcel[Entry]) -> str:
    received = sum(source.received for source in parcel.sources)
    total = sum({source.name: source.entry.bytes for source in parcel.sources}.values())
    hosts = hosts_named(dict.fromkeys(source.host for source in parcel.sources))
    words = f"{bytes_words(received)} of {bytes_words(total)} are here from {hosts}"
    return f"{parcel.words} ({words})"

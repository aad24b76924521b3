"""Fetches the files that the script saves from the hosts into the run folder.

The leader passes on the reports of workers and agents. Files are fetched in a thread, one at a
time; of each name only the newest is wanted. A file that cannot be fetched or stored stays in the
spool of its host and is tried again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvd_elastic.checkpoint.collector import HostFiles
from hvd_elastic.checkpoint.saved import SAVED_FOLDER, find_stored, receive_file
from hvd_elastic.checkpoint.whole_files import HashingWriter
from hvd_elastic.errors import HvdElasticError
from hvd_elastic.formatting import bytes_words
from hvd_elastic.run_events import LogNote, Saved
from hvd_elastic.wire.messages import DropSaved, SavedFile

_RETRY_S = 2.0
"""Time before a file that could not be fetched is tried again [s]."""
_LAST_TRIES_S = 10.0
"""How long the end of a run keeps trying to fetch a file that fails [s]."""
_SILENCE_S = 90.0
"""How long the end of a run waits for a transfer without any data [s]; longer than the limit after
which a transfer fails by itself."""
_SILENT_S = 1.0
"""How long the end of a run waits for files before it says so [s]."""
_TOLD_EVERY_S = 5.0
"""Time between two notes on the files that the end of a run waits for [s]."""


@dataclass
class _Source:
    """A file to fetch, and the host whose spool has it."""

    saved: SavedFile
    host: str
    agent: HostFiles
    heard: float
    """When it was reported [monotonic s]."""
    seconds: float = 0.0
    """How long the worker took to write it [s]."""
    retry_at: float = 0.0
    """When it may be tried [monotonic s]."""
    error: str = ""
    """Why it could not be fetched; empty: it was not tried yet."""
    received: int = 0
    """How much of it has arrived [bytes]."""
    is_lost: bool = False
    """Whether the loss of its host was told."""

    @property
    def words(self) -> str:
        return f"the file {self.saved.name!r} that the script saved at step {self.saved.step}"


class SavedFileCollector:
    """Fetches the saved files of one run; its methods are called from the leader's loop.

    Args:
        folder: folder of the run in which users find the files.
        life: returns the id of this leader's term.
        agents: returns the connections of the hosts that can be used now.
        post: schedules a call in the leader's loop.
        emit, warn: record an event or a warning.
        on_idle: called when no more file is wanted.
    """

    def __init__(
        self,
        folder: Path,
        *,
        life: Callable[[], str],
        agents: Callable[[], Collection[HostFiles]],
        post: Callable[[Callable[[], None]], None],
        emit: Callable[[Saved | LogNote], None],
        warn: Callable[[str], None],
        on_idle: Callable[[], None],
    ) -> None:
        self._folder = folder
        self._life = life
        self._agents = agents
        self._post = post
        self._emit = emit
        self._warn = warn
        self._on_idle = on_idle
        self._stored = find_stored(folder)
        self._wanted: dict[str, _Source] = {}
        self._introduced: set[HostFiles] = set()
        """Connections whose agent has said what is in its host's spool."""
        self._complaints: set[tuple[str, str]] = set()
        """Name of a file, and why it could not be fetched, that users were told."""
        self._working = False
        self._received_at = 0.0
        self._told_at = 0.0

    # -- reports ---------------------------------------------------------------------------

    def saved(self, host: str, agent: HostFiles, saved: SavedFile, seconds: float) -> None:
        """Handle a worker's report that a file is in the spool of its host.

        Args:
            host: host of the worker.
            agent: connection to its agent.
            saved: the file.
            seconds: how long the worker took to write it [s].
        """
        name = saved.name
        wanted, stored = self._wanted.get(name), self._stored.get(name)
        if saved == stored or (stored is not None and not self._is_later(saved, stored)):
            agent.send(DropSaved((saved,)))
            return
        if wanted is not None and saved != wanted.saved:
            if not self._is_later(saved, wanted.saved):
                agent.send(DropSaved((saved,)))
                return
            wanted.agent.send(DropSaved((wanted.saved,)))
        # A host that is back offers the same file again, through another connection.
        self._wanted[name] = _Source(saved, host, agent, time.monotonic(), seconds)
        self._begin()

    def offered(self, host: str, agent: HostFiles, files: Sequence[SavedFile]) -> None:
        """Handle an agent's list of the files in its host's spool that no leader has fetched."""
        self._introduced.add(agent)
        for saved in files:
            self.saved(host, agent, saved, 0.0)

    def _is_later(self, saved: SavedFile, other: SavedFile) -> bool:
        """Return whether a file was saved after another one of the same name.

        The clocks of hosts differ, so they only decide between terms of earlier leaders.
        """
        if saved.life == other.life:
            return (saved.generation, saved.number) > (other.generation, other.number)
        if self._life() in (saved.life, other.life):
            return saved.life == self._life()
        return saved.created > other.created

    # -- fetching --------------------------------------------------------------------------

    def look(self) -> None:
        """Try again what has failed, and warn of files on hosts that were lost; called often."""
        agents = self._agents()
        for source in self._wanted.values():
            if source.agent not in agents and not source.is_lost:
                source.is_lost = True
                self._warn(
                    f"host {source.host} was lost before {source.words} had been fetched from "
                    f"there; it will be fetched when the host is back. {self._left_words(source)}"
                )
        self._begin()

    def _left_words(self, source: _Source) -> str:
        stored = self._stored.get(source.saved.name)
        if stored is None:
            return f"Until then {self._folder} has no file of that name"
        return f"Until then {self._folder} has that of step {stored.step}"

    def _begin(self) -> None:
        if self._working:
            return
        agents, now = self._agents(), time.monotonic()
        for source in self._wanted.values():
            if source.agent in agents and now >= source.retry_at:
                self._working = True
                self._received_at = now
                threading.Thread(
                    target=self._fetch, args=(source,), name="saved file", daemon=True
                ).start()
                return

    def _fetch(self, source: _Source) -> None:
        """Fetch a file; runs in a thread."""
        error = ""
        try:
            receive_file(self._folder, source.saved, lambda writer: self._receive(source, writer))
        except (HvdElasticError, OSError) as failure:
            error = str(failure)
        self._post(lambda: self._ended(source, error))

    def _receive(self, source: _Source, writer: HashingWriter) -> None:
        def write(data: bytes | memoryview) -> None:
            self._received_at = time.monotonic()
            source.received += writer.write(data)

        source.received = 0
        assert source.agent.info is not None
        path = f"{source.agent.info.spool}/{SAVED_FOLDER}/{source.saved.spooled}"
        source.agent.receive(path, write)

    def _ended(self, source: _Source, error: str) -> None:
        self._working = False
        saved, now = source.saved, time.monotonic()
        wanted = self._wanted.get(saved.name)
        is_wanted = wanted is not None and wanted.saved == saved
        if not error:
            self._stored[saved.name] = saved
            self._complaints = {each for each in self._complaints if each[0] != saved.name}
            path = str(self._folder / saved.name)
            self._emit(saved.event(path, source.seconds + now - source.heard))
            source.agent.send(DropSaved((saved,)))
            if is_wanted:
                del self._wanted[saved.name]
        elif wanted is not None and is_wanted:  # else a newer file has taken its place meanwhile
            wanted.retry_at, wanted.error = now + _RETRY_S, error
            # A script that saves often must not have the same warning every time.
            complaint = saved.name, error.replace(saved.spooled, "")
            if complaint not in self._complaints and wanted.agent in self._agents():
                self._complaints.add(complaint)
                self._warn(f"{wanted.words} is not in the run folder: {error}; trying again")
        self._begin()
        if not self._wanted:
            self._on_idle()

    # -- the end ---------------------------------------------------------------------------

    def holds(self, agent: HostFiles) -> bool:
        """Return whether a file is still to be fetched through this connection."""
        return any(source.agent is agent for source in self._wanted.values())

    def is_awaited(self, ended_at: float) -> bool:
        """Return whether the end of the run has to wait for a file.

        Args:
            ended_at: when training ended [monotonic s].
        """
        now, agents = time.monotonic(), self._agents()
        if all(source.agent not in agents for source in self._wanted.values()):
            return False
        if self._working:
            return now < max(self._received_at, ended_at) + _SILENCE_S
        return now < ended_at + _LAST_TRIES_S

    def tell_awaited(self, ended_at: float) -> None:
        """Note which files the end of the run waits for, if it takes long; called often.

        Args:
            ended_at: when training ended [monotonic s].
        """
        now = time.monotonic()
        if now < max(ended_at + _SILENT_S, self._told_at + _TOLD_EVERY_S):
            return
        self._told_at = now
        agents = self._agents()
        files = [
            f"{source.saved.name} ({bytes_words(source.received)} of "
            f"{bytes_words(source.saved.bytes)} are here from host {source.host})"
            for source in self._wanted.values()
            if source.agent in agents
        ]
        message = f"training has ended; waiting for what the script saved: {', '.join(files)}"
        self._emit(LogNote(message))

    def missing(self) -> str:
        """Return which files could not be fetched, and why; empty: none is missing."""
        agents = self._agents()
        parts = []
        for source in self._wanted.values():
            why = source.error or "it has not arrived"
            if source.agent not in agents:
                why = f"host {source.host} was lost before it had been fetched"
            parts.append(f"{source.words} is not in the run folder: {why}")
        if not parts:
            return ""
        return (
            f"{'; '.join(parts)}. It stays on the disk of {self._hosts()}, and "
            "hvd-elastic run --resume fetches it from there"
        )

    def _hosts(self) -> str:
        hosts = dict.fromkeys(source.host for source in self._wanted.values())
        return f"host {', '.join(hosts)}"

    def end(self) -> None:
        """Let the hosts empty their spools at the end of the run, except for missing files."""
        for agent in self._agents():
            if agent in self._introduced and not self.holds(agent):
                agent.send(DropSaved(None))

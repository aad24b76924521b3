"""Fetches the files that the script saves from the hosts into the run folder.

The leader passes on the reports of workers and agents. Of each name only the newest is wanted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

from hvd_elastic.checkpoint.saved import SAVED_FOLDER, find_stored, receive_file
from hvd_elastic.checkpoint.spool_collector import Callbacks, Collector, HostFiles, Parcel, Source
from hvd_elastic.errors import HvdElasticError
from hvd_elastic.wire.messages import Release, SavedBrought, SavedFile, Tell


class SavedFileCollector(Collector[SavedFile, SavedFile]):
    """Fetches the saved files of one run.

    Args:
        life: returns the id of this leader's term.
        agents: returns the connections of the hosts that can be used now.
    """

    _not_here = "is not in the run folder"

    def __init__(
        self,
        folder: Path,
        *,
        life: Callable[[], str],
        agents: Callable[[], Collection[HostFiles]],
        call: Callbacks,
    ) -> None:
        super().__init__(agents, call)
        self._folder = folder
        self._life = life
        self._stored = find_stored(folder)
        self._wanted: dict[str, Parcel[SavedFile]] = {}
        self._introduced: set[HostFiles] = set()
        """Connections whose agent has said what is in its host's spool."""
        self._lost: set[Parcel[SavedFile]] = set()
        """Those of which was told that their host was lost."""
        self._asked: dict[str, tuple[str, HostFiles]] = {}
        """File and connection of each worker that is to load a file, and has no answer yet."""
        self._copying: set[tuple[str, str, HostFiles]] = set()
        """Worker, file and connection of copies that are under way: workers ask again meanwhile."""

    # -- reports ---------------------------------------------------------------------------

    def saved(self, host: str, agent: HostFiles, saved: SavedFile, seconds: float) -> None:
        """Handle a worker's report that a file is in the spool of its host.

        Args:
            seconds: how long the worker took to write it [s].
        """
        name = saved.name
        wanted, stored = self._wanted.get(name), self._stored.get(name)
        if saved == stored or (stored is not None and not self._is_later(saved, stored)):
            _release(agent, saved)
            return
        if wanted is not None and saved != (known := wanted.sources[0]).entry:
            if not self._is_later(saved, known.entry):
                _release(agent, saved)
                return
            _release(known.agent, known.entry)
        # A host that is back offers the same file again, through another connection.
        source = Source(host, agent, saved, f"{SAVED_FOLDER}/{saved.spooled}", seconds)
        words = f"the file {name!r} that the script saved at step {saved.step}"
        self._wanted[name] = Parcel(words, [source], name)
        self.fetch_due()

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

    def tell_lost(self) -> None:
        """Warn once of each file on a host that was lost; called often."""
        for parcel in self._wanted.values():
            (source,) = parcel.sources
            if parcel not in self._lost and not self._is_there(parcel):
                self._lost.add(parcel)
                stored = self._stored.get(source.entry.name)
                until = "no file of that name" if stored is None else f"that of step {stored.step}"
                self._call.warn(
                    f"host {source.host} was lost before {parcel.words} had been fetched from "
                    f"there; it will be fetched when the host is back. Until then {self._folder} "
                    f"has {until}"
                )
        self._answer()

    def _parcels(self) -> list[Parcel[SavedFile]]:
        return [parcel for parcel in self._wanted.values() if self._is_there(parcel)]

    def _fetch(self, parcel: Parcel[SavedFile]) -> SavedFile:
        (source,) = parcel.sources
        return receive_file(self._folder, source.entry, partial(self._receive, source))

    def _note_stored(self, parcel: Parcel[SavedFile], stored: SavedFile) -> Sequence[str]:
        (source,) = parcel.sources
        self._stored[stored.name] = stored
        path = str(self._folder / stored.name)
        seconds = source.seconds + time.monotonic() - source.heard
        self._call.emit(stored.event(path, seconds))
        _release(source.agent, stored)
        wanted = self._wanted.get(stored.name)
        if wanted is not None and wanted.sources[0].entry == stored:
            del self._wanted[stored.name]
        self._answer()
        return ()

    def _note_failed(self, parcel: Parcel[SavedFile]) -> bool:
        self._answer()
        # Else a newer file has taken its place meanwhile, or its host was lost.
        return self._wanted.get(parcel.subject) is parcel and self._is_there(parcel)

    # -- loading -----------------------------------------------------------------------------

    def bring(self, name: str, worker: str, agent: HostFiles) -> None:
        """Bring the newest file of a name to the host of a worker, which waits for it.

        Args:
            name: name that the script gave it.
            worker: the worker, which is told by :class:`SavedBrought`.
        """
        self._asked[worker] = name, agent
        self._answer()

    def _answer(self) -> None:
        """Answer the workers whose file is here, or will not be here soon."""
        for worker, (name, agent) in [*self._asked.items()]:
            wanted = self._wanted.get(name)
            if wanted is not None and not wanted.error and wanted not in self._lost:
                continue
            del self._asked[worker]
            if wanted is not None:
                agent.send(Tell(worker, SavedBrought(name, error=self._why(wanted))))
            elif name not in self._stored:
                agent.send(Tell(worker, SavedBrought(name)))
            elif (copy := (worker, name, agent)) not in self._copying:
                self._copying.add(copy)
                threading.Thread(
                    target=self._put, args=(name, worker, agent), name="load file", daemon=True
                ).start()

    def _put(self, name: str, worker: str, agent: HostFiles) -> None:
        """Copy a file to the host of a worker, and tell the worker; runs in a thread."""
        assert agent.info is not None
        path, error = f"{agent.info.spool}/{SAVED_FOLDER}/.loaded-{name}", ""
        try:
            agent.put(self._folder / name, path)
        except (HvdElasticError, OSError) as failure:
            path, error = "", str(failure)
        self._copying.discard((worker, name, agent))  # first, as the worker may ask once more
        agent.send(Tell(worker, SavedBrought(name, path, error)))

    # -- the end ---------------------------------------------------------------------------

    def holds(self, agent: HostFiles) -> bool:
        """Return whether a file is still to be fetched through this connection."""
        return any(parcel.sources[0].agent is agent for parcel in self._wanted.values())

    def missing(self) -> str:
        """Return which files could not be fetched, and why; empty: none is missing."""
        if not self._wanted:
            return ""
        why = "; ".join(map(self._why, self._wanted.values()))
        hosts = dict.fromkeys(parcel.sources[0].host for parcel in self._wanted.values())
        return (
            f"{why}. It stays on the disk of host {', '.join(hosts)}, and "
            "hvd-elastic run --resume fetches it from there"
        )

    def _why(self, parcel: Parcel[SavedFile]) -> str:
        error = parcel.error or "it has not arrived"
        if not self._is_there(parcel):
            error = f"host {parcel.sources[0].host} was lost before it had been fetched"
        return f"{parcel.words} {self._not_here}: {error}"

    def empty_spools(self) -> None:
        """Let the hosts empty their spools at the end of the run, except for missing files."""
        for agent in self._agents():
            if agent in self._introduced and not self.holds(agent):
                agent.send(Release("saved"))


def _release(agent: HostFiles, saved: SavedFile) -> None:
    agent.send(Release("saved", files=(saved,)))

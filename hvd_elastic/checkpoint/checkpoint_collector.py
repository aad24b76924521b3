"""Collects the shards of checkpoints from the hosts.

The leader passes on the reports of workers and agents. The shards of a checkpoint are transferred
from all hosts at once. If checkpoints come faster than the network can transfer them, the newest
complete one is next.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from hvd_elastic.checkpoint.manifests import CheckpointInfo, warning_of_not_finite
from hvd_elastic.checkpoint.place import CheckpointStore
from hvd_elastic.checkpoint.shards import Key, ShardInfo, complete_sets, parse_shard, receive_shard
from hvd_elastic.checkpoint.spool_collector import Callbacks, Collector, HostFiles, Parcel, Source
from hvd_elastic.errors import CheckpointError, HvdElasticError
from hvd_elastic.run_events import Checkpoint
from hvd_elastic.wire.framing import encode
from hvd_elastic.wire.messages import CheckpointWritten, Release

_AT_ONCE = 16
"""Most transfers at the same time; more would only compete for the leader's network."""

_Collected = tuple[CheckpointInfo, list[str]]
"""A checkpoint, and problems with its copies and its upload."""


class CheckpointCollector(Collector[ShardInfo, _Collected]):
    """Collects the checkpoints of one run.

    Args:
        copies: number of other hosts that keep a copy of each shard.
        resumed: whether to collect checkpoints that an earlier leader has not collected.
    """

    _not_here = "was not kept"

    def __init__(
        self,
        store: CheckpointStore,
        *,
        copies: int,
        resumed: bool,
        by_host: Callable[[], Mapping[str, HostFiles]],
        call: Callbacks,
    ) -> None:
        super().__init__(lambda: by_host().values(), call)
        self._by_host = by_host
        self._store = store
        self._copies = copies
        self._accepting = resumed
        self._known: dict[Key, Parcel[ShardInfo]] = {}
        self._missed: Parcel[ShardInfo] | None = None
        """The newest checkpoint that could not be collected and is still in the spools."""
        self._unwritten = ""
        """Why a rank could not write its shard after that; empty: none has reported it."""
        self._restart: Callable[[], bool] | None = None
        """While this returns True, nothing is fetched: a restart has chosen its checkpoint."""
        self._beginning = threading.Lock()
        """Held while a fetch begins, or a restart keeps others from beginning."""
        self._writable = True
        self.newest_step = -1
        """Step of the newest checkpoint of the current history of training; -1: none."""
        self.resume_step = -1
        """Step of the newest one with finite weights, else of the newest one; -1: none."""
        self.newest_s = 0.0
        """How long that checkpoint took to be written and collected [s]."""
        self.expected = ""
        """Why there should be a checkpoint; empty: there need not be one."""

    def check(self) -> None:
        """Check that checkpoints can be written, before training starts.

        Raises:
            CheckpointError: they cannot be written, or there are checkpoints of another run.
        """
        self._writable = False
        try:
            self._store.check()
        finally:
            self.newest_step = self.resume_step = self._store.resume_step()
        self._writable = True

    # -- reports of shards -----------------------------------------------------------------

    def written(self, host: str, agent: HostFiles, said: CheckpointWritten) -> None:
        """Handle a worker's report that its shard is in the spool of its host."""
        try:
            self._add_shard(host, agent, said.shard, said.seconds, said.blocked_s)
        except ValueError as error:
            self._complain("", f"host {host}: a checkpoint was not kept: {error}")
            return
        self._accepting = False
        self.fetch_due()

    def offered(self, host: str, agent: HostFiles, spooled: Sequence[Any]) -> None:
        """Handle a new agent's list of shards in its host's spool, left under an earlier leader."""
        if not spooled:
            return
        if not self._accepting:
            # Training has continued from another state, so these shards are obsolete.
            self.leaving(agent)
            return
        for described in spooled:
            with contextlib.suppress(ValueError):
                self._add_shard(host, agent, described)
        self.fetch_due()

    def failed(self, host: str, message: str) -> None:
        """Handle a worker's report that it could not write its shard."""
        self._unwritten = f"host {host}: {message}"
        self._complain("", self._unwritten)

    def _add_shard(
        self, host: str, agent: HostFiles, described: Any, seconds: float = 0, blocked_s: float = 0
    ) -> None:
        shard = parse_shard(described, self._store.folder)
        source = Source(host, agent, shard, shard.file, seconds, blocked_s)
        parcel = Parcel[ShardInfo](f"the checkpoint of step {shard.step}", [])
        self._known.setdefault(shard.key, parcel).sources.append(source)

    # -- collecting ------------------------------------------------------------------------

    def fetch_due(self) -> None:
        with self._beginning:
            if self._restart is None or not self._restart():
                super().fetch_due()

    def _parcels(self) -> list[Parcel[ShardInfo]]:
        """Return the checkpoints of which all shards are known, newest first."""
        shards = [source.entry for parcel in self._known.values() for source in parcel.sources]
        sets = [parts[0] for parts in complete_sets(shards) if parts[0].step >= self.newest_step]
        return [self._known[first.key] for first in sets]

    def _fetch(self, parcel: Parcel[ShardInfo]) -> _Collected:
        """Fetch all shards of a checkpoint, then copy and upload it."""
        began = time.monotonic()
        shards = self._receive_all(parcel.sources)
        written_s = max(source.seconds for source in parcel.sources)
        info = self._store.add_checkpoint(shards, time.monotonic() - began + written_s)
        self._call.post(lambda: self._note_here(info))
        problems = [warning_of_not_finite(info)] if info.not_finite else []
        problems += self._copy(info)
        place = str(info.path)
        try:
            place = self._store.upload(info, self._note_progress)
        except CheckpointError as error:
            problems.append(f"a checkpoint is in the run folder alone: {error}")
        event = Checkpoint(
            step=info.step,
            path=place,
            bytes=info.bytes,
            seconds=round(info.seconds, 3),
            blocked_s=round(max(source.blocked_s for source in parcel.sources), 6),
            shards=len(info.shards),
            not_finite=info.not_finite,
        )
        self._call.post(lambda: self._call.emit(event))
        return info, problems

    def _receive_all(self, sources: Sequence[Source[ShardInfo]]) -> list[ShardInfo]:
        folder = self._store.folder
        (shards,) = complete_sets(source.entry for source in sources)
        there = {path.name for path in folder.iterdir()} if folder.is_dir() else set()

        def receive(shard: ShardInfo) -> ShardInfo:
            error: HvdElasticError | None = None
            for source in sources:
                if source.name == shard.file:
                    try:
                        return receive_shard(folder, shard, partial(self._receive, source))
                    except HvdElasticError as failure:
                        error = failure
            raise error or CheckpointError(f"no host has shard {shard.index}")

        with ThreadPoolExecutor(min(_AT_ONCE, len(shards))) as pool:
            futures = [pool.submit(receive, shard) for shard in shards]
        try:
            return [future.result() for future in futures]
        except BaseException:
            for shard in shards:
                if shard.file not in there:
                    (folder / shard.file).unlink(missing_ok=True)
            raise

    def _copy(self, info: CheckpointInfo) -> list[str]:
        """Copy each shard to other hosts; return a message for each failure."""
        problems = []
        agents = dict(self._by_host())
        spools = {host: agent.info.spool for host, agent in agents.items() if agent.info}
        for shard in info.shards:
            others = _others(list(spools), shard.host, self._copies)
            if len(others) < self._copies:
                problems.append(
                    f"a checkpoint has fewer copies than --checkpoint-copies {self._copies}: "
                    f"only {len(others)} other hosts are up"
                )
            for host in others:
                spool = spools[host]
                described = self._store.folder / f".tmp-description-{shard.sha256[:12]}"
                self._note_progress()
                try:
                    agents[host].put(shard.path, f"{spool}/{shard.file}")
                    described.write_bytes(encode(shard.manifest()))
                    agents[host].put(described, f"{spool}/{Path(shard.file).stem}.json")
                except (HvdElasticError, OSError) as error:
                    problems.append(f"a copy of a checkpoint was not made: {error}")
                finally:
                    described.unlink(missing_ok=True)
        return list(dict.fromkeys(problems))

    def _note_here(self, info: CheckpointInfo) -> None:
        """Note that a checkpoint is complete in its folder; its copies and its upload follow."""
        self._received_at = time.monotonic()
        self._writable, self._missed, self._unwritten = True, None, ""
        self.newest_step, self.newest_s = info.step, info.seconds
        if not info.not_finite or self.resume_step < 0:
            self.resume_step = info.step
        self.expected = f"that of step {info.step} was written"

    def _note_stored(self, parcel: Parcel[ShardInfo], stored: _Collected) -> Sequence[str]:
        info, problems = stored
        # Older incomplete checkpoints are no longer needed.
        self._known = {key: known for key, known in self._known.items() if key[0] > info.step}
        self._release(self.resume_step - 1 if self._copies else info.step)
        return problems

    def _note_failed(self, parcel: Parcel[ShardInfo]) -> bool:
        key = parcel.sources[0].entry.key
        if self._known.get(key) is not parcel:
            return False  # training has continued from another checkpoint meanwhile
        # The hosts keep the newest.
        self._known = {other: known for other, known in self._known.items() if other[0] >= key[0]}
        self._release(key[0] - 1)
        if key[0] <= self.newest_step:
            del self._known[key]
            return False  # an earlier leader had already collected this one
        self._missed = parcel
        return True

    def _release(self, up_to_step: int | None) -> None:
        for agent in self._agents():
            agent.send(Release("shards", up_to_step=up_to_step))

    def leaving(self, agent: HostFiles) -> None:
        """Let an agent delete its spool, because its host leaves the run."""
        agent.send(Release("shards"))

    def empty_spools(self, *, succeeded: bool, searched_in_vain: bool) -> None:
        """Let all hosts delete their spools at the end of the run, unless they may be needed.

        Args:
            searched_in_vain: whether a checkpoint that should exist was not found.
        """
        if self._is_uploading:
            self._call.warn(
                f"{self._store.url} lacks the checkpoint of step {self.newest_step}, whose upload "
                f"has not ended; it is in {self._store.folder}"
            )
        newer = any(each.sources[0].entry.step > self.newest_step for each in self._parcels())
        needed = self._copies or searched_in_vain or not self._writable
        if not (self._missed or newer) and (succeeded or not needed):
            self._release(None)

    @property
    def _is_uploading(self) -> bool:
        """Return whether the newest checkpoint is in its folder, and its upload has not ended."""
        fetched = self._fetching.sources[0].entry.step if self._fetching is not None else -1
        return self._store.url is not None and 0 <= fetched <= self.newest_step

    def missing(self, reached: int) -> str:
        """Return that there is no checkpoint of the step that training has reached; empty: it is.

        A rank that was lost before it had written its shard has told nothing.
        """
        if max(self.newest_step, 0) >= reached:
            return ""
        parcels = (each for each in self._parcels() if each.sources[0].entry.step == reached)
        last = next(parcels, None)
        if last is None:
            silent = f"a rank has ended before its shard of step {reached} was written"
            return self._unwritten or silent
        why = self._why(last) if last.error else f"{last.words} has not been fetched yet"
        if self._is_there(last):
            return f"{why}. It stays on its hosts, from which --resume fetches it"
        return f"{why}. --resume fetches it from its hosts when all of them are up"

    # -- restoring -------------------------------------------------------------------------

    def goes_on_from(self, newest: CheckpointInfo | None) -> None:
        """Forget the shards of other histories: training continues from this checkpoint."""
        self._accepting = False
        self._restart = None
        self._known.clear()
        self._missed, self._unwritten = None, ""
        self.newest_step = self.resume_step = -1 if newest is None else newest.step
        # A later takeover must not use shards of a history that training has abandoned.
        self._release(None)

    @property
    def why_missed(self) -> str:
        """Return why the newest checkpoint could not be collected; empty: it was."""
        missed = self._missed
        return "" if missed is None else self._why(missed)

    def collect_rest(self, restart: Callable[[], bool]) -> None:
        """Wait until what the hosts still have is collected; called from another thread.

        A checkpoint that comes later is newer than the one that training continues from, but of a
        history that it abandons. So nothing is fetched until :meth:`goes_on_from` is called.

        Args:
            restart: returns whether that is still to be expected.
        """
        self._restart = None
        self._idle.wait()  # shards of an earlier leader may still be being collected
        if self._missed:
            self._idle.clear()
            self._call.post(self._collect_missed)
        while self._restart is None:
            self._idle.wait()
            with self._beginning:
                if self._idle.is_set():
                    self._restart = restart

    def restart_failed(self, restart: Callable[[], bool]) -> None:
        """Fetch again, since this restart does not take place."""
        if self._restart is restart:
            self._restart = None

    def _collect_missed(self) -> None:
        """Try again to collect the missed checkpoint from the hosts that are still up."""
        missed = self._missed
        if missed is not None and self._is_there(missed):
            missed.retry.at = 0.0
        elif missed is not None:
            self._known.pop(missed.sources[0].entry.key, None)
            self._missed = None
        self.fetch_due()
        if not self.busy:
            self._idle.set()


def _others(hosts: Sequence[str], own: str, count: int) -> list[str]:
    """Return the ``count`` hosts after ``own`` in cyclic order.

    >>> _others(["a", "b", "c"], "b", 2)
    ['c', 'a']
    """
    at = hosts.index(own) + 1 if own in hosts else 0
    return [host for host in [*hosts[at:], *hosts[:at]] if host != own][:count]
